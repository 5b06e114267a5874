"""The guard: Host, Origin, limits on everything, headers of every answer, no traceback for a client."""

import asyncio
import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.fake_engine import Api, Call, Reply, an_api, awaited, calls

from poise.scheduler.model.errors import RequestError
from poise.service.server import logs
from poise.service.server.http.guard import (
    BUSY,
    AllowedHosts,
    ApiOptions,
    ConcurrencyLimit,
    RequestGuard,
    RequestLimits,
)
from poise.service.server.logs import LINES, SPAN, Logbook, LogFormat
from poise.service.wire.views import Account, Role


def an_api_with(
    folder: Path, limits: RequestLimits | None = None, hosts: AllowedHosts | None = None
) -> tuple[Api, io.StringIO]:
    log = io.StringIO()
    options = ApiOptions(hosts or AllowedHosts(), limits or RequestLimits(), log=Logbook(log, form=LogFormat.JSON))
    return an_api(folder, options), log


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Api:
    return an_api_with(tmp_path_factory.mktemp("guard"))[0]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8642", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8642"])
def test_loopback_names_are_let_in_with_any_port(host: str, api: Api) -> None:
    assert api.call("user", "GET", "/v1/me", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost@evil",
     "localhost:99999x", "localhost:", "localhost.", "127.0.0.2", "0.0.0.0", "[::]", "::1", "local host", "localhost\t",
     "localhost,evil", "xn--localhost"],
)  # fmt: skip
def test_host_that_is_not_this_server_is_refused_even_with_a_token(host: str, api: Api) -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        assert api.call("admin", method, "/v1/jobs", host=host).problem[:2] == (403, "wrong-host")


def test_request_without_a_host_or_with_two_is_refused(api: Api) -> None:
    async def status(hosts: list[bytes]) -> int:
        found: list[int] = []

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b""}

        async def send(message: object) -> None:
            assert isinstance(message, dict)
            found.extend([message["status"]] if "status" in message else [])

        token = f"Bearer {api.tokens['admin']}".encode()
        headers = [(b"authorization", token), *((b"host", host) for host in hosts)]
        scope = {"type": "http", "method": "GET", "path": "/v1/me", "query_string": b"", "headers": headers}
        await api.app(scope, receive, send)
        return found[0]

    assert awaited(status([])) == 403
    assert awaited(status([b"localhost", b"localhost"])) == 403


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "https://localhost.evil.example", "http://localhost:3000", "file://", "localhost"],
)
def test_page_of_another_origin_is_refused_for_every_method(method: str, origin: str, api: Api) -> None:
    reply = api.call("admin", method, "/v1/jobs", host="localhost:8642", origin=origin)
    assert reply.problem[:2] == (403, "wrong-origin")


def test_page_of_the_server_itself_is_let_in(api: Api) -> None:
    assert api.call("user", "GET", "/v1/me", host="localhost:8642", origin="http://localhost:8642").status == 200


def test_no_answer_lets_another_origin_read_it(api: Api) -> None:
    reply = api.call("user", "GET", "/v1/me")
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_configured_name_is_let_in(tmp_path: Path) -> None:
    api, _ = an_api_with(tmp_path, hosts=AllowedHosts.of(["GPU1.example.org", "2001:db8::1"]))
    for host in ("gpu1.example.org", "gpu1.Example.org:443", "[2001:db8::1]:8642", "localhost"):
        assert api.call("user", "GET", "/v1/me", host=host).status == 200
    assert api.call("user", "GET", "/v1/me", host="gpu2.example.org").status == 403


@pytest.mark.parametrize("name", ["", "a b", "http://x", "x:80", "beef:8642", "[a:1]", "*", "x/y", "-"])
def test_invalid_host_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(RequestError, match="--host-name"):
        AllowedHosts.of([name])


SMALL = RequestLimits(body=100, headers=10, header_bytes=2_000, path=50, query=60)


def _post(api: Api, *pieces: bytes, **headers: str) -> Reply:
    call = api.request("user", "POST", "/v1/jobs", None, content_type="application/json", **headers)
    return calls(api.app, [Call(call.method, call.path, call.headers, pieces)])[0]


