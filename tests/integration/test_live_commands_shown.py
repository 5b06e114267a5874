"""The live verbs on canned answers and over a real socket: every column, every fact, and a server that goes away."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from tests.shell import poise

from poise.cli import live, queue
from poise.durable import replace_file
from poise.service.client import Client, streams

ROW: dict[str, Any] = {
    "id": "17", "name": "resnet50", "tenant": "vision", "app": "tuning", "state": "PAUSED",
    "flags": ["PREEMPTED", "RESTARTED"], "position": 3,
    "reason": {"code": "share", "text": "is ahead of its share by 12 GPU-minutes"},
    "gpus": 0, "wanted": 4,
    "gpu_type": None, "gpu_types": ["a100", "v100"], "submitted": 1_700_000_000.0, "started": 1_700_000_060.5,
    "finished": None, "waited": 11_520.0, "ran": 45.0, "restarts": 2, "eta": 7_200.0, "share": 0.125,
}  # fmt: skip
RUNNING = ROW | {
    "id": "18", "state": "RUNNING", "flags": [], "position": None, "gpus": 4, "gpu_type": "v100", "eta": None, "share": None,
}  # fmt: skip
RUN = {
    "epoch": 1, "started": 1_700_000_060.5, "ended": 1_700_000_105.5, "gpus": {"v100-0": [0, 1], "v100-1": [0, 1]},
    "how": "preempted", "cause": None, "codes": [75, 75], "begun": 0.0, "kept": 1_500.0, "lost": 12.0,
}  # fmt: skip
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/jobs": {"jobs": [RUNNING, ROW], "total": 2, "counts": {"RUNNING": 1, "PAUSED": 1, "PENDING": 0}},
    "/v1/jobs/17": {
        "job": ROW, "preemptions": 1, "failures": 0, "gpu_seconds": 7_200.0, "lost_gpu_seconds": 0.0, "steps": 1_500.0,
        "total_steps": 6_000.0, "checkpoint_steps": 1_500.0, "throughput": 33.3, "loss": 0.25, "cause": None, "runs": [RUN],
        "request": {"command": ["python", "train.py"], "cwd": "/data"},
    },
    "/v1/jobs/17/why": {
        "job": "17", "state": "PAUSED", "reason": ROW["reason"], "evidence": ["vision holds 25% and is due 12.5%"],
        "advice": "ask for fewer GPUs",
    },
}  # fmt: skip


@pytest.fixture
def _canned(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=ANSWERS[request.url.path]))
    monkeypatch.setattr(Client, "from_config", lambda **_: Client("http://x", "t", transport=transport))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().split("   ") if cell.strip()]


@pytest.mark.usefixtures("_canned")
def test_queue_has_these_columns_and_durations_for_people() -> None:
    lines = poise("queue").out.splitlines()
    assert lines[0] == "1 running, 1 paused"
    heading, running, paused = (cells(line) for line in lines if "─" not in line and len(cells(line)) > 5)
    assert heading == [
        "#",
        "ID",
        "NAME",
        "TENANT",
        "GPUS",
        "TYPE",
        "STATE",
        "REASON",
        "WAITED",
        "RAN",
        "RESTARTS",
        "ETA",
        "SHARE",
    ]
    assert running == ["–", "18", "resnet50", "vision", "4", "v100", "RUNNING", "share", "3h12m", "45s", "2", "–", "–"]
    assert paused == [
        "3", "17", "resnet50", "vision", "4", "a100/v100", "PAUSED+PREEMPTED+RESTARTED", "share", "3h12m", "45s", "2",
        "2h00m", "12.5%",
    ]  # fmt: skip


@pytest.mark.usefixtures("_canned")
def test_queue_wide_has_all_that_is_known() -> None:
    said = poise("queue", "-o", "wide").out
    assert "is ahead of its share" in said
    assert "2023-11-14 22:13:20Z" in said
    assert "APP" in said


@pytest.mark.usefixtures("_canned")
def test_watch_draws_again_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(queue, "sleep", pause)
    said = poise("queue", "--watch")
    assert said.code == 130
    assert said.out.count("resnet50") == 6
    assert "Traceback" not in said.err


@pytest.mark.usefixtures("_canned")
def test_show_tells_state_progress_and_runs() -> None:
    said = poise("show", "17").out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for want in (
        "17 resnet50",
        "state PAUSED+PREEMPTED+RESTARTED",
        "reason is ahead of its share by 12 GPU-minutes (share)",
        "GPUs 0 held, 4 asked for; type a100/v100",
        "steps 1,500 of 6,000",
        "checkpoint at step 1,500",
        "throughput 33.3 steps/s",
        "GPU-hours 2",
        "preemptions 1",
        "command python train.py",
        "1 2023-11-14 22:14:20Z 45s v100-0:0/1 v100-1:0/1 preempted 75 75 0..1,500 12s –",
    ):
        assert want in lines
    assert not any(line.startswith(("finished", "lost", "failures", "cause")) for line in lines)


@pytest.mark.usefixtures("_canned")
def test_show_says_when_it_lists_the_last_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Runs\n" in poise("show", "17").out
    (run,) = ANSWERS["/v1/jobs/17"]["runs"]
    monkeypatch.setitem(ANSWERS["/v1/jobs/17"], "runs", [{**run, "epoch": 21}, {**run, "epoch": 22}])
    assert "Runs, the last 2 of 22\n" in poise("show", "17").out


@pytest.mark.usefixtures("_canned")
def test_show_has_no_numbers_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that reports nothing, and has hardly run."""
    unaware = {"steps": 0.0, "total_steps": None, "checkpoint_steps": None, "throughput": None, "gpu_seconds": 0.06}
    for name, value in unaware.items():
        monkeypatch.setitem(ANSWERS["/v1/jobs/17"], name, value)
    lines = [" ".join(line.split()) for line in poise("show", "17").out.splitlines()]
    assert "GPU-hours <0.001" in lines
    assert not any(line.startswith("steps") for line in lines)
    monkeypatch.setitem(ANSWERS["/v1/jobs/17"], "total_steps", 100.0)  # as its owner said
    assert "steps – of 100" in [" ".join(line.split()) for line in poise("show", "17").out.splitlines()]
    monkeypatch.setitem(ANSWERS["/v1/jobs/17"], "total_steps", None)
    monkeypatch.setitem(ANSWERS["/v1/jobs/17"], "checkpoint_steps", 0.0)
    assert "steps 0" in [" ".join(line.split()) for line in poise("show", "17").out.splitlines()]


