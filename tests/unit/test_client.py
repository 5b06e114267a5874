"""`poise.Client` against answers that are made up: what it sends, what it makes of answers, when it tries again."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from poise.client import Client, RefusedError, Request, UnavailableError, WaitTimeoutError, connection, following, handle
from poise.model.errors import PoiseError, RequestError
from poise.wire.request import MOST_JOBS
from poise.wire.views import Role, State

SUBMITTED = {"jobs": ["j1"]}
ROW: dict[str, Any] = {
    "id": "j1", "name": "n", "tenant": "t", "app": None, "state": "PENDING", "flags": [], "position": 1, "gpus": 0,
    "wanted": 1, "reason": {"code": "capacity", "text": "no GPU is free"}, "gpu_type": None, "gpu_types": [],
    "submitted": 1.0, "started": None, "finished": None, "waited": 0.0, "ran": 0.0, "restarts": 0, "eta": None,
    "share": None,
}  # fmt: skip
DETAIL: dict[str, Any] = {
    "job": ROW, "preemptions": 0, "failures": 0, "gpu_seconds": 0.0, "lost_gpu_seconds": 0.0, "steps": 0.0,
    "total_steps": None, "checkpoint_steps": None, "throughput": None, "loss": None, "cause": None, "runs": [],
    "request": None,
}  # fmt: skip
QUEUE = {"jobs": [ROW], "total": 1, "counts": {"PENDING": 1}}

Reply = httpx.Response | type[Exception]


def problem(status: int, code: str, detail: str) -> httpx.Response:
    return httpx.Response(status, json={"code": code, "detail": detail})


@dataclass
class Desk:
    """Answers one request after the other; the last answer is given again and again."""

    replies: list[Reply | Callable[[httpx.Request], httpx.Response]]
    seen: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, httpx.Response):
            return reply
        if isinstance(reply, type):
            raise reply("it broke")
        return reply(request)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.seen]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by itself: every pause, and every look at the clock, moves it on."""
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    def clock() -> float:
        pause(1e-6)
        return now

    for module in (connection, following):
        monkeypatch.setattr(module, "sleep", pause)
        monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(handle, "monotonic", clock)


def talking(*replies: Any, patience: float = 15.0) -> tuple[Client, Desk]:
    desk = Desk([httpx.Response(200, json=each) if isinstance(each, dict) else each for each in replies])
    return Client("http://server:1", "secret-token", transport=httpx.MockTransport(desk), patience=patience), desk


def test_a_submission_says_what_was_asked_where_and_under_a_key() -> None:
    client, desk = talking(SUBMITTED)
    job = client.submit(command=["./train", "x"], gpus=2, env={"A": "1"})
    assert job.id == "j1"
    (body,) = desk.bodies
    here = str(Path.cwd())
    assert body["jobs"] == [{"command": [f"{here}/train", "x"], "gpus": 2, "env": {"A": "1"}, "cwd": here}]
    assert len(body["key"]) == 32
    assert desk.seen[0].headers["authorization"] == "Bearer secret-token"
    assert (desk.seen[0].method, desk.seen[0].url.path) == ("POST", "/v1/jobs")


def test_a_folder_whose_name_is_no_text_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    client, desk = talking(SUBMITTED)
    with pytest.raises(RequestError, match=r"^cwd: expected text, got "):
        client.submit(command=["x"])
    os.rmdir(folder)
    with pytest.raises(RequestError, match=r"^the current folder is not there any more"):
        client.submit(command=["x"])
    assert desk.seen == []


def test_a_submission_that_is_too_large_says_what_to_do() -> None:
    client, _ = talking(problem(413, "too-large", "expected a body of at most 9 bytes"))
    with pytest.raises(RefusedError, match=r"^2 jobs are too much for one submission \(expected .* 9 bytes\); divide"):
        client.submit_all([Request(command=("x",))] * 2)


def test_a_program_without_a_slash_is_looked_up_where_the_job_runs() -> None:
    client, desk = talking(SUBMITTED)
    client.submit(Request(command=("python", "./x.py"), cwd="/data"))
    assert desk.bodies[0]["jobs"][0]["command"] == ["python", "./x.py"]


