"""`poise serve` as a process: one clear line if it cannot start, real sockets, TLS, signals, what it leaves behind."""

import http.client
import json
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import a_certificate
from tests.shell import COMMAND, PATIENCE, Said, poise, unread

from poise.cli import UNREAD
from poise.service.backends.local.processes import start_of

ROOT = Path(__file__).resolve().parents[2]
JOB = json.dumps({"jobs": [{"command": ["x"]}]})


FAKE = [sys.executable, "-m", "tests.fake_serve"]
"""`poise serve` over an engine in memory, which is there sooner."""


def started(*options: object, command: list[str] = FAKE) -> "subprocess.Popen[str]":
    words = [*command, "--cluster", "v100:2", "--workers", "null", *map(str, options)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, cwd=ROOT, start_new_session=True, **pipes)


def ended(process: "subprocess.Popen[str]") -> Said:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return Said(process.returncode, out, err)


def refusal(*options: object) -> str:
    """What a server says that cannot start."""
    return poise("serve", "--cluster", "v100:2", "--workers", "null", "--listen", "127.0.0.1:0", *options).refusal


@dataclass
class Server:
    """A server that answers."""

    process: "subprocess.Popen[str]"
    url: str
    state: Path
    token: str
    context: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def call(self, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        if self.context is None:
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        else:
            link = http.client.HTTPSConnection("localhost", self.port, timeout=PATIENCE, context=self.context)
        given = {"authorization": f"Bearer {self.token}", "content-type": "application/json", **headers}
        try:
            link.request(method, path, body, given)
            answer = link.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            link.close()

    def stop(self, number: int = signal.SIGTERM) -> Said:
        self.process.send_signal(number)
        return ended(self.process)


def a_server(state: Path, *options: object, context: ssl.SSLContext | None = None, command: list[str] = FAKE) -> Server:
    process = started("--state", state, "--listen", "127.0.0.1:0", "--json", *options, command=command)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"it did not start: {process.communicate()}")
    document = json.loads(line)
    assert document["pid"] == process.pid
    return Server(process, document["url"], state, Path(document["token_file"]).read_text().strip(), context)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own."""
    yield from _running(tmp_path / "state")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that no test may stop."""
    yield from _running(tmp_path_factory.mktemp("serve") / "state")


def _running(state: Path) -> Iterator[Server]:
    running = a_server(state, "--log-format", "json")
    yield running
    running.process.kill()
    running.process.communicate()


def test_first_start_leaves_token_and_address_for_clients_of_the_owner(shared: Server) -> None:
    said = json.loads((shared.state / "server.json").read_text())
    assert (said["url"], said["pid"], said["born"]) == (shared.url, shared.process.pid, start_of(shared.process.pid))
    for path in shared.state.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(shared.state.stat().st_mode) == 0o700
    assert shared.call("GET", "/v1/me")[0] == 200
    assert shared.call("POST", "/v1/jobs", JOB)[0] == 201


@pytest.mark.parametrize(
    "words",
    [("queue",), ("queue", "-o", "csv"), ("queue", "--watch"), ("nodes",), ("shares",), ("tokens",), ("queue", "--json")],
    ids=" ".join,
)
def test_command_whose_output_is_not_read_ends_like_one_with_a_closed_pipe(shared: Server, words: tuple[str, ...]) -> None:
    assert shared.call("POST", "/v1/jobs", JOB)[0] == 201
    assert unread(*words, POISE_URL=shared.url, POISE_TOKEN=shared.token) == (UNREAD, "")


def test_token_is_in_no_message_log_or_argument(server: Server) -> None:
    server.call("GET", "/v1/nothing")
    server.call("GET", "/v1/me", authorization=f"Bearer {server.token}x")
    arguments = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    said = server.stop()
    assert said.code == 0, said
    assert server.token not in said.out + said.err + arguments.decode()
    assert "admin's token was made" in said.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_service_gracefully(number: int, server: Server) -> None:
    said = server.stop(number)
    assert said.code == 0, said
    assert not (server.state / "server.json").exists()
    last = [json.loads(line) for line in said.err.splitlines() if "stopping" in line][-1]
    assert (last["event"], last["jobs_going_on"]) == ("stopping", 1)


