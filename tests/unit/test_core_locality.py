"""Claims that insist on few nodes: when they wait, whom they preempt, and when insisting would mean waiting for ever."""

import pytest
from tests.builders import a_job, nodes, simulate

from poise.scheduler.core.reasons import Code
from poise.scheduler.model.action import Launch, Preempt
from poise.scheduler.model.speed import Locality

VGG = "VGG16"
"""Its largest tensor is three quarters of it: Tiresias packs it."""


def test_a_skewed_model_waits_for_one_node_and_says_so() -> None:
    halves = [a_job("one", gpus=2, seconds=100), a_job("two", gpus=2, seconds=50), a_job("three", gpus=2, seconds=70)]
    jobs = [*halves, a_job("vgg", at=10, gpus=4, seconds=10, model=VGG)]
    story = simulate(jobs, "tiresias", nodes(4, 4), placement="best-fit", until=60)
    assert story.scheduler.explain("vgg").code is Code.FRAGMENTATION
    story = simulate(jobs, "tiresias", nodes(4, 4), placement="best-fit")
    assert story.starts["vgg"] == 70
    [waited] = [launch.waited for _, launch in story.actions(Launch) if launch.job == "vgg"]
    assert waited == (0, 20, 40)


def test_a_model_of_many_small_tensors_goes_anywhere() -> None:
    halves = [a_job("one", gpus=2, seconds=100), a_job("two", gpus=2, seconds=50), a_job("three", gpus=2, seconds=70)]
    jobs = [*halves, a_job("resnet", at=10, gpus=4, seconds=10, model="ResNet-50")]
    story = simulate(jobs, "tiresias", nodes(4, 4), placement="best-fit")
    assert story.starts["resnet"] == 50
    assert len(story.runs_of("resnet")[0].gpus) == 2


def test_packlimit_says_what_is_skewed() -> None:
    jobs = [a_job("one", gpus=3, seconds=50), a_job("two", gpus=3, seconds=70), a_job("r", at=10, gpus=2, model="ResNet-50")]
    cluster = nodes(4, 4)
    assert simulate(jobs, "tiresias", cluster, placement="best-fit").starts["r"] == 10
    assert simulate(jobs, "tiresias:packlimit=0.05", cluster, placement="best-fit").starts["r"] == 50


def test_counting_gpus_knows_no_nodes_to_insist_on() -> None:
    """Two of four GPUs come from one job further back; to empty a whole node two jobs would have to go."""
    low = [a_job(name, gpus=2, seconds=100) for name in ("a", "b", "c")]
    jobs = [*low, a_job("vgg", at=30, gpus=4, seconds=2, model=VGG)]
    story = simulate(jobs, "tiresias:limits=20", nodes(4, 4), placement="count")
    assert story.starts["vgg"] == 30
    assert story.preemptions == 1


@pytest.mark.parametrize("policy", ["tiresias", "tiresias+stable"])
def test_a_gang_that_no_rack_can_hold_does_not_insist_on_one(policy: str) -> None:
    jobs = [a_job("vgg", gpus=8, seconds=10, model=VGG)]
    story = simulate(jobs, policy, nodes(4, 4, racks=(0, 1)), placement="consolidate")
    assert "vgg" in story.finishes


@pytest.mark.parametrize("policy", ["tiresias", "tiresias+stable"])
def test_a_gang_that_no_rack_can_hold_on_its_fewest_nodes_is_content_with_a_rack(policy: str) -> None:
    """Two nodes of 8 would do, but stand in two racks; one rack has an 8 and three 1s."""
    cluster = nodes(8, 1, 1, 1, 8, racks=(0, 0, 0, 0, 1))
    story = simulate([a_job("vgg", gpus=10, seconds=10, model=VGG)], policy, cluster, placement="consolidate")
    assert "vgg" in story.finishes
    state = story.scheduler.state
    assert state.shape(state.rows["vgg"], Locality.PACKED).locality is Locality.RACK


def test_room_for_a_packed_gang_is_made_in_one_rack() -> None:
    """The two jobs furthest back stand in different racks; z, who loses its rack, is served again before y."""
    low = [a_job(name, at=i, gpus=4, seconds=100) for i, name in enumerate("wzyx")]
    jobs = [*low, a_job("vgg", at=50, gpus=8, seconds=2, model=VGG)]
    cluster = nodes(4, 4, 4, 4, racks=(0, 1, 1, 0))
    story = simulate(jobs, "tiresias:limits=20", cluster, placement="consolidate")
    assert story.starts["vgg"] == 50
    stopped = [(action.job, action.why.value) for _, action in story.actions(Preempt)]
    assert stopped == [("y", "outranked"), ("z", "moved"), ("x", "outranked")]