@pytest.mark.parametrize(
    "broken", [httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout, problem(503, "not-ready", "wait")]
)
def test_a_submission_is_sent_again_under_the_same_key(broken: Reply) -> None:
    client, desk = talking(broken, broken, SUBMITTED)
    assert client.submit(command=["x"]).id == "j1"
    assert len({body["key"] for body in desk.bodies}) == 1
    assert len(desk.seen) == 3


def test_trying_again_is_bounded_and_ends_in_one_line() -> None:
    client, desk = talking({"jobs": [], "total": 0, "counts": {}}, httpx.ReadError, patience=10.0)
    client.queue()
    with pytest.raises(UnavailableError, match=r"^no answer from http://server:1: it broke$"):
        client.queue()
    assert 8 <= len(desk.seen) <= 14


def test_somebody_who_watches_is_told_once_that_a_server_is_away() -> None:
    told: list[str] = []
    client, _ = talking(QUEUE, *[httpx.ReadError] * 20, QUEUE, httpx.ReadError, QUEUE, patience=600.0)
    client._link.waiting = told.append
    for _ in range(3):
        client.queue()
    assert told == ["no answer from http://server:1: it broke"]


def test_a_server_that_never_answered_is_not_waited_for_long() -> None:
    client, desk = talking(httpx.ConnectError, patience=600.0)
    with pytest.raises(UnavailableError, match="is `poise serve` running"):
        client.queue()
    assert len(desk.seen) <= 6


def test_a_token_is_not_made_twice_after_a_lost_connection() -> None:
    client, desk = talking(httpx.ReadError)
    with pytest.raises(UnavailableError):
        client.make_token("ci", tenant="vision", role=Role.READER)
    assert len(desk.seen) == 1


@pytest.mark.parametrize(("code", "sent"), [("busy", 2), ("not-ready", 1)])
def test_a_token_is_asked_for_again_only_if_the_server_did_not_look_at_it(code: str, sent: int) -> None:
    made = {"token": "x", "account": {"name": "ci", "tenant": "t", "role": "user"}}
    client, desk = talking(problem(503, code, "no answer in time; it may yet be done"), made)
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
        assert client._link.whereabouts is not None
        server.unlink()
        (tmp_path / "poise").mkdir()
        (tmp_path / "poise" / "client.toml").write_text('url = "http://127.0.0.1:2"\ntoken = "secret-token"\n')
        assert client._link.whereabouts.look() == "http://127.0.0.1:1"
        announce("http://127.0.0.1:3")
        assert client._link.whereabouts.look() == "http://127.0.0.1:3"
        announce("https://127.0.0.1:4")
        assert client._link.whereabouts.look() == "http://127.0.0.1:3"
        monkeypatch.setenv("POISE_STATE", str(tmp_path / "other"))
        assert client._link.whereabouts.look() == "http://127.0.0.1:3"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 429])
def test_a_refusal_is_a_request_error_with_the_servers_line_and_code(status: int) -> None:
    client, desk = talking(problem(status, "some-code", "first\nsecond"))
    with pytest.raises(RefusedError, match=r"^first second$") as caught:
        client.why("j1")
    assert (caught.value.status, caught.value.code, len(desk.seen)) == (status, "some-code", 1)
    assert isinstance(caught.value, RequestError)


def test_a_token_that_is_worth_nothing_is_named_by_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = problem(401, "no-token", "a token is needed: Authorization: Bearer TOKEN")
    client, _ = talking(answer)
    with pytest.raises(RefusedError, match=r"^the token is not known to http://server:1, or has expired$"):
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
            with pytest.raises(RefusedError, match=f"^the token in {where} is not known to http://far:1, or has expired$"):
                client.queue()
        monkeypatch.setenv("POISE_TOKEN", "older")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (problem(507, "storage-full", "the disk is full"), "the disk is full"),
        (httpx.Response(500, text="<html>"), "http://server:1 answered 500 Internal Server Error"),
        (httpx.Response(302, headers={"location": "http://elsewhere/"}), "http://server:1 answered 302 Found"),
        (httpx.Response(200, text="<html>"), "is not understood"),
    ],
)
def test_what_is_no_answer_is_a_failure_and_is_not_asked_again(reply: httpx.Response, said: str) -> None:
    client, desk = talking(reply)
    with pytest.raises(UnavailableError, match=said):
        client.nodes()
    assert len(desk.seen) == 1


