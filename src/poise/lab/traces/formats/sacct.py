"""Slurm's accounting: what `sacct --parsable2` (or `--parsable`) prints with its header, or `sacct --json`.

| column | becomes |
|---|---|
| `JobID`, `JobIDRaw` | id, as `JobID` has it: `7`, `7_3` of an array, `7+1` of a heterogeneous job; one of the two will do |
| `Cluster` | goes before the ids, `<cluster>/7`, if there are several clusters |
| `Account`, `User` | tenant: the account; the user where the log has no accounts |
| `JobName` | name |
| `Submit`, `Eligible` | submitted: the later of the two, unless the job started before it was eligible |
| `Start`, `End` | observed: when it ran |
| `ElapsedRaw`, `Elapsed` | duration, s; from `Start` to `End` where neither is there |
| `State` | outcome: COMPLETED passed; CANCELLED, PREEMPTED, REVOKED killed; TIMEOUT, NODE_FAIL and all others failed |
| `AllocTRES`, `ReqTRES` | gpus: the `gres/gpu` that it got; of the request, if it got nothing |
| `AllocGRES` | gpus, in old versions that do not count TRES: the total, as `gpu:4` or `gpu:tesla:2` |
| `ReqTRES`, `Constraints` | gpu_types: of the request, `gres/gpu:a100=2`; or of a constraint, `a100\\|v100`; else any |
| `AllocNodes`, `NNodes` | observed: the number of nodes, over which the GPUs count as divided as evenly as they go |

Columns may stand in any order, and others beside them. In JSON the same is read from `job_id`, `array`, `het`, `cluster`,
`account`, `user`, `name`, `time`, `state`, `tres`, `constraints` and `allocation_nodes`.

Rows of one id are the attempts of one job, which was requeued; `sacct --duplicates` prints them all. One that is there
twice, by `Submit`, counts as it is last, so that exports may stand one after another in a file.

duration   the run times of all attempts added up, s
failures   attempts that failed and were followed by another: each after its run time, of the cause that its state names
app        the array that a job is a task of

A GPU type gets the name of the throughput table whose words it has: `nvidia_a100-sxm4-80gb` is `a100`. A constraint counts
only if it names nothing but such types. Times are UTC unless they name their zone, or are seconds since 1970. Steps
(`7.batch`, `7.0`) are no jobs; where a job has no GPUs of its own, those of its largest step count. Each part of a
heterogeneous job is a job.

Left out and counted: jobs without a GPU, jobs that never started, jobs that had not ended when the log was taken, and
attempts that end before they start. A job on slices of GPUs (MIG) gets whole ones and is counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from poise.lab.traces.formats import sacct_json, sacct_text
from poise.lab.traces.formats.slurm_run import SlurmRun, SlurmStep
from poise.lab.traces.parsing import MOST_JOBS, TraceInput, field_refusal, label
from poise.lab.traces.schema import FailedAttempt, JobOutcome, RunAttempt, TraceJob
from poise.scheduler.model.job import Job

_PASSED, _KILLED, _FAILED = JobOutcome.PASSED, JobOutcome.KILLED, JobOutcome.FAILED
OUTCOMES = {
    "COMPLETED": _PASSED,
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), _KILLED),
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL"),
        _FAILED,
    ),
}
RUNNING = ("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "CONFIGURING")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "POWER_UP_NODE")
STATES = (*OUTCOMES, *RUNNING, *WAITING)


@dataclass(slots=True)
class SlurmJob:
    """The rows of one job: its attempts by submission, and the most GPUs that a step of it had."""

    by_submission: dict[float, SlurmRun] = field(default_factory=dict)
    step_gpus: int = 0
    prefix: str = ""

    @property
    def runs(self) -> list[SlurmRun]:
        """Its attempts in order."""
        return [run for _, run in sorted(self.by_submission.items())]


def records(source: TraceInput) -> Iterator[tuple[int, SlurmJob]]:
    """Yield each job with the line of its first row, in the order of these."""
    jobs: dict[tuple[str, str], SlurmJob] = {}
    for run in _runs(source):
        job = jobs.setdefault((run.cluster, run.key), SlurmJob())
        if isinstance(run, SlurmStep):
            job.step_gpus = max(job.step_gpus, run.gpus)
        else:
            job.by_submission[run.submitted] = run
        if len(jobs) > MOST_JOBS:
            raise source.error(run.line, None, f"expected at most {MOST_JOBS:,} jobs, got more")
    several = len({cluster for cluster, _ in jobs}) > 1
    for (cluster, _), job in jobs.items():
        if not job.by_submission:
            source.count("steps left out because the log does not have their job")
            continue
        job.prefix = f"{label(cluster, 'Cluster')}/" if several and cluster else ""
        yield min(run.line for run in job.by_submission.values()), job


def _runs(source: TraceInput) -> Iterator[SlurmRun | SlurmStep]:
    """Yield every row, of whichever of the two formats the file has."""
    return sacct_json.runs(source) if source.is_json() else sacct_text.runs(source)


def job_of(slurm: SlurmJob, source: TraceInput) -> TraceJob | None:
    """Return the job of its rows; None if it has no GPU, never started or has not ended."""
    runs = slurm.runs
    first, last = runs[0], runs[-1]
    for run in runs:
        if run.state not in STATES:
            raise field_refusal("State", f"one of {', '.join(STATES)}", run.state)
    gpus = last.gpus or max(run.gpus for run in runs) or slurm.step_gpus
    if not gpus:
        source.count("jobs left out because they have no GPU")
        return None
    if last.state in (*RUNNING, *WAITING):
        source.count(f"jobs left out because they {'ran' if last.state in RUNNING else 'waited'} when the log was taken")
        return None
    attempts = _attempts(runs, source)
    if not attempts:
        source.count("jobs left out because they never started")
        return None
    if any(run.sliced for run in runs):
        source.count("jobs on slices of GPUs that get whole ones")
    submitted = first.submitted
    if first.eligible is not None and submitted < first.eligible <= attempts[0].start:
        submitted = first.eligible
        source.count("jobs that count as submitted when they became eligible to run")
    seconds = sum(attempt.seconds for attempt in attempts)
    name = f"{source.prefix}{slurm.prefix}{last.job}"
    job = Job(name, submitted, gpus, seconds, tenant=last.tenant, app=last.array, name=last.name, gpu_types=last.gpu_types)
    observed = tuple(RunAttempt(each.start, each.end, each.nodes) for each in attempts)
    return TraceJob(job, OUTCOMES[last.state], _failures(attempts), observed=observed)


class _Attempt(NamedTuple):
    """An attempt that ran, from start to end for these accounted seconds, on these GPUs by node."""

    start: float
    end: float
    seconds: float
    nodes: tuple[int, ...]
    state: str


def _attempts(runs: Sequence[SlurmRun], source: TraceInput) -> list[_Attempt]:
    """Return the attempts that ran, in order."""
    found = []
    for run in runs:
        if run.start is None or run.end is None or (run.seconds == 0 and OUTCOMES.get(run.state) is _KILLED):
            continue  # Slurm gives some that were cancelled while they waited a start, which is their end
        if run.end < run.start:
            source.count("attempts left out because they end before they start")
            continue
        seconds = run.end - run.start if run.seconds is None else run.seconds
        found.append(_Attempt(run.start, run.end, seconds, _divided(run.gpus, run.nodes), run.state))
    return found


def _divided(gpus: int, nodes: int) -> tuple[int, ...]:
    """Return GPUs of each node, as even as they go; empty where the nodes are not known or some would have none."""
    if not 0 < nodes <= gpus:
        return ()
    share, more = divmod(gpus, nodes)
    return tuple(share + (place < more) for place in range(nodes))


def _failures(attempts: Sequence[_Attempt]) -> tuple[FailedAttempt, ...]:
    """Return the attempts before the last one that failed; what was preempted or requeued goes on in the next attempt."""
    failures, ran = [], 0.0
    for attempt in attempts[:-1]:
        ran += attempt.seconds
        if OUTCOMES.get(attempt.state) is _FAILED:
            failures.append(FailedAttempt(ran, attempt.state.lower().replace("_", "-")))
            ran = 0.0
    return tuple(failures)
