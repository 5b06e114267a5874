"""Causes of delay on the Philly trace (docs/algorithms/philly.md): the larger the gang, the more it waits for
locality and not for

its tenant's share. The public trace has neither quotas nor a cluster, so both are inferred: a quarter of Philly's machines,
and for each virtual cluster the most GPUs that its jobs ever want at once, both brought down by one factor.

`python -m tests.golden.test_philly_delays` prints the table of docs/policies/philly.md: the whole trace, in a minute.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from poise.lab.experiment import Experiment, simulate
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.job import Job

CSV = Path(__file__).resolve().parents[3] / "shared" / "data" / "philly" / "philly_passed_jobs.csv"
JOBS = 8_000
"""The first ones: a tenth of the trace, most of it in ten days of full load."""

NODES = (8,) * 66 + (4,) * 68
"""A quarter of the 264 machines of eight GPUs and the 271 of four that Philly's utilisation log shows."""

NODES_A_RACK = 10
BUCKETS = {"1": range(1, 2), "2-4": range(2, 5), "5-8": range(5, 9), ">8": range(9, 1 << 20)}


@dataclass
class Delay:
    """What became of the jobs of one size: how many waited mostly for what, and seconds by cause."""

    jobs: int = 0
    waited: int = 0
    for_share: int = 0
    for_place: int = 0
    fair_share: float = 0.0
    fragmentation: float = 0.0
    capacity: float = 0.0

    @property
    def placeless(self) -> float:
        """Of the jobs that waited, the part that did so mostly within its quota, for want of a place."""
        return self.for_place / self.waited

    @property
    def fragmented(self) -> float:
        """Fragmentation as a part of the time that was not for want of GPUs altogether."""
        return self.fragmentation / (self.fair_share + self.fragmentation)


def most_at_once(jobs: Iterable[Job]) -> int:
    """The most GPUs that jobs want at once, if each starts when it is submitted."""
    changes = sorted(
        change for job in jobs for change in ((job.submitted, job.gpus), (job.submitted + (job.duration or 0.0), -job.gpus))
    )
    now = most = 0
    for _, gpus in changes:
        now += gpus
        most = max(most, now)
    return most


def quotas(jobs: list[Job], gpus: int) -> str:
    """What each virtual cluster wants at once at most, brought down as the cluster is."""
    factor = gpus / most_at_once(jobs)
    tenants: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        tenants[job.tenant].append(job)
    return "/".join(f"{tenant}:{factor * most_at_once(each):.3f}" for tenant, each in tenants.items())


def delays(trace: Trace) -> dict[str, Delay]:
    """The delays of a trace under `philly`, by size of the gang."""
    nodes = (Node(f"n{i}", "gpu", gpus, f"rack-{i // NODES_A_RACK}") for i, gpus in enumerate(NODES))
    policy = f"philly:quotas={quotas([each.job for each in trace.jobs], sum(NODES))}"
    outcome = simulate(trace, Experiment(Cluster(tuple(nodes)), policy, settings=Settings(cadence=Cadence.EVENTS)))
    found = {name: Delay() for name in BUCKETS}
    for life in outcome.history.jobs.values():
        share, fragmentation, capacity = life.waited
        delay = found[next(name for name, sizes in BUCKETS.items() if life.gpus in sizes)]
        delay.jobs += 1
        delay.waited += share + fragmentation + capacity > 0
        delay.for_share += share > fragmentation + capacity
        delay.for_place += 0 < fragmentation + capacity >= share
        delay.fair_share += share
        delay.fragmentation += fragmentation
        delay.capacity += capacity
    return found


@cache
def of_the_slice() -> dict[str, Delay]:
    if not CSV.exists():
        pytest.skip(f"{CSV} is not there: the public traces are not part of the repository")
    trace = read_trace(str(CSV))
    return delays(replace(trace, jobs=trace.jobs[:JOBS]))


def test_jobs_of_every_size_wait_for_both_causes() -> None:
    found = of_the_slice()
    assert sum(each.jobs for each in found.values()) == JOBS
    assert all(each.waited for each in found.values())


def test_delay_shifts_from_fair_share_to_fragmentation_as_gangs_grow() -> None:
    parts = [each.fragmented for each in of_the_slice().values()]
    assert all(larger >= smaller for smaller, larger in pairwise(parts)), parts
    assert parts[0] == 0, "a single GPU is never fragmented"
    assert parts[-1] > parts[1]


def test_more_of_the_larger_gangs_wait_for_want_of_a_place() -> None:
    parts = [each.placeless for each in list(of_the_slice().values())[1:]]
    assert all(larger >= smaller for smaller, larger in pairwise(parts)), parts


def table(found: dict[str, Delay]) -> str:
    lines = ["| GPUs | jobs | waited | mostly for their share | for a place | fair share | fragmentation | capacity |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, each in found.items():
        hours = (each.fair_share / 3600, each.fragmentation / 3600, each.capacity / 3600)
        counts = f"{each.for_share:,} ({1 - each.placeless:.1%}) | {each.for_place:,} ({each.placeless:.1%})"
        lines.append(f"| {name} | {each.jobs:,} | {each.waited:,} | {counts} | {' | '.join(f'{h:,.1f} h' for h in hours)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(delays(read_trace(str(CSV)))) + "\n")
