"""Conformance with the Tiresias authors' simulator (docs/algorithms/tiresias.md): its published table, and job by
job with an oracle."""

import csv
import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import Story, simulate
from tests.oracles import Outcome, Queues, Task, WholeSeconds, oracle
from tests.strategies import choices

from poise.engine.assembly import preset_named
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.action import Preempt, PreemptionCause
from poise.scheduler.model.job import Job

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SIXTY = DATA / "tiresias" / "60_job.csv"
MURI = sorted(DATA.glob("muri/muri_trace*_job.csv")) or [DATA / "muri" / "muri_trace1_job.csv"]

Row = tuple[float, int, float]
"""Submission, GPUs, seconds."""

MOMENTS = (0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0)
GANGS = (1, 2, 4, 1, 2, 8)
SECONDS = (2.0, 4.0, 1.0, 2.0, 4.0, 8.0, 3.0, 6.0)

TABLE = {
    "fifo": (200.816667, 151, 1864, 3335, 0),
    "fifo-skip": (190.683333, 130, 1800, 3271, 0),
    "tiresias:service=seconds": (190.683333, 130, 1800, 3271, 0),
    "tiresias": (190.683333, 130, 1800, 3271, 0),
    "smallest-first": (198.2, 127, 1800, 3271, 8),
    "srtf": (192.116667, 127, 1800, 3271, 4),
    "srsf": (195.9, None, None, 3315, 7),
}
"""Average, sorted[30] and greatest completion time, makespan, preemptions; None where nothing was published."""

BUSY = {
    "tiresias:limits=300/900": (890.15, 40),
    "tiresias:limits=300/900,promote=8": (739.133333, 65),
}
"""Average completion time and preemptions on 8 GPUs, where jobs cross limits and wait: here whole seconds matter."""

EXACT = {"tiresias:limits=300/900": 889.191667, "tiresias:limits=300/900,promote=8": 742.85}
"""The same averages without the preset, where a job crosses a limit when it does."""

POLICIES = (
    "fifo",
    "fifo-skip",
    "smallest-first",
    "srtf",
    "srsf",
    "las",
    "lrtf",
    "tiresias:limits=8/24",
    "tiresias:limits=4/16,service=seconds",
    "tiresias:limits=8/24,promote=1",
    "tiresias:limits=4/8/32,promote=2",
    "tiresias:limits=4,service=seconds,promote=0.5",
)

LARGE = ("fifo", "smallest-first", "srtf", "srsf", "tiresias", "tiresias:limits=200000/2000000,promote=8")


def read(path: Path) -> list[Job]:
    if not path.exists():
        pytest.skip(f"{path} is not there: the public traces are not part of the repository")
    with path.open() as lines:
        return [
            Job(row["job_id"], float(row["submit_time"]), int(row["num_gpu"]), float(row["duration"]))
            for row in csv.DictReader(lines)
        ]


PRESET = preset_named("tiresias")


def ours(policy: str, jobs: Iterable[Job], gpus: int, combinators: str = "+stable") -> Story:
    return simulate([TraceJob(job) for job in jobs], policy + combinators, f"gpu:{gpus}", placement=PRESET.placement)


def theirs(policy: str, jobs: Iterable[Job], gpus: int, queues: type[Queues] = Queues) -> Outcome:
    tasks = [Task(job.id, Fraction(job.submitted), job.gpus, Fraction(job.duration or 0)) for job in jobs]
    return oracle(policy, tasks, gpus, queues)


def stops(story: Story) -> int:
    """Jobs that ran and then waited; one that went on elsewhere did not wait."""
    return sum(action.why is not PreemptionCause.MOVED for _, action in story.actions(Preempt))