def test_keys_of_a_newer_server_are_dropped_at_any_depth() -> None:
    newer = {**QUEUE, "cursor": 7, "jobs": [{**ROW, "mood": {"a": 1}, "reason": {"code": "c", "text": "t", "url": "u"}}]}
    client, _ = talking(newer)
    found = client.queue()
    assert (found.jobs[0].id, found.jobs[0].reason.text) == ("j1", "t")


def test_an_unknown_word_of_a_newer_server_fails_in_one_clear_line() -> None:
    client, _ = talking({**QUEUE, "new": 1, "jobs": [{**ROW, "state": "SNOOZING"}]})
    with pytest.raises(UnavailableError, match=r"jobs\.0\.state is 'SNOOZING'; is the server a newer Poise\?$") as caught:
        client.queue()
    assert "\n" not in str(caught.value)


def test_a_map_is_one_submission_of_an_app() -> None:
    client, desk = talking({"jobs": ["a", "b", "c", "d"]})
    request = Request(name="fit", command=("python", "fit.py", "--lr=${LR}"))
    jobs = client.map(request, {"LR": [0.1, 0.01], "SEED": [1, 2]})
    assert [job.id for job in jobs] == ["a", "b", "c", "d"]
    (body,) = desk.bodies
    assert [(job["name"], job["app"], job["command"][-1], job["env"]) for job in body["jobs"]] == [
        ("fit-0", "fit", "--lr=0.1", {"LR": "0.1", "SEED": "1"}),
        ("fit-1", "fit", "--lr=0.1", {"LR": "0.1", "SEED": "2"}),
        ("fit-2", "fit", "--lr=0.01", {"LR": "0.01", "SEED": "1"}),
        ("fit-3", "fit", "--lr=0.01", {"LR": "0.01", "SEED": "2"}),
    ]
    client.map(request, [{"LR": 3}])
    assert desk.bodies[1]["jobs"][0]["env"] == {"LR": "3"}


@pytest.mark.parametrize(("given", "values"), [("12", ["12"]), (1, ["1"]), (None, ["None"]), (range(2), ["0", "1"])])
def test_a_text_or_a_number_in_a_map_is_one_value(given: object, values: list[str]) -> None:
    client, desk = talking({"jobs": [f"job-{place}" for place, _ in enumerate(values)]})
    client.map(Request(command=("x", "${A}")), {"A": given})
    assert [job["env"]["A"] for job in desk.bodies[0]["jobs"]] == values


def test_maps_of_one_script_without_a_name_are_apps_of_their_own() -> None:
    client, desk = talking({"jobs": ["a", "b"]})
    for _ in range(2):
        client.map(Request(command=("python", "fit.py", "${LR}")), {"LR": [0.1, 0.01]})
    for body in desk.bodies:
        assert {job["app"] for job in body["jobs"]} == {f"fit-{body['key'][:4]}"}
    assert desk.bodies[0]["key"] != desk.bodies[1]["key"]


@pytest.mark.parametrize("cwd", ["data", Path("data"), "~", Path("/data")])
def test_a_folder_may_be_relative_or_a_path_and_is_sent_from_the_root(cwd: str | Path) -> None:
    client, desk = talking(SUBMITTED)
    client.submit(command=["x"], cwd=cwd)
    assert desk.bodies[0]["jobs"][0]["cwd"] == str(Path.cwd() / Path(cwd).expanduser())


