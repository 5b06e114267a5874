"""Shares and rounds beside jobs that keep their GPUs whoever waits."""

from dataclasses import replace

import numpy as np
import pytest
from tests.workloads import a_workload

from poise.scheduler.mechanism.pinned_jobs import RoundSelection, shared_out
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.workload import Allocation, Workload
from poise.scheduler.policies.allox import AlloX
from poise.scheduler.policies.gavel import FinishTime, MaxMin


def pinning(workload: Workload, *jobs: int) -> Workload:
    """The same with these jobs pinned where they run."""
    pinned = np.isin(np.arange(workload.jobs), jobs)
    free: Floats = workload.gpus.copy()
    np.subtract.at(free, workload.column_type[workload.held[pinned]], workload.gang[pinned])
    return replace(workload, pinned=pinned, free=free)


def shares(workload: Workload) -> Allocation:
    return shared_out(MaxMin(), workload, MaxMin().start())[0]


def test_what_a_pinned_job_leaves_is_shared_by_the_others() -> None:
    """A gang of 3 on 4 GPUs, three jobs of one GPU each: a third of the time on the fourth GPU."""
    workload = pinning(a_workload([[1.0]] * 4, [4], gang=[3, 1, 1, 1], held=[0, -1, -1, -1]), 0)
    assert shares(workload).share[1:, 0] == pytest.approx([1 / 3] * 3)


def test_shares_are_of_types_that_can_be_had() -> None:
    """All would be faster on the first type, which is taken."""
    workload = pinning(a_workload([[9.0, 1.0]] * 3, [1, 1], held=[0, -1, -1]), 0)
    assert shares(workload).share[1:] == pytest.approx(np.array([[0.0, 0.5], [0.0, 0.5]]))


def test_a_gang_that_does_not_fit_beside_a_pinned_one_has_no_share() -> None:
    workload = pinning(a_workload([[1.0]] * 3, [4], gang=[3, 2, 1], held=[0, -1, -1]), 0)
    assert shares(workload).share[1:, 0] == pytest.approx([0.0, 1.0])


def test_a_pinned_job_has_the_share_that_it_would_have_otherwise() -> None:
    """So it gets ahead of it."""
    workload = a_workload([[1.0]] * 2, [1], held=[0, -1])
    assert shares(pinning(workload, 0)).share[0, 0] == pytest.approx(shares(workload).share[0, 0])


def test_pairs_are_of_the_others_and_of_a_pinned_job_where_it_is() -> None:
    """Together any two do 1.6 times as much as one after the other; the first type is the pinned job's alone."""
    workload = a_workload([[1.0, 1.0]] * 4, [1, 1], held=[0, -1, -1, -1], kind=[0] * 4, beside=[[[0.8, 0.8]]])
    pairs = shares(pinning(workload, 0)).pairs
    jobs = np.sort(np.stack((pairs.first, pairs.second)), axis=0)
    those = {(one, other): column for one, other, column in zip(*jobs.tolist(), pairs.column.tolist(), strict=True)}
    assert {(1, 2), (1, 3), (2, 3)} <= those.keys()
    assert all(column == (one > 0) for (one, _), column in those.items())


def test_what_is_remembered_is_of_everybody() -> None:
    policy = FinishTime()
    workload = pinning(a_workload([[1.0]] * 2, [2], held=[0, -1]), 0)
    _, memory = shared_out(policy, workload, policy.start())
    assert memory.rows.tolist() == [0, 1]


def test_a_policy_that_lets_everybody_go_on_is_asked_once_and_sees_all() -> None:
    """AlloX counts on the end of the pinned job, and does not refuse the gang that waits for it."""
    workload = pinning(a_workload([[1.0]] * 2, [2], gang=[1, 2], held=[0, -1]), 0)
    assert shared_out(AlloX(), workload, None)[0].remarks == ()


def test_a_round_begins_with_those_who_are_pinned() -> None:
    workload = pinning(a_workload([[1.0, 1.0]] * 3, [1, 1], held=[1, -1, 0]), 0, 2)
    served = RoundSelection.first(workload)
    assert (served.column.tolist(), served.is_served) == ([1, -1, 0], [True, False, True])


def test_beside_a_pinned_job_is_who_comes_first_and_is_not_served_yet() -> None:
    workload = pinning(a_workload([[1.0]] * 4, [2], held=[0, 0, -1, -1]), 0)
    served = RoundSelection.first(workload)
    served.serve(2, -1, 0)
    served.join([(0, 2, 0), (1, 2, 0), (0, 3, 0), (0, 1, 0)], workload)
    assert served.partner.tolist() == [3, -1, -1, 0]


def test_a_pinned_job_that_is_to_be_alone_is() -> None:
    workload = pinning(a_workload([[1.0]] * 2, [1], held=[0, -1]), 0)
    served = RoundSelection.first(workload)
    served.join([(0, -1, 0), (0, 1, 0)], workload)
    assert served.partner.tolist() == [-1, -1]


def test_two_pinned_jobs_that_share_go_on_as_they_are() -> None:
    workload = pinning(a_workload([[1.0]] * 3, [1], held=[0, 0, -1]), 0, 1)
    served = RoundSelection.first(replace(workload, partner=np.array([1, 0, -1])))
    served.join([(0, 2, 0), (1, 2, 0)], workload)
    assert served.partner.tolist() == [1, 0, -1]