def assert_same(policy: str, jobs: list[Job], gpus: int) -> None:
    """By exact moments, and by whole seconds as with the preset.

    By whole seconds the authors take a job that reaches two limits in one second through the queue between them, and may
    stop and start others on the way, all at one moment. So preemptions are compared by exact moments only, and ends by
    whole seconds only where no job is that fast.
    """
    story, want = ours(policy, jobs, gpus), theirs(policy, jobs, gpus)
    assert ends(story) == want.finishes
    assert stops(story) == want.preemptions
    if max(job.gpus for job in jobs) <= narrowest(policy):
        assert ends(ours(policy, jobs, gpus, PRESET.combinators)) == theirs(policy, jobs, gpus, WholeSeconds).finishes


def narrowest(policy: str) -> float:
    """GPU-seconds between the two limits that are closest to each other; those counted in seconds are far apart."""
    limits = re.search(r"limits=([0-9/]+)", policy)
    if limits is None or "service=seconds" in policy:
        return inf
    of = [0, *map(int, limits[1].split("/"))]
    return min(after - before for before, after in pairwise(of))


def ends(story: Story) -> dict[str, Fraction]:
    return {job: Fraction(time) for job, time in story.finishes.items()}


@pytest.mark.parametrize("policy", TABLE)
def test_the_published_table_comes_out_exactly(policy: str) -> None:
    story = ours(policy, read(SIXTY), 16, PRESET.combinators)
    times = sorted(story.completion_times.values())
    first = min(each.job.submitted for each in story.jobs)
    average, median, longest, makespan, preemptions = TABLE[policy]
    assert len(times) == 60
    assert round(sum(times) / 60, 6) == average
    assert median in (None, times[30])
    assert longest in (None, times[-1])
    assert max(story.finishes.values()) - first == makespan
    assert story.preemptions == preemptions


@pytest.mark.parametrize("policy", BUSY)
def test_queues_change_at_whole_seconds_with_the_preset(policy: str) -> None:
    story = ours(policy, read(SIXTY), 8, PRESET.combinators)
    average, preemptions = BUSY[policy]
    assert round(sum(story.completion_times.values()) / 60, 6) == average
    assert story.preemptions == preemptions


@pytest.mark.parametrize("policy", EXACT)
def test_queues_change_when_a_limit_is_reached_without_the_preset(policy: str) -> None:
    story = ours(policy, read(SIXTY), 8)
    assert round(sum(story.completion_times.values()) / 60, 6) == EXACT[policy]


def test_srsf_with_ties_by_submission_is_the_other_legitimate_figure() -> None:
    times = simulate([TraceJob(job) for job in read(SIXTY)], "srsf", "gpu:16").completion_times
    assert round(sum(times.values()) / 60, 3) == 194.983


@pytest.mark.parametrize("policy", [*TABLE, *POLICIES])
def test_the_60_jobs_end_when_the_oracle_says(policy: str) -> None:
    assert_same(policy, read(SIXTY), 16)


each_job = choices(
    (0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0), (1, 2, 4, 1, 2, 8), (2.0, 4.0, 1.0, 2.0, 4.0, 8.0, 3.0, 6.0)
)


@pytest.mark.parametrize("policy", POLICIES)
@given(rows=st.lists(choices(MOMENTS, GANGS, SECONDS), min_size=1, max_size=16), gpus=st.sampled_from((8, 16)))
def test_small_traces_full_of_ties_end_when_the_oracle_says(policy: str, rows: list[Row], gpus: int) -> None:
    ordered = sorted(rows, key=lambda row: row[0])
    jobs = [Job(str(i), at, gang, seconds) for i, (at, gang, seconds) in enumerate(ordered)]
    assert_same(policy, jobs, gpus)


@pytest.mark.slow
@pytest.mark.parametrize("trace", MURI, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "policy", ["fifo", "smallest-first", "srtf", "srsf", "tiresias", "tiresias:limits=200000/2000000,promote=8"]
)
def test_the_first_jobs_of_larger_traces_end_when_the_oracle_says(policy: str, trace: Path) -> None:
    assert_same(policy, read(trace)[:300], 64)
