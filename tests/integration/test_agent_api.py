"""What the listener for agents does with requests that no agent sends: it refuses them, whoever they come from."""

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.certificates import a_certificate
from tests.remote import RemoteStage

from poise.service.backends.remote import agent_http
from poise.service.backends.remote.agent_api import MOST_BODY
from poise.service.backends.remote.agent_http import MOST_HEAD, AgentListener
from poise.service.backends.remote.identity import TOKEN_FILE
from poise.service.server.http.listener import Certificate


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[RemoteStage]:
    made = RemoteStage(tmp_path, ())
    yield made
    made.close()


@pytest.fixture
def http(stage: RemoteStage) -> Iterator[httpx.Client]:
    token = (stage.folder / "server" / TOKEN_FILE).read_text().strip()
    with httpx.Client(base_url=stage.url, headers={"Authorization": f"Bearer {token}"}) as client:
        yield client


def closed_after(stage: RemoteStage, head: bytes) -> int:
    """How many bytes of an endless head are taken before the connection ends."""
    host, port = stage.url.removeprefix("http://").split(":")
    sent = 0
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /agent/hello HTTP/1.1\r\nHost: x\r\n")
        with suppress(ConnectionError):
            while sent < 100 * MOST_HEAD:
                connection.sendall(head)
                sent += len(head)
    return sent


@pytest.mark.parametrize("head", [b"x" * 1000, b"X-A: b\r\n" * 100], ids=["one endless name", "endless headers"])
def test_head_without_an_end_closes_the_connection(stage: RemoteStage, head: bytes) -> None:
    assert closed_after(stage, head) < 99 * MOST_HEAD  # what the kernel holds of it is not read


@pytest.mark.parametrize("sent", [b"", b"POST /agent/hello HTTP/1.1\r\nHost:"], ids=["nothing", "half a head"])
def test_connection_that_does_not_complete_a_head_is_closed(
    stage: RemoteStage, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(agent_http, "HEAD_SECONDS", 0.2)
    host, port = stage.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_flood_of_silent_connections_keeps_no_agent_out(
    stage: RemoteStage, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_http, "MOST_WAITING", 5)
    host, port = stage.url.removeprefix("http://").split(":")
    with ExitStack() as flood:
        silent = [flood.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(50)]
        for _ in range(2):
            assert http.post("/agent/hello", content="{}").json()["code"] == "wrong-request"
        assert silent[0].recv(1) == b""


def test_stranger_who_is_answered_keeps_no_connection(stage: RemoteStage) -> None:
    """Not even one who goes on with a body that nobody has asked for."""
    host, port = stage.url.removeprefix("http://").split(":")
    for path in ("/x", "/agent/hello", "/agent/checkpoints/1"):
        with socket.create_connection((host, int(port)), timeout=30) as connection, suppress(ConnectionError):
            connection.sendall(f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
            assert connection.recv(12) in (b"HTTP/1.1 401", b"HTTP/1.1 404", b"HTTP/1.1 405")
            connection.sendall(b"y")
            while connection.recv(1 << 16):
                pass


def test_silent_tls_handshakes_are_bounded_in_time_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = Certificate(*a_certificate(tmp_path))
    monkeypatch.setattr(agent_http, "MOST_WAITING", 5)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("well")(scope, receive, send)

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as bound:
            listener = AgentListener(answer, bound, certificate.context())
            serving = asyncio.get_running_loop().create_task(listener.serve())
            silent = [await asyncio.open_connection(*bound.getsockname()) for _ in range(20)]
            assert await asyncio.wait_for(silent[0][0].read(), 5.0) == b""  # long before its time is over
            trusting = ssl.create_default_context(cafile=str(certificate.chain))
            trusting.check_hostname = False
            async with httpx.AsyncClient(verify=trusting) as client:
                assert (await client.get(f"https://127.0.0.1:{bound.getsockname()[1]}/")).text == "well"
            monkeypatch.setattr(agent_http, "HEAD_SECONDS", 0.2)
            late, writer = await asyncio.open_connection(*bound.getsockname())
            assert await asyncio.wait_for(late.read(), 5.0) == b""
            for each in (writer, *(writer for _, writer in silent)):
                each.close()
            listener.stop()
            await serving

    asyncio.run(story())


def test_long_heads_and_bodies_in_turn_are_taken_on_one_connection(http: httpx.Client) -> None:
    for _ in range(4):
        said = http.post("/agent/hello", content=b"x" * (2 * MOST_HEAD), headers={"X-Long": "y" * (MOST_HEAD // 2)})
        assert (said.status_code, said.json()["code"]) == (400, "wrong-request")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("orders", {"session": "0" * 32, "done": 0}, 410, "session-over"),
        ("orders", {"session": "0" * 32, "done": -1}, 400, "wrong-request"),
        ("news", {"session": "none", "now": 0, "first": 1, "news": []}, 400, "wrong-request"),
        ("hello", [], 400, "wrong-request"),
    ],
)
def test_wrong_request_is_refused_by_code(http: httpx.Client, path: str, body: object, status: int, code: str) -> None:
    said = http.post(f"/agent/{path}", content=json.dumps(body))
    assert (said.status_code, said.json()["code"]) == (status, code)


def test_message_that_is_too_long_is_refused(http: httpx.Client) -> None:
    said = http.post("/agent/news", content=b" " * (MOST_BODY + 1))
    assert (said.status_code, said.json()["detail"]) == (400, f"a message has at most {MOST_BODY:,} bytes")


@pytest.mark.parametrize("path", ["/agent/hello", "/agent/checkpoints/1", "/agent/files/" + "0" * 64])
def test_every_path_wants_the_token(stage: RemoteStage, path: str) -> None:
    method = "POST" if path.endswith("hello") else "GET"
    for token in ("", "Bearer wrong"):
        said = httpx.request(method, stage.url + path, headers={"Authorization": token})
        assert (said.status_code, said.json()["code"]) == (401, "unauthorized")
        assert said.headers["connection"] == "close"
