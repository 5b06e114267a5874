"""`poise.Client` against answers that are made up: what it sends, what it makes of answers, when it tries again."""

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fake_desk import DETAIL, QUEUE, ROW, SUBMITTED, Reply, problem, talking

from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.client import Client, JobRequest, ServerRefusedError, UnavailableError, WaitTimeoutError
from poise.service.wire.request import MOST_JOBS
from poise.service.wire.views import JobState

pytestmark = pytest.mark.usefixtures("no_pauses", "no_venv")


def test_a_submission_says_what_was_asked_where_and_under_a_key() -> None:
    client, desk = talking(SUBMITTED)
    job = client.submit(command=["./train", "x"], gpus=2, env={"A": "1"}, export="none")
    assert job.id == "j1"
    (body,) = desk.bodies
    here = str(Path.cwd())
    what = {"command": [f"{here}/train", "x"], "gpus": 2, "env": {"A": "1"}, "export": "none", "cwd": here}
    assert body["jobs"] == [what]
    assert "environments" not in body
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


def test_jobs_to_wait_for_are_handles_or_words_and_moments_are_datetimes_or_texts() -> None:
    client, desk = talking(SUBMITTED, SUBMITTED)
    moment = datetime(2033, 5, 18, 3, 33, 20, tzinfo=UTC)
    client.submit(command=["x"], after=client.job("17"), begin=moment, deadline="2033-05-18T04:33:20Z", venv=None)
    client.submit(command=["x"], after=[client.job("18"), "3,2,1:succeeded", 5], begin=2e9, venv=None)
    jobs = [body["jobs"][0] for body in desk.bodies]
    assert [each["after"] for each in jobs] == [["17"], ["18", "1-3:succeeded", "5"]]
    assert [(each["begin"], each.get("deadline")) for each in jobs] == [(2e9, 2e9 + 3600), (2e9, None)]


def test_an_app_of_the_own_tenant_is_waited_for_rather_than_a_job_of_others_of_that_name() -> None:
    theirs = {"id": "9", "name": "prep", "tenant": "bob", "state": "PENDING"}
    found, me = {"jobs": [theirs], "total": 1, "exact": True}, {"name": "alice", "tenant": "alice", "role": "user"}
    rows = QUEUE | {"jobs": [ROW | {"id": "3"}, ROW | {"id": "4"}], "total": 2}
    client, desk = talking(found, me, rows, SUBMITTED)
    client.submit(command=["x"], after="prep:succeeded", venv=None)
    assert json.loads(desk.seen[-1].content)["jobs"][0]["after"] == ["3-4:succeeded"]
    client, desk = talking(found, me, QUEUE | {"jobs": [], "total": 0}, SUBMITTED)
    client.submit(command=["x"], after="prep:succeeded", venv=None)
    assert json.loads(desk.seen[-1].content)["jobs"][0]["after"] == ["9:succeeded"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"after": "1:"}, r"^after: expected ids or names of jobs, and ended, succeeded or failed"),
        ({"after": [None]}, r"^after: there is no job 'None', and no app of this tenant is called so$"),
        ({"after": "9-1"}, r"^after: expected the lower id first, got '9-1'$"),
        ({"begin": "soon"}, r"^begin: expected a moment such as 16:00, .*, got 'soon'$"),
        ({"deadline": -1}, r"^deadline: expected at least 0, got -1$"),
        ({"begin": datetime.max.replace(tzinfo=UTC)}, r"^begin: expected at most 253,402,300,799, got 253402300"),
        ({"begin": [1]}, r"^begin: expected "),
        ({"array_cap": 0}, r"^array_cap: expected at least 1, got 0$"),
    ],
)
def test_what_says_when_a_job_starts_and_makes_no_sense_is_one_line(given: dict[str, object], said: str) -> None:
    nobody, me = {"jobs": [], "total": 0, "exact": False}, {"name": "alice", "tenant": "alice", "role": "user"}
    client, desk = talking(nobody, me, QUEUE | {"jobs": [], "total": 0})
    with pytest.raises(PoiseError, match=said) as caught:
        client.submit(command=["x"], **given)
    assert "\n" not in str(caught.value)
    assert all(request.method == "GET" for request in desk.seen)


def test_a_submission_that_is_too_large_says_what_to_do() -> None:
    client, _ = talking(problem(413, "too-large", "expected a body of at most 9 bytes"))
    with pytest.raises(ServerRefusedError, match=r"^2 jobs are too much for one submission \(expected .* 9 bytes\); divide"):
        client.submit_all([JobRequest(command=("x",))] * 2)


