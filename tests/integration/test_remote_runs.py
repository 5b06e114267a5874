"""Runs on other machines: gangs over nodes, what their agents tell each other, restarts of server and agents, fencing."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from tests.backends import TRAINS, WAITS, a_request, an_order, notice, python, until
from tests.remote import NODES, RemoteStage

from poise.service.agent import agent
from poise.service.backends.api import (
    DesiredState,
    NodeState,
    RunBegan,
    RunEnded,
    RunEnding,
    RunOrder,
    RunPart,
    RunProgressed,
)
from poise.service.backends.local.backend import LocalBackend
from poise.service.backends.remote.identity import TOKEN_FILE
from poise.service.wire.agent_messages import PROTOCOL

V0, V1, K0 = RunPart("v100-0", "v100", (0, 1)), RunPart("v100-1", "v100", (2,)), RunPart("k80-0", "k80", (0,))
LEASE = 4.0
SPEAKS = """
import json, os
print(json.dumps({name: os.environ.get(name) for name in (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "POISE_NODES")}))
"""
"""Prints the variables of a rank."""
FAILS_ON_RANK_2 = """
import os, sys, time
if os.environ["RANK"] == "2":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(3)
time.sleep(1000)
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[RemoteStage]:
    made = RemoteStage(tmp_path)
    yield made
    made.close()


@pytest.fixture
def short(tmp_path: Path) -> Iterator[RemoteStage]:
    """With a short lease."""
    made = RemoteStage(tmp_path, lease=LEASE)
    yield made
    made.close()


def gang(job: str, command: tuple[str, ...] | str, *parts: RunPart, epoch: int = 1, **more: Any) -> RunOrder:
    """A run over several nodes, one replica per GPU."""
    return an_order(job, a_request(command, gpus=sum(len(part.slots) for part in parts), **more), parts=parts, epoch=epoch)


def lines(stage: RemoteStage, job: str, rank: int) -> list[str]:
    """What a rank has written, without the marks between runs."""
    text = stage.backend.log(job, rank, 0, 1 << 20).text.decode()
    return [line for line in text.splitlines() if not line.startswith("---")]


def test_gang_over_three_nodes_has_one_numbering_of_ranks(stage: RemoteStage) -> None:
    stage.backend.launch(gang("1", SPEAKS, V0, V1, K0, replicas="gpu"))
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.FINISHED, (0, 0, 0, 0))
    told = [json.loads(lines(stage, "1", rank)[0]) for rank in range(4)]
    assert [each["RANK"] for each in told] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "0", "0"]
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"], each["POISE_NODES"]) for each in told} == {
        ("4", "127.0.0.1", told[0]["MASTER_PORT"], "3")
    }


def test_gang_begins_once_and_only_with_all_its_parts(stage: RemoteStage) -> None:
    stage.backend.launch(gang("1", WAITS, V0, V1))
    stage.wait(RunBegan, "1")
    assert stage.processes("v100-0")
    assert stage.processes("v100-1")
    stage.backend.kill("1", 1, "enough")
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED
    assert len(stage.of(RunBegan, "1")) == 1
    assert not stage.processes()


def test_part_that_fails_ends_the_others_and_its_cause_is_the_run_s(stage: RemoteStage, tmp_path: Path) -> None:
    stage.backend.launch(gang("1", python(FAILS_ON_RANK_2, str(tmp_path / "go")), V0, V1, K0, replicas="gpu"))
    stage.wait(RunBegan, "1")
    (tmp_path / "go").touch()
    ended = stage.wait(RunEnded, "1")
    assert ended.how is RunEnding.FAILED
    assert ended.codes[2] == 3
    assert not stage.processes()


def test_part_that_fails_ends_the_others_while_the_server_is_away(stage: RemoteStage, tmp_path: Path) -> None:
    order = gang("1", python(FAILS_ON_RANK_2, str(tmp_path / "go")), V0, V1, K0, replicas="gpu")
    stage.backend.launch(order)
    stage.wait(RunBegan, "1")
    stage.backend.close()
    (tmp_path / "go").touch()
    until(lambda: not stage.processes())
    stage.open().adopt([(order, DesiredState.RUN)])
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes[2]) == (RunEnding.FAILED, 3)


