"""Pods: an agent in one container, and what starts its run in another, here as processes of one machine.

What the two containers share is shared here too: a directory, all processes, and the user. The user's container has an
environment and a working directory of its own.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from tests.backends import PATIENCE, TRAINS, WAITS, Stage, a_request, notice, until
from tests.remote import AgentThread, listening
from tests.shell import COMMAND

from poise.service.agent.agent import AgentConfig
from poise.service.agent.installation import install
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
from poise.service.backends.local.orders import LocalSettings
from poise.service.backends.local.processes import environment_of, pids
from poise.service.backends.local.runner.starter import UNUSABLE
from poise.service.backends.remote.authority import AuthorityAwayError
from poise.service.backends.remote.backend import AgentAccess, RemoteBackend
from poise.service.wire.agent_messages import NodeSpec

STARTER = Path("poise", "service", "backends", "local", "runner", "starter.py")
TRAINS_ATTACHED = """
import time
from poise.worker import attach

state = {"n": 0}
def save(path):
    with open(path, "w") as file:
        file.write(str(state["n"]))
def load(path):
    with open(path) as file:
        state["n"] = int(file.read())
for step in attach(save, load).steps(100_000):
    state["n"] += 1
    time.sleep(0.01)
"""


class PodAuthority:
    """Each pod's token is `token of ` and its name, and speaks for it alone."""

    def __init__(self) -> None:
        self.is_away = False

    async def node_of(self, token: str) -> str | None:
        if self.is_away:
            raise AuthorityAwayError
        return token.removeprefix("token of ") if token.startswith("token of ") else None


class Pod:
    """The processes of one pod."""

    def __init__(self, stage: "PodStage", name: str, gpus: int = 1, image: dict[str, str] | None = None) -> None:
        self.name, self.folder, self.state = name, stage.folder / name, stage.folder / name / "state"
        self.workdir, self.log, self.token = (self.folder / each for each in ("workdir", "termination-log", "token"))
        for each in (self.folder, self.workdir):
            each.mkdir()
        self.log.touch()
        self.token.write_text(f"token of {name}")
        self._image = {"PATH": os.environ["PATH"], "OF_THE_IMAGE": "yes", **(image or {})}
        self._command = [sys.executable, str(stage.library / STARTER), str(self.folder / "starter"), str(self.log)]
        options = {
            "SERVER": stage.url, "TOKEN_FILE": str(self.token), "NODE": name, "GPUS": f"v100:{gpus}", "ONCE": "true",
            "STATE": str(self.state), "STARTER": str(self.folder / "starter"), "ADDRESS": "127.0.0.1", "QUIET": "true",
        }  # fmt: skip
        more = {f"POISE_AGENT_{key}": value for key, value in options.items()}
        self._agent_environ = {"PATH": os.environ["PATH"], "OF_THE_AGENT": "yes", **more}
        self._started: list[subprocess.Popen[bytes]] = []
        self.agent = self.start_agent()
        self.starter: subprocess.Popen[bytes] | None = None

    def start_agent(self) -> subprocess.Popen[bytes]:
        self.agent = subprocess.Popen([COMMAND, "agent"], env=self._agent_environ)
        self._started.append(self.agent)
        return self.agent

    def start(self) -> "Pod":
        """The image has arrived: start the user's container."""
        self.starter = subprocess.Popen(self._command, env=self._image, cwd=self.workdir)
        self._started.append(self.starter)
        return self

    def codes(self) -> tuple[int, int]:
        """Exit codes of the user's container and of the agent, once both have ended."""
        assert self.starter is not None
        return self.starter.wait(PATIENCE), self.agent.wait(PATIENCE)

    def close(self) -> None:
        for each in self._started:
            if each.poll() is None:
                each.kill()
                each.wait()

    def sweep(self) -> None:
        """Kill what a container would not outlive."""
        while found := _marked(self.state):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sleep(0.01)


