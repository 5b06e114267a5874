"""To whom `poise.Client` shows a token, and how often it asks for one."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.fake_desk import problem, talking

from poise.scheduler.model.errors import RequestError
from poise.service.client import Client, ServerRefusedError, UnavailableError
from poise.service.wire.views import Role

pytestmark = pytest.mark.usefixtures("no_pauses")


def test_a_token_is_not_made_twice_after_a_lost_connection() -> None:
    client, desk = talking(httpx.ReadError)
    with pytest.raises(UnavailableError):
        client.make_token("ci", tenant="vision", role=Role.READER)
    assert len(desk.seen) == 1


@pytest.mark.parametrize(
    ("status", "code", "sent"), [(503, "busy", 2), (503, "not-ready", 1), (429, "too-many-requests", 2)]
)
def test_a_token_is_asked_for_again_only_if_the_server_did_not_look_at_it(status: int, code: str, sent: int) -> None:
    made = {"token": "x", "account": {"name": "ci", "tenant": "t", "role": "user"}}
    client, desk = talking(problem(status, code, "no answer in time; it may yet be done"), made)
    with suppress(UnavailableError):
        client.make_token("ci", tenant="t")
    assert len(desk.seen) == sent


def test_a_token_is_not_shown_to_whoever_listens_where_a_server_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_STATE", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "admin.token").write_text("secret-token\n")
    with socket.create_server(("127.0.0.1", 0)) as thief:
        said = {"url": f"http://127.0.0.1:{thief.getsockname()[1]}", "pid": os.getpid(), "born": 1}
        (tmp_path / "server.json").touch(mode=0o600)
        (tmp_path / "server.json").write_text(json.dumps(said))
        with (
            Client.from_config() as client,
            pytest.raises(UnavailableError, match="has ended; start one with `poise serve`"),
        ):
            client.queue()
        thief.settimeout(0)
        with pytest.raises(BlockingIOError):
            thief.accept()


@pytest.mark.parametrize("token", [None, "from-the-environment"])
def test_a_token_goes_to_no_other_server_while_its_own_is_restarted(
    token: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POISE_STATE", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv("POISE_TOKEN", token)
    (tmp_path / "admin.token").write_text("secret-token\n")
    server = tmp_path / "server.json"

    def announce(url: str) -> None:
        server.touch(mode=0o600)
        server.write_text(json.dumps({"url": url, "pid": os.getpid()}))

    announce("http://127.0.0.1:1")
    with Client.from_config() as client:
        server.unlink()
        (tmp_path / "poise").mkdir()
        (tmp_path / "poise" / "client.toml").write_text('url = "http://127.0.0.1:2"\ntoken = "secret-token"\n')
        assert client._link.locate() == "http://127.0.0.1:1"
        announce("http://127.0.0.1:3")
        assert client._link.locate() == "http://127.0.0.1:3"
        announce("https://127.0.0.1:4")
        assert client._link.locate() == "http://127.0.0.1:3"
        monkeypatch.setenv("POISE_STATE", str(tmp_path / "other"))
        assert client._link.locate() == "http://127.0.0.1:3"


def test_a_token_that_is_worth_nothing_is_named_by_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = problem(401, "no-token", "a token is needed: Authorization: Bearer TOKEN")
    client, _ = talking(answer)
    with pytest.raises(ServerRefusedError, match=r"^the token is not known to http://server:1, or has expired$"):
        client.queue()
    monkeypatch.setenv("POISE_STATE", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "poise").mkdir()
    config = tmp_path / "poise" / "client.toml"
    config.write_text('url = "http://far:1"\ntoken = "old"\n')
    for where in (str(config), "POISE_TOKEN"):
        with Client.from_config() as client:
            monkeypatch.setattr(client._link._http, "request", lambda *_, **__: answer)
            with pytest.raises(
                ServerRefusedError, match=f"^the token in {where} is not known to http://far:1, or has expired$"
            ):
                client.queue()
        monkeypatch.setenv("POISE_TOKEN", "older")


def test_proxies_of_the_environment_never_see_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    client = Client("http://127.0.0.1:1", "t", patience=0.0)
    with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:1"):
        client.queue()


def test_certificates_are_checked_unless_one_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(RequestError, match="no certificates can be read from it"):
        Client("https://127.0.0.1:1", "t", verify=tmp_path / "ca.pem")
    Client("https://127.0.0.1:1", "t").close()