def test_part_that_finished_in_a_run_that_failed_does_not_keep_the_next_run_from_its_node(stage: RemoteStage) -> None:
    ends = "import os, sys; sys.exit(int(os.environ['RANK'] == '0'))"
    stage.backend.launch(gang("1", ends, V1, K0))
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    stage.backend.launch(gang("1", "", V1, K0, epoch=2))
    assert stage.wait(RunEnded, "1", 2).how is RunEnding.FINISHED


def test_run_leaves_gpus_that_others_use_and_its_neighbour_stays(
    stage: RemoteStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "WITHHELD_GRACE", 0.0)
    for slot in (0, 1):
        stage.backend.launch(an_order(f"on-{slot}", a_request(TRAINS), parts=(RunPart("v100-0", "v100", (slot,)),)))
        stage.wait(RunProgressed, f"on-{slot}")
    stage.agents["v100-0"].call(lambda each: each.withhold((1, 3)))
    ended = stage.wait(RunEnded, "on-1")
    assert (ended.how, ended.cause) == (RunEnding.YIELDED, None)
    assert stage.reports[-1].withheld == (1, 3)
    assert not stage.of(RunEnded, "on-0")


def test_gang_goes_on_under_a_new_server_and_new_agents(stage: RemoteStage) -> None:
    order = gang("1", TRAINS, V0, V1, preemption="checkpoint")
    stage.backend.launch(order)
    stage.wait(RunBegan, "1")
    before = set(stage.processes())
    for node in NODES:
        stage.agents[node.name].stop()
    stage.backend.close()
    stage.open()
    stage.agents = {node.name: stage.agent(node) for node in NODES}
    stage.backend.adopt([(order, DesiredState.RUN)])
    stage.wait(RunBegan, "1", count=2)
    assert set(stage.processes()) == before
    stage.backend.stop("1", 1, notice())
    ended = stage.wait(RunEnded, "1")
    assert ended.how is RunEnding.YIELDED
    assert ended.steps


def test_run_that_ended_while_its_agent_was_away_is_reported_as_it_ended(stage: RemoteStage) -> None:
    stage.backend.launch(an_order("1", a_request("import time; time.sleep(0.5); raise SystemExit(4)")))
    stage.wait(RunBegan, "1")
    stage.agents["v100-0"].stop()
    until(lambda: not stage.processes())
    assert not stage.of(RunEnded, "1")
    stage.agents["v100-0"] = stage.agent(NODES[0])
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.FAILED, (4,))


def test_run_that_ends_while_its_agent_stops_is_reported_by_the_next_one(stage: RemoteStage) -> None:
    """What would be heard of then would be sent over connections that are being closed, and leave them open."""
    stage.backend.launch(an_order("1", a_request(WAITS)))
    stage.wait(RunBegan, "1")
    heard: list[object] = []

    def end_run_while_closing(node_agent: agent.Agent) -> None:
        close = node_agent._checkpoints.close

        def close_slowly() -> None:
            node_agent._heard = heard.append  # type: ignore[method-assign, assignment]
            for pid in stage.processes():
                os.kill(pid, signal.SIGKILL)
            sleep(1.0)  # time for a back end that still watches the run to report its end
            close()

        node_agent._checkpoints.close = close_slowly  # type: ignore[method-assign]

    stage.agents["v100-0"].call(end_run_while_closing)
    stage.agents["v100-0"].stop()
    assert not heard
    stage.agents["v100-0"] = stage.agent(NODES[0])
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED


def test_order_that_was_given_while_the_agent_was_away_is_carried_out_when_it_is_back(stage: RemoteStage) -> None:
    stage.agents["v100-0"].stop()
    stage.backend.launch(an_order("1", a_request("print('here')")))
    stage.agents["v100-0"] = stage.agent(NODES[0])
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert lines(stage, "1", 0) == ["here"]


