"""What Themis is for, over several seeds: no app fares much worse than alone, and which knobs that hangs on."""

from functools import cache
from statistics import fmean

import pytest

from poise.engine.assembly import preset_named
from poise.lab.experiment import Experiment, simulate
from poise.lab.traces.synthetic import generate
from poise.scheduler.model.cluster import parse_cluster

SEEDS = range(3)
MIX = "jobs=30,rate=6,durations=gavel,sizes=1:0.4/2:0.2/4:0.3/8:0.1,models=vgg16/vgg16/vgg16/inception-v3/inception-v3"
"""60 % of jobs suffer from distance (VGG16: 1.289 times as slow over two nodes), 40 % do not."""


@cache
def worst_rho(policy: str, seed: int) -> float:
    preset = preset_named("themis")
    experiment = Experiment(parse_cluster("p100:16"), policy, preset.placement, settings=preset.settings)
    worst = simulate(generate(f"{MIX},seed={seed}"), experiment).summary.worst_rho
    assert worst is not None
    return worst


def mean_worst_rho(policy: str) -> float:
    return fmean(worst_rho(policy, seed) for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_worst_rho_is_lower_than_that_of_las_srtf_and_fifo_at_the_same_load(seed: int) -> None:
    assert worst_rho("themis", seed) < min(worst_rho(other, seed) for other in ("las", "srtf", "fifo"))


def test_worst_rho_falls_as_leases_shorten() -> None:
    assert mean_worst_rho("themis") < mean_worst_rho("themis:lease=7200")


def test_to_ask_the_worst_off_alone_lowers_worst_rho_against_asking_everybody() -> None:
    """On average over seeds: between f = 0 and f = 0.8 it is noisy."""
    assert mean_worst_rho("themis") < mean_worst_rho("themis:f=0.4") < mean_worst_rho("themis:f=0")


@pytest.mark.parametrize("error", [0.05, 0.2])
def test_bids_that_are_off_by_a_fifth_change_worst_rho_by_less_than_15_percent(error: float) -> None:
    assert mean_worst_rho(f"themis:error={error}") == pytest.approx(mean_worst_rho("themis"), rel=0.15)