@pytest.mark.usefixtures("_canned")
def test_no_letter_of_somebodys_command_is_a_command_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = {"command": ["python", "a\x1b]0;b\x07\x9b2J\u202e\n"], "cwd": "/tmp/\x1b[2J"}
    monkeypatch.setitem(ANSWERS["/v1/jobs/17"], "request", hostile)
    said = poise("show", "17").out
    assert r"python 'a\x1b]0;b\x07\x9b2J\u202e\n'" in said
    assert r"/tmp/\x1b[2J" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


@pytest.mark.usefixtures("_canned")
def test_why_is_a_reason_its_evidence_and_what_would_help() -> None:
    assert poise("why", "17").out == (
        "17 PAUSED: is ahead of its share by 12 GPU-minutes (share)\n"
        "  vision holds 25% and is due 12.5%\n"
        "What would help: ask for fewer GPUs\n"
    )


LOG = "".join(f"epoch {number}\n" for number in range(9))


class Service:
    """A server of a log over real sockets. It says half of it, then dies, and comes back under another port."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._is_second = False
        self._servers: list[ThreadingHTTPServer] = []
        (state / "admin.token").write_text("token\n")
        self.start()

    def start(self) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self._servers.append(server)
        url = f"http://127.0.0.1:{server.server_port}"
        replace_file(self._state / "server.json", json.dumps({"url": url, "pid": 1}))  # a client may be reading it

    def restart(self) -> None:
        self.stop()
        self._is_second = True
        self.start()

    def stop(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()

    def part(self, offset: int) -> dict[str, Any]:
        there = LOG if self._is_second else LOG[: len(LOG) // 2]
        return {"text": there[offset:], "offset": offset, "next": len(there), "ended": self._is_second}

    def _handler(service) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler inside has a self of its own
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.headers["Authorization"] == "Bearer token"
                offset = int(parse_qs(urlsplit(self.path).query)["offset"][0])
                if offset and not service._is_second:
                    threading.Thread(target=service.restart).start()
                    return  # without an answer
                body = json.dumps(service.part(offset)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        return Handler


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POISE_STATE", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(streams, "LONGEST_POLL", 0.05)
    monkeypatch.setattr(live, "LONG_PATIENCE", 60.0)
    made = Service(tmp_path)
    yield made
    made.stop()


def test_following_a_log_survives_a_restart_of_the_server_and_ends_with_the_job(service: Service) -> None:
    said = poise("logs", "-f", "17")
    assert (said.code, said.err, said.out) == (0, "", LOG)


def test_where_no_server_answers_the_line_says_so(service: Service) -> None:
    service.stop()
    said = poise("queue")
    assert said.failure.startswith("no answer from http://127.0.0.1:")
    assert said.err.endswith("is `poise serve` running?\n")
