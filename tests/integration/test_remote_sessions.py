"""Runs over nodes in cases that a crash, or a message that comes late, makes rare: what a node may still begin.

Nodes are those of tests/nodes_model.py, which check what must hold; the remote back end is real.
"""

from collections.abc import Iterator

import pytest
from tests.nodes_model import LEASE, ModelCluster

from poise.service.backends.api import DesiredState


@pytest.fixture
def world() -> Iterator[ModelCluster]:
    world = ModelCluster([1, 1])
    join(world, "n0", "n1")
    yield world
    world.settle()
    world.close()


def join(world: ModelCluster, *names: str) -> None:
    """Have nodes open a session, and do what they are told."""
    for name in names:
        world.hello(world.nodes[name])
        pass_on(world, name)


def pass_on(world: ModelCluster, *names: str) -> None:
    """Have nodes carry out their orders, begin what they can, and report."""
    for name in names:
        node = world.nodes[name]
        world.ask(node)
        for key in [*node.parts]:
            world.begin(node, key)
        world.tell(node)


def test_next_run_of_a_job_waits_for_the_one_before_it_on_another_node_also_after_a_restart(world: ModelCluster) -> None:
    world.launch("a", [("n0", 0)])
    pass_on(world, "n0")
    world.stop(("a", 1))
    world.launch("a", [("n1", 0)])
    world.crash()
    join(world, "n1")
    assert not world.nodes["n1"].parts
    join(world, "n0")
    world.end(world.nodes["n0"], ("a", 1), "yielded")
    pass_on(world, "n0", "n1")
    assert world.nodes["n1"].alive() == [("a", 2)]


def test_part_of_a_broken_gang_is_ended_by_the_next_session_of_its_agent(world: ModelCluster) -> None:
    world.launch("a", [("n0", 0), ("n1", 0)])
    pass_on(world, "n0", "n1")
    world.lose_agent(world.nodes["n1"])  # before it hears that the other part has failed
    world.end(world.nodes["n0"], ("a", 1), "failed")
    pass_on(world, "n0")
    join(world, "n1")
    assert world.nodes["n1"].parts["a", 1].desired == DesiredState.GONE.value


def test_part_that_was_called_off_is_not_begun_because_another_one_has_moved(world: ModelCluster) -> None:
    world.launch("b", [("n1", 0)])
    pass_on(world, "n1")
    world.stop(("b", 1))
    world.launch("a", [("n0", 0), ("n1", 0)])
    pass_on(world, "n0")
    world.ask(world.nodes["n1"])  # waits there for the GPU of the other job
    world.kill(("a", 1))
    world.ask(world.nodes["n1"])  # its end is on its way to the server
    world.lose_agent(world.nodes["n0"])
    join(world, "n0")
    world.end(world.nodes["n1"], ("b", 1), "yielded")
    pass_on(world, "n1")
    assert not world.nodes["n1"].alive()


def test_node_that_an_earlier_server_promised_a_longer_lease_is_not_lost_sooner(world: ModelCluster) -> None:
    world.launch("a", [("n0", 0)])
    pass_on(world, "n0")
    world.crash(LEASE / 5)
    world.hello(world.nodes["n1"])
    world.wait(LEASE * 0.9)  # would be several leases of this server, which has not heard from the other node
    assert world.nodes["n0"].alive() == [("a", 1)]
    world.wait(LEASE * 0.2)
    assert not world.nodes["n0"].alive()


def test_job_that_finishes_on_its_way_out_does_not_begin_again_on_another_node(world: ModelCluster) -> None:
    world.launch("a", [("n0", 0)])
    pass_on(world, "n0")
    world.stop(("a", 1))
    world.launch("a", [("n1", 0)])
    world.end(world.nodes["n0"], ("a", 1), "finished")
    pass_on(world, "n0", "n1")
    assert not world.nodes["n1"].parts
