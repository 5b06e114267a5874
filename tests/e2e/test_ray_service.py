"""`poise serve --backend ray` as its users meet it, on a cluster of real daemons with token authentication."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.crashing import chain, joint_chain
from tests.e2e.ray_service import RayService
from tests.e2e.service import ended, until
from tests.ray_cluster import PretendedNode, RayDaemons, ray_daemons
from tests.ray_stage import CLUSTER, release
from tests.shell import poise, poise_apart

from poise.service.client import Client
from poise.service.wire.views import NodeCondition

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow]
POLICY = ("--policy", "fifo", "--round", "1s")
OFTEN = {"every": 0.2, "deadline": 30.0}
STEPS = 200
RANKS = 5
"""Of a job that does not fit on one node."""


@pytest.fixture(scope="module")
def service(ray_cluster: RayDaemons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayService]:
    """A service for all tests here but one, with the cluster to itself: others have let go of it, and so does this one."""
    release(ray_cluster)
    folder = tmp_path_factory.mktemp("served")
    made = RayService(folder, ray_cluster, *POLICY)
    with pytest.MonkeyPatch.context() as monkeypatch:
        made.talk_to_it(monkeypatch)
        made.up()
        yield made
    made.close()
    assert "nothing of this cluster is held any more" in release(ray_cluster)


@pytest.fixture
def client(service: RayService) -> Client:
    return service.client()


def held_job(service: RayService, client: Client, seed: str) -> str:
    """Submit a job that is held at half of its steps; return its id once it has saved."""
    service.let(STEPS // 2)
    job = client.submit(command=service.held(STEPS, 0.01, seed), checkpoint=OFTEN)
    until(lambda: (client.show(job.id).checkpoint_steps or 0) > 0, "it has saved nothing")
    return job.id


def test_nodes_are_shown_with_types_and_racks_of_rays_labels(service: RayService) -> None:
    shown = poise("nodes", "--json").json["nodes"]
    found = {(row["name"], row["gpu_type"], row["gpus"], row["rack"], row["state"]) for row in shown}
    assert found == {(node.name, node.gpu_type, node.gpus, node.rack, "up") for node in CLUSTER}


def test_job_over_two_nodes_runs_to_its_end_with_checkpoints_kept_by_the_server(service: RayService, client: Client) -> None:
    job = client.submit(command=service.ranks(STEPS, 0.01, "gang"), gpus=RANKS, replicas="gpu", checkpoint=OFTEN).id
    detail = ended(client, job)
    [run] = detail.runs
    assert len(run.gpus) == 2
    assert detail.checkpoint_steps == STEPS
    assert [*(service.state / "jobs" / job / "kept").iterdir()]
    printed = {client.log(job, replica=rank).splitlines()[-1] for rank in range(RANKS)}
    assert printed == {joint_chain("gang", STEPS, RANKS)}
    assert service.violations == ""


def test_job_gets_the_environment_of_the_shell_unless_it_says_otherwise(
    service: RayService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_SHELL", "comes along")
    command = ("sh", "-c", "echo ${OF_THE_SHELL:-absent} ${HOME:+at home} ${POISE_TOKEN:-without a token}")
    for export, printed in (("all", "comes along"), ("none", "absent")):
        job = client.submit(command=command, export=export).id
        ended(client, job)
        assert client.log(job).splitlines()[-1] == f"{printed} at home without a token"
    assert service.violations == ""


def test_server_that_is_killed_finds_its_runs_again(service: RayService, client: Client) -> None:
    """Its agents are told by Ray that it listens on another port now."""
    job = held_job(service, client, "killed")
    pids = {each.pid for each in service.replicas(job)}
    service.kill()
    client = service.up()
    assert {each.pid for each in service.replicas(job)} == pids
    service.let(STEPS)
    assert len(ended(client, job).runs) == 1
    assert client.log(job).splitlines()[-1] == chain("killed", STEPS)


def test_drain_moves_a_job_to_another_ray_node(service: RayService, client: Client) -> None:
    steps = 1_000  # much longer than a command takes, also on a slow machine
    job = client.submit(command=service.counting(steps, 0.02, "drained"), checkpoint=OFTEN).id
    until(lambda: (client.show(job).checkpoint_steps or 0) > 0, "it has saved nothing")
    [first] = service.where(job)
    said = poise("drain", first, "--reason", "new driver")
    assert said.code == 0, said.err
    assert said.out.splitlines()[-1] == f"{first} is empty"
    until(lambda: service.where(job), "it does not go on")
    assert service.where(job) != [first]
    before, after = ended(client, job).runs
    assert before.lost == 0.0
    assert after.begun == before.kept
    assert client.log(job).splitlines()[-1] == chain("drained", steps)
    assert poise("return", first).out == f"{first} up: takes new runs\n"
    assert service.violations == ""


def test_second_service_is_refused_and_changes_nothing(service: RayService, client: Client, tmp_path: Path) -> None:
    other = ("--state", tmp_path, "--listen", "127.0.0.1:0", "--backend", "ray", "--address", service.daemons.address)
    said = poise_apart("serve", *other, "--agents", "127.0.0.1:0", "--allow-root", "--quiet")
    assert (said.code, said.out) == (2, "")
    refusal = said.err.splitlines()[-1]
    assert refusal.startswith("poise: another Poise service ")
    assert refusal.endswith(" drives this Ray cluster; stop that one, then let go of the cluster with `poise ray release`")
    assert all(service.state_of(client, node.name) is NodeCondition.UP for node in CLUSTER)


def test_cluster_is_not_let_go_of_while_its_service_runs(service: RayService) -> None:
    said = poise_apart("ray", "release", "--address", service.daemons.address)
    assert said.code != 0
    assert "is running; stop it first" in said.err


def test_run_outlives_a_head_that_dies_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raylet ends some time after its head, by default a minute, and the agent with it; the run does not."""
    alone = PretendedNode("alone", "127.0.0.9", "V100", 1)
    with ray_daemons([alone], RAY_gcs_rpc_server_reconnect_timeout_s="20") as daemons:
        service = RayService(tmp_path, daemons, *POLICY, fence=300.0)
        try:
            service.talk_to_it(monkeypatch)
            client = service.up()
            job = held_job(service, client, "headless")
            pids = {each.pid for each in service.replicas(job)}
            daemons.kill_head()
            service.let(STEPS - 50)
            # Its agent needs the server only, for news as for checkpoints.
            until(lambda: (client.show(job).checkpoint_steps or 0) > STEPS // 2, "it does not go on")
            until(lambda: not daemons.lives(alone.name), "the raylet does not end")
            daemons.start_head(again=True)
            daemons.start_node(alone.name)
            service.joined(client, alone.name)
            assert {each.pid for each in service.replicas(job)} == pids
            service.let(STEPS)
            assert len(ended(client, job).runs) == 1
        finally:
            service.close()
