"""Every policy of the catalogue comes to its end where restarts take as long as turns, or longer: nobody only restarts."""

import pytest
from tests.builders import Story, a_job, simulate
from tests.strategies import VARIANTS

from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.policies.catalogue import POLICIES

TURN = 5.0
OVERHEADS = (TURN, TURN - 1e-6, 1.4 * TURN, 2.4 * TURN)
"""As long as a turn, or so little shorter that a turn leaves no time worth having, or longer."""

SLICED = (
    "tiresias:limits=4/8,promote=1",
    "tiresias:limits=8,promote=0.1",
    "tiresias:limits=6,promote=0.01,service=seconds",
    "tiresias-gittins:limits=4/8,samples=1,promote=1",
    "themis:lease=5",
    "hlas:lease=5",
    "hare:lease=5",
    "gandiva-fair:quantum=5",
    "optimus:interval=5",
)
"""Policies with turns of their own that are as short."""

JOBS = [
    a_job("a", seconds=40),
    a_job("b", seconds=40),
    a_job("c", at=3.0, gpus=2, seconds=30),
    a_job("d", at=5.0, seconds=25),
    a_job("e", at=6.0, gpus=2, seconds=30),
]


def played(policy: str, overhead: float, cadence: Cadence = Cadence.BOTH) -> Story:
    settings = Settings(cadence=cadence, round=TURN, restart_overhead=overhead)
    return simulate(JOBS, policy, "gpu:2", placement="consolidate", settings=settings)


@pytest.mark.parametrize("overhead", OVERHEADS)
@pytest.mark.parametrize("policy", dict.fromkeys((*POLICIES, *VARIANTS, *SLICED)))
def test_all_jobs_end_though_restarts_take_as_long_as_turns(policy: str, overhead: float) -> None:
    assert set(played(policy, overhead).finishes) == set("abcde")


@pytest.mark.parametrize("cadence", Cadence)
@pytest.mark.parametrize("policy", ["las", "lrtf", "stride:quantum=5", *SLICED])
def test_all_jobs_end_at_every_cadence_though_a_turn_is_hardly_longer_than_a_restart(policy: str, cadence: Cadence) -> None:
    assert set(played(policy, TURN - 1e-6, cadence).finishes) == set("abcde")


def test_a_turn_is_not_cut_off_before_a_run_has_worked_as_long_as_it_took_to_start() -> None:
    """`las` looks at every 5 s. Restarts take 4 s: after 5 s a run has worked for 1 s, after 10 s for 6."""
    jobs = [a_job("a", seconds=12), a_job("b", seconds=12)]
    story = simulate(jobs, "las", "gpu:1", settings=Settings(round=TURN, restart_overhead=4.0))
    assert [(run.job, run.began) for run in story.runs] == [("a", 0.0), ("b", 10.0), ("a", 20.0), ("b", 30.0)]
    assert story.finishes == {"a": 30.0, "b": 40.0}
