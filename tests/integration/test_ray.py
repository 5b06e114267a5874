"""The Ray back end on a cluster of real daemons: discovery, GPUs of others, crashes of all kinds, ownership.

All tests but one are of one service, whose nodes remember what ran: each names its jobs differently.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from tests.backends import STUBBORN, TRAINS, Stage, a_request, an_order, until
from tests.ray_cluster import RayDaemons
from tests.ray_stage import CLUSTER, RayStage, ray_script, release, released
from tests.remote import listening

from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.api import (
    DesiredState,
    NodeState,
    RunBegan,
    RunEnded,
    RunEnding,
    RunPart,
    RunProgressed,
)
from poise.service.backends.ray.backend import RayBackend, RayOptions
from poise.service.backends.remote.backend import AgentAccess
from poise.service.server.logs import Level, Logbook

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow]

HOLDS = """
import sys
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
node = next(each["NodeID"] for each in ray.nodes() if each["Labels"].get("node-name") == sys.argv[1])
class Holder:
    def gpus(self):
        return [int(each) for each in ray.get_gpu_ids()]
holder = ray.remote(Holder).options(num_cpus=0, num_gpus=int(sys.argv[2]), scheduling_strategy=On(node, soft=False)).remote()
print(ray.get(holder.gpus.remote()), flush=True)
sys.stdin.read()
"""
"""Takes GPUs of a node as any user of Ray does, says which, and holds them until stdin ends."""


@pytest.fixture
def stage(ray_cluster: RayDaemons, ray_folder: Path) -> Iterator[RayStage]:
    made = RayStage(ray_cluster, ray_folder)
    yield made
    made.close()


@pytest.fixture
def short(ray_cluster: RayDaemons, ray_folder: Path) -> Iterator[RayStage]:
    """With a lease that is short, and longer than it takes Ray to find a node dead."""
    made = RayStage(ray_cluster, ray_folder, lease=30.0)
    yield made
    made.close()


class OtherServer(Stage):
    """A second server on the cluster, of the same service or of another one."""

    def __init__(self, daemons: RayDaemons, folder: Path, **environment: str) -> None:
        super().__init__()
        folder.mkdir(exist_ok=True)
        bound = listening()
        access = AgentAccess(bound, f"http://127.0.0.1:{bound.getsockname()[1]}")
        options = RayOptions(environment.pop("address", daemons.address), folder / "nodes", isolate="off")
        with mock.patch.dict(os.environ, daemons.environment | environment), bound:
            log = Logbook(least=Level.ERROR)
            self.backend = RayBackend((), folder, self.tell, access, options, log, lease=60.0)


def test_nodes_with_gpus_are_discovered_with_their_types_and_racks(stage: RayStage) -> None:
    assert {report.node for report in stage.reports} == set(CLUSTER)


def test_run_over_two_nodes_begins_and_yields(stage: RayStage) -> None:
    parts = RunPart("v100-0", "v100", (0, 1)), RunPart("k80-0", "k80", (3,))
    says = "import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'])"
    order = an_order("gang", a_request(says, replicas="gpu"), parts=parts)
    stage.backend.launch(order)
    ended = stage.wait(RunEnded, "gang")
    assert (ended.how, ended.codes) == (RunEnding.FINISHED, (0, 0, 0))
    texts = [stage.backend.log("gang", rank, 0, 1_000).text.decode() for rank in range(3)]
    assert [text.splitlines()[-1] for text in texts] == ["0 127.0.0.3", "1 127.0.0.3", "2 127.0.0.3"]


def test_agent_that_is_killed_comes_back_and_finds_its_runs_and_its_gpus(stage: RayStage) -> None:
    """While Ray restarts the actor, others who wait for GPUs must not get those that Poise uses."""
    stage.backend.launch(an_order("killed", a_request(TRAINS), 0))
    stage.wait(RunProgressed, "killed")
    before, runs = stage.daemons.agent("v100-0"), stage.processes("v100-0")
    assert before is not None
    waiting = ray_script(stage.daemons, HOLDS, "v100-0", "1")
    os.kill(before, signal.SIGKILL)
    until(lambda: stage.daemons.agent("v100-0") not in (None, before))
    reports = len(stage.of(RunProgressed, "killed"))
    stage.wait(RunProgressed, "killed", count=reports + 2)  # one of them may have been under way
    assert stage.processes("v100-0") == runs
    assert not stage.of(RunEnded, "killed")
    assert waiting.poll() is None
    waiting.kill()
    assert waiting.communicate()[0] == ""


def test_server_with_another_address_is_found_by_the_agents(stage: RayStage) -> None:
    order = an_order("moved", a_request(TRAINS), 0)
    stage.backend.launch(order)
    stage.wait(RunProgressed, "moved")
    stage.backend.close()
    stage.move()
    stage.open().adopt([(order, DesiredState.RUN)])
    stage.wait(RunBegan, "moved", count=2)
    assert not stage.of(RunEnded, "moved")


def test_node_whose_raylet_dies_is_lost_after_its_lease_and_comes_back(short: RayStage) -> None:
    stage = short
    stage.backend.launch(an_order("fenced", a_request(STUBBORN), 0))
    stage.wait(RunBegan, "fenced")
    stage.daemons.kill_node("v100-0")
    until(lambda: any("Ray says that the node is dead" in each.evidence for each in [*stage.reports]))
    assert stage.node_state("v100-0") is NodeState.UNREACHABLE
    assert stage.processes("v100-0")  # Ray's word ends nothing
    assert not stage.of(RunEnded, "fenced")
    ended = stage.wait(RunEnded, "fenced")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "node-lost")
    assert stage.node_state("v100-0") is NodeState.LOST
    assert not stage.processes("v100-0")
    stage.daemons.start_node("v100-0")
    stage.joined("v100-0")
    stage.backend.launch(an_order("fenced", a_request(), 0, epoch=2))
    assert stage.wait(RunEnded, "fenced", 2).how is RunEnding.FINISHED


def test_gpus_of_other_ray_work_are_seen_and_taken_up_once_free(ray_cluster: RayDaemons, tmp_path: Path) -> None:
    release(ray_cluster)
    others = ray_script(ray_cluster, HOLDS, "p100-0", "1")
    assert others.stdout is not None
    theirs = tuple(int(each) for each in others.stdout.readline().strip("[]\n").split(","))
    assert len(theirs) == 1
    stage = RayStage(ray_cluster, tmp_path, nodes=())
    until(lambda: stage.withheld("p100-0") == theirs)
    assert stage.withheld("v100-0") == ()
    others.communicate()
    until(lambda: stage.withheld("p100-0") == ())
    stage.close()
    assert "nothing of this cluster is held any more" in release(ray_cluster)
    again = ray_script(ray_cluster, HOLDS, "p100-0", "2")
    assert again.stdout is not None
    assert again.stdout.readline() == "[0, 1]\n"
    again.communicate()


def test_second_service_is_refused_until_the_first_has_let_go(stage: RayStage, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"another Poise service .* drives this Ray cluster"):
        OtherServer(stage.daemons, tmp_path / "second")


def test_server_is_told_when_another_one_of_its_service_has_taken_over(ray_cluster: RayDaemons, ray_folder: Path) -> None:
    first = OtherServer(ray_cluster, ray_folder / "server")
    assert not first.failures
    second = OtherServer(ray_cluster, ray_folder / "server")
    until(lambda: first.failures)
    assert "taken over" in first.failures[0].problem
    assert not second.failures
    first.backend.close()
    second.backend.close()


def test_agent_that_does_not_answer_ends_the_attempt_to_let_go(stage: RayStage) -> None:
    stage.backend.close()
    agent = stage.daemons.agent("k80-0")
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    try:
        done = released(stage.daemons, "driver.RELEASE_SECONDS, driver.ANSWER_SECONDS = 6.0, 10.0")
    finally:
        os.kill(agent, signal.SIGCONT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "poise: no answer from agents on 1 node; nothing was given back"
    stage.open().adopt([])


@pytest.mark.parametrize(
    "environment", [{"RAY_AUTH_TOKEN": "wrong" * 8}, {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}]
)
def test_cluster_refuses_a_wrong_token(ray_cluster: RayDaemons, tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="refuses the token"):
        OtherServer(ray_cluster, tmp_path / "second", **environment)


def test_address_where_nothing_listens_is_named(ray_cluster: RayDaemons, tmp_path: Path) -> None:
    with pytest.raises(PoiseError, match=r"nothing answers at 127\.0\.0\.2:1 "):
        OtherServer(ray_cluster, tmp_path / "second", address="127.0.0.2:1")