def _body(length: int) -> bytes:
    body = json.dumps({"jobs": [{"command": ["x"]}]}).encode()
    return body[:-1] + b" " * (length - len(body)) + body[-1:]


def test_body_at_its_bound_is_taken_and_one_byte_beyond_is_not(tmp_path: Path) -> None:
    api, _ = an_api_with(tmp_path, SMALL)
    assert _post(api, _body(100)).status == 201
    assert _post(api, _body(101)).problem[:2] == (413, "too-large")
    assert _post(api, *(bytes([byte]) for byte in _body(101))).problem[:2] == (413, "too-large")
    assert _post(api, b"", content_length="101").problem[:2] == (413, "too-large")
    assert _post(api, b"", content_length="-1").problem[:2] == (413, "too-large")
    assert len(api.engine.jobs) == 3


def test_heads_beyond_their_bounds_are_refused(tmp_path: Path) -> None:
    api, _ = an_api_with(tmp_path, SMALL)
    assert api.call("user", "GET", "/v1/me", **{f"x{number}": "1" for number in range(8)}).status == 200
    assert api.call("user", "GET", "/v1/me", **{f"x{number}": "1" for number in range(9)}).problem[:2] == (431, "too-large")
    assert api.call("user", "GET", "/v1/me", x="1" * 2_000).problem[:2] == (431, "too-large")
    assert api.call("user", "GET", "/v1/jobs?tenant=" + "a" * 60).problem[:2] == (414, "too-large")
    assert api.call("user", "GET", "/" + "a" * 50).problem[:2] == (414, "too-large")


def test_requests_beyond_the_limit_are_told_to_retry(tmp_path: Path) -> None:
    api, _ = an_api_with(tmp_path, RequestLimits(requests=0))
    reply = api.call("user", "GET", "/v1/me")
    assert reply.problem[:2] == (503, "busy")
    assert reply.headers["retry-after"] == "1"


def test_one_token_cannot_take_all_places_and_some_are_reserved_for_operators() -> None:
    accounts = {role: Account(name=role.value, tenant="t", role=role) for role in Role}
    limit = ConcurrencyLimit(RequestLimits(requests=10, reserved=2, per_token=5))
    for _ in range(5):
        assert limit.enter(accounts[Role.USER]) is None
    refusal = limit.enter(accounts[Role.USER])
    assert refusal is not None
    assert (refusal.status, refusal.code) == (429, "too-many-requests")
    assert refusal.detail == "token 'user' has 5 requests under way, of at most 5; wait for an answer first"
    for _ in range(3):
        assert limit.enter(accounts[Role.READER]) is None
    assert limit.enter(accounts[Role.READER]) is BUSY
    for role in (Role.OPERATOR, Role.ADMIN):
        assert limit.enter(accounts[role]) is None
    assert limit.enter(accounts[Role.ADMIN]) is BUSY
    limit.leave(accounts[Role.USER])
    assert limit.enter(accounts[Role.USER]) is BUSY
    limit.leave(accounts[Role.OPERATOR])
    limit.leave(accounts[Role.ADMIN])
    assert limit.enter(accounts[Role.USER]) is None


def test_operator_may_have_more_requests_under_way_than_others() -> None:
    account = Account(name="o", tenant="t", role=Role.OPERATOR)
    limit = ConcurrencyLimit(RequestLimits(requests=10, reserved=2, per_token=5))
    assert [limit.enter(account) for _ in range(11)] == [None] * 10 + [BUSY]


@pytest.mark.slow
def test_every_request_is_counted_out_however_it_ends(tmp_path: Path) -> None:
    api, _ = an_api_with(tmp_path, RequestLimits(requests=1, reserved=0, body=100, upload=0.05))
    call = api.request("user", "POST", "/v1/jobs", None, content_type="application/json")
    for pieces in ((b"{", None), (_body(101),), (_body(100),), (b"{",)):
        calls(api.app, [Call(call.method, call.path, call.headers, pieces)])
    api.engine.fails = lambda: ZeroDivisionError("x")
    assert api.call("user", "GET", "/v1/service").status == 500
    assert api.call("user", "GET", "/v1/me").status == 200


