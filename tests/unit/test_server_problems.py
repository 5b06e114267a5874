"""What a client is told of its mistakes: one line that names the field, the value and the nearest known key."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.fake_engine import Api, Call, Kept, an_api, calls
from tests.machine import Service

from poise.service.backends.api import RunEnding
from poise.service.server.http.app import create_app
from poise.service.server.http.guard import ApiOptions
from poise.service.server.http.problems import body_problem
from poise.service.server.logs import Level, Logbook
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.wire.request import MOST_VARIABLES, JobRequest, RetrySpec, Submission
from poise.service.wire.views import JobState, SubmittedView


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Api:
    """As the test before has left it; for a property, whose examples share one fixture, `renew` it first."""
    return an_api(tmp_path_factory.mktemp("problems"), ApiOptions(log=Logbook(least=Level.ERROR)))


@pytest.fixture
def api(shared: Api) -> Api:
    shared.renew()
    return shared


def _job(**fields: Any) -> dict[str, Any]:
    return {"jobs": [{"command": ["x"]}, {"command": ["x"], **fields}]}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (_job(gpu=4), "unknown key 'gpu' in jobs[1]; did you mean 'gpus'?"),
        (_job(checkpoint={"evry": 1}), "unknown key 'evry' in jobs[1].checkpoint; did you mean 'every'?"),
        (_job(retry={"xyzzy": 1}), "unknown key 'xyzzy' in jobs[1].retry; known: exit_codes, on_errors"),
        ({"job": []}, "unknown key 'job'; did you mean 'jobs'? (and 1 more)"),
        ({}, "jobs: missing"),
        ({"jobs": []}, "jobs: tuple should have at least 1 item after validation, not 0, got []"),
        (_job(gpus=0), "jobs[1].gpus: expected greater than or equal to 1, got 0"),
        (_job(gpus="4"), "jobs[1].gpus: expected a valid integer, got '4'"),
        (_job(gpus=True), "jobs[1].gpus: expected a valid integer, got True"),
        (_job(gpus=2, min_gpus=4), "jobs[1]: gpus: expected min_gpus <= gpus <= max_gpus"),
        (_job(env={"POISE_X": "1"}), "jobs[1]: env: names that begin with POISE_ are Poise's own"),
        (_job(state="x"), "unknown key 'state' in jobs[1]; did you mean 'name'?"),
        ([], "body: expected an object, got []"),
        (7, "body: expected an object, got 7"),
    ],
)
def test_mistake_in_a_body_is_one_line_that_says_where_and_what(body: Any, line: str, api: Api) -> None:
    reply = api.call("user", "POST", "/v1/jobs", body)
    assert reply.problem[:2] == (400, "wrong-request")
    if "'state'" not in line:  # whichever is nearest
        assert reply.problem[2] == line
    assert len(api.engine.jobs) == 2


@pytest.mark.parametrize(
    ("list_", "place"),
    [('{"jobs":[%s]}', "jobs[0]"), ('{"jobs":[{"command":[%s]}]}', "jobs[0].command[0]")],
)
def test_list_of_mistakes_costs_no_more_than_its_first(list_: str, place: str) -> None:
    raw = (list_ % ",".join(["7"] * 100_000)).encode()
    with pytest.raises(ValidationError) as error:
        Submission.model_validate_json(raw, strict=True)
    assert error.value.error_count() <= 3
    assert str(body_problem(error.value, Submission)).startswith(f"{place}: expected ")


def test_variables_are_counted_before_they_are_looked_at() -> None:
    names = {f"-{number}": "" for number in range(MOST_VARIABLES + 1)}
    with pytest.raises(ValidationError) as error:
        Submission.model_validate({"jobs": [{"command": ["x"], "env": names}]})
    line = "jobs[0].env: dictionary should have at most 500 items after validation, not 501, got {'-0': ''"
    assert str(body_problem(error.value, Submission)).startswith(line)
    assert error.value.error_count() <= 2


def test_mistakes_that_are_very_many_are_counted_and_not_described(api: Api) -> None:
    line = "5,000 mistakes, too many to name one; known keys: name, tenant, role, days"
    body = {"name": "new", **{f"x{number}": 1 for number in range(5_000)}}
    assert api.call("admin", "POST", "/v1/tokens", body).problem == (400, "wrong-request", line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/v1/jobs?stat=RUNNING", "query: unknown key 'stat'; did you mean 'state'?"),
        ("/v1/jobs?limit=0", "query: limit: expected greater than or equal to 1, got '0'"),
        ("/v1/jobs?limit=1001", "query: limit: expected less than or equal to 1000, got '1001'"),
        ("/v1/jobs?offset=-1", "query: offset: expected greater than or equal to 0, got '-1'"),
        ("/v1/jobs/job-0/logs?limit=1048577", "query: limit: expected less than or equal to 1048576, got '1048577'"),
        ("/v1/jobs?limit=1&limit=2", "query: limit: expected once, got it 2 times"),
        ("/v1/jobs?tenant=a&tenant=a&tenant=a", "query: tenant: expected once, got it 3 times"),
        ("/v1/jobs/a%20b", "path: job: string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$', got 'a b'"),
        ("/v1/jobs/job-0%0A", "path: job: string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$', got 'job-0\\n'"),
    ],
)
def test_mistake_in_a_path_or_query_is_one_line_too(path: str, line: str, api: Api) -> None:
    assert api.call("user", "GET", path).problem == (400, "wrong-request", line)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/me"), ("GET", "/v1/nodes"), ("GET", "/v1/shares"), ("GET", "/v1/service"), ("GET", "/v1/policy"),
        ("GET", "/v1/tokens"), ("GET", "/v1/jobs/job-0"), ("GET", "/v1/jobs/job-0/why"), ("GET", "/metrics"),
        ("GET", "/openapi.json"), ("POST", "/v1/jobs"), ("POST", "/v1/jobs/job-0/release"), ("POST", "/v1/tokens"),
        ("PUT", "/v1/shares/mine"), ("PUT", "/v1/policy"), ("DELETE", "/v1/tokens/user"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("query", ["x=1", "x", "x=", "x=1&x=2"])
def test_endpoint_that_takes_no_query_refuses_every_key(method: str, path: str, query: str, api: Api) -> None:
    assert api.call("admin", method, f"{path}?{query}").problem == (400, "wrong-request", "query: unknown key 'x'")


@pytest.mark.parametrize("name", ["..", ".", "%2e%2e", "a%2fb", "%2fetc%2fpasswd", "a%00", "-rf", "a" * 65, "é"])
def test_invalid_id_reaches_no_job(name: str, api: Api) -> None:
    for path in (f"/v1/jobs/{name}", f"/v1/jobs/{name}/logs", f"/v1/jobs/{name}/why"):
        assert api.call("admin", "GET", path).status in {400, 404}


def test_value_that_is_long_is_cut(api: Api) -> None:
    line = api.call("user", "POST", "/v1/jobs", _job(name="x" * 100_000)).problem[2]
    assert line.startswith("jobs[1].name: string should have at most 64 characters, got 'xxx")
    assert len(line) < 200
    line = api.call("user", "POST", "/v1/jobs", {"jobs": [{"y" * 100_000: 1}]}).problem[2]
    assert len(line) < 700


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 10_000, b'{"jobs": NaN}', b'"\\ud800"', b"1" * 5_000])
def test_invalid_json_is_refused(raw: bytes, api: Api) -> None:
    call = api.request("user", "POST", "/v1/jobs", {})
    status, code, _ = calls(api.app, [Call(call.method, call.path, call.headers, (raw,))])[0].problem
    assert (status, code) == (400, "wrong-request")


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"]
)
def test_body_without_the_type_json_is_refused(kind: str, api: Api) -> None:
    reply = api.call("user", "POST", "/v1/jobs", _job(), content_type=kind)
    assert reply.problem[:2] == (415, "wrong-type")
    assert api.call("user", "POST", "/v1/jobs", _job(), content_type="Application/JSON; charset=utf-8").status == 201


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (RefusalCode.WRONG, 400),
        (RefusalCode.FORBIDDEN, 403),
        (RefusalCode.UNKNOWN, 404),
        (RefusalCode.CONFLICT, 409),
        (RefusalCode.FULL, 429),
        (RefusalCode.STORAGE, 507),
        (RefusalCode.NOT_READY, 503),
    ],
)
def test_refusal_of_the_engine_has_its_status_and_temporary_ones_say_when_to_retry(
    fault: RefusalCode, status: int, api: Api
) -> None:
    api.engine.fails = lambda: RequestRefusedError(fault, "not\nnow")
    reply = api.call("user", "POST", "/v1/jobs", _job())
    assert reply.problem == (status, fault.value, "not now")
    assert ("retry-after" in reply.headers) == (status in {429, 503, 507})


def test_error_that_answers_many_commands_collects_no_tracebacks(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    full = RequestRefusedError(RefusalCode.STORAGE, "no room")
    reply: Future[SubmittedView] = Future()
    reply.set_exception(full)
    monkeypatch.setattr(api.engine, "submit", lambda *_: reply)
    for _ in range(3):
        assert api.call("user", "POST", "/v1/jobs", {"jobs": [{"command": ["x"]}]}).problem == (
            507,
            "storage-full",
            "no room",
        )
    assert full.__traceback__ is None


def test_unknown_policy_is_refused_with_the_nearest_ones(api: Api) -> None:
    reply = api.call("admin", "PUT", "/v1/policy", {"policy": "tiresius"})
    assert reply.problem[:2] == (400, "wrong-request")
    assert reply.problem[2].startswith("unknown policy 'tiresius'; did you mean tiresias")


def test_large_body_is_read_as_any_other(api: Api) -> None:
    jobs = [{"command": ["x" * 800]} for _ in range(1_000)]
    assert len(api.call("user", "POST", "/v1/jobs", {"jobs": jobs}).json["jobs"]) == 1_000
    jobs[-1]["nme"] = ["x"]
    line = "unknown key 'nme' in jobs[999]; did you mean 'name'?"
    assert api.call("user", "POST", "/v1/jobs", {"jobs": jobs}).problem == (400, "wrong-request", line)


def test_queue_is_asked_for_what_the_query_says(api: Api) -> None:
    api.engine.jobs |= {
        f"more-{number}": Kept("mine", JobRequest(command=("x",), app="sweep"), state)
        for number, state in enumerate(JobState)
    }
    assert len(api.call("user", "GET", "/v1/jobs").json["jobs"]) == 2 + 5
    assert len(api.call("user", "GET", "/v1/jobs?state=FAILED&state=SUCCEEDED").json["jobs"]) == 2
    assert len(api.call("user", "GET", "/v1/jobs?tenant=mine&app=sweep&limit=2&offset=4").json["jobs"]) == 1
    assert api.call("user", "GET", "/v1/jobs?tenant=theirs").json["total"] == 1


def test_character_that_cannot_be_encoded_hides_nothing_else(api: Api, tmp_path: Path) -> None:
    service = Service(tmp_path)
    [job] = service.submit(JobRequest(command=("x",), retry=RetrySpec(on_errors=0)))
    service.machine.end(job, RunEnding.FAILED, cause="caf\udce9 é", code=1)
    service.settle()
    service.restart()
    app = create_app(service.engine, api.accounts, ApiOptions(log=Logbook(least=Level.ERROR)))
    paths = ("/v1/jobs?state=FAILED", f"/v1/jobs/{job}", f"/v1/jobs/{job}/why", "/v1/events")
    for reply in calls(app, [api.request("operator", "GET", path) for path in paths]):
        assert reply.status == 200
        assert "caf? é" in str(reply.json)


def test_refusal_with_a_character_that_cannot_be_encoded_is_answered(api: Api) -> None:
    api.engine.fails = lambda: RequestRefusedError(RefusalCode.WRONG, "caf\udce9")
    assert api.call("user", "GET", "/v1/service").problem == (400, "wrong-request", "caf?")


def test_log_is_asked_for_what_the_query_says(api: Api) -> None:
    whole = api.call("user", "GET", "/v1/jobs/job-0/logs").json
    assert (whole["text"], whole["next"]) == ("epoch 1\nepoch 2\n", 16)
    assert api.call("user", "GET", "/v1/jobs/job-0/logs?offset=8&limit=5").json["text"] == "epoch"
    assert api.call("user", "GET", "/v1/jobs/job-0/logs?offset=-8").json["text"] == "epoch 2\n"


_KEYS = st.sampled_from([*JobRequest.model_fields, *Submission.model_fields, "x"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=10,
)


@given(fields=st.dictionaries(_KEYS, _VALUES, max_size=4))
def test_any_body_is_taken_or_refused_in_one_line(fields: dict[str, Any], shared: Api) -> None:
    shared.renew()
    for body in (fields, {"jobs": [fields]}, {"jobs": [{"command": ["x"], **fields}]}):
        reply = shared.call("user", "POST", "/v1/jobs", body)
        assert reply.status == 201 or reply.problem[0] in {400, 403, 429}
