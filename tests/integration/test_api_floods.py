"""Floods from one address or one token against a server in its own process: requests of all others are answered."""

import json
import resource
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from select import select

import pytest
from tests.certificates import a_certificate
from tests.floods import Flood
from tests.integration.test_api_serve import Server, a_server
from tests.shell import PATIENCE

from poise.service.server.logs import LINES

CONNECTIONS = 1_100
PROBES = 40
LOG = ("--quiet", "--log-format", "json")
AT_ONCE = 8
"""Probes that are under way together."""


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """Both ends of every connection are on this machine, but only one is in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = a_server(tmp_path / "state", *LOG)
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Server]:
    chain, key = a_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(chain))
    running = a_server(tmp_path / "state", *LOG, "--tls-cert", chain, "--tls-key", key, context=context)
    yield running
    running.process.kill()
    running.process.communicate()


def statuses(server: Server, probes: int = PROBES) -> list[int | str]:
    """What an admin gets who asks so often, each time on a new connection."""

    def ask(_: int) -> int | str:
        try:
            return server.call("GET", "/v1/me")[0]
        except OSError as error:
            return type(error).__name__

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(ask, range(probes)))


def events(server: Server) -> list[str]:
    """What the log has once the server has stopped: few lines, whatever came."""
    said = server.stop()
    assert said.code == 0, said
    found = [json.loads(line)["event"] for line in said.err.splitlines()]
    assert len(found) <= 4 * LINES
    return found


def a_user(server: Server) -> str:
    body = json.dumps({"name": "ann", "tenant": "vision", "role": "user"})
    token: str = json.loads(server.call("POST", "/v1/tokens", body)[2])["token"]
    return token


def test_slow_connections_without_a_token_do_not_lock_out_others(server: Server) -> None:
    with Flood(server.port, CONNECTIONS) as flood:
        assert statuses(server) == [200] * PROBES
        assert flood.opened > CONNECTIONS
    assert set(events(server)) == {"connection-displaced"}


def test_connections_without_a_tls_handshake_do_not_lock_out_others(secure: Server) -> None:
    with Flood(secure.port, CONNECTIONS, b"\x16\x03\x01\x02\x00") as flood:
        assert statuses(secure) == [200] * PROBES
        assert flood.opened > CONNECTIONS
    assert set(events(secure)) == {"connection-displaced"}


@pytest.mark.parametrize("first", [b"nonsense\r\n\r\n", b"GET /v1/me HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_refused_requests_without_a_token_do_not_fill_the_log(first: bytes, server: Server) -> None:
    with Flood(server.port, 200, first) as flood:
        while flood.opened < 1_000:
            assert statuses(server, AT_ONCE) == [200] * AT_ONCE
    assert "request" in events(server)


def test_connections_that_fail_to_speak_tls_do_not_fill_the_log(secure: Server) -> None:
    with Flood(secure.port, 200, b"GET / HTTP/1.1\r\n\r\n") as flood:
        while flood.opened < 1_000:
            assert statuses(secure, AT_ONCE) == [200] * AT_ONCE
    events(secure)


def _post(token: str, length: int) -> bytes:
    lines = ("POST /v1/jobs HTTP/1.1", "host: localhost", f"authorization: Bearer {token}", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {length}", "", "{")).encode()


def test_bodies_that_one_token_never_sends_do_not_lock_out_others(server: Server) -> None:
    with Flood(server.port, 300, _post(a_user(server), 1_000)):
        assert statuses(server, 30) == [200] * 30


def _get(token: str, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode()


def test_idle_connections_of_one_token_do_not_lock_out_others(server: Server) -> None:
    with Flood(server.port, CONNECTIONS, _get(a_user(server), "/v1/me")) as flood:
        assert statuses(server) == [200] * PROBES
        assert flood.opened > CONNECTIONS


def test_answers_that_one_token_does_not_read_do_not_lock_out_others(server: Server) -> None:
    ask = _get(a_user(server), "/openapi.json")
    with ExitStack() as stack:
        for _ in range(300):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.setblocking(False)
            deaf.send(ask * 100)
        assert statuses(server, 30) == [200] * 30


def test_token_with_too_many_requests_under_way_is_told_when_to_retry(server: Server) -> None:
    token = a_user(server)
    with ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE)) for _ in range(70)]
        for link in links:
            link.sendall(_post(token, 1_000))
        answers: list[bytes] = []
        while len(answers) < 6:
            for link in select(links, [], [], PATIENCE)[0]:
                links.remove(link)
                answers.append(b"".join(iter(partial(link.recv, 1 << 12), b"")))
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b'"code":"too-many-requests"' in answer
        assert b"token 'ann' has 64 requests under way, of at most 64; wait for an answer first" in answer
