"""Connections that are slow, idle or too many, on real sockets."""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest
from tests.certificates import a_certificate
from tests.fake_engine import an_api, awaited
from uvicorn.protocols.http.h11_impl import H11Protocol

from poise.service.server.http import connections
from poise.service.server.http.connections import ConnectionLimits
from poise.service.server.http.guard import ApiOptions
from poise.service.server.http.listener import BindAddress, Certificate, HttpConnection, bind, serve_http
from poise.service.server.logs import Level, Logbook

LIMIT = 30.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(*a_certificate(tmp_path_factory.mktemp("tls")))


def visited(folder: Path, visit: Callable[[int, str], Awaitable[None]], certificate: Certificate | None = None) -> None:
    """Run a server, and a client of it that is given its port and a token."""
    log = Logbook(least=Level.ERROR)
    api = an_api(folder, ApiOptions(log=log))
    bound = bind(BindAddress("127.0.0.1", 0))
    port, over, ready = bound.getsockname()[1], [False], asyncio.Event()

    async def client() -> None:
        await ready.wait()
        try:
            await asyncio.wait_for(visit(port, api.tokens["user"]), LIMIT)
        finally:
            over[0] = True

    async def run() -> None:
        tls = None if certificate is None else certificate.context()
        serving = serve_http(api.app, bound, tls, log=log, ready=ready.set, is_over=lambda: over[0])
        await asyncio.gather(serving, client())

    with bound:
        awaited(run())


