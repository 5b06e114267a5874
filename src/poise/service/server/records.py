"""Job records: where each job stands, for people; and counts over all of them.

A record is kept consistent with the journal: `service_state.py` changes it in the same batch in which the core learns the
fact, and the store commits both together. GPUs are charged as the journal has it, from the launch of a run until the core
takes them back (`released`). The processes may be gone a little later (`ended`); the next run on the GPUs waits for that.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from poise.scheduler.model.cluster import Cluster, Holding, bits
from poise.scheduler.model.job import Job, Yields
from poise.service.backends.api import DesiredState, RunEnded, RunEnding, RunProgressed
from poise.service.wire.request import JobRequest, PreemptionMode
from poise.service.wire.views import Flag, JobState, RunView

MOST_RUNS = 50  # runs of a job that are kept one by one; totals count all
LOST = "node-lost"  # failure cause of a run that was lost with its runner, or with the machine

Slot = tuple[str, int]  # a GPU: its node, and its number there
Key = TypeVar("Key")


@dataclass(slots=True)
class RunRecord:
    """One run. Times are seconds since 1970, None until they come. Field names are stored: they must not change.

    begun      steps that the job had done when the run was launched
    began      all its processes were there
    attached   it had done a step, and could save what it does
    released   the core took its GPUs back
    ended      its processes were gone
    kept       steps that the job goes on from after it;  lost: GPU-seconds of work that it did not save
    grip       what is wanted of it
    by_type    number of its GPUs by type
    """

    epoch: int
    started: float
    gpus: dict[str, tuple[int, ...]]
    count: int
    by_type: dict[str, int]
    begun: float
    began: float | None = None
    attached: float | None = None
    released: float | None = None
    ended: float | None = None
    how: str | None = None
    cause: str | None = None
    codes: tuple[int | None, ...] = ()
    kept: float | None = None
    lost: float | None = None
    grip: DesiredState = DesiredState.RUN

    @property
    def gpu_type(self) -> str:
        """Type of its GPUs: `v100`, or `v100+k80` if they are mixed."""
        return "+".join(self.by_type)

    @property
    def exit(self) -> str | None:
        """How its processes ended, for people; None: not known."""
        codes = [str(code) for code in dict.fromkeys(self.codes) if code is not None]
        if codes:
            return f"exit code{'s' * (len(codes) > 1)} {', '.join(codes)}"
        never_began = self.how == RunEnding.FAILED and self.codes and self.began is None
        return "setup failed" if never_began and self.cause != LOST else None

    def view(self) -> RunView:
        """The run as the API shows it."""
        return RunView(
            epoch=self.epoch, started=self.started, ended=self.ended or self.released, gpus=self.gpus, how=self.how,
            cause=self.cause, codes=self.codes, begun=self.begun, kept=self.kept, lost=self.lost,
        )  # fmt: skip


@dataclass(slots=True)
class JobRecord:
    """One job. Field names are stored: they must not change.

    weight      its own, before its tenant's; `job.weight` is the product
    on_errors   retries that its owner asked for;  forgiven: exit codes that do not count against them
    faults      failed runs that count against its retries;  failures: all failed runs
    busy        seconds for which its processes held GPUs; `ran` also counts the wait for those who had them before
    since       when it last began to wait, or to run
    steps       done as it last reported;  total: of how many;  checkpoint: steps that would survive
    lost        GPU-seconds of work that was not saved; None: unknown, as a run reported nothing
    unsaved     the last run that was asked to leave saved nothing of what it did
    cause       why it failed or was cancelled, once it has
    by          the token that it was submitted with; None: from before that was noted
    size        bytes of its request; stored with the request, not here
    """

    job: Job
    name: str
    weight: float
    preemption: PreemptionMode
    deadline: float
    on_errors: int | None
    forgiven: tuple[int, ...]
    state: JobState = JobState.PENDING
    held: bool = False
    faults: int = 0
    failures: int = 0
    preemptions: int = 0
    launches: int = 0
    waited: float = 0.0
    ran: float = 0.0
    busy: float = 0.0
    gpu_seconds: float = 0.0
    lost: float | None = 0.0
    since: float = 0.0
    started: float | None = None
    finished: float | None = None
    steps: float = 0.0
    total: float | None = None
    checkpoint: float | None = None
    unsaved: bool = False
    throughput: float | None = None
    loss: float | None = None
    cause: str | None = None
    flags: tuple[Flag, ...] = ()
    by: str | None = None
    runs: list[RunRecord] = field(default_factory=list)
    size: int = 0

    @staticmethod
    def of(job: Job, request: JobRequest, by: str | None = None, size: int = 0) -> "JobRecord":
        """The record of a job that has just been submitted."""
        return JobRecord(
            job, job.name or job.id, request.weight, request.preemption, request.checkpoint.deadline,
            request.retry.on_errors, request.retry.exit_codes, total=request.steps, since=job.submitted, held=request.hold,
            by=by, size=size,
        )  # fmt: skip

    @property
    def current(self) -> RunRecord | None:
        """The run that holds GPUs, as the core sees it."""
        last = self.runs[-1] if self.runs else None
        return last if last is not None and last.released is None else None

    @property
    def ended(self) -> float | None:
        """When the job finished, once all its processes are gone too: it can then be dropped from memory."""
        return self.finished if not self.open_runs() else None

    def open_runs(self) -> list[RunRecord]:
        """Runs whose processes may still be there, the earliest first."""
        return [run for run in self.runs if run.ended is None]

    def stopping_runs(self) -> list[RunRecord]:
        """Runs whose processes may still be on GPUs that the core has taken back."""
        return [run for run in self.runs if run.ended is None and run.released is not None]

    def run(self, epoch: int) -> RunRecord | None:
        """The run of an epoch, if it is one of the last."""
        return next((run for run in reversed(self.runs) if run.epoch == epoch), None)

    def launch(self, run: RunRecord, now: float) -> None:
        """Give it the GPUs of a new run."""
        self.waited += now - self.since
        self.since = now
        self.launches += 1
        if self.started is None:
            self.started = now
        self.runs.append(run)
        if len(self.runs) > MOST_RUNS and self.runs[0].ended is not None:
            del self.runs[0]
        self.update_state()

    def release(self, now: float) -> None:
        """Take its GPUs back, if it has any, and charge for them."""
        run = self.current
        if run is None:
            return
        run.released = now
        self.ran += now - run.started
        self.busy += 0.0 if run.began is None else max(now - run.began, 0.0)
        self.gpu_seconds += run.count * (now - run.started)
        self.since = now
        self.update_state()

    def begin_run(self, run: RunRecord, at: float, begun: float | None) -> None:
        """Note that all processes of a run have started.

        The run before it has kept exactly what this one begins with. Its node may have been lost before it could say so.

        begun   steps that the run begins with; None: the back end does not know, and what was last reported stays
        """
        if begun is not None:
            before = next((each for each in reversed(self.runs) if each.epoch < run.epoch and each.began is not None), None)
            if before is not None and begun != (before.begun if before.kept is None else before.kept):
                before.kept = begun
            if begun != run.begun:
                self.steps = self.checkpoint = begun
            for each in self.runs:
                if before is None or each.epoch > before.epoch:  # those in between did not begin
                    each.begun = begun
        run.began = at
        self.update_state()

    def can_yield(self, run: RunRecord, news: RunProgressed) -> bool:
        """Whether a run has done a step and can save it. After a run that saved nothing, it must have saved already."""
        has_stepped = news.throughput is not None or news.steps > run.begun
        if not has_stepped or news.checkpoint is None:
            return False
        return not self.unsaved or news.checkpoint > run.begun

    def why_pinned(self, now: float, spared: float) -> str | None:
        """Why it keeps its GPUs while others want them; None: it has none, may be preempted, or has only just started.

        spared   seconds for which nothing is said of a run that has not reported yet
        """
        run = self.current
        if run is None or self.job.yields is Yields.ANY_TIME:
            return None
        if self.job.yields is Yields.NEVER:
            return "its owner wants it so"
        is_new = now - run.started < spared
        return None if is_new or run.attached is not None else "it has not reported that it did a step and can save it"

    def end_run(self, run: RunRecord, news: RunEnded, now: float) -> None:
        """Note that the processes of a run are gone: what it saved, and how much of its work is lost."""
        run.ended, run.how, run.codes = now, news.how.value, news.codes
        said = f"ended by {news.cause}" if news.cause in ("TERM", "KILL") else news.cause
        run.cause = "; ".join(text for text in (run.cause, said) if text) or None
        if news.steps is not None and run.began is not None:  # otherwise it did nothing that could be saved or lost
            kept = run.kept = news.steps
            if run.grip is DesiredState.LEAVE and run.attached is not None:
                self.unsaved = kept <= run.begun
            # Lost: the GPU-seconds of this run, times the part of its steps that has to be done again.
            done = max(self.steps, kept) - run.begun
            seconds = (run.released or run.ended or run.started) - run.began
            run.lost = run.count * max(seconds, 0.0) * ((done - (kept - run.begun)) / done) if done > 0 else 0.0
            self.lost = None if self.lost is None else self.lost + run.lost
            self.steps = self.checkpoint = kept
            for later in self.runs:
                if later.epoch > run.epoch:  # it was launched before this one had left, and goes on from here
                    later.begun = kept
        elif run.began is not None and news.how is not RunEnding.FINISHED:
            self.lost = None
        self.update_state()

    def end(self, state: JobState, now: float, cause: str | None) -> None:
        """Finish the job, successfully or not."""
        self.release(now)
        if self.finished is None:
            if not self.runs or self.runs[-1].released != now:
                self.waited += now - self.since
            self.finished, self.state, self.cause = now, state, cause

    def update_state(self) -> None:
        """Derive the state from the runs, unless the job has finished."""
        if self.finished is not None:
            return
        current = self.current
        if current is not None:
            self.state = JobState.STARTING if current.began is None else JobState.RUNNING
        elif any(run.grip is DesiredState.LEAVE and run.began is not None for run in self.open_runs()):
            self.state = JobState.CHECKPOINTING
        else:
            self.state = JobState.PAUSED if self.runs else JobState.PENDING

    def all_flags(self) -> tuple[Flag, ...]:
        """Flags that the API shows: those of its failure, and those that follow from where it stands."""
        flags = list(self.flags)
        if self.held and not self.state.is_final:
            flags.append(Flag.HELD)
        if self.preemptions and self.state in {JobState.PAUSED, JobState.CHECKPOINTING}:
            flags.append(Flag.PREEMPTED)
        if self.launches > 1:
            flags.append(Flag.RESTARTED)
        return tuple(flags)

    def text(self) -> str:
        """The record as JSON, without the job."""
        document = dict(zip(_JOB_FIELDS, _job_values(self), strict=True))
        document["runs"] = [dict(zip(_RUN_FIELDS, _run_values(run), strict=True)) for run in self.runs]
        return _encode(document)

    @staticmethod
    def read(job: Job, text: str) -> "JobRecord":
        """The record that `text` wrote."""
        document = json.loads(text)
        document["runs"] = [_read_run(**run) for run in document["runs"]]
        document["preemption"] = PreemptionMode(document["preemption"])
        document["state"] = JobState(document["state"])
        document["flags"] = tuple(map(Flag, document["flags"]))
        document["forgiven"] = tuple(document["forgiven"])
        return JobRecord(job=job, **document)


# Getters made once: a busy service writes thousands of records a second.
_JOB_FIELDS = tuple(each.name for each in fields(JobRecord) if each.name not in {"job", "runs", "size"})
_RUN_FIELDS = tuple(each.name for each in fields(RunRecord))
_job_values, _run_values = attrgetter(*_JOB_FIELDS), attrgetter(*_RUN_FIELDS)
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _read_run(gpus: dict[str, list[int]], codes: list[int | None], grip: str, **rest: Any) -> RunRecord:  # noqa: ANN401
    by_node = {node: tuple(slots) for node, slots in gpus.items()}
    return RunRecord(gpus=by_node, codes=tuple(codes), grip=DesiredState(grip), **rest)


def slots_by_node(cluster: Cluster, holding: Holding) -> dict[str, tuple[int, ...]]:
    """GPUs by the name of their node: slots, ascending."""
    return {cluster.nodes[node].name: tuple(bit.bit_length() - 1 for bit in bits(mask)) for node, mask in holding}


def type_counts(cluster: Cluster, holding: Holding) -> dict[str, int]:
    """Number of GPUs by type, in the order of the cluster."""
    counts: dict[str, int] = {}
    for node, mask in holding:
        gpu_type = cluster.nodes[node].gpu_type
        counts[gpu_type] = counts.get(gpu_type, 0) + mask.bit_count()
    return counts


# Counts over all records, kept up to date: with 100,000 jobs no request can afford to look at each of them.


class Contention(NamedTuple):
    """Who holds GPUs of some types: how many `gpus` by how many `jobs`; and the largest holders with what they hold."""

    gpus: int
    jobs: int
    largest: tuple[tuple[JobRecord, dict[str, int]], ...]


class _Counted(NamedTuple):
    """What of a job is counted."""

    state: str
    tenant: str
    gpus: tuple[Slot, ...]
    waits: bool


class StateCounts:
    """Counts of jobs that have not ended, or whose processes are not all gone.

    states    jobs by state;  waiting: jobs that wait, by tenant
    holders   jobs on each GPU that is held; policies that pair jobs put two on one GPU
    held      GPUs by tenant; one that two tenants share counts for both
    jobs      jobs of each tenant that has any, in order of submission
    """

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self.holders: Counter[Slot] = Counter()
        self.held: Counter[str] = Counter()
        self.jobs: dict[str, dict[str, None]] = {}
        self._holders_by_tenant: Counter[tuple[str, Slot]] = Counter()
        self._counted: dict[str, _Counted] = {}
        self._contention: dict[tuple[str, ...], Contention] = {}

    def share(self, tenant: str) -> float | None:
        """A tenant's part of all GPUs that are held; None if none are."""
        return self.held[tenant] / len(self.holders) if self.holders else None

    def among(self, jobs: Iterable[str]) -> Counter[str]:
        """Number of these jobs by state."""
        return Counter([self._counted[job].state for job in jobs])

    def contention(self, types: tuple[str, ...], compute: Callable[[], Contention]) -> Contention:
        """Who holds GPUs of these types; computed once and kept until any job gets or loses GPUs."""
        if types not in self._contention:
            self._contention[types] = compute()
        return self._contention[types]

    def count(self, record: JobRecord) -> None:
        """Count a job as it stands now instead of as it stood before."""
        job, run = record.job.id, record.current
        gpus = () if run is None else tuple((node, slot) for node, slots in run.gpus.items() for slot in slots)
        waits = run is None and record.finished is None
        now = _Counted(record.state.value, record.job.tenant, gpus, waits)
        before = self._counted.get(job)
        if before == now:
            return
        if before is None:
            self.jobs.setdefault(now.tenant, {})[job] = None
        else:
            self._add(before, -1)
        self._counted[job] = now
        self._add(now, 1)

    def forget(self, job: str) -> None:
        """Count a job no more."""
        if (before := self._counted.pop(job, None)) is not None:
            self._add(before, -1)
            del self.jobs[before.tenant][job]
            if not self.jobs[before.tenant]:
                del self.jobs[before.tenant]

    def _add(self, counted: _Counted, sign: int) -> None:
        _change(self.states, counted.state, sign)
        if counted.waits:
            _change(self.waiting, counted.tenant, sign)
        if counted.gpus:
            self._contention.clear()
        for gpu in counted.gpus:
            _change(self.holders, gpu, sign)
            key = (counted.tenant, gpu)
            had = key in self._holders_by_tenant
            _change(self._holders_by_tenant, key, sign)
            _change(self.held, counted.tenant, (key in self._holders_by_tenant) - had)


def _change(counter: Counter[Key], key: Key, by: int) -> None:
    """Add to a counter; a key whose count is 0 is dropped."""
    counter[key] += by
    if not counter[key]:
        del counter[key]