def test_log_continues_where_a_job_moves_to_another_node(stage: RemoteStage) -> None:
    for epoch, part in enumerate((V1, K0, V1), start=1):
        command = f"print('run {epoch}', flush=True); {WAITS}"
        stage.backend.launch(an_order("1", a_request(command, preemption="restart"), parts=(part,), epoch=epoch))
        until(lambda epoch=epoch: f"run {epoch}" in lines(stage, "1", 0))
        stage.backend.stop("1", epoch, notice())
        stage.wait(RunEnded, "1", epoch)
    assert lines(stage, "1", 0) == ["run 1", "run 2", "run 3"]


def test_runs_that_the_server_does_not_know_are_ended(stage: RemoteStage) -> None:
    stage.backend.launch(gang("1", WAITS, V0, V1))
    stage.wait(RunBegan, "1")
    stage.reopen()
    until(lambda: not stage.processes())
    assert not stage.of(RunEnded, "1")


def test_node_that_is_cut_off_has_ended_its_runs_before_it_is_lost(short: RemoteStage) -> None:
    """All processes of the run are stopped, as if the machine hung, and its agent is gone: only the kernel can end them."""
    short.backend.launch(an_order("1", a_request(WAITS)))
    short.wait(RunBegan, "1")
    pids = short.processes("v100-0")
    short.agents["v100-0"].stop()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: short.node_state("v100-0") is NodeState.LOST)
    assert not short.processes("v100-0")
    ended = short.wait(RunEnded, "1")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "node-lost")
    report = next(each for each in short.reports if each.state is NodeState.LOST)
    assert "lease" in report.evidence
    short.agents["v100-0"] = short.agent(NODES[0])
    short.joined("v100-0")
    short.backend.launch(an_order("1", a_request(""), epoch=2))
    assert short.wait(RunEnded, "1", 2).how is RunEnding.FINISHED


def test_node_that_is_cut_off_for_less_than_its_lease_loses_nothing(short: RemoteStage) -> None:
    short.backend.launch(an_order("1", a_request(WAITS)))
    short.wait(RunBegan, "1")
    before = short.processes("v100-0")
    short.agents["v100-0"].stop()
    short.agents["v100-0"] = short.agent(NODES[0])
    sleep(1.5 * LEASE)
    assert short.processes("v100-0") == before
    assert not any(each.state is NodeState.LOST for each in short.reports)


