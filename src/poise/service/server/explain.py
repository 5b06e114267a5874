"""Why a job stands where it stands: the one dominant reason, the numbers behind it, and what would help."""

from collections import Counter
from collections.abc import Iterator
from heapq import nsmallest
from itertools import chain

from poise.scheduler.core.claim_shapes import WaitCause
from poise.scheduler.core.reasons import Code, Reason
from poise.scheduler.core.settings import Cadence
from poise.scheduler.model.job import Yields
from poise.scheduler.model.units import counted, format_seconds
from poise.scheduler.policies.catalogue import POLICIES, Capability, Family, PolicyClaim, listing_of, promise_of
from poise.service.backends.api import RunEnding
from poise.service.server.batch import awaited, is_awaited, remedy
from poise.service.server.records import JobRecord
from poise.service.server.service_state import ServiceState
from poise.service.server.state_counts import Contention
from poise.service.wire import views
from poise.service.wire.views import JobState

_CODES = {WaitCause.ORDER: Code.ORDER, WaitCause.FRAGMENTATION: Code.FRAGMENTATION, WaitCause.CAPACITY: Code.CAPACITY}
MOST_HOLDERS = 3
"""Jobs that are named as holding what another one waits for."""


def reason_of(situation: ServiceState, record: JobRecord, now: float) -> views.ReasonView:
    """The dominant reason of a job that has not ended; the back end knows more of runs than the core does."""
    if (stranded := situation.stranded.get(record.job.id)) is not None:
        return views.ReasonView(code=Code.REJECTED.value, text=f"cannot run on the cluster as it is now: {stranded}")
    found = situation.scheduler.explain(record.job.id)
    if found.code is Code.RUNNING and record.state is JobState.STARTING:
        awaits = _awaits_others(situation, record)
        text = "waits until those who had its GPUs have left" if awaits else "its processes are being started"
        return views.ReasonView(code="starting", text=text)
    if record.state is JobState.CHECKPOINTING:
        return views.ReasonView(code="checkpointing", text=_leaves(record))
    if found.code is Code.RUNNING and is_awaited(record):
        return views.ReasonView(code=found.code.value, text=f"{found.text}, and is to be held: {awaited(record)}")
    until = situation.scheduler.backs_off_until(record.job.id)
    return _shown(found if until is None else Reason(found.code, _tried_again(record, until - now)))


def _leaves(record: JobRecord) -> str:
    keeps = f"; until it is gone it keeps {counted(sum(run.count for run in record.open_runs()), 'GPU')}"
    if any(run.attached is not None for run in record.open_runs()):
        return f"was asked to leave, and writes its checkpoint{keeps}"
    lost = "so it is ended, and what it has not saved itself is lost"
    return f"was asked to leave; it does not save by poise.worker, {lost}{keeps}"


def _tried_again(record: JobRecord, seconds: float) -> str:
    """Of a job that backs off: when it comes back, and what for."""
    last = record.runs[-1]
    ended = "left without being asked to" if last.how == RunEnding.YIELDED else f"failed: {last.cause}"
    return f"is tried again in {format_seconds(max(seconds, 0.0))} at the earliest, as its last run {ended}"


def _awaits_others(situation: ServiceState, record: JobRecord) -> bool:
    """A run that has lost its GPUs is still there, of the job itself or on GPUs that it has now."""
    mine = {} if record.current is None else record.current.gpus
    others = (run for name in situation.closing for run in situation.records[name].open_runs() if run.released is not None)
    return len(record.open_runs()) > 1 or any(
        not set(slots).isdisjoint(mine.get(node, ())) for run in others for node, slots in run.gpus.items()
    )


def ended_reason(record: JobRecord) -> views.ReasonView:
    """Of a job that has ended."""
    codes = {JobState.SUCCEEDED: Code.FINISHED, JobState.FAILED: Code.FAILED, JobState.CANCELLED: Code.CANCELLED}
    return views.ReasonView(code=codes[record.state].value, text=record.cause or "did all its work")


def reason_counts(situation: ServiceState) -> dict[str, int]:
    """Jobs that have not ended by the core's dominant reason; jobs that wait for the same are looked at together."""
    state = situation.scheduler.state
    away = len(state.suspended) - sum(map(state.running, state.suspended))  # some of them are on trial
    counts: Counter[str] = Counter({Code.RUNNING.value: len(situation.running), Code.HELD.value: away})
    counts[Code.REJECTED.value] += len(situation.stranded)
    for shape in state.waiting_shapes.values():
        cause = Code.SHARE if shape.is_held else _CODES[shape.classify(state.free, state.placement)]
        counts[cause.value] += shape.waiting
    return dict(counts)


def why(situation: ServiceState, record: JobRecord, now: float) -> views.WhyView:
    """One reason, the evidence, one next step."""
    if record.finished is not None:
        return views.WhyView(
            job=record.job.id,
            state=record.state,
            reason=ended_reason(record),
            evidence=_past(record, now),
            advice=_look(record),
        )
    reason = reason_of(situation, record, now)
    return views.WhyView(
        job=record.job.id,
        state=record.state,
        reason=reason,
        evidence=(*_past(record, now), *_contention(situation, record, reason.code, now)),
        advice=_advice(situation, record, reason.code, now),
    )


