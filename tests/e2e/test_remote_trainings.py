"""Three PyTorch trainings share fewer GPUs than they want, on four machines: preempted, moved, and as good as undisturbed.

One is DistributedDataParallel over two nodes, one divides its steps into micro-batches and runs on any mix of GPU types, one
is alone. For each in turn, a node that it trains on is taken out of service until it trains elsewhere. Checkpoints go
through the server: nodes share no directory.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.machines import Machines, Network, why_no_network
from tests.e2e.service import EXAMPLES, ended, until

from poise.service.client import Client
from poise.service.wire.request import JobRequest, Replicas

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

NODES = {"v100-0": "v100:1", "v100-1": "v100:1", "v100-2": "v100:1", "k80-0": "k80:1"}
PATIENCE = 400.0
PAUSE = 0.06  # seconds of a step
STEPS = {"train_ddp.py": 300, "train_micro_batches.py": 400, "train_pytorch.py": 800}
"""Each trains for long enough that it is still there when it is its turn to be moved."""
BOUND = 1e-5
"""Of each weight, where gradients were added in another order; weights are around 0.1."""


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    network = None if why_no_network() else Network(list(NODES))
    made = Machines(
        tmp_path, "--policy", "las", "--round", "10s", "--cadence", "both", "--minimum-run", "4s", "--allow-root",
        nodes=NODES, network=network,
    )  # fmt: skip
    monkeypatch.setenv("POISE_STATE", str(made.state))
    yield made
    made.close()
    if network is not None:
        network.close()


def command(script: str, pause: float, *more: str) -> tuple[str, ...]:
    """Train, slowly enough for something to happen meanwhile."""
    words = ("--steps", str(STEPS[script]), "--seconds-per-step", str(pause))
    return (sys.executable, str(EXAMPLES / script), *words, *more)


def undisturbed(script: str, ranks: int, *more: str, **variables: str) -> str:
    """What a training prints that is left alone; all its ranks the same."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            command(script, 0.0, *more), text=True, stdout=subprocess.PIPE,
            env=os.environ | meeting | variables | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = {each.communicate(timeout=PATIENCE)[0] for each in started}
    assert [each.returncode for each in started] == [0] * ranks
    assert len(said) == 1
    return said.pop().strip()


def last_line(client: Client, job: str, rank: int = 0) -> str:
    """What a rank has printed in the end."""
    return client.logs(job, replica=rank).strip().splitlines()[-1]


def test_trainings_that_are_preempted_and_moved_between_nodes_end_with_the_weights_of_undisturbed_ones(
    machines: Machines, tmp_path: Path
) -> None:
    client = machines.up()
    interface = {"GLOO_SOCKET_IFNAME": "lo" if machines.network is None else "eth0"}
    parts_file, wanted_file = str(tmp_path / "parts.pt"), str(tmp_path / "wanted.pt")
    requests = [
        JobRequest(name="ddp", command=command("train_ddp.py", PAUSE), gpus=2, replicas=Replicas.GPU, env=interface),
        JobRequest(
            name="parts",
            command=command("train_micro_batches.py", PAUSE, "--out", parts_file),
            micro_batches=4,
            replicas=Replicas.GPU,
            env=interface,
        ),
        JobRequest(name="alone", command=command("train_pytorch.py", PAUSE), gpus=1),
    ]
    ddp, parts, alone = jobs = [each.id for each in client.submit_all(requests)]
    for job in jobs:
        move(client, job)
    details = {job: ended(client, job, PATIENCE) for job in jobs}

    assert last_line(client, ddp) == last_line(client, ddp, 1) == undisturbed("train_ddp.py", 2)
    assert last_line(client, alone) == undisturbed("train_pytorch.py", 1)
    undisturbed("train_micro_batches.py", 1, "--out", wanted_file, POISE_MICRO_BATCHES="4")
    torch.testing.assert_close(torch.load(parts_file), torch.load(wanted_file), rtol=0, atol=BOUND)

    places = {job: [frozenset(run.gpus) for run in detail.runs] for job, detail in details.items()}
    assert all(len(set(nodes)) > 1 for nodes in places.values()), places  # preempted, and moved
    assert all(len(nodes) == 2 for nodes in places[ddp])
    assert any("k80-0" in nodes and len(nodes) > 1 for nodes in places[parts]), places  # a mix of types
    # Nothing was lost. A run that was asked to leave before it had begun has nothing to lose.
    assert not any(run.lost for detail in details.values() for run in detail.runs)


def move(client: Client, job: str) -> None:
    """Take a node out of service that a job trains on, until the job trains without it; give it back."""
    node = where_it_trains(client, job)
    client.drain(node)
    where_it_trains(client, job, without=node)
    client.return_node(node)


def where_it_trains(client: Client, job: str, without: str | None = None) -> str:
    """Wait until a job gets on with its work, and not on that node; return one of its nodes."""
    nodes: list[str] = []

    def gets_on() -> bool:
        detail = client.show(job)
        assert not detail.job.state.is_final, f"job {job} has ended before it was moved"
        run = detail.runs[-1] if detail.runs else None
        is_on = run is not None and run.ended is None and detail.steps > run.begun
        nodes[:] = run.gpus if is_on and run is not None else ()
        return bool(nodes) and without not in nodes

    until(gets_on, f"job {job} does not train without {without}", PATIENCE)
    return nodes[0]