def wrong_calls(client: Client) -> Iterator[tuple[Callable[[], object], str]]:
    yield lambda: client.submit(command="python x.py"), "command: expected a list, got 'python x.py'"
    yield lambda: client.submit(), "command: is missing"
    yield lambda: client.submit(command=[]), "command: expected at least 1 of them, got 0"
    yield lambda: client.submit(command=["x"] * 1_001), "command: expected at most 1,000 of them"
    yield lambda: client.submit(command=["x"], gpu_types=["a"] * 65), "gpu_types: expected at most 64 of them"
    yield lambda: client.submit(command=["x"], gpu=2), "unknown field 'gpu'; did you mean gpus"
    yield (
        lambda: client.submit(command=["x"], checkpoint={"evry": 1}),
        "checkpoint: unknown field 'evry'; did you mean every?",
    )
    yield lambda: client.submit(command=["x"], gpus=0), "gpus: expected at least 1, got 0"
    yield lambda: client.submit(Request(command=("x",)), gpus=2), "give a Request, or the fields of one"
    yield lambda: client.submit(command=["x"], cwd="~nobody-at-all"), "cwd: nobody's home is known as '~nobody-at-all'"
    yield lambda: client.submit(command=["x"], cwd=3), "cwd: expected text, got 3"
    yield (
        lambda: client.submit("job.yaml"),  # type: ignore[arg-type]
        "expected a Request, got str; read_job_file(Path(...)) of poise.wire.jobfile reads a job file",
    )
    yield lambda: client.submit_all(["job.yaml"]), "expected a Request, got str"  # type: ignore[list-item]
    yield lambda: client.submit_all([Request(command=("x",))], key="a"), "key: expected"
    yield lambda: client.map({"command": ["x"]}, [{"A": 1}]), "expected a Request, got dict"  # type: ignore[arg-type]
    yield lambda: client.submit_all([]), "expected 1 to 1,000 jobs in a submission, got 0"
    yield lambda: client.map(Request(command=("x",)), []), "params: expected at least one environment"
    for wrong, shown in ((5, "int"), ([1, 2], "int"), ("A=1", "str"), ([{"A": 1}, None], "NoneType")):
        said = f"params: expected environments, [{{'LR': 0.1}}], or values, {{'LR': [0.1, 0.01]}}, got {shown}"
        yield lambda given=wrong: client.map(Request(command=("x",)), given), said  # type: ignore[misc]
    yield lambda: client.map(Request(command=("x",)), {"A": []}), "params: A has no values; e.g. LR: [0.1, 0.01]"
    yield lambda: client.map(Request(command=("x",)), {"A": range(MOST_JOBS + 1)}), "params: 1,001 jobs are more than"
    yield lambda: client.map(Request(command=("x",)), [{"POISE_A": 1}]), "env: names that begin with POISE_ are Poise's own"
    yield lambda: client.show("../me"), "job: '../me' is no name of a job"
    yield lambda: client.queue(states=["waiting"]), "unknown state 'waiting'; "
    yield lambda: client.submit(comand=["x"]), "unknown field 'comand'; did you mean command?"
    yield lambda: client.set_weight("vision", 0), "weight: expected at least 0.001, got 0"
    yield lambda: client.use(""), "policy: expected"
    yield lambda: client.make_token("a b", tenant="t"), "name: expected letters"
    yield lambda: client.make_token("a", tenant="t", days=-1), "days: expected more than 0, got -1"


def test_what_can_be_seen_to_be_wrong_is_not_sent() -> None:
    client, desk = talking(SUBMITTED)
    for call, said in wrong_calls(client):
        with pytest.raises(RequestError) as caught:
            call()
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)
    assert desk.seen == []


def test_waiting_ends_with_the_final_state_or_with_the_time() -> None:
    running, done = {**DETAIL, "job": {**ROW, "state": "RUNNING"}}, {**DETAIL, "job": {**ROW, "state": "FAILED"}}
    client, _ = talking(running, running, httpx.ReadError, done)
    assert client.job("j1").wait() is State.FAILED
    client, desk = talking(running)
    with pytest.raises(WaitTimeoutError, match="job j1 is RUNNING after 60 s; it goes on"):
        client.job("j1").wait(timeout=60)
    assert len(desk.seen) > 10
    assert issubclass(WaitTimeoutError, PoiseError | TimeoutError)


def a_log(text: str, ended_after: int) -> Callable[[httpx.Request], httpx.Response]:
    """A log of which a few bytes more are there at each look, and which ends after so many looks."""
    looks = 0

    def reply(request: httpx.Request) -> httpx.Response:
        nonlocal looks
        looks += 1
        there = text if looks >= ended_after else text[: 5 * looks]
        asked = int(request.url.params["offset"])
        start = max(0, len(there) + asked) if asked < 0 else min(asked, len(there))
        part = there[start : start + int(request.url.params["limit"])]
        return httpx.Response(
            200, json={"text": part, "offset": start, "next": start + len(part), "ended": looks >= ended_after}
        )

    return reply