class PodStage(Stage):
    """A server that expects pods."""

    def __init__(self, folder: Path, *, lease: float = 60.0) -> None:
        super().__init__()
        self.folder, self.library, self.lease = folder, folder / "lib", lease
        install(self.library)
        self._bound = listening()
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        self.authority = PodAuthority()
        self.pods: list[Pod] = []
        self.backend = self.open()
        self.backend.adopt([])

    def open(self) -> RemoteBackend:
        (self.folder / "server").mkdir(exist_ok=True)
        access = AgentAccess(self._bound, self.url)
        self.backend = RemoteBackend(
            (), self.folder / "server", self.tell, access, lease=self.lease, authority=self.authority, adopt_seconds=0.1
        )
        return self.backend

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the runs, in their thread."""
        return self.backend._call(lambda: getattr(self.backend._runs, name)(*arguments))

    def pod(self, name: str, **more: Any) -> Pod:
        self.call("expect", name)
        self.pods.append(Pod(self, name, **more))
        return self.pods[-1]

    def run(self, job: str, command: tuple[str, ...] | str, *pods: str, epoch: int = 1, **more: Any) -> RunOrder:
        parts = tuple(RunPart(each, "v100", (0,)) for each in pods)
        order = RunOrder(job, epoch, parts, a_request(command, gpus=len(pods), **more))
        self.backend.launch(order)
        return order

    def text(self, job: str, replica: int = 0) -> str:
        return self.backend.log(job, replica, 0, 1 << 20).text.decode()

    def close(self) -> None:
        for each in self.pods:
            each.close()
        self.backend.close()
        self._bound.close()
        for each in self.pods:
            each.sweep()


def _marked(state: Path) -> list[int]:
    mark = b"POISE_RUN_DIR=" + bytes(state)
    return [pid for pid in pids() if any(each.startswith(mark) for each in environment_of(pid))]


def hello_of(name: str, identity: str = "1" * 32) -> dict[str, Any]:
    return {"protocol": 1, "version": "x", "node": {"name": name, "gpu_type": "v100", "gpus": 1}, "identity": identity}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[PodStage]:
    made = PodStage(tmp_path)
    yield made
    made.close()


def test_run_finishes_and_its_pod_completes(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", "print('hello')", "pod-1")
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert pod.codes() == (0, 0)
    assert "hello" in stage.text("1")
    assert json.loads(pod.log.read_text())["how"] == "finished"


def test_run_has_the_environment_of_its_own_container(stage: PodStage) -> None:
    says = "import os, json; print(json.dumps({**os.environ, 'cwd': os.getcwd()}))"
    image = {
        "PYTHONPATH": "/of/the/image",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "POISE_AGENTS_TOKEN": "secret",
        "CUDA_HOME": "/c",
    }
    pod = stage.pod("pod-1", image=image).start()
    stage.run("1", (sys.executable, "-S", "-c", says), "pod-1", env={"MINE": "1"})
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    found = json.loads(next(line for line in stage.text("1").splitlines() if line.startswith("{")))
    wanted = {
        "OF_THE_IMAGE": "yes", "MINE": "1", "cwd": str(pod.workdir), "CUDA_VISIBLE_DEVICES": "0", "CUDA_HOME": "/c",
        "PYTHONPATH": f"/of/the/image:{stage.library}", "MASTER_ADDR": "127.0.0.1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    assert {name: found.get(name) for name in wanted} == wanted
    assert not {"OF_THE_AGENT", "POISE_AGENTS_TOKEN", "POISE_AGENT_SERVER"} & found.keys()


def test_run_leaves_with_a_checkpoint_and_goes_on_in_another_pod(stage: PodStage) -> None:
    first = stage.pod("pod-1").start()
    stage.run("1", TRAINS, "pod-1")
    stage.wait(RunProgressed, "1")
    stage.backend.stop("1", 1, notice())
    end = stage.wait(RunEnded, "1")
    assert end.how is RunEnding.YIELDED
    assert end.steps is not None
    assert end.steps > 0
    assert first.codes() == (75, 0)
    assert stage.call("forget", "pod-1")
    stage.pod("pod-2").start()
    stage.run("1", TRAINS, "pod-2", epoch=2)
    assert stage.wait(RunBegan, "1", 2).begun == end.steps


def test_worker_library_is_there_in_an_image_without_it(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", (sys.executable, "-S", "-c", TRAINS_ATTACHED), "pod-1")
    stage.wait(RunProgressed, "1")
    stage.backend.stop("1", 1, notice())
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED
    assert pod.codes() == (75, 0)


def test_run_fails_with_its_cause_and_its_exit_code(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", "import sys; print('CUDA out of memory'); sys.exit(3)", "pod-1")
    end = stage.wait(RunEnded, "1")
    assert (end.how, end.cause, end.codes) == (RunEnding.FAILED, "gpu-out-of-memory", (3,))
    assert pod.codes() == (3, 0)


def test_container_that_comes_late_is_waited_for(stage: PodStage) -> None:
    pod = stage.pod("pod-1")
    stage.run("1", "print('hello')", "pod-1")
    until((pod.state / "jobs" / "1" / "runs" / "1" / "order.json").exists)
    pod.start()
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert pod.codes() == (0, 0)


def test_run_that_waits_for_its_container_can_be_called_off(stage: PodStage) -> None:
    pod = stage.pod("pod-1")
    stage.run("1", "print('hello')", "pod-1")
    until((pod.state / "jobs" / "1" / "runs" / "1" / "order.json").exists)
    stage.backend.kill("1", 1, "cancelled")
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED
    assert pod.agent.wait(PATIENCE) == 0
    pod.start_agent()  # as the kubelet does: the container may come yet, and has to be told
    pod.start()
    assert pod.codes()[0] == 75


def test_agent_that_was_killed_finds_its_run_again(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", TRAINS, "pod-1")
    stage.wait(RunProgressed, "1")
    pod.agent.kill()
    pod.agent.wait()
    seen = len(stage.of(RunProgressed, "1"))
    pod.start_agent()
    until(lambda: len(stage.of(RunProgressed, "1")) > seen)
    stage.backend.stop("1", 1, notice())
    end = stage.wait(RunEnded, "1")
    assert (end.how, end.codes) == (RunEnding.YIELDED, (75,))
    assert pod.codes() == (75, 0)


def test_container_that_is_ended_has_its_run_save(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", (sys.executable, "-S", "-c", TRAINS_ATTACHED), "pod-1")
    stage.wait(RunProgressed, "1")
    assert pod.starter is not None
    pod.starter.send_signal(signal.SIGTERM)
    assert pod.starter.wait(PATIENCE) == 75
    pod.agent.send_signal(signal.SIGTERM)  # the kubelet ends agents last
    end = stage.wait(RunEnded, "1")
    assert (end.how, end.cause, end.codes) == (RunEnding.FAILED, "node-lost", (75,))
    assert end.steps is not None
    assert end.steps > 0
    assert pod.agent.wait(PATIENCE) == 0


def test_term_to_the_agent_alone_leaves_the_run_be(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", TRAINS, "pod-1")
    stage.wait(RunProgressed, "1")
    pod.agent.send_signal(signal.SIGTERM)
    seen = len(stage.of(RunProgressed, "1"))
    until(lambda: len(stage.of(RunProgressed, "1")) > seen + 1)
    stage.backend.stop("1", 1, notice())
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED
    assert pod.codes() == (75, 0)


def test_term_ends_an_agent_whose_container_never_came(stage: PodStage) -> None:
    pod = stage.pod("pod-1")
    stage.run("1", "print('hello')", "pod-1")
    until((pod.state / "jobs" / "1" / "runs" / "1" / "order.json").exists)
    pod.agent.send_signal(signal.SIGTERM)
    end = stage.wait(RunEnded, "1")
    assert (end.how, end.codes) == (RunEnding.YIELDED, ())
    assert pod.agent.wait(PATIENCE) == 0


def test_gang_over_two_pods(stage: PodStage) -> None:
    says = "import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'], os.environ['POISE_NODES'])"
    pods = [stage.pod(name).start() for name in ("pod-1", "pod-2")]
    stage.run("1", says, "pod-1", "pod-2")
    end = stage.wait(RunEnded, "1")
    assert (end.how, end.codes) == (RunEnding.FINISHED, (0, 0))
    assert [each.codes() for each in pods] == [(0, 0)] * 2
    assert "1 127.0.0.1 2" in stage.text("1", 1)


def test_pod_that_is_gone_fails_its_run_at_once(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", WAITS, "pod-1")
    stage.wait(RunBegan, "1")
    pod.close()
    before = monotonic()
    stage.call("give_up", "pod-1", "its pod was evicted", "node-lost")
    end = stage.wait(RunEnded, "1")
    assert monotonic() - before < stage.lease / 2
    assert (end.how, end.cause) == (RunEnding.FAILED, "node-lost")
    assert stage.reports[-1].state is NodeState.LOST
    assert stage.reports[-1].evidence == "its pod was evicted"


def test_agent_that_is_forgotten_ends_with_its_run(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", WAITS, "pod-1")
    stage.wait(RunBegan, "1")
    assert not stage.call("forget", "pod-1")
    stage.call("give_up", "pod-1", "its pod is gone", "node-lost")
    assert stage.call("forget", "pod-1")
    assert pod.agent.wait(PATIENCE) == 0
    assert pod.starter is not None
    assert pod.starter.wait(PATIENCE) != 0
    assert not _marked(pod.state)
    until(lambda: "pod-1" not in (stage.folder / "server" / "service.json").read_text())


def test_agent_without_a_server_ends_after_its_lease(tmp_path: Path) -> None:
    stage = PodStage(tmp_path, lease=2.0)
    try:
        stage.call("expect", "pod-1")
        spec = NodeSpec(name="pod-1", gpu_type="v100", gpus=1)
        settings = LocalSettings(term_seconds=0.3)
        config = AgentConfig(
            stage.url, "token of pod-1", spec, tmp_path / "pod-1", settings=settings, once=True, orphaned=1.0
        )  # fmt: skip
        agent = AgentThread(config)
        stage.run("1", WAITS, "pod-1")
        stage.wait(RunBegan, "1")
        stage.backend.close()
        stage._bound.close()
        until(lambda: not agent._thread.is_alive())
        assert agent._agent.exit_code == 1
        assert not _marked(tmp_path / "pod-1")
    finally:
        stage.close()


def test_server_that_is_restarted_finds_its_pods(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    order = stage.run("1", TRAINS, "pod-1")
    stage.wait(RunProgressed, "1")
    stage.backend.close()
    stage.open()
    stage.call("expect", "pod-1")
    stage.backend.adopt([(order, DesiredState.RUN)])
    stage.wait(RunBegan, "1", count=2)
    stage.backend.stop("1", 1, notice())
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED
    assert pod.codes() == (75, 0)


def test_session_goes_on_while_the_authority_is_away_and_with_a_new_token(stage: PodStage) -> None:
    pod = stage.pod("pod-1").start()
    stage.run("1", TRAINS, "pod-1")
    stage.wait(RunProgressed, "1")
    session = stage.backend._runs.links["pod-1"].session
    stage.authority.is_away = True
    seen = len(stage.of(RunProgressed, "1"))
    until(lambda: len(stage.of(RunProgressed, "1")) > seen + 1)
    stage.authority.is_away = False
    pod.token.with_suffix(".new").write_text("token of pod-1")
    pod.token.with_suffix(".new").rename(pod.token)
    seen = len(stage.of(RunProgressed, "1"))
    until(lambda: len(stage.of(RunProgressed, "1")) > seen + 1)
    assert stage.backend._runs.links["pod-1"].session == session


def test_starter_says_what_its_container_lacks(tmp_path: Path) -> None:
    """As of an old Python: the file is read by any, and refuses by itself."""
    starter = (tmp_path / "starter.py").resolve()
    source = Path(install.__code__.co_filename).parents[2] / Path(*STARTER.parts[1:])
    starter.write_text(source.read_text().replace("LEAST = (3, 10)", "LEAST = (4, 0)"))
    done = subprocess.run([sys.executable, str(starter), str(tmp_path / "x")], capture_output=True, text=True, check=False)
    assert done.returncode == UNUSABLE
    assert done.stderr.count("\n") == 1
    assert "runs need Python 4.0 or later" in done.stderr


# Who speaks


def post(stage: PodStage, path: str, token: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{stage.url}{path}", headers={"Authorization": f"Bearer {token}"}, **more)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


def test_token_of_a_pod_speaks_for_that_pod_alone(stage: PodStage) -> None:
    for name in ("pod-1", "pod-2"):
        stage.call("expect", name)
    assert code_of(post(stage, "/agent/hello", "token of pod-1", json=hello_of("pod-2"))) == (401, "unauthorized")
    assert code_of(post(stage, "/agent/hello", "made up", json=hello_of("pod-2"))) == (401, "unauthorized")
    session = post(stage, "/agent/hello", "token of pod-1", json=hello_of("pod-1")).json()["session"]
    asked = {"session": session, "done": 0}
    assert post(stage, "/agent/orders", "token of pod-1", json=asked).status_code == 200
    assert code_of(post(stage, "/agent/orders", "token of pod-2", json=asked)) == (401, "unauthorized")
    told = {"session": session, "now": 0.0, "first": 1, "news": []}
    assert code_of(post(stage, "/agent/news", "token of pod-2", json=told)) == (401, "unauthorized")


def test_pod_that_nobody_expects_is_not_wanted(stage: PodStage) -> None:
    assert code_of(post(stage, "/agent/hello", "token of pod-9", json=hello_of("pod-9"))) == (409, "not-wanted")
    assert "pod-9" not in stage.backend._runs.links


def test_forgotten_pod_has_no_session_any_more(stage: PodStage) -> None:
    stage.call("expect", "pod-1")
    session = post(stage, "/agent/hello", "token of pod-1", json=hello_of("pod-1")).json()["session"]
    assert stage.call("forget", "pod-1")
    asked = {"session": session, "done": 0}
    assert code_of(post(stage, "/agent/orders", "token of pod-1", json=asked)) == (410, "session-over")
    assert code_of(post(stage, "/agent/hello", "token of pod-1", json=hello_of("pod-1"))) == (409, "not-wanted")


def test_authority_that_is_away_refuses_nobody_for_good(stage: PodStage) -> None:
    stage.call("expect", "pod-1")
    session = post(stage, "/agent/hello", "token of pod-1", json=hello_of("pod-1")).json()["session"]
    stage.authority.is_away = True
    asked = {"session": session, "done": 0}
    assert code_of(post(stage, "/agent/hello", "token of pod-1", json=hello_of("pod-1"))) == (503, "unverified")
    assert post(stage, "/agent/orders", "token of pod-1", json=asked).status_code == 200
    assert code_of(post(stage, "/agent/orders", "token of pod-2", json=asked)) == (503, "unverified")


def test_pod_has_nothing_of_other_jobs(stage: PodStage) -> None:
    for name in ("pod-1", "pod-2"):
        stage.call("expect", name)
    stage.run("1", WAITS, "pod-1", files="a" * 64)
    stage.run("2", WAITS, "pod-2", files="b" * 64)
    session = post(stage, "/agent/hello", "token of pod-1", json=hello_of("pod-1")).json()["session"]
    query, token = {"session": session}, {"Authorization": "Bearer token of pod-1"}
    with httpx.Client(base_url=stage.url, headers=token, params=query) as client:
        assert client.put("/agent/checkpoints/1/step-1-1.tar", content=b"x").status_code == 200
        assert client.get("/agent/checkpoints/1/step-1-1.tar").content == b"x"
        for answer in (
            client.get("/agent/checkpoints/2"),
            client.get("/agent/checkpoints/2/step-1-1.tar"),
            client.put("/agent/checkpoints/2/step-1-1.tar", content=b"x"),
            client.delete("/agent/checkpoints/2/step-1-1.tar"),
            client.get(f"/agent/files/{'b' * 64}", params={**query, "tenant": "default"}),
            client.get(f"/agent/files/{'a' * 64}", params={**query, "tenant": "other"}),
            client.post("/agent/logs", content=_logs(session, "2")),
        ):
            assert code_of(answer) == (403, "forbidden")
        assert client.get(f"/agent/files/{'a' * 64}", params={**query, "tenant": "default"}).status_code == 404
        assert client.post("/agent/logs", content=_logs(session, "1")).status_code == 200
    assert not (stage.folder / "server" / "jobs" / "2" / "log").exists()


def _logs(session: str, job: str) -> bytes:
    pieces = [{"job": job, "rank": 0, "offset": 0, "length": 2}]
    return json.dumps({"session": session, "pieces": pieces}).encode() + b"\nhi"