def test_tokens_survive_a_restart_and_a_kill(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = a_server(state)
    body = json.dumps({"name": "ann", "tenant": "vision", "role": "user"})
    made = json.loads(first.call("POST", "/v1/tokens", body)[2])["token"]
    first.stop(signal.SIGKILL)
    second = a_server(state)
    assert second.token == first.token
    assert second.call("GET", "/v1/me", authorization=f"Bearer {made}")[0] == 200
    assert "token was made" not in second.stop().err
    third = a_server(state, "--new-admin-token")
    assert third.token != first.token
    assert third.call("GET", "/v1/me", authorization=f"Bearer {first.token}")[0] == 401
    third.stop()


def test_second_server_on_the_same_state_is_refused_and_the_first_goes_on(shared: Server) -> None:
    line = refusal("--state", shared.state)
    assert (
        line
        == f"--state {shared.state}: another server holds it (process {shared.process.pid}); stop that one, or name another"
    )
    assert shared.call("GET", "/v1/me")[0] == 200
    assert (shared.state / "server.json").exists()


def test_port_in_use_is_reported_before_any_file_is_made(shared: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert (
        refusal("--state", other, "--listen", f"127.0.0.1:{shared.port}")
        == f"--listen 127.0.0.1:{shared.port}: Address already in use"
    )
    assert not (other / "admin.token").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--listen", "nonsense:port"), "--listen 'nonsense:port': expected HOST:PORT, e.g. 127.0.0.1:8642"),
        (("--listen", "0.0.0.0:0"), "--listen 0.0.0.0:0: others could read tokens on the way"),
        (("--policy", "tiresius"), "unknown policy 'tiresius'; did you mean tiresias"),
        (("--placement", "tight"), "unknown placement 'tight'"),
        (("--cluster", "v100"), "cluster 'v100': 'v100' is not TYPE:GPUS"),
        (("--round", "0"), "--round: expected at least 0.001 seconds, got 0.0"),
        (("--host-name", "a b"), "--host-name 'a b': expected the name or address of a host"),
        (("--tls-cert", "cert.pem"), "--tls-cert and --tls-key go together; give both"),
        (("--tls-cert", "no.pem", "--tls-key", "no.pem"), "--tls-cert no.pem: cannot be read"),
        (("--workers", "elsewhere"), "Invalid value for '--backend' / '--workers'"),
    ],
)
def test_wrong_option_is_refused_in_one_line(options: tuple[str, ...], line: str, tmp_path: Path) -> None:
    assert refusal("--state", tmp_path / "state", *options).startswith(line)


def test_state_that_others_may_read_is_refused_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert (
        refusal("--state", tmp_path) == f"--state {tmp_path}: others may look into it (mode 0755); run chmod 700 {tmp_path}"
    )


def test_engine_that_dies_takes_the_service_with_it(server: Server) -> None:
    server.call("POST", "/v1/jobs", json.dumps({"jobs": [{"command": ["die"]}]}))
    said = ended(server.process)
    assert said.code == 1
    assert said.err.splitlines()[-1] == "poise: the engine stopped: out of luck"
    assert "Traceback" not in said.err