def test_a_log_is_followed_to_its_end_across_lost_connections() -> None:
    text = "".join(f"line {number}\n" for number in range(50))
    client, _ = talking(httpx.ReadError, a_log(text, ended_after=20), patience=600.0)
    assert "".join(client.job("j1").logs(follow=True)) == text


def test_a_log_is_read_whole_in_parts() -> None:
    text = "x" * (2 * following.PART + 5)
    client, desk = talking(a_log(text, ended_after=0))
    assert client.job("j1").logs() == text
    assert len(desk.seen) == 4


@pytest.mark.parametrize(("lines", "want"), [(0, ""), (2, "line 8\nline 9\n"), (100, None)])
def test_the_tail_of_a_log_is_its_last_lines(lines: int, want: str | None) -> None:
    text = "".join(f"line {number}\n" for number in range(10))
    client, _ = talking(a_log(text, ended_after=0))
    assert client.tail("j1", lines) == (text if want is None else want, len(text))


def test_the_tail_of_a_log_of_long_lines_is_looked_for_further_back() -> None:
    text = "".join(f"{number}{'.' * following.PART}\n" for number in range(9))
    client, _ = talking(a_log(text, ended_after=0))
    found, offset = client.tail("j1", 3)
    assert [line[0] for line in found.splitlines()] == ["6", "7", "8"]
    assert offset == len(text)


def test_a_bar_of_progress_that_is_drawn_again_is_one_line() -> None:
    text = "begin\n" + "".join(f"\r{percent}%" for percent in range(100)) + "\ndone\x0c\u2028\n"
    client, _ = talking(a_log(text, ended_after=0))
    assert client.tail("j1", 2)[0] == text.removeprefix("begin\n")


def test_the_tail_of_a_log_whose_beginning_was_deleted_is_what_is_left() -> None:
    text, deleted = "left\n" * 3, 10_000

    def reply(request: httpx.Request) -> httpx.Response:
        asked, end = int(request.url.params["offset"]), deleted + len(text)
        start = min(max(deleted, end + asked if asked < 0 else asked), end)
        return httpx.Response(200, json={"text": text[start - deleted :], "offset": start, "next": end, "ended": True})

    client, desk = talking(reply)
    assert client.tail("j1", 100) == (text, deleted + len(text))
    assert len(desk.seen) <= 4


def test_no_letter_of_a_refusal_is_a_command_to_the_terminal() -> None:
    client, _ = talking(problem(400, "wrong-request", "a\x1b]0;b\x07\u202e\nc"))
    with pytest.raises(RefusedError, match=r"^a\\x1b\]0;b\\x07\\u202e c$"):
        client.why("j1")


def test_events_are_followed_from_the_number_that_was_last() -> None:
    def happening(number: int) -> dict[str, Any]:
        return {"number": number, "time": 1.0, "actor": "a", "kind": "k", "job": None, "tenant": None, "text": "t"}

    client, desk = talking(
        {"events": [happening(4)], "next": 4}, {"events": [], "next": 4}, {"events": [happening(5)], "next": 5}
    )
    follow = client.follow_events(after=-1, job="j1")
    assert [next(follow).number, next(follow).number] == [4, 5]
    assert [request.url.params["after"] for request in desk.seen] == ["-1", "4", "4"]


def test_filters_that_are_not_given_are_not_sent() -> None:
    client, desk = talking(QUEUE)
    client.queue(states=[State.RUNNING, State.PAUSED], tenant="t")
    client.queue()
    assert str(desk.seen[0].url.query, "ascii") == "state=RUNNING&state=PAUSED&tenant=t&limit=50&offset=0"
    assert str(desk.seen[1].url.query, "ascii") == "limit=50&offset=0"


def test_what_anybody_would_write_is_understood() -> None:
    """States by their words, in any case or a single one, and a job by its number."""
    client, desk = talking(QUEUE, QUEUE, DETAIL)
    client.queue(states=["running", "PAUSED"])
    client.queue(states="FAILED")
    client.show(7)  # type: ignore[arg-type]
    assert str(desk.seen[0].url.query, "ascii") == "state=RUNNING&state=PAUSED&limit=50&offset=0"
    assert str(desk.seen[1].url.query, "ascii") == "state=FAILED&limit=50&offset=0"
    assert desk.seen[2].url.path == "/v1/jobs/7"


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