def _shown(reason: Reason) -> views.ReasonView:
    return views.ReasonView(code=reason.code.value, text=reason.text)


def _past(record: JobRecord, now: float) -> tuple[str, ...]:
    """What has happened to it so far."""
    said = []
    if record.launches:
        run = record.current
        received = record.gpu_seconds + (0.0 if run is None else run.count * (now - run.started))
        times = f"{counted(record.launches, 'run')}, {_gpu_seconds(received)} received"
        preempted = f"preempted {counted(record.preemptions, 'time')}"
        lost = "" if record.lost is None else f", {_gpu_seconds(record.lost)} of work lost"
        said.append(f"{times}, {preempted}{lost}")
    if record.failures:
        last = next((run for run in reversed(record.runs) if run.how == "failed"), None)
        how = [] if last is None else [each for each in (last.cause, last.exit) if each]
        said.append(counted(record.failures, "failed run") + (f"; the last: {', '.join(how)}" if how else ""))
    if record.runs and record.runs[-1].cause and record.state in {JobState.PAUSED, JobState.CHECKPOINTING}:
        said.append(f"last run: {record.runs[-1].cause}")
    return tuple(said)


def _stays(situation: ServiceState, record: JobRecord, now: float) -> str | None:
    """Why a job that holds GPUs keeps them whoever waits; None: it holds none, does not, or has only just started."""
    run = record.current
    if run is None or record.job.yields is Yields.ANY_TIME:
        return None
    if record.job.yields is Yields.NEVER:
        return "its owner wants it so"
    is_new = now - run.started < situation.header.settings.round
    return None if is_new or run.attached is not None else "it has not reported that it did a step and can save it"


def _gpu_seconds(amount: float) -> str:
    return counted(round(amount), "GPU-second")


def _contention(situation: ServiceState, record: JobRecord, code: str, now: float) -> tuple[str, ...]:
    """Who holds what it waits for, and how its tenant stands; of a job that runs, whether it goes on to."""
    if (stays := _stays(situation, record, now)) is not None:
        return (f"it is not preempted: {stays}",)
    if code in {Code.REJECTED, Code.RUNNING, Code.HELD, "starting", "checkpointing"}:
        return ()
    cluster, tally, mine = situation.header.cluster, situation.tally, record.job.gpu_types
    usable = tuple(gpu_type for gpu_type in cluster.gpu_types if not mine or gpu_type in mine)
    if usable not in tally.contention:
        tally.contention[usable] = _contended(situation, usable)
    found = tally.contention[usable]
    named = ", ".join(_holder(each, gpus, _stays(situation, each, now) is not None) for each, gpus in found.largest)
    said = [f"it can use {', '.join(usable)}; held of those: {counted(found.gpus, 'GPU')}"]
    if named:
        said.append(f"held among others by {named}" if found.jobs > MOST_HOLDERS else f"held by {named}")
    if (left := _being_left(situation, usable)) is not None:
        said.append(left)
    held = tally.held.by_tenant[record.job.tenant]
    said.append(f"tenant {record.job.tenant} holds {held} of {counted(cluster.gpus, 'GPU')}")
    return tuple(said)


def _being_left(situation: ServiceState, usable: tuple[str, ...]) -> str | None:
    """Who is still on GPUs of those types that count as free, or as somebody else's, by now; None: nobody is."""
    said = []
    for name in situation.closing:
        runs = [run for run in situation.records[name].open_runs() if run.released is not None]
        counts = sum((Counter(run.by_type) for run in runs), Counter[str]())
        said += [f"{counts[gpu_type]} {gpu_type} by job {name}" for gpu_type in usable if counts[gpu_type]]
    return f"still being left: {', '.join(said[:MOST_HOLDERS])}" if said else None


def _contended(situation: ServiceState, usable: tuple[str, ...]) -> Contention:
    holders = (situation.records[name] for name in situation.running)
    using = [(each, of_them) for each in holders if (of_them := _held_of(each, usable))]
    most = nsmallest(MOST_HOLDERS, using, key=lambda pair: (-sum(pair[1].values()), pair[0].job.submitted))
    places = {node.name for node in situation.header.cluster.nodes if node.gpu_type in usable}
    return Contention(sum(node in places for node, _ in situation.tally.holders), len(using), tuple(most))


def _held_of(record: JobRecord, usable: tuple[str, ...]) -> dict[str, int]:
    """GPUs that it holds of those types."""
    held = {} if record.current is None else record.current.by_type
    return {gpu_type: count for gpu_type, count in held.items() if gpu_type in usable}


def _holder(record: JobRecord, gpus: dict[str, int], stays: bool) -> str:
    held = " and ".join(f"{count} {gpu_type}" for gpu_type, count in gpus.items())
    return f"job {record.job.id} (tenant {record.job.tenant}, {held}{', not preempted' * stays})"