def _raw(server: Server, *pieces: bytes) -> bytes:
    """What comes back for these bytes, until the server hangs up."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as link, suppress(ConnectionError):
        for piece in pieces:
            link.sendall(piece)
        while part := link.recv(65_536):
            found += part
    return found


def _head(server: Server, method: bytes, path: bytes, *more: bytes) -> bytes:
    lines = (
        method + b" " + path + b" HTTP/1.1",
        b"host: localhost",
        b"authorization: Bearer " + server.token.encode(),
        *more,
    )
    return b"\r\n".join(lines) + b"\r\n\r\n"


def test_body_in_chunks_is_counted_as_it_arrives(shared: Server) -> None:
    head = _head(shared, b"POST", b"/v1/jobs", b"content-type: application/json", b"transfer-encoding: chunked")
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    answer = _raw(shared, head, *[chunk] * 17, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"too-large"' in answer


def test_body_that_is_far_too_large_is_answered_and_not_cut_off(shared: Server) -> None:
    status, _, body = shared.call("POST", "/v1/jobs", " " * (4 << 20))
    assert (status, json.loads(body)["detail"]) == (413, "expected a body of at most 1,048,576 bytes")


def test_what_is_not_http_is_answered_by_a_problem_and_disconnected(shared: Server) -> None:
    for nonsense in (
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    ):
        answer = _raw(shared, nonsense)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"wrong-request"' in answer


def test_body_with_two_framings_is_refused_and_nothing_after_it_is_read(shared: Server) -> None:
    two = (b"content-type: application/json", b"content-length: 5", b"transfer-encoding: chunked")
    head, after = _head(shared, b"POST", b"/v1/jobs", *two), _head(shared, b"GET", b"/v1/me")
    answer = _raw(shared, head + b"0\r\n\r\n" + after)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"expected Content-Length or Transfer-Encoding, got both" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_head_without_end_is_refused(shared: Server) -> None:
    answer = _raw(shared, b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 10_000 + b"\r\n"] * 10)
    assert not answer or answer.startswith(b"HTTP/1.1 4")  # the server may hang up while we are still sending


def test_no_answer_names_the_software(shared: Server) -> None:
    _, headers, _ = shared.call("GET", "/v1/me")
    assert "server" not in headers


def test_several_requests_share_a_connection(shared: Server) -> None:
    link = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE)
    for _ in range(3):
        link.request(
            "POST", "/v1/jobs", JOB, {"authorization": f"Bearer {shared.token}", "content-type": "application/json"}
        )
        answer = link.getresponse()
        assert answer.status == 201
        answer.read()
    link.close()


def test_idle_connections_neither_lock_out_others_nor_delay_the_stop(server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(50)]
    idle[0].sendall(b"GET /v1/me HTTP/1.1\r\nhost: local")
    assert server.call("GET", "/v1/me")[0] == 200
    assert server.stop().code == 0
    for each in idle:
        each.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return a_certificate(tmp_path_factory.mktemp("tls"))


def test_two_options_are_enough_for_tls(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    chain, key = certificate
    context = ssl.create_default_context(cafile=str(chain))
    server = a_server(tmp_path / "state", "--tls-cert", chain, "--tls-key", key, context=context)
    assert server.url.startswith("https://")
    assert server.call("GET", "/v1/me")[0] == 200
    assert server.call("GET", "/v1/me", authorization="Bearer x")[0] == 401
    assert b"HTTP/1.1 200" not in _raw(server, _head(server, b"GET", b"/v1/me"))  # not in the clear
    said = server.stop()
    assert said.code == 0, said


def test_key_of_another_certificate_is_refused_in_one_line(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    chain, _ = certificate
    line = refusal("--state", tmp_path / "state", "--tls-cert", chain, "--tls-key", chain)
    assert "not a certificate and its key" in line


def test_request_to_upgrade_the_protocol_is_ignored(server: Server) -> None:
    for protocol in (b"websocket", b"h2c"):
        head = _head(server, b"GET", b"/v1/me", b"connection: upgrade, close", b"upgrade: " + protocol)
        assert _raw(server, head).startswith(b"HTTP/1.1 200 ")
    assert "ebsocket" not in server.stop().err.lower()


def test_log_is_one_json_document_per_line(server: Server) -> None:
    server.call("GET", "/nothing")
    said = server.stop()
    lines = [json.loads(line) for line in said.err.splitlines() if not line.startswith("poise: ")]
    assert {"time", "level", "event"} <= set(lines[0])
    assert [line["status"] for line in lines if line["event"] == "request"] == [404]


def test_service_takes_jobs_and_keeps_them_over_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for number in (1, 2):
        server = a_server(state, "--quiet", command=[COMMAND, "serve"])
        assert server.call("POST", "/v1/jobs", JOB)[0] == 201
        queue = json.loads(server.call("GET", "/v1/jobs")[2])
        assert queue["total"] == number
        for path in (
            "/v1/nodes",
            "/v1/shares",
            "/v1/service",
            "/v1/events",
            f"/v1/jobs/{queue['jobs'][0]['id']}/why",
            "/metrics",
        ):
            assert server.call("GET", path)[0] == 200, path
        said = server.stop()
        assert (said.code, said.err) == (0, "")


def test_tokens_are_made_listed_and_revoked(shared: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_URL", shared.url)
    monkeypatch.setenv("POISE_TOKEN", shared.token)
    made = poise("tokens", "--make", "ann", "--tenant", "vision", "--days", "1")
    assert "ann has the role user, of tenant vision, until " in made.err
    assert json.loads(shared.call("GET", "/v1/me", authorization=f"Bearer {made.out.strip()}")[2])["role"] == "user"
    assert [each["name"] for each in poise("tokens", "--json").json["accounts"]] == ["admin", "ann"]
    assert "vision" in poise("tokens").out
    assert poise("tokens", "--revoke", "ann").out == "ann is revoked\n"
    assert shared.call("GET", "/v1/me", authorization=f"Bearer {made.out.strip()}")[0] == 401
    assert poise("tokens", "--revoke", "ann").refusal == "there is no token 'ann'"
    assert poise("tokens", "--make", "a", "--revoke", "b").refusal.startswith("--make and --revoke exclude each other")
    assert poise("tokens", "--role", "admin").refusal.startswith("--tenant, --role and --days describe")
