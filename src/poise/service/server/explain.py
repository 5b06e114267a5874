"""Why a job stands where it stands: the one dominant reason, the evidence, and what would help.

`why` is the entry point. The core gives the reason (`scheduler/core/reasons.py`); this module adds what only the service
knows: runs that are starting or leaving, holds that wait, who holds the GPUs that a job could use, and what its owner or an
admin could do. All of it is called under the engine's lock.
"""

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from heapq import nsmallest

from poise.scheduler.core.reasons import Code, waiting_code
from poise.scheduler.core.settings import Cadence
from poise.scheduler.model.units import counted, format_seconds
from poise.scheduler.policies.catalogue import (
    POLICIES,
    Capability,
    Family,
    PolicyProperty,
    listing_of,
    promise_of,
)
from poise.service.backends.api import RunEnding
from poise.service.server.batch import deferral, is_hold_deferred, stop_advice
from poise.service.server.node_records import out_of_use
from poise.service.server.records import Contention, JobRecord
from poise.service.server.service_state import ServiceState
from poise.service.server.start_conditions import StartCode
from poise.service.wire.views import JobState, ReasonView, WhyView

MOST_NODES = 3  # nodes that cannot be used which are named to a job that waits
MOST_HOLDERS = 3  # jobs that are named as holding what another one waits for


class LiveCode(StrEnum):
    """Codes of reasons that only a live service has, besides those of the core (`Code`)."""

    STARTING = "starting"
    CHECKPOINTING = "checkpointing"


def why(state: ServiceState, record: JobRecord, now: float) -> WhyView:
    """One reason, the evidence, one next step."""
    job, history = record.job.id, tuple(_history(record, now))
    if record.finished is not None:
        advice = f"poise logs {job}" if record.state is JobState.FAILED else None
        return WhyView(job=job, state=record.state, reason=ended_reason(record), evidence=history, advice=advice)
    reason = reason_of(state, record, now)
    evidence = (*history, *_conditions(state, record, reason, now), *_contention(state, record, reason.code, now))
    is_early = reason.code in {*StartCode}
    step = _of_start(state, record, StartCode(reason.code)) if is_early else _advice(state, record, reason.code, now)
    return WhyView(job=job, state=record.state, reason=reason, evidence=evidence, advice=step)


# The reason.


def reason_of(state: ServiceState, record: JobRecord, now: float) -> ReasonView:
    """The dominant reason of a job that has not ended. The service knows more of runs than the core does."""
    job = record.job.id
    if (stranded := state.stranded.get(job)) is not None:
        return ReasonView(code=Code.REJECTED.value, text=f"cannot run on the cluster as it is now: {stranded}")
    found = state.scheduler.explain(job)
    code, text = found.code.value, found.text
    if found.code is Code.RUNNING and record.state is JobState.STARTING:
        awaits = _awaits_others(state, record)
        text = "waits until those who had its GPUs have left" if awaits else "its processes are being started"
        return ReasonView(code=LiveCode.STARTING, text=text)
    if record.state is JobState.CHECKPOINTING:
        gpus = counted(sum(run.count for run in record.open_runs()), "GPU")
        if any(run.attached is not None for run in record.open_runs()):
            text = "was asked to leave, and writes its checkpoint"
        else:
            lost = "so it is ended, and what it has not saved itself is lost"
            text = f"was asked to leave; it does not save by poise.worker, {lost}"
        return ReasonView(code=LiveCode.CHECKPOINTING, text=f"{text}; until it is gone it keeps {gpus}")
    if (condition := state.conditions.code_of(job)) is not None:
        texts = state.conditions.texts(job, state.records, now)
        return ReasonView(code=condition.value, text=texts[0] if texts else "is about to compete")
    if found.code is Code.RUNNING and is_hold_deferred(record):
        return ReasonView(code=code, text=f"{text}, and will be held: {deferral(record)}")
    until = state.scheduler.backs_off_until(job)
    if until is not None:
        last = record.runs[-1]
        ended = "left without being asked to" if last.how == RunEnding.YIELDED else f"failed: {last.cause}"
        wait = format_seconds(max(until - now, 0.0))
        text = f"is tried again in {wait} at the earliest, as its last run {ended}"
    return ReasonView(code=code, text=text)


def _awaits_others(state: ServiceState, record: JobRecord) -> bool:
    """A run that has lost its GPUs is still there: of the job itself, or on GPUs that it has now."""
    mine = {} if record.current is None else record.current.gpus
    others = (run for job in state.stopping for run in state.records[job].stopping_runs())
    return len(record.open_runs()) > 1 or any(
        not set(slots).isdisjoint(mine.get(node, ())) for run in others for node, slots in run.gpus.items()
    )


def ended_reason(record: JobRecord) -> ReasonView:
    """The reason of a job that has ended."""
    codes = {JobState.SUCCEEDED: Code.FINISHED, JobState.FAILED: Code.FAILED, JobState.CANCELLED: Code.CANCELLED}
    return ReasonView(code=codes[record.state].value, text=record.cause or "did all its work")


