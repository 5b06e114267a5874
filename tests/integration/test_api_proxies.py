"""The proxy configurations of the manual: they are valid, their limits fit the service's, and nginx serves with its own."""

import http.client
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends import until
from tests.certificates import a_certificate
from tests.floods import Flood
from tests.integration.test_api_serve import ROOT, Server, a_server
from tests.shell import PATIENCE

from poise.service.server.http.connections import HEAD_SECONDS, LIMITS, READ_SECONDS
from poise.service.server.http.guard import RequestLimits
from poise.service.server.http.listener import IDLE_SECONDS

PAGE = (ROOT / "docs" / "how-to" / "put-a-proxy-in-front.md").read_text(encoding="utf-8")
NAME = "gpu1.example.org"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_limits_of_the_proxy_fit_those_of_the_service() -> None:
    said = dict(re.findall(r"^\s*(\w+) ([\w ]+);", block("nginx"), re.MULTILINE))
    limits = RequestLimits()
    assert said["client_max_body_size"] == f"{limits.body >> 20}m"
    assert said["large_client_header_buffers"] == f"4 {limits.header_bytes >> 10}k"
    assert said["client_body_timeout"] == f"{limits.upload:g}s"
    assert said["client_header_timeout"] == f"{HEAD_SECONDS:g}s"
    assert said["send_timeout"] == f"{READ_SECONDS:g}s"
    assert said["limit_conn"] == f"poise_connections {LIMITS.per_token}"
    assert int(said["proxy_read_timeout"].removesuffix("s")) > limits.seconds
    assert re.findall(r"keepalive_timeout (\d+)s", block("nginx")) == ["10", str(IDLE_SECONDS)]
    assert IDLE_SECONDS > 10  # or a request could meet a connection that the service is just closing


@pytest.mark.skipif(shutil.which("caddy") is None, reason="Caddy is not installed")
def test_configuration_of_caddy_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "Caddyfile"
    path.write_text(block("caddyfile"))
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        ["caddy", "validate", "--adapter", "caddyfile", "--config", path],
        env=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Server]:
    """A service as its clients see it, behind nginx."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    chain, key = a_certificate(tmp_path)
    with ExitStack() as stack:
        service = a_server(tmp_path / "state", "--host-name", NAME)
        stack.callback(service.process.communicate)
        stack.callback(service.process.kill)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        text = (
            block("nginx")
            .replace("127.0.0.1:8642", f"127.0.0.1:{service.port}")
            .replace("listen 443", f"listen 127.0.0.1:{port}")
        )
        text = text.replace("/etc/ssl/gpu1.pem", str(chain)).replace("/etc/ssl/gpu1.key", str(key))
        folders = " ".join(f"{each}_temp_path {tmp_path};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        user = "user root; " if Path("/root").owner() == tmp_path.owner() else ""
        path = tmp_path / "nginx.conf"
        path.write_text(
            f"{user}daemon off; pid {tmp_path}/nginx.pid; error_log stderr; worker_processes 1;\n"
            f"events {{ worker_connections 4096; }}\nhttp {{ access_log off; {folders}\n{text}}}\n"
        )
        command = [nginx, "-p", str(tmp_path), "-e", "stderr", "-c", str(path)]
        checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        stack.callback(process.communicate)
        stack.callback(process.terminate)
        assert process.stderr is not None
        context = ssl.create_default_context(cafile=str(chain))
        server = replace(service, url=f"https://localhost:{port}", context=context)
        until(lambda: process.poll() is not None or answers(port))
        yield server


def answers(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


def test_service_behind_nginx_is_called_by_its_name_and_kept_from_large_bodies_and_slow_clients(proxied: Server) -> None:
    assert proxied.call("GET", "/v1/me", host=NAME)[0] == 200
    assert proxied.call("GET", "/v1/me", host=NAME, origin=f"https://{NAME}")[0] == 200
    assert proxied.call("GET", "/v1/me", host="other.example.org")[0] == 403
    assert proxied.call("POST", "/v1/jobs", " " * ((1 << 20) + 1), host=NAME)[0] == 413
    with Flood(proxied.port, 300, b"\x16\x03\x01\x02\x00"):
        assert proxied.call("GET", "/v1/me", host=NAME)[0] == 200


def test_nginx_bounds_the_requests_per_second_of_one_address(proxied: Server) -> None:
    link = http.client.HTTPSConnection("localhost", proxied.port, timeout=PATIENCE, context=proxied.context)
    statuses: list[int] = []
    while 429 not in statuses and len(statuses) < 5_000:
        link.request("GET", "/v1/me", headers={"host": NAME, "authorization": "Bearer wrong"})
        answer = link.getresponse()
        answer.read()
        statuses.append(answer.status)
    link.close()
    assert set(statuses[:200]) == {401}
    assert statuses[-1] == 429
