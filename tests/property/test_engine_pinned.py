"""A gang that may not be preempted, beside jobs that may: what it leaves is shared as if there were nothing else."""

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest
from tests.machine import Service, a_request

from poise.scheduler.core.settings import Settings
from poise.scheduler.policies.catalogue import POLICIES
from poise.service.wire.request import JobRequest

ROUND = 60.0
ROUNDS = 60
"""Long enough for several of the longest leases of the catalogue."""
SLACK = 2
"""How many times as long it may take until each job has had a turn beside the gang: rounds count from another time."""
COMBINED = ("max-min+packed", "finish-time+packed", "max-min+partitioned", "max-min+agnostic", "max-min+plain", "las+stable")
GREEDY = ("max-throughput", "min-cost")
"""Who runs depends on what types there are, and turns are taken only among jobs that are worth the same."""
TURNS = ("max-min", "finish-time", "hierarchical", "gandiva", "gandiva-fair", "themis", "hlas", "stride", "las")
"""Policies that share by taking turns; some of the others do, too."""
MODELS = (("ResNet-18", 128), ("LM", 80), ("Recommendation", 2048))


@dataclass(frozen=True)
class Case:
    """Jobs of so many GPUs on a cluster with a gang, and on what the gang leaves of it."""

    cluster: str
    gang: int
    rest: str
    jobs: tuple[int, ...]


CASES = {
    "of one node": Case("v100:4", 3, "v100:1", (1, 1, 1)),
    "of one of two nodes": Case("v100:8", 4, "v100:4", (2, 1, 4, 3, 2)),
    "of one of two types": Case("v100:4,k80:4", 4, "k80:4", (1, 1, 2, 1, 1, 2, 4)),
}


def service(directory: Path, policy: str, cluster: str) -> Service:
    directory.mkdir()
    return Service(directory, policy, cluster, Settings(round=ROUND))


def jobs_of(case: Case) -> list[JobRequest]:
    """Of models that are known to do well together, where the policy asks."""
    models = zip(case.jobs, cycle(MODELS), strict=False)
    return [a_request(gpus=gpus, model=model, batch_size=batch) for gpus, (model, batch) in models]


def turns(service: Service, jobs: list[str], rounds: int) -> int | None:
    """Rounds until each of the jobs has had a turn, and a second one; None if either takes more than so many."""
    longest = 0
    for _ in range(2):
        missing, passed = set(jobs), 0
        while missing := missing - {job for job, _ in service.machine.alive}:
            if passed == rounds:
                return None
            service.pass_time(ROUND)
            passed += 1
        longest = max(longest, passed)
        service.pass_time(ROUND)
    return longest


def alone(directory: Path, policy: str, case: Case) -> int | None:
    """Rounds until each job has had a turn where there is no gang."""
    without = service(directory, policy, case.rest)
    return turns(without, without.submit(*jobs_of(case)), ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("policy", [*(each for each in POLICIES if each not in GREEDY), *COMBINED])
def test_gpus_beside_a_pinned_gang_are_shared_by_all_jobs_that_fit(policy: str, kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    bound = alone(tmp_path / "alone", policy, case)
    if bound is None:
        assert policy not in TURNS or kind != "of one node"
        pytest.skip("the policy lets a job wait for the end of another even without a gang")
    beside = service(tmp_path / "beside", policy, case.cluster)
    (gang,) = beside.submit(a_request(gpus=case.gang, gpu_types=("v100",), preemption="never"))
    jobs = beside.submit(*jobs_of(case))
    assert turns(beside, jobs, SLACK * bound + SLACK) is not None
    assert (gang, 1) in beside.machine.alive