def reason_counts(state: ServiceState) -> dict[str, int]:
    """Jobs that have not ended by the core's dominant reason; jobs of one shape wait for the same, and count together."""
    core = state.scheduler.state
    away = len(core.suspended) - sum(map(core.running, core.suspended))  # some of them are on trial
    counts: Counter[str] = Counter({Code.RUNNING.value: len(state.running), Code.REJECTED.value: len(state.stranded)})
    barred = state.conditions.codes - Counter(filter(None, map(state.conditions.code_of, state.stranded)))
    counts.update({code.value: jobs for code, jobs in barred.items()})
    counts[Code.HELD.value] = max(0, away - barred.total())
    for shape in core.waiting_shapes.values():
        counts[waiting_code(core, shape).value] += shape.waiting
    return dict(counts)


# The evidence.


def _history(record: JobRecord, now: float) -> Iterator[str]:
    """What has happened to a job so far."""
    if record.launches:
        run = record.current
        received = record.gpu_seconds + (0.0 if run is None else run.count * (now - run.started))
        lost = "" if record.lost is None else f", {counted(round(record.lost), 'GPU-second')} of work lost"
        times = f"{counted(record.launches, 'run')}, {counted(round(received), 'GPU-second')} received"
        yield f"{times}, preempted {counted(record.preemptions, 'time')}{lost}"
    if record.failures:
        last = next((run for run in reversed(record.runs) if run.how == "failed"), None)
        how = [] if last is None else [each for each in (last.cause, last.exit) if each]
        yield counted(record.failures, "failed run") + (f"; the last: {', '.join(how)}" if how else "")
    if record.runs and record.runs[-1].cause and record.state in {JobState.PAUSED, JobState.CHECKPOINTING}:
        yield f"last run: {record.runs[-1].cause}"


def _conditions(state: ServiceState, record: JobRecord, reason: ReasonView, now: float) -> Iterator[str]:
    """What else has to happen before a job may start."""
    for text in state.conditions.texts(record.job.id, state.records, now):
        if text != reason.text:
            yield f"it {text}"


def _contention(state: ServiceState, record: JobRecord, code: str, now: float) -> Iterator[str]:
    """Who holds what a job waits for, and how its tenant stands; for a job that runs, whether it keeps its GPUs."""
    if (stays := record.why_pinned(now, state.header.settings.round)) is not None:
        yield f"it is not preempted: {stays}"
        return
    if code in {Code.REJECTED, Code.RUNNING, Code.HELD, *LiveCode, *StartCode}:
        return
    cluster, tenant = state.header.cluster, record.job.tenant
    usable = tuple(each for each in cluster.gpu_types if not record.job.gpu_types or each in record.job.gpu_types)
    found = state.counts.contention(usable, lambda: _contended(state, usable))
    yield f"it can use {', '.join(usable)}; held of those: {counted(found.gpus, 'GPU')}"
    named = []
    for each, by_type in found.largest:
        held = " and ".join(f"{count} {gpu_type}" for gpu_type, count in by_type.items())
        pinned = ", not preempted" if each.why_pinned(now, state.header.settings.round) is not None else ""
        named.append(f"job {each.job.id} (tenant {each.job.tenant}, {held}{pinned})")
    if named:
        yield f"held {'among others ' if found.jobs > MOST_HOLDERS else ''}by {', '.join(named)}"
    left = []
    for job in state.stopping:  # these GPUs count as free, or as another job's, by now
        counts = sum((Counter(run.by_type) for run in state.records[job].stopping_runs()), Counter[str]())
        left += [f"{counts[gpu_type]} {gpu_type} by job {job}" for gpu_type in usable if counts[gpu_type]]
    if left:
        yield f"still being vacated: {', '.join(left[:MOST_HOLDERS])}"
    yield from _missing_nodes(state, usable)
    yield f"tenant {tenant} holds {state.counts.held[tenant]} of {counted(cluster.gpus, 'GPU')}"


def _missing_nodes(state: ServiceState, usable: tuple[str, ...]) -> Iterator[str]:
    """Which nodes that a job could use are lost, drained or used by others: why, and since when."""
    missing = list(out_of_use(state.nodes, state.header.cluster, usable))
    yield from missing[:MOST_NODES]
    if len(missing) > MOST_NODES:
        yield f"and {counted(len(missing) - MOST_NODES, 'more node')} that cannot be used, or not all of it: poise nodes"


def _contended(state: ServiceState, usable: tuple[str, ...]) -> Contention:
    """Who holds GPUs of these types. Looks at all jobs that run, hence computed once until one of them changes."""
    using = []
    for job in state.running:
        run = state.records[job].current
        by_type = {} if run is None else {name: count for name, count in run.by_type.items() if name in usable}
        if by_type:
            using.append((state.records[job], by_type))
    most = nsmallest(MOST_HOLDERS, using, key=lambda pair: (-sum(pair[1].values()), pair[0].job.submitted))
    nodes = {node.name for node in state.header.cluster.nodes if node.gpu_type in usable}
    return Contention(sum(node in nodes for node, _ in state.counts.holders), len(using), tuple(most))