def test_node_whose_agent_takes_longer_than_a_lease_to_adopt_its_runs_keeps_them(
    short: RemoteStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    short.backend.launch(an_order("1", a_request(WAITS)))
    short.wait(RunBegan, "1")
    before = short.processes()
    short.agents["v100-0"].stop()
    adopt, adopted = LocalBackend.adopt, threading.Event()

    def adopt_slowly(backend: LocalBackend, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        sleep(1.5 * LEASE)
        adopt(backend, runs)
        adopted.set()

    monkeypatch.setattr(LocalBackend, "adopt", adopt_slowly)
    short.agents["v100-0"] = short.agent(NODES[0])
    assert adopted.wait(10 * LEASE)
    assert short.processes() == before
    assert NodeState.LOST not in {each.state for each in short.reports}


def test_job_that_saves_is_asked_to_before_its_node_s_lease_ends(short: RemoteStage) -> None:
    """Its agent is gone for good. The runner sends TERM, which the worker takes as the end of its lease."""
    worker = f"import signal; from threading import Event; {TERM_SAVES}"
    short.backend.launch(an_order("1", a_request(python(worker), preemption="checkpoint")))
    short.wait(RunBegan, "1")
    until(lambda: "ready" in "".join(lines(short, "1", 0)))
    short.agents["v100-0"].stop()
    kept = short.folder / "v100-0" / "jobs" / "1" / "checkpoint" / "saved"
    until(kept.exists)
    until(lambda: short.node_state("v100-0") is NodeState.LOST)


TERM_SAVES = """
import os, sys
def save(*_):
    open(os.environ["POISE_CHECKPOINT_DIR"] + "/saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
Event().wait()
"""


def hello(stage: RemoteStage, *, token: str | None = None, **more: Any) -> httpx.Response:
    """Say hello as another agent would."""
    node = {"name": "k80-0", "gpu_type": "k80", "gpus": 2} | more.pop("node", {})
    message = {"protocol": PROTOCOL, "version": "0", "node": node, "identity": "0" * 32} | more
    token = token or (stage.folder / "server" / TOKEN_FILE).read_text().strip()
    return httpx.post(f"{stage.url}/agent/hello", json=message, headers={"Authorization": f"Bearer {token}"})


def test_agents_that_cannot_be_talked_to_are_refused_by_a_code(stage: RemoteStage) -> None:
    def code(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["code"]

    assert code(hello(stage)) == (409, "name-taken")
    assert code(hello(stage, protocol=PROTOCOL + 1)) == (409, "agent-version")
    assert code(hello(stage, service="f" * 32)) == (409, "foreign-service")
    assert code(hello(stage, token="wrong")) == (401, "unauthorized")
    assert code(hello(stage, identity="short")) == (400, "wrong-request")
    assert code(hello(stage, node={"gpus": 0})) == (400, "wrong-request")
    assert stage.node_state("k80-0") is NodeState.UP


def test_name_of_a_node_is_its_own_over_a_restart_of_the_server_until_it_is_lost(short: RemoteStage) -> None:
    """Otherwise another machine of that name would be told to begin what the node still runs."""
    order = an_order("1", a_request(WAITS), parts=(K0,))
    short.backend.launch(order)
    short.wait(RunBegan, "1")
    short.agents["k80-0"].stop()
    short.reopen((order, DesiredState.RUN))
    assert hello(short).json()["code"] == "name-taken"
    until(lambda: short.node_state("k80-0") is NodeState.LOST)
    assert hello(short).is_success


def test_server_with_a_shorter_lease_waits_for_the_longer_one_that_nodes_may_have(tmp_path: Path) -> None:
    stage = RemoteStage(tmp_path, lease=LEASE)
    stage.backend.close()
    for each in stage.agents.values():
        each.stop()
    for _ in range(2):  # also if that server is restarted before it is over
        began = monotonic()
        stage.open(lease=0.1).adopt([])
        sleep(0.5)
        assert not stage.reports[len(NODES) :]
        stage.backend.close()
    stage.open(lease=0.1).adopt([])
    until(lambda: stage.node_state("k80-0") is NodeState.LOST)
    assert monotonic() - began > LEASE
    stage.backend.close()
    stage._bound.close()


def test_node_that_has_joined_a_server_with_shorter_leases_is_not_lost_before_the_longer_ones_have_ended(
    tmp_path: Path,
) -> None:
    """Its agent knows of the shorter one. A runner that stands still does not."""
    stage = RemoteStage(tmp_path, lease=LEASE)
    stage.backend.close()
    began = monotonic()
    stage.open(lease=1.0).adopt([])
    until(lambda: len(stage.reports) == 2 * len(NODES))
    for each in stage.agents.values():
        each.stop()
    until(lambda: stage.node_state("k80-0") is NodeState.LOST)
    assert monotonic() - began > LEASE
    stage.backend.close()
    stage._bound.close()


def test_node_that_joins_is_reported_with_what_it_has(stage: RemoteStage) -> None:
    answer = hello(stage, node={"name": "new-0", "gpu_type": "a100", "gpus": 8, "rack": "r7", "withheld": [1]}).json()
    message = {"session": answer["session"], "now": 0.0, "first": 1, "news": [{"kind": "adopted"}]}
    token = (stage.folder / "server" / TOKEN_FILE).read_text().strip()
    httpx.post(f"{stage.url}/agent/news", json=message, headers={"Authorization": f"Bearer {token}"})
    until(lambda: stage.node_state("new-0") is NodeState.UP)
    report = stage.reports[-1]
    assert (report.node.gpu_type, report.node.gpus, report.node.rack, report.withheld) == ("a100", 8, "r7", (1,))
