"""A node of a real service is taken out of service while trainings run there: they save, move and lose nothing."""

import hashlib
import json
import signal
import subprocess
from collections.abc import Callable

import pytest
from tests.e2e.service import PATIENCE, Service, ended, until
from tests.shell import COMMAND, poise

from poise.service.client import Client
from poise.service.wire.views import JobState, NodeCondition, NodeRow

pytestmark = pytest.mark.slow
Started = Callable[..., Service]
STEPS, SECONDS = 3_000, 0.01
"""Of a job: it takes much longer than a command does, also on a slow machine."""
TWO_NODES = ("--cluster", "v100:2@1", "--policy", "fifo", "--round", "1s")
OFTEN = {"every": 0.2, "deadline": 30.0}


def chain(seed: str) -> str:
    """What examples/live/count_steps.py prints when nothing interrupts it."""
    hashed = hashlib.sha256(seed.encode()).hexdigest()
    for step in range(STEPS):
        hashed = hashlib.sha256(f"{hashed} {step}".encode()).hexdigest()
    return hashed


def node(client: Client, name: str) -> NodeRow:
    return next(each for each in client.nodes().nodes if each.name == name)


def place(client: Client, job: str) -> str:
    """The node that the last run of a job has."""
    [name] = client.show(job).runs[-1].gpus
    return name


def test_a_training_moves_to_another_node_and_ends_as_if_nothing_had_been(a_service: Started) -> None:
    service = a_service(*TWO_NODES)
    client = service.up()
    job = client.submit(command=service.counting(STEPS, SECONDS, "s"), checkpoint=OFTEN)
    until(lambda: (client.show(job.id).checkpoint_steps or 0) >= 50, "it has not got so far")
    first = place(client, job.id)
    said = poise("drain", first, "--reason", "new driver")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == f"{first} is drained; 1 run still there"
    assert lines[-1] == f"{first} is empty"
    assert any("has left" in line for line in lines)
    assert node(client, first).state is NodeCondition.DRAINED
    until(lambda: client.show(job.id).job.state is JobState.RUNNING, "it does not go on")
    second = place(client, job.id)
    assert second != first
    run = client.show(job.id).runs[0]
    assert run.cause == f"preempted (drained): node {first} is drained by admin: new driver; it comes back by itself"
    assert run.lost == 0.0
    # The drain outlives the service, and nothing starts there.
    service.kill()
    client = service.up()
    assert node(client, first).drain_reason == "new driver"
    other = client.submit(command=service.counting(5, 0.01, "t"))
    until(lambda: "is drained by admin: new driver" in " ".join(client.why(other.id).evidence), "it is not told why")
    assert poise("return", first).out == f"{first} up: takes new runs\n"
    assert place(client, ended(client, other.id).job.id) == first
    detail = ended(client, job.id)
    assert detail.lost_gpu_seconds == 0.0
    assert chain("s") in client.log(job.id).splitlines()[-1]
    assert service.violations == ""


def test_ctrl_c_ends_the_waiting_and_not_the_drain(a_service: Started) -> None:
    service = a_service(*TWO_NODES)
    client = service.up()
    service.let(5)
    job = client.submit(command=service.held(STEPS // 10, 0.005, "s"), preemption="never")
    until(lambda: client.show(job.id).job.state is JobState.RUNNING, "it does not run")
    name = place(client, job.id)
    waiting = subprocess.Popen([COMMAND, "drain", name, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == f"{name} is drained; 1 run still there\n"
    assert "it stays until it ends: its owner wants it so" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 130
    assert f"the drain goes on; `poise return {name}` ends it" in err
    [found] = json.loads(out)
    assert (found["state"], found["runs"][0]["job"]) == ("draining", job.id)
    assert node(client, name).state is NodeCondition.DRAINING
    assert client.show(job.id).job.state is JobState.RUNNING
    assert poise("drain", name, "--no-wait").out.startswith(f"{name} is drained; 1 run still there\n")
    service.let(STEPS)
    ended(client, job.id)
    until(lambda: node(client, name).state is NodeCondition.DRAINED, "it is not empty")
    assert poise("drain", name).out == f"{name} is empty\n"