# The advice: one next step.


def _advice(state: ServiceState, record: JobRecord, code: str, now: float) -> str | None:
    job = record.job.id
    if code == Code.REJECTED:
        return f"it runs once the cluster has what it asks for; or poise cancel {job}, and submit it anew"
    if code == Code.HELD and record.held:
        return f"poise release {job}"
    if is_hold_deferred(record):
        return f"{stop_advice(record)}; poise release {job} lifts the hold"
    if state.scheduler.backs_off_until(job) is not None:
        return f"poise logs {job}"
    if code in {Code.CAPACITY, Code.FRAGMENTATION}:
        return _smaller(state, record) or _patience(state, record, now)
    if code == Code.UNAVAILABLE:
        return _smaller(state, record) or "Nothing to do: it starts when nodes are back, or given out again"
    if code == Code.ORDER:
        return "Nothing to do: it gets its turn as those ahead of it have had theirs"
    return _larger_share(state, record.job.tenant) if code == Code.SHARE else None


def _of_start(state: ServiceState, record: JobRecord, code: StartCode) -> str:
    """What a job does that does not compete yet."""
    if code is StartCode.DEPENDENCY:
        first = state.conditions.first_awaited(record.job.id)
        return "Nothing to do: it competes once they have ended" + ("" if first is None else f"; poise why {first}")
    if code is StartCode.BEGIN:
        return "Nothing to do: it competes from then on"
    return "Nothing to do: it competes once one of these has ended, or is held"


def _smaller(state: ServiceState, record: JobRecord) -> str | None:
    """What would fit right now, if anything would."""
    core, job = state.scheduler.state, record.job
    free = dict(zip(core.topology.types, core.free.idle, strict=True))
    other = [name for name, idle in free.items() if job.gpu_types and name not in job.gpu_types and idle >= job.gpus]
    if other:
        return f"allow {' or '.join(other)} as well: enough GPUs are free there now"
    most = max((idle for name, idle in free.items() if not job.gpu_types or name in job.gpu_types), default=0)
    if job.min_gpus is not None and job.min_gpus <= most < job.gpus:
        # It is elastic and could run on what is free, but is not given it.
        listing = listing_of(state.header.policy)
        if Capability.ELASTIC in listing.can:
            return f"Nothing to do: policy {listing.name} looks for a number of GPUs for it when it plans again"
        others = " or ".join(each.name for each in POLICIES.values() if Capability.ELASTIC in each.can)
        given = f"policy {listing.name} gives it {counted(job.gpus, 'GPU')} or none"
        return f"{given}: submit it with -g {most}, or ask an admin for {others}"
    # No more than that: under some policies those ahead of it, which do not fit, hold up a job that does.
    return f"with {counted(most, 'GPU')} it would fit into what is free now" if 0 < most < job.gpus else None


def _patience(state: ServiceState, record: JobRecord, now: float) -> str:
    """What a job waits for that needs nothing but time: free GPUs, or its turn, as the policy in force works."""
    free = "Nothing to do: it starts when enough GPUs are free"
    listing, settings = listing_of(state.header.policy), state.header.settings
    if PolicyProperty.NO_PREEMPTION in listing.claims:
        return free
    current = ((state.records[job], state.records[job].current) for job in state.running)
    wanted = record.job.gpu_types
    holders = (each for each, run in current if run is not None and (not wanted or set(wanted) & run.by_type.keys()))
    are_pinned = (each.why_pinned(now, state.header.settings.round) is not None for each in holders)
    if next(are_pinned, False) and all(are_pinned):  # lazily: usually the first holder already settles it
        return f"{free}; the jobs that hold them now are not preempted"
    if listing.family is Family.QUEUE:
        return f"{free}, or when it comes before jobs that run: these then make room for it"
    looks = f"at the end of a round (every {format_seconds(settings.round)})"
    if settings.cadence is Cadence.EVENTS:
        looks = "whenever a job comes or ends"
    if PolicyProperty.NO_STARVATION in listing.claims:
        return f"Nothing to do: it gets its turn {looks}, or sooner if enough GPUs are free"
    return f"{free}, or when policy {listing.name}, which looks again {looks}, gives it a turn"


def _larger_share(state: ServiceState, tenant: str) -> str:
    """What helps a job that would take its tenant beyond its share: the end of its other jobs, or a larger share."""
    spec = state.header.policy
    starts = f"jobs of tenant {tenant} that hold GPUs end" if state.counts.held[tenant] else "others leave enough GPUs idle"
    stated = promise_of(spec).stated_by(tenant)
    raised = f"poise shares --set {tenant}=WEIGHT"
    if stated is not None:
        raised = f"poise use {listing_of(spec).name}:{stated}=..., which states it"
    return f"it starts when {starts}, or an admin raises its share: {raised}"
