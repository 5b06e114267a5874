"""What runs in a pod, piece by piece; and nodes that come and go."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.backends import WAITS, LocalStage, a_request, an_order, python, until

from poise.scheduler.model.cluster import Node
from poise.service.agent.installation import STAMP, install
from poise.service.agent.tokens import AgentToken
from poise.service.backends.api import DesiredState, NodeReport, NodeState, RunEnded, RunEnding, RunOrder, RunPart
from poise.service.backends.local import backend as local_backend
from poise.service.backends.local.orders import LocalSettings, order_fields
from poise.service.backends.local.runner import starter, starting
from poise.service.backends.local.runner.supervisor import completed
from poise.service.backends.local.starters import answer_to, ask_for_runner, tell_done
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.remote import links, runs
from poise.service.backends.remote.identity import ServiceIdentity
from poise.service.backends.remote.links import with_slack
from poise.service.backends.remote.runs import RefusedAgentError, RemoteRuns
from poise.service.wire.agent_messages import SOONEST, Hello, NodeAdopted, NodeSpec, PartBegan, PartEnded

# The starter


@pytest.mark.parametrize(
    ("how", "codes", "code"),
    [
        ("finished", (0, 0), 0), ("yielded", (75, 75), 75), ("failed", (3,), 3), ("failed", (-15, 0, 4), 4),
        ("failed", (-9,), 137), ("failed", (), 1), ("failed", (None, 0), 1), ("failed", (75,), 75), (None, (), 1),
    ],
)  # fmt: skip
def test_exit_code_says_how_a_run_went(how: str | None, codes: tuple[int | None, ...], code: int) -> None:
    assert starting.exit_code(how, codes) == code
    replicas = [{"rank": rank, "code": each} for rank, each in enumerate(codes)]
    assert starting.exit_code_of({"how": how, "replicas": replicas}) == code


def test_exit_code_of_nonsense() -> None:
    assert [starting.exit_code_of(each) for each in (None, {}, {"replicas": 7}, {"replicas": [1, {"code": "x"}]})] == [1] * 4


def test_secrets_of_poise_are_not_inherited() -> None:
    given = {"PATH": "/bin", "POISE_AGENTS_TOKEN": "x", "POISE_AGENT_SERVER": "y", "MY_TOKEN": "z"}
    assert starting.inheritable(given) == {"PATH": "/bin", "MY_TOKEN": "z"}


@pytest.mark.parametrize(
    ("platform", "version", "said"),
    [("linux", (3, 8), "and it has 3.8"), ("win32", (3, 12), "need Linux"), ("linux", (3, 10), None)],
)
def test_starter_needs_linux_and_a_python_of_these_days(
    monkeypatch: pytest.MonkeyPatch, platform: str, version: tuple[int, int], said: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    found = starter.problem()
    assert (found is None) if said is None else (found is not None and said in found)


class Container:
    """A starter, as a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "starter", folder / "log"
        self.log.touch()
        command = [sys.executable, starter.__file__, str(self.folder), str(self.log)]
        self.process = subprocess.Popen(command, env={"PATH": os.environ["PATH"], "MARK": "of the container"}, cwd=folder)

    def wait(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    made = Container(tmp_path)
    yield made
    made.close()


@pytest.fixture
def stage(tmp_path: Path, container: Container) -> Iterator[LocalStage]:
    settings = LocalSettings(term_seconds=0.3, progress_every=0.05, starter=container.folder)
    made = LocalStage(tmp_path, settings)
    yield made
    container.close()
    made.backend.close()
    made.open(LocalSettings()).adopt([])  # which ends what is left
    until(lambda: not made.processes())
    made.backend.close()


def test_starter_that_is_told_so_ends_with_the_code_and_what_it_has_started(stage: LocalStage, container: Container) -> None:
    stage.begun("1", WAITS)
    assert tell_done(container.folder, 5, None, 10.0)
    assert container.wait() == 5
    until(lambda: not stage.processes())
    end = stage.wait(RunEnded, "1")
    assert (end.how, end.cause) == (RunEnding.FAILED, "node-lost")


def test_starter_writes_a_short_termination_message(stage: LocalStage, container: Container) -> None:
    stage.run("1", "pass")
    stage.wait(RunEnded, "1")
    run = stage.run_dir("1")
    many = {**stage.said("1", "exit.json"), "replicas": [{"rank": rank, "code": 0} for rank in range(1000)]}
    (run / "exit.json").write_text(json.dumps(many))
    assert tell_done(container.folder, 0, str(run), 10.0)
    assert container.wait() == 0
    said = json.loads(container.log.read_text())
    assert said["how"] == "finished"
    assert "replicas" not in said


def test_starter_without_a_run_leaves_at_once_on_term(container: Container) -> None:
    until((container.folder / starting.SOCKET).exists)
    container.process.send_signal(signal.SIGTERM)
    assert container.wait() == 75
    assert ask_for_runner(container.folder, "/nowhere", {}) is None
    assert not tell_done(container.folder, 0, None, 0.1)


def test_starter_that_was_sent_term_starts_nothing_more(stage: LocalStage, container: Container) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"
    slow = LocalSettings(term_seconds=2.0, progress_every=0.05, starter=container.folder)
    stage.backend.close()
    stage.open(slow).adopt([])
    stage.begun("1", python(stubborn), 0)
    stage.says("1", "ready")
    container.process.send_signal(signal.SIGTERM)
    call = None
    while call is None:
        call = ask_for_runner(container.folder, str(stage.run_dir("1")), {})
    os.set_blocking(call.connection, True)
    with pytest.raises(OSError, match="shutdown") as problem:
        answer_to(call)
    assert problem.value.errno == errno.ESHUTDOWN
    for handle in call:
        os.close(handle)
    assert container.wait() == 137


def test_run_that_cannot_be_started_says_why(stage: LocalStage, container: Container) -> None:
    until((container.folder / starting.SOCKET).exists)
    call = ask_for_runner(container.folder, str(stage.folder / "jobs" / "1" / "runs" / "1"), {})
    assert call is not None
    os.set_blocking(call.connection, True)
    with pytest.raises(FileNotFoundError):
        answer_to(call)
    for handle in call:
        os.close(handle)


def test_nonsense_does_not_end_a_starter(container: Container, stage: LocalStage) -> None:
    until((container.folder / starting.SOCKET).exists)
    for fields in ({}, {"start": 1}, {"done": "x"}, {"done": None}, {"start": "/x", "marks": 3}):
        with starting.connected(str(container.folder)) as connection:
            starting.send(connection, fields)
            connection.setblocking(True)
            assert connection.recv(100) == b""
    stage.run("1", "print('well')")
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED


def test_starter_that_does_not_answer_is_asked_again(
    stage: LocalStage, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    until((container.folder / starting.SOCKET).exists)
    monkeypatch.setattr(local_backend, "ANSWER_SECONDS", 0.3)
    container.process.send_signal(signal.SIGSTOP)
    stage.run("1", "print('well')")
    until(lambda: any(run.attempts > 1 for run in stage.backend._runs.table))
    monkeypatch.setattr(local_backend, "ANSWER_SECONDS", 30.0)
    container.process.send_signal(signal.SIGCONT)
    end = stage.wait(RunEnded, "1")
    assert (end.how, end.codes) == (RunEnding.FINISHED, (0,))


def test_run_that_waits_for_a_starter_is_adopted(stage: LocalStage, container: Container, tmp_path: Path) -> None:
    container.close()
    (container.folder / starting.SOCKET).unlink(missing_ok=True)
    order = stage.run("1", "import os; print(os.environ['MARK'])")
    until((stage.run_dir("1") / "order.json").exists)
    stage.reopen((order, DesiredState.RUN))
    again = Container(tmp_path)
    try:
        assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
        assert "of the container" in stage.text("1")
    finally:
        again.close()


# Orders


def test_order_without_a_starter_is_as_it_was(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    order = an_order("1", a_request("pass", env={"A": "1"}))
    more: dict[str, Any] = {"base": {"PATH": "/bin"}, "devices": {}, "port": 5, "begun": 0.0}
    plain = order_fields(order, state, LocalSettings(), **more)
    there = order_fields(order, state, LocalSettings(starter=tmp_path), **more)
    state.close()
    assert "inherit" not in plain
    assert {name for name in there if there[name] != plain.get(name)} == {"environment", "directory", "inherit"}
    assert there["directory"] == "."
    assert completed(plain, {"PATH": "/other"}) is plain
    full = completed(there, {"PATH": "/other", "PYTHONPATH": "/mine", "B": "2"})["environment"]
    own = {"PATH": "/other", "B": "2", "A": "1", "PYTHONUNBUFFERED": "1", "MASTER_PORT": "5"}
    assert {name: full[name] for name in own} == own
    assert full["PYTHONPATH"].startswith("/mine:/")


# The agent's part


def test_token_is_read_again_once_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = AgentToken("first", path)
    assert token() == "first"
    for text in ("second\n", "third\n"):
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        assert token() == text.strip()
    path.write_text("")
    assert token() == "third"
    path.unlink()
    assert token() == "third"
    assert AgentToken("given", None)() == "given"


def test_package_is_copied_once_and_replaced_by_another_version(tmp_path: Path) -> None:
    package = tmp_path / "source" / "thing"
    (package / "below" / "__pycache__").mkdir(parents=True)
    (package / "below" / "__pycache__" / "x.pyc").write_text("")
    (package / "below" / "x.py").write_text("1")
    target = tmp_path / "lib"
    assert install(target, package)
    assert not install(target, package)
    assert (target / "thing" / "below" / "x.py").read_text() == "1"
    assert (target / "thing" / "below").stat().st_mode & 0o777 == 0o755
    (package / "below" / "x.py").write_text("2")
    (package / "y.py").write_text("")
    assert install(target, package)
    found = {str(path.relative_to(target / "thing")) for path in target.rglob("*") if path.is_file()}
    assert found == {STAMP, "below/x.py", "y.py"}
    assert (target / "thing" / "below" / "x.py").read_text() == "2"
    assert [path.name for path in target.iterdir()] == ["thing"]


# Nodes that come and go


class Pods:
    """A server's view of pods, with a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.events, self.folder = 1000.0, [], folder  # type: ignore[var-annotated]
        for module in (links, runs):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        self.restart()

    def restart(self) -> None:
        self.service = ServiceIdentity(self.folder)
        self.runs = RemoteRuns(self.service, (), self.events.append, lease=60.0)

    def join(self, name: str) -> str:
        node = NodeSpec(name=name, gpu_type="v100", gpus=1)
        session = self.runs.hello(Hello(protocol=1, version="x", node=node, identity="1" * 32), is_bound=True).session
        self.service.save_now()
        link = self.runs.link_of(session)
        self.runs.answered(link)
        self.runs.hear(link, 0.0, [NodeAdopted()])
        return session

    def launch(self, job: str, *pods: str) -> RunOrder:
        order = RunOrder(job, 1, tuple(RunPart(each, "v100", (0,)) for each in pods), a_request("", gpus=len(pods)))
        self.runs.launch(order)
        return order

    @property
    def ends(self) -> list[RunEnded]:
        return [each for each in self.events if isinstance(each, RunEnded)]

    @property
    def states(self) -> list[NodeState]:
        return [each.state for each in self.events if isinstance(each, NodeReport)]


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    made = Pods(tmp_path, monkeypatch)
    made.runs.adopt([])
    return made


def test_lease_of_a_node_that_is_expected_begins_when_it_comes(pods: Pods) -> None:
    pods.runs.expect("p")
    pods.launch("1", "p")
    pods.now += 10_000.0
    pods.runs.look()
    assert not pods.events
    node = NodeSpec(name="p", gpu_type="v100", gpus=1)
    pods.runs.hello(Hello(protocol=1, version="x", node=node, identity="1" * 32), is_bound=True)
    pods.runs.look()  # while what the node is told is being written down
    assert pods.runs.table.get(("1", 1)) is not None
    pods.join("p")
    pods.now += with_slack(60.0) - 1.0
    pods.runs.look()
    assert not pods.ends
    pods.now += 2.0
    pods.runs.look()
    assert [(each.how, each.cause) for each in pods.ends] == [(RunEnding.FAILED, "node-lost")]
    assert pods.states == [NodeState.UP, NodeState.UNREACHABLE, NodeState.LOST]
    assert "p" in pods.runs.links


def test_lease_of_a_node_that_an_earlier_server_has_known_counts_from_the_start(pods: Pods) -> None:
    pods.runs.expect("p")
    order = pods.launch("1", "p")
    pods.join("p")
    pods.restart()
    pods.runs.expect("p")
    pods.runs.adopt([(order, DesiredState.RUN)])
    pods.now += with_slack(60.0) + 1.0
    pods.runs.look()
    assert [each.cause for each in pods.ends] == ["node-lost"]


def test_given_up_node_has_failed_what_was_open_there(pods: Pods) -> None:
    for name in ("p", "q"):
        pods.runs.expect(name)
    pods.launch("1", "p", "q")
    sessions = [pods.join(name) for name in ("p", "q")]
    first, second = (pods.runs.link_of(each) for each in sessions)
    pods.runs.hear(first, 0.0, [PartBegan(job="1", epoch=1, at=0.0, port=7)])
    pods.runs.hear(second, 0.0, [PartBegan(job="1", epoch=1, at=0.0, port=0)])
    broken = PartEnded(job="1", epoch=1, at=-5.0, how="failed", steps=None, cause="mpi-error", codes=(1,), failed_at=-5.0)
    pods.runs.hear(first, 0.0, [broken])
    assert not pods.ends
    pods.runs.give_up("q", "its pod was evicted", "storage-full")
    pods.runs.give_up("q", "again", "killed")
    assert [(each.how, each.cause, each.codes) for each in pods.ends] == [(RunEnding.FAILED, "storage-full", (1, None))]
    with pytest.raises(RefusedAgentError, match="over"):
        pods.runs.link_of(sessions[1])


def test_given_up_node_keeps_the_end_that_it_has_reported(pods: Pods) -> None:
    pods.runs.expect("p")
    pods.launch("1", "p")
    link = pods.runs.link_of(pods.join("p"))
    end = PartEnded(job="1", epoch=1, at=0.0, how="finished", steps=9.0, cause=None, codes=(0,))
    pods.runs.hear(link, 0.0, [end])
    pods.runs.give_up("p", "its pod has ended", "killed")
    assert [each.how for each in pods.ends] == [RunEnding.FINISHED]


def test_run_whose_node_never_came_fails_at_once(pods: Pods) -> None:
    for name in ("p", "q"):
        pods.runs.expect(name)
    pods.launch("1", "p", "q")
    pods.runs.give_up("q", "its image cannot be pulled", "image-missing")
    assert not pods.ends  # the part of rank 0 may have begun
    pods.runs.give_up("p", "its image cannot be pulled", "image-missing")
    assert [each.cause for each in pods.ends] == ["image-missing"]
    assert not pods.states


def test_nothing_is_left_of_a_forgotten_node(pods: Pods) -> None:
    pods.runs.expect("p")
    pods.launch("1", "p")
    session = pods.join("p")
    assert not pods.runs.forget("p")
    pods.runs.give_up("p", "gone", "killed")
    assert pods.runs.forget("p")
    assert pods.runs.forget("p")  # again
    assert (pods.runs.links, pods.runs._sessions, pods.runs._known, pods.service.nodes) == ({}, {}, {}, {})
    pods.service.save_now()
    assert ServiceIdentity(pods.folder).nodes == {}
    with pytest.raises(RefusedAgentError) as refused:
        pods.runs.link_of(session)
    assert refused.value.code == "session-over"
    with pytest.raises(RefusedAgentError) as refused:
        pods.join("p")
    assert refused.value.code == "not-wanted"


def test_server_that_starts_tells_no_pod_that_it_is_not_wanted(pods: Pods) -> None:
    pods.restart()
    with pytest.raises(RefusedAgentError) as refused:
        pods.join("p")
    assert refused.value.code == "starting"


def test_reports_are_as_often_as_there_are_agents(tmp_path: Path) -> None:
    nodes = [Node(f"n{number}", "v100", 1) for number in range(100)]
    found = RemoteRuns(ServiceIdentity(tmp_path), nodes, lambda _event: None, lease=60.0)
    assert found.report_every == SOONEST