def test_a_program_without_a_slash_is_looked_up_where_the_job_runs() -> None:
    client, desk = talking(SUBMITTED)
    client.submit(JobRequest(command=("python", "./x.py"), cwd="/data"))
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
    client._link.on_wait = told.append
    for _ in range(3):
        client.queue()
    assert told == ["no answer from http://server:1: it broke"]


def test_a_server_that_never_answered_is_not_waited_for_long() -> None:
    client, desk = talking(httpx.ConnectError, patience=600.0)
    with pytest.raises(UnavailableError, match="is `poise serve` running"):
        client.queue()
    assert len(desk.seen) <= 6


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 429])
def test_a_refusal_is_a_request_error_with_the_servers_line_and_code(status: int) -> None:
    client, desk = talking(problem(status, "some-code", "first\nsecond"))
    with pytest.raises(ServerRefusedError, match=r"^first second$") as caught:
        client.why("j1")
    assert (caught.value.status, caught.value.code, len(desk.seen)) == (status, "some-code", 1)
    assert isinstance(caught.value, RequestError)


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
    request = JobRequest(name="fit", command=("python", "fit.py", "--lr=${LR}"))
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
    client.map(JobRequest(command=("x", "${A}")), {"A": given})
    assert [job["env"]["A"] for job in desk.bodies[0]["jobs"]] == values


def test_maps_of_one_script_without_a_name_are_apps_of_their_own() -> None:
    client, desk = talking({"jobs": ["a", "b"]})
    for _ in range(2):
        client.map(JobRequest(command=("python", "fit.py", "${LR}")), {"LR": [0.1, 0.01]})
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
    yield lambda: client.submit(JobRequest(command=("x",)), gpus=2), "give a Request, or the fields of one"
    yield lambda: client.submit(command=["x"], cwd="~nobody-at-all"), "cwd: there is no home folder '~nobody-at-all'"
    yield lambda: client.submit(command=["x"], cwd=3), "cwd: expected text, got 3"
    yield (
        lambda: client.submit("job.yaml"),  # type: ignore[arg-type]
        "expected a Request, got str; read_job_file(Path(...)) of poise.service.wire.jobfile reads a job file",
    )
    yield lambda: client.submit_all(["job.yaml"]), "expected a Request, got str"  # type: ignore[list-item]
    yield lambda: client.submit_all([JobRequest(command=("x",))], key="a"), "key: expected"
    yield lambda: client.map({"command": ["x"]}, [{"A": 1}]), "expected a Request, got dict"  # type: ignore[arg-type]
    yield lambda: client.submit_all([]), "expected 1 to 1,000 jobs in a submission, got 0"
    yield lambda: client.map(JobRequest(command=("x",)), []), "params: expected at least one environment"
    for wrong, shown in ((5, "int"), ([1, 2], "int"), ("A=1", "str"), ([{"A": 1}, None], "NoneType")):
        said = f"params: expected environments, [{{'LR': 0.1}}], or values, {{'LR': [0.1, 0.01]}}, got {shown}"
        yield lambda given=wrong: client.map(JobRequest(command=("x",)), given), said  # type: ignore[misc]
    yield lambda: client.map(JobRequest(command=("x",)), {"A": []}), "params: A has no values; e.g. LR: [0.1, 0.01]"
    yield lambda: client.map(JobRequest(command=("x",)), {"A": range(MOST_JOBS + 1)}), "params: 1,001 jobs are more than"
    yield (
        lambda: client.map(JobRequest(command=("x",)), [{"POISE_A": 1}]),
        "env: names that begin with POISE_ are Poise's own",
    )
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
    assert client.job("j1").wait() is JobState.FAILED
    client, desk = talking(running)
    with pytest.raises(WaitTimeoutError, match="job j1 is RUNNING after 60 s; it goes on"):
        client.job("j1").wait(timeout=60)
    assert len(desk.seen) > 10
    assert issubclass(WaitTimeoutError, PoiseError | TimeoutError)


def test_no_letter_of_a_refusal_is_a_command_to_the_terminal() -> None:
    client, _ = talking(problem(400, "wrong-request", "a\x1b]0;b\x07\u202e\nc"))
    with pytest.raises(ServerRefusedError, match=r"^a\\x1b\]0;b\\x07\\u202e c$"):
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
    client.queue(states=[JobState.RUNNING, JobState.PAUSED], tenant="t")
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