def _advice(situation: ServiceState, record: JobRecord, code: str, now: float) -> str | None:
    """One next step."""
    job = record.job
    if code == Code.REJECTED:
        return f"it runs once the cluster has what it asks for; or poise cancel {job.id}, and submit it anew"
    if code == Code.HELD and record.held:
        return f"poise release {job.id}"
    if is_awaited(record):
        return f"{remedy(record)}; poise release {job.id} lifts the hold"
    if situation.scheduler.backs_off_until(job.id) is not None:
        return _read_logs(record)
    if code in {Code.CAPACITY, Code.FRAGMENTATION}:
        return _smaller(situation, record, now)
    if code == Code.ORDER:
        return "Nothing to do: it gets its turn as those ahead of it have had theirs"
    if code == Code.SHARE:
        return _larger_share(situation, job.tenant)
    return None


def _smaller(situation: ServiceState, record: JobRecord, now: float) -> str:
    """What would fit right now, if anything would."""
    state, job = situation.scheduler.state, record.job
    free = dict(zip(state.topology.types, state.free.idle, strict=True))
    other = [name for name, idle in free.items() if job.gpu_types and name not in job.gpu_types and idle >= job.gpus]
    if other:
        return f"allow {' or '.join(other)} as well: enough GPUs are free there now"
    most = max((idle for name, idle in free.items() if not job.gpu_types or name in job.gpu_types), default=0)
    if job.min_gpus is not None and job.min_gpus <= most < job.gpus:
        return _elastic(situation.header.policy, job.gpus, most)
    if 0 < most < job.gpus:
        # No more than that: under some policies those ahead of it, which do not fit, hold up a job that does.
        return f"with {counted(most, 'GPU')} it would fit into what is free now"
    return _patience(situation, record, now)


def _patience(situation: ServiceState, record: JobRecord, now: float) -> str:
    """What a job waits for that needs nothing but time: free GPUs, or its turn, as the policy in force works."""
    free = "Nothing to do: it starts when enough GPUs are free"
    listing = listing_of(situation.header.policy)
    if PolicyClaim.NO_PREEMPTION in listing.claims:
        return free
    if _all_stay(situation, record, now):
        return f"{free}; the jobs that hold them now are not preempted"
    if listing.family is Family.QUEUE:
        return f"{free}, or when it comes before jobs that run: these then make room for it"
    if PolicyClaim.NO_STARVATION in listing.claims:
        return f"Nothing to do: it gets its turn {_looks(situation)}, or sooner if enough GPUs are free"
    return f"{free}, or when policy {listing.name}, which looks again {_looks(situation)}, gives it a turn"


def _all_stay(situation: ServiceState, record: JobRecord, now: float) -> bool:
    """Jobs hold GPUs which it can use, and none of them is preempted. Looks no further than the first that is."""
    holders = _holders(situation, record)
    first = next(holders, None)
    return first is not None and all(_stays(situation, each, now) is not None for each in chain((first,), holders))


def _looks(situation: ServiceState) -> str:
    """When the policy may take GPUs from jobs that run."""
    settings = situation.header.settings
    if settings.cadence is Cadence.EVENTS:
        return "whenever a job comes or ends"
    return f"at the end of a round (every {format_seconds(settings.round)})"


def _holders(situation: ServiceState, record: JobRecord) -> Iterator[JobRecord]:
    """Jobs that hold GPUs which it can use."""
    mine = record.job.gpu_types
    for name in situation.running:
        held = situation.records[name].current
        if held is not None and any(not mine or gpu_type in mine for gpu_type in held.by_type):
            yield situation.records[name]


def _larger_share(situation: ServiceState, tenant: str) -> str:
    """Of a job that would take its tenant beyond its share: whether that is for others of its jobs, or it is too large."""
    spec = situation.header.policy
    mine = situation.tally.held.by_tenant[tenant]
    starts = f"jobs of tenant {tenant} that hold GPUs end" if mine else "others leave enough GPUs idle"
    stated = promise_of(spec).stated_by(tenant)
    raised = f"poise shares --set {tenant}=WEIGHT"
    if stated is not None:
        raised = f"poise use {listing_of(spec).name}:{stated}=..., which states it"
    return f"it starts when {starts}, or an admin raises its share: {raised}"


def _elastic(policy: str, gpus: int, most: int) -> str:
    """Of a job that would do with what is free, and is not given it."""
    listing = listing_of(policy)
    if Capability.ELASTIC in listing.can:
        return f"Nothing to do: policy {listing.name} looks for a number of GPUs for it when it plans again"
    others = " or ".join(each.name for each in POLICIES.values() if Capability.ELASTIC in each.can)
    given = f"policy {listing.name} gives it {counted(gpus, 'GPU')} or none"
    return f"{given}: submit it with -g {most}, or ask an admin for {others}"


def _look(record: JobRecord) -> str | None:
    return _read_logs(record) if record.state is JobState.FAILED else None


def _read_logs(record: JobRecord) -> str:
    return f"poise logs {record.job.id}"
