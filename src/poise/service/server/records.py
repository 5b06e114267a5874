"""Where each job stands, for people: its runs, what it has received, what was lost. Kept in step with the journal.

GPUs are charged as the journal has it: from the launch of a run until the core takes them back (`released`). The processes
may be gone a little later (`ended`); whoever gets the GPUs next waits for that.
"""

import json
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from poise.scheduler.model.cluster import Cluster, Holding, bits
from poise.scheduler.model.job import Job
from poise.service.backends.api import DesiredState, RunEnded, RunEnding, RunProgressed
from poise.service.wire.request import JobRequest, PreemptionMode
from poise.service.wire.views import Flag, JobState, RunView

MOST_RUNS = 50
"""Runs of a job that are kept one by one; totals count all."""
LOST = "node-lost"
"""Cause of death of a run that went with its runner, or with the machine."""
SIGNALS = ("TERM", "KILL")
"""How a run was made to leave that did not by itself."""


@dataclass(slots=True)
class RunRecord:
    """One run. Moments; None until they come.

    began      its processes were all there
    attached   it had done a step, and could save what it does
    released   the core took its GPUs back
    ended      its processes were gone
    grip       what is wanted of it
    by_type    how many of its GPUs are of which type
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
        """Of its GPUs: `v100`, or `v100+k80` if they are mixed."""
        return "+".join(self.by_type)

    @property
    def exit(self) -> str | None:
        """How its processes ended, for people; None: that is not known."""
        codes = [str(code) for code in dict.fromkeys(self.codes) if code is not None]
        if codes:
            return f"exit code{'s' * (len(codes) > 1)} {', '.join(codes)}"
        never_began = self.how == RunEnding.FAILED and self.codes and self.began is None
        return "setup failed" if never_began and self.cause != LOST else None

    def view(self) -> RunView:
        """For people."""
        return RunView(
            epoch=self.epoch, started=self.started, ended=self.ended or self.released, gpus=self.gpus, how=self.how,
            cause=self.cause, codes=self.codes, begun=self.begun, kept=self.kept, lost=self.lost,
        )  # fmt: skip


@dataclass(slots=True)
class JobRecord:
    """One job.

    weight      its own, before its tenant's; `job.weight` is the product
    faults      failed runs that count against its retries;  failures: all of them
    busy        seconds for which processes of it held GPUs; `ran` also counts the wait for those who had them before
    since       when it last began to wait, or to run
    steps       done as it last reported;  total: of how many;  checkpoint: steps that would survive
    lost        GPU-seconds of work that was not kept; None: there was a run of which nobody knows what it did
    unsaved     the last run that was asked to leave kept nothing of what it did
    cause       why it failed or was cancelled, once it has
    by          the token that it was submitted with; None: from before that was noted
    size        bytes of what was submitted; kept with that, and not here
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
        """A job that has just been submitted."""
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

    def open_runs(self) -> list[RunRecord]:
        """Runs whose processes may still be there, the earliest first."""
        return [run for run in self.runs if run.ended is None]

    def run(self, epoch: int) -> RunRecord | None:
        """The run of an epoch, if it is one of the last."""
        return next((run for run in reversed(self.runs) if run.epoch == epoch), None)

    def launch(self, run: RunRecord, now: float) -> None:
        """It gets GPUs."""
        self.waited += now - self.since
        self.since = now
        self.launches += 1
        if self.started is None:
            self.started = now
        self.runs.append(run)
        if len(self.runs) > MOST_RUNS and self.runs[0].ended is not None:
            del self.runs[0]
        self.restate()

    def release(self, now: float) -> None:
        """The core takes its GPUs back, if it has any; that is when they are paid for."""
        run = self.current
        if run is None:
            return
        run.released = now
        self.ran += now - run.started
        self.busy += 0.0 if run.began is None else max(now - run.began, 0.0)
        self.gpu_seconds += run.count * (now - run.started)
        self.since = now
        self.restate()

    def can_leave(self, run: RunRecord, news: RunProgressed) -> bool:
        """The run has done a step and can save what it does; after one that could not, it has to have done so."""
        has_stepped = news.throughput is not None or news.steps > run.begun
        if not has_stepped or news.checkpoint is None:
            return False
        return not self.unsaved or news.checkpoint > run.begun

    def gone(self, news: RunEnded, now: float) -> None:
        """The processes of a run are gone: what it kept, and what of its work is lost."""
        run = self.run(news.epoch)
        if run is None or run.ended is not None:
            return
        run.ended, run.how, run.codes = now, news.how.value, news.codes
        said = f"ended by {news.cause}" if news.cause in SIGNALS else news.cause
        run.cause = "; ".join(text for text in (run.cause, said) if text) or None
        if news.steps is not None and run.began is not None:  # otherwise it did nothing that could be kept or lost
            run.kept = news.steps
            if run.grip is DesiredState.LEAVE and run.attached is not None:
                self.unsaved = news.steps <= run.begun
            self._count_lost(run, news.steps)
        elif run.began is not None and news.how is not RunEnding.FINISHED:
            self.lost = None
        self.restate()

    def _count_lost(self, run: RunRecord, kept: float) -> None:
        """GPU-seconds of this run behind its last checkpoint: of what it did, the part that is to be done again."""
        done = max(self.steps, kept) - run.begun
        seconds = (run.released or run.ended or run.started) - (run.began or run.started)
        run.lost = run.count * max(seconds, 0.0) * ((done - (kept - run.begun)) / done) if done > 0 else 0.0
        self.lost = None if self.lost is None else self.lost + run.lost
        self.steps = self.checkpoint = kept
        for later in self.runs:
            if later.epoch > run.epoch:  # it was launched before this one had left, and goes on from here
                later.begun = kept

    def end(self, state: JobState, now: float, cause: str | None) -> None:
        """It has come to its end."""
        self.release(now)
        if self.finished is None:
            if not self.runs or self.runs[-1].released != now:
                self.waited += now - self.since
            self.finished, self.state, self.cause = now, state, cause

    def restate(self) -> None:
        """The state follows from the runs."""
        if self.finished is not None:
            return
        current = self.current
        if current is not None:
            self.state = JobState.STARTING if current.began is None else JobState.RUNNING
        elif any(run.grip is DesiredState.LEAVE and run.began is not None for run in self.open_runs()):
            self.state = JobState.CHECKPOINTING
        else:
            self.state = JobState.PAUSED if self.runs else JobState.PENDING

    def flagged(self) -> tuple[Flag, ...]:
        """What else there is to say."""
        flags = list(self.flags)
        if self.held and not self.state.is_final:
            flags.append(Flag.HELD)
        if self.preemptions and self.state in {JobState.PAUSED, JobState.CHECKPOINTING}:
            flags.append(Flag.PREEMPTED)
        if self.launches > 1:
            flags.append(Flag.RESTARTED)
        return tuple(flags)

    def text(self) -> str:
        """As JSON, without the job."""
        document = dict(zip(_KEPT, _kept_of(self), strict=True))
        document["runs"] = [dict(zip(_OF_RUN, _run_of(run), strict=True)) for run in self.runs]
        return _encode(document)

    @staticmethod
    def read(job: Job, text: str) -> "JobRecord":
        """What `text` wrote."""
        document = json.loads(text)
        document["runs"] = [_run(**run) for run in document["runs"]]
        document["preemption"] = PreemptionMode(document["preemption"])
        document["state"] = JobState(document["state"])
        document["flags"] = tuple(map(Flag, document["flags"]))
        document["forgiven"] = tuple(document["forgiven"])
        return JobRecord(job=job, **document)


_KEPT = tuple(each.name for each in fields(JobRecord) if each.name not in {"job", "runs", "size"})
_OF_RUN = tuple(each.name for each in fields(RunRecord))
_kept_of, _run_of = attrgetter(*_KEPT), attrgetter(*_OF_RUN)
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _run(gpus: dict[str, list[int]], codes: list[int | None], grip: str, **rest: Any) -> RunRecord:  # noqa: ANN401
    parts = {node: tuple(slots) for node, slots in gpus.items()}
    return RunRecord(gpus=parts, codes=tuple(codes), grip=DesiredState(grip), **rest)


def places(cluster: Cluster, holding: Holding) -> dict[str, tuple[int, ...]]:
    """GPUs by the name of their node: slots, ascending."""
    return {cluster.nodes[node].name: tuple(bit.bit_length() - 1 for bit in bits(mask)) for node, mask in holding}


def type_counts(cluster: Cluster, holding: Holding) -> dict[str, int]:
    """How many GPUs are of which type, in the cluster's order."""
    counts: dict[str, int] = {}
    for node, mask in holding:
        gpu_type = cluster.nodes[node].gpu_type
        counts[gpu_type] = counts.get(gpu_type, 0) + mask.bit_count()
    return counts