@pytest.mark.parametrize("limits", [RequestLimits(seconds=0.05), RequestLimits(upload=0.05)])
def test_request_that_never_arrives_completely_times_out(limits: RequestLimits, tmp_path: Path) -> None:
    api, _ = an_api_with(tmp_path, limits)
    call = api.request("user", "POST", "/v1/jobs", None, content_type="application/json")
    pieces = (b"{", None)
    assert calls(api.app, [Call(call.method, call.path, call.headers, pieces)])[0].problem[:2] == (408, "too-slow")


def test_every_answer_has_security_headers(api: Api) -> None:
    for who, path in (("user", "/v1/me"), ("user", "/nothing"), (None, "/v1/me"), ("reader", "/v1/tokens")):
        headers = api.call(who, "GET", path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["content-security-policy"].startswith("default-src 'none'")


def test_bug_is_a_500_with_a_number_under_which_the_log_has_the_traceback(tmp_path: Path) -> None:
    api, log = an_api_with(tmp_path)
    api.engine.fails = lambda: ZeroDivisionError("secret detail")
    status, code, detail = api.call("user", "GET", "/v1/service").problem
    assert (status, code) == (500, "internal")
    assert "secret detail" not in detail
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    bug = next(line for line in lines if line["event"] == "bug")
    assert bug["trace"] in detail
    assert "ZeroDivisionError" in bug["traceback"]


def test_log_names_routes_and_accounts_and_never_a_token_a_path_or_a_query(tmp_path: Path) -> None:
    api, log = an_api_with(tmp_path)
    token = api.tokens["user"]
    api.call("user", "GET", f"/v1/jobs/{token}?tenant={token}")
    api.call("user", "PUT", "/v1/policy", {"policy": token})
    api.call(None, "GET", f"/{token}", authorization=f"Basic {token}")
    made = api.call("admin", "POST", "/v1/tokens", {"name": "new", "tenant": "t", "role": "user"}).json["token"]
    text = log.getvalue()
    assert token not in text
    assert made not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"GET", "PUT"} <= {line.get("method") for line in lines}
    assert {line["route"] for line in lines if line["event"] == "request"} <= {"/v1/jobs/{job}", "/v1/policy", "other"}
    assert {"event": "token-made", "name": "new", "by": "admin"}.items() <= lines[-1].items()


def test_refusals_are_logged_up_to_a_limit_per_source_and_then_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(logs, "monotonic", lambda: now)
    api, log = an_api_with(tmp_path)
    for who, path in ((None, "/v1/me"), ("user", "/nothing"), ("admin", "/nothing")):
        calls(api.app, [api.request(who, "GET", path) for _ in range(50)])
    assert _lines(log, "request") == ["127.0.0.1"] * LINES + ["user"] * LINES + ["admin"] * LINES
    assert _lines(log, "lines-left-out") == []
    now = SPAN
    api.call(None, "GET", "/v1/me")
    assert sorted(_lines(log, "lines-left-out")) == ["127.0.0.1", "token admin", "token user"]
    assert len(_lines(log, "request")) == 3 * LINES + 1


def _lines(log: io.StringIO, event: str) -> list[str]:
    """Who caused the lines of an event."""
    found = [json.loads(line) for line in log.getvalue().splitlines()]
    return [each.get("address") or each.get("caused_by") or each["account"] for each in found if each["event"] == event]


def test_websocket_is_closed(api: Api) -> None:
    said: list[object] = []

    async def knock() -> None:
        async def receive() -> dict[str, object]:
            return {"type": "websocket.connect"}

        async def send(message: object) -> None:
            said.append(message)

        await api.app({"type": "websocket", "path": "/v1/jobs", "headers": []}, receive, send)

    awaited(knock())
    assert said == [{"type": "websocket.close", "code": 1008}]


def test_request_under_way_when_the_server_stops_is_told_to_retry() -> None:
    answers: list[dict[str, object]] = []

    async def forever(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        answers.append(dict(message))

    async def stop() -> None:
        accounts = Mock(known=Mock(return_value=Account(name="a", tenant="a", role=Role.USER)))
        guard = RequestGuard(forever, accounts, ApiOptions(log=Logbook(io.StringIO())))
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer x")]
        scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "query_string": b"", "headers": headers}
        task = asyncio.create_task(guard(scope, receive, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    awaited(stop())
    assert answers[0]["status"] == 503