async def connected(port: int, context: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = None if context is None else "localhost"
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """The server hangs up without a word."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


def test_connection_that_sends_no_head_in_time_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)

    async def visit(port: int, _token: str) -> None:
        reader, writer = await connected(port)
        assert await is_closed(reader)
        writer.close()

    visited(tmp_path, visit)


def test_head_that_arrives_byte_by_byte_does_not_extend_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)

    async def visit(port: int, _token: str) -> None:
        reader, writer = await connected(port)
        end = asyncio.ensure_future(is_closed(reader))
        while not end.done():
            writer.write(b"x")
            await asyncio.wait([end], timeout=0.01)
        assert end.result()
        writer.close()

    visited(tmp_path, visit)


def test_second_head_on_a_connection_has_a_deadline_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def visit(port: int, token: str) -> None:
        link = await connected(port)
        await _ask(link, token)
        link[1].write(b"GET /v1/me HT")
        assert await is_closed(link[0])
        link[1].close()

    visited(tmp_path, visit)


def test_head_that_arrived_in_time_is_answered_by_a_busy_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def visit(port: int, token: str) -> None:
        reader, writer = link = await connected(port)
        await _ask(link, token)
        writer.write(b"GET /v1/me HTTP/1.1\r\n")
        await asyncio.sleep(0.05)  # the server, in this event loop, has read the first line, and waits for the rest
        writer.write(f"host: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode())
        sleep(0.4)
        await _answer(reader)
        writer.close()

    visited(tmp_path, visit)


def test_pipelined_requests_are_all_answered_and_the_connection_stays(tmp_path: Path) -> None:
    async def visit(port: int, token: str) -> None:
        reader, writer = link = await connected(port)
        head = f"GET /v1/me HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode()
        writer.write(head * 3)
        for _ in range(3):
            await _answer(reader)
        await _ask(link, token)
        writer.close()

    visited(tmp_path, visit)


def test_what_is_not_http_is_answered_by_a_problem(tmp_path: Path) -> None:
    """Fails if uvicorn no longer calls `send_400_response`."""
    assert "send_400_response" in vars(H11Protocol)

    async def visit(port: int, _token: str) -> None:
        reader, writer = await connected(port)
        writer.write(b"nonsense\r\n\r\n")
        found = await reader.read()
        assert found.startswith(b"HTTP/1.1 400 ")
        assert found.endswith(b'{"code": "wrong-request", "detail": "Invalid HTTP request received."}')
        writer.close()

    visited(tmp_path, visit)


def test_connection_uses_no_private_name_of_uvicorn() -> None:
    """Versions of uvicorn may change what begins with an underscore."""
    assert not [name for name in vars(HttpConnection) if name.startswith("_") and not name.endswith("__")]


NO_GRACE = ConnectionLimits(anonymous=2, authenticated=2, per_token=2, grace=0.0)


def test_new_connection_replaces_the_oldest_anonymous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LIMITS", NO_GRACE)

    async def visit(port: int, token: str) -> None:
        known = await connected(port)
        await _ask(known, token)
        silent = [await connected(port) for _ in range(3)]
        last = await connected(port)
        assert await is_closed(silent[0][0])
        await _ask(last, token)
        await _ask(known, token)
        for _, writer in (known, *silent, last):
            writer.close()

    visited(tmp_path, visit)


def test_anonymous_connection_is_not_closed_within_its_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LIMITS", ConnectionLimits(anonymous=1, grace=10 * LIMIT))

    async def visit(port: int, token: str) -> None:
        first, second = [await connected(port) for _ in range(2)]
        third = await connected(port)  # the kernel has it, and it is taken once one of the others has brought a token
        await _ask(first, token)
        await _ask(second, token)
        await _ask(third, token)
        for _, writer in (first, second, third):
            writer.close()

    visited(tmp_path, visit)


def test_connections_without_a_tls_handshake_are_closed_for_others_too(
    certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LIMITS", ConnectionLimits(anonymous=2, authenticated=2, grace=0.2))
    context = ssl.create_default_context(cafile=str(certificate.chain))

    async def visit(port: int, token: str) -> None:
        first = await connected(port, context)
        await _ask(first, token)
        silent = [await connected(port) for _ in range(3)]
        last = await connected(port, context)
        assert await is_closed(silent[0][0])
        await _ask(last, token)
        await _ask(first, token)
        for _, writer in (first, *silent, last):
            writer.close()

    visited(tmp_path, visit, certificate)


def test_token_with_too_many_connections_loses_the_longest_idle_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LIMITS", ConnectionLimits(per_token=2))

    async def visit(port: int, token: str) -> None:
        links = [await connected(port) for _ in range(3)]
        for each in (0, 1, 0, 2):
            await _ask(links[each], token)
        assert await is_closed(links[1][0])
        for each in (0, 2):
            await _ask(links[each], token)
        for _, writer in links:
            writer.close()

    visited(tmp_path, visit)


def test_connection_without_a_tls_handshake_in_time_is_closed(
    certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)

    async def visit(port: int, _token: str) -> None:
        reader, writer = await connected(port)
        assert await is_closed(reader)
        writer.close()

    visited(tmp_path, visit, certificate)


def test_connections_leave_files_to_the_rest_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LIMITS", ConnectionLimits(grace=0.0))

    async def visit(port: int, token: str) -> None:
        with above_all_files() as lowest:
            monkeypatch.setattr(connections, "open_files_limit", lambda: lowest + 40)
            monkeypatch.setattr(connections, "SPARE_FILES", 20)
            monkeypatch.setattr(connections, "HEAD_SECONDS", 10 * LIMIT)
            links = [await connected(port) for _ in range(25)]  # each takes a file on either side
            for link in links[:5]:
                assert await is_closed(link[0])
            await _ask(links[-1], token)
            free = os.dup(0)
            os.close(free)
            for _, writer in links:
                writer.close()
        assert free < lowest + 40

    visited(tmp_path, visit)


@contextmanager
def above_all_files() -> Iterator[int]:
    """The lowest number that is free, with no gaps below it: others that this process has open do not count then."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.dup(0)]
    while taken[-1] < highest:
        taken.append(os.dup(0))
    lowest = taken.pop()
    os.close(lowest)
    try:
        yield lowest
    finally:
        for each in taken:
            os.close(each)


def test_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: asked.append(both))
    for limits in ((1_024, 4_096), (1_024, 1_100), (1 << 20, 1 << 20), (1_024, resource.RLIM_INFINITY)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, both=limits: both)
        connections.raise_open_files_limit(10)
    wanted = connections.LIMITS.total + connections.SPARE_FILES + 10 * connections.FILES_PER_RUN
    assert asked == [(wanted, 4_096), (1_100, 1_100), (wanted, resource.RLIM_INFINITY)]


async def _ask(link: tuple[asyncio.StreamReader, asyncio.StreamWriter], token: str) -> None:
    reader, writer = link
    writer.write(f"GET /v1/me HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode())
    await _answer(reader)


async def _answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    await reader.readexactly(int(length.split()[1]))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_client_that_does_not_read_its_answers_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)

    async def visit(port: int, token: str) -> None:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.connect(("127.0.0.1", port))
            deaf.setblocking(False)
            ask = f"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode()
            await asyncio.get_running_loop().sock_sendall(deaf, ask * 200)  # more than all buffers hold
            await asyncio.get_running_loop().sock_recv(deaf, 1)
            both = _open_files()
            while _open_files() == both:  # until the server has closed its end
                await asyncio.sleep(0.01)

    visited(tmp_path, visit)
    assert capsys.readouterr().err == ""


def test_client_that_disconnects_during_a_request_is_no_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def visit(port: int, token: str) -> None:
        _, writer = await connected(port)
        head = f"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: 1000\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        other = await connected(port)
        await _ask(other, token)
        other[1].close()

    visited(tmp_path, visit)
    assert capsys.readouterr().err == ""


def test_socket_is_listened_on_before_anything_is_opened() -> None:
    with bind(BindAddress("127.0.0.1", 0)) as bound, socket.create_connection(bound.getsockname(), timeout=LIMIT) as client:
        assert client.getpeername() == bound.getsockname()
