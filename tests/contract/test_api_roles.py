"""Who may do what: every path, method and role, for jobs of the same and of another tenant. The table is written by hand."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fake_engine import Api, Call, an_api, calls

from poise.service.server.http.guard import ApiOptions
from poise.service.server.logs import Level, Logbook
from poise.service.wire.views import NewToken, Role

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get")
VICTIM = "victim"
MINE, THEIRS = "job-0", "job-1"

JOB = {"jobs": [{"command": ["true"]}]}
TOKEN = {"name": "new", "tenant": "mine", "role": "reader"}


@dataclass(frozen=True)
class Row:
    """Who gets through: roles that do with a job of their own tenant, and with another's (or where there is no job)."""

    method: str
    path: str
    own: str
    other: str
    body: Any = None


EVERYBODY, USERS, OPERATORS, ADMINS = "reader user operator admin", "user operator admin", "operator admin", "admin"

TABLE = (
    Row("GET", "/v1/jobs", EVERYBODY, EVERYBODY),
    Row("POST", "/v1/jobs", USERS, USERS, JOB),
    Row("GET", "/v1/jobs/{job}", EVERYBODY, EVERYBODY),
    Row("GET", "/v1/jobs/{job}/why", EVERYBODY, EVERYBODY),
    Row("GET", "/v1/jobs/{job}/logs", EVERYBODY, OPERATORS),
    Row("POST", "/v1/jobs/{job}/cancel", USERS, OPERATORS),
    Row("POST", "/v1/tenants/{tenant}/cancel", USERS, OPERATORS),
    Row("POST", "/v1/cancellations", USERS, USERS, {"tenant": "mine"}),
    Row("GET", "/v1/names/{name}", EVERYBODY, EVERYBODY),
    Row("POST", "/v1/jobs/{job}/hold", USERS, OPERATORS),
    Row("POST", "/v1/jobs/{job}/release", USERS, OPERATORS),
    Row("POST", "/v1/files/{sha256}", USERS, USERS, {"total": 1024, "offset": 0, "data": ""}),
    Row("GET", "/v1/nodes", EVERYBODY, EVERYBODY),
    Row("POST", "/v1/nodes/{node}/drain", OPERATORS, OPERATORS, {"reason": "new driver"}),
    Row("POST", "/v1/nodes/{node}/return", OPERATORS, OPERATORS),
    Row("GET", "/v1/shares", EVERYBODY, EVERYBODY),
    Row("PUT", "/v1/shares/{tenant}", ADMINS, ADMINS, {"weight": 2.0}),
    Row("GET", "/v1/service", EVERYBODY, EVERYBODY),
    Row("GET", "/v1/policy", EVERYBODY, EVERYBODY),
    Row("PUT", "/v1/policy", ADMINS, ADMINS, {"policy": "las"}),
    Row("GET", "/v1/events", EVERYBODY, EVERYBODY),
    Row("GET", "/v1/me", EVERYBODY, EVERYBODY),
    Row("GET", "/v1/tokens", ADMINS, ADMINS),
    Row("POST", "/v1/tokens", ADMINS, ADMINS, TOKEN),
    Row("DELETE", "/v1/tokens/{name}", ADMINS, ADMINS),
    Row("GET", "/metrics", EVERYBODY, EVERYBODY),
    Row("GET", "/openapi.json", EVERYBODY, EVERYBODY),
)
PATHS = tuple(dict.fromkeys(row.path for row in TABLE))
NOWHERE = (
    "/",
    "/v1",
    "/v1/",
    "/v1/jobs/",
    "/v1/jobs/job-0/",
    "/v1/jobs/job-0/secrets",
    "/docs",
    "/redoc",
    "/admin",
    "//v1/jobs",
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Api:
    made = an_api(tmp_path_factory.mktemp("roles"), ApiOptions(log=Logbook(least=Level.ERROR)))
    for name, days in (("expired", 1e-9), ("revoked", None)):
        wanted = NewToken(name=name, tenant="mine", role=Role.ADMIN, days=days)
        made.tokens[name] = made.accounts.make(wanted).token
    made.accounts.revoke("revoked")
    made.tokens |= {"wrong": "poise_" + "x" * 43, VICTIM: ""}
    return made


@pytest.fixture
def api(shared: Api) -> Api:
    shared.renew()
    return shared


def _path(template: str, job: str) -> str:
    return template.format(job=job, tenant="theirs" if job == THEIRS else "mine", name=VICTIM, node="gpu-0", sha256="0" * 64)


def test_table_has_every_endpoint_of_the_api(api: Api) -> None:
    described = api.call("reader", "GET", "/openapi.json").json["paths"]
    found = {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert found | {("GET", "/openapi.json")} == {(row.method, row.path) for row in TABLE}
    routes = {(method, route.path) for route in api.app.routes for method in getattr(route, "methods", ())}  # type: ignore[attr-defined]
    assert routes == {(row.method, row.path) for row in TABLE}


def test_reference_has_every_endpoint_with_its_role() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    found = set(re.findall(r"^\| ([A-Z]+) \| `(/[^`]*)` \| (\w+) \|", page, re.MULTILINE))
    assert found == {(row.method, row.path, row.own.split()[0]) for row in TABLE}


def test_reference_names_documents_as_the_description_does(api: Api) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [A-Z]+ \| `/[^`]*` \| .*$", page, re.MULTILINE)
    named = set(re.findall(r"`([A-Z][a-z]\w+)`", "\n".join(rows)))
    assert named
    assert named <= api.call("reader", "GET", "/openapi.json").json["components"]["schemas"].keys()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.method} {row.path}")
def test_role_gets_through_only_where_the_table_says_so(row: Row, api: Api) -> None:
    for role in Role:
        for job, allowed in ((MINE, row.own), (THEIRS, row.other)):
            api.renew()
            _make_victim(api)
            status = api.call(role, row.method, _path(row.path, job), row.body).status
            assert (200 <= status < 300) == (role.value in allowed.split()), (role, job, status)
            assert status < 300 or status == 403


def _make_victim(api: Api) -> None:
    if VICTIM not in {each.name for each in api.accounts.all()}:
        api.accounts.make(NewToken(name=VICTIM, tenant="mine", role=Role.READER))


@pytest.mark.parametrize("path", [*PATHS, *NOWHERE])
def test_request_without_a_good_token_gets_401_whatever_the_path_and_method(path: str, api: Api) -> None:
    where = _path(path, MINE)
    body = (b'{"jobs":[{"command":["true"]}]}',)
    kinds: dict[str, dict[str, str]] = {
        "none": {},
        "basic": {"authorization": "Basic YTpi"},
        "empty": {"authorization": "Bearer "},
    }
    kinds |= {name: {"authorization": f"Bearer {api.tokens[name]}"} for name in ("wrong", "expired", "revoked")}
    kinds["bare"] = {"authorization": api.tokens["admin"]}
    kinds["forwarded"] = {"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1", "forwarded": "for=127.0.0.1"}
    kinds["cookie"] = {"cookie": f"token={api.tokens['admin']}"}
    kinds["query"] = {}
    asked = [
        Call(method, f"{where}?token={api.tokens['admin']}" if kind == "query" else where, headers, body)
        for method in METHODS
        for kind, headers in kinds.items()
    ]
    for reply in calls(api.app, asked):
        assert reply.problem[:2] == (401, "no-token")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert set(api.engine.jobs) == {MINE, THEIRS}


@pytest.mark.parametrize("path", PATHS)
def test_method_that_a_path_does_not_have_is_refused_to_every_role(path: str, api: Api) -> None:
    known = {row.method for row in TABLE if row.path == path}
    others = [method for method in METHODS if method not in known]
    asked = [api.request(role, method, _path(path, MINE), {}) for role in Role for method in others]
    for reply in calls(api.app, asked):
        assert reply.problem[:2] == (405, "no-such-method")
        assert set(reply.headers["allow"].split(", ")) == known


@pytest.mark.parametrize("path", NOWHERE)
def test_unknown_path_is_404_for_every_role_and_method(path: str, api: Api) -> None:
    asked = [api.request(role, method, path) for role in Role for method in METHODS]
    assert {reply.problem[:2] for reply in calls(api.app, asked)} == {(404, "not-found")}


@pytest.mark.parametrize("maker", Role)
@pytest.mark.parametrize("wanted", Role)
def test_no_role_grants_what_it_lacks(maker: Role, wanted: Role, api: Api) -> None:
    body = {"name": "new", "tenant": "mine", "role": wanted.value}
    reply = api.call(maker, "POST", "/v1/tokens", body)
    assert reply.status == (201 if maker is Role.ADMIN else 403)
    assert ("new" in {each.name for each in api.accounts.all()}) == (maker is Role.ADMIN)


@pytest.mark.parametrize("role", Role)
def test_command_and_environment_are_shown_to_owner_and_operators_alone(role: Role, api: Api) -> None:
    assert api.call(role, "GET", f"/v1/jobs/{MINE}").json["request"] is not None
    theirs = api.call(role, "GET", f"/v1/jobs/{THEIRS}")
    assert (theirs.json["request"] is not None) == (role in {Role.OPERATOR, Role.ADMIN}) == (b"SECRET" in theirs.body)


@pytest.mark.parametrize("role", [Role.USER, Role.OPERATOR, Role.ADMIN])
def test_only_operators_submit_in_another_tenants_name(role: Role, api: Api) -> None:
    jobs = [{"command": ["true"]}, {"command": ["true"], "tenant": "theirs"}]
    reply = api.call(role, "POST", "/v1/jobs", {"jobs": jobs})
    if role is Role.USER:
        assert reply.problem == (403, "forbidden", "jobs[1].tenant: token 'user' is of tenant mine, not of theirs")
        assert len(api.engine.jobs) == 2
    else:
        assert reply.status == 201
        assert api.engine.jobs["job-3"].tenant == "theirs"


@pytest.mark.parametrize("role", [Role.USER, Role.OPERATOR, Role.ADMIN])
def test_only_operators_give_a_job_more_than_the_usual_weight(role: Role, api: Api) -> None:
    jobs = [{"command": ["true"], "weight": weight} for weight in (0.001, 1.0, 1.5)]
    reply = api.call(role, "POST", "/v1/jobs", {"jobs": jobs})
    if role is Role.USER:
        line = "expected at most 1 with a token of role user, got 1.5; give your other jobs less, or ask an operator"
        assert reply.problem == (403, "forbidden", f"jobs[2].weight: {line}")
        assert len(api.engine.jobs) == 2
        assert api.call(role, "POST", "/v1/jobs", {"jobs": jobs[2:]}).problem[2] == f"weight: {line}"
        assert api.call(role, "POST", "/v1/jobs", {"jobs": jobs[:2]}).status == 201
    else:
        assert reply.status == 201


def test_user_may_name_their_own_tenant(api: Api) -> None:
    assert api.call("user", "POST", "/v1/jobs", {"jobs": [{"command": ["true"], "tenant": "mine"}]}).status == 201


@pytest.mark.parametrize("verb", ["cancel", "hold", "release"])
def test_refused_command_changes_nothing(verb: str, api: Api) -> None:
    before = dict(api.engine.jobs)
    assert api.call("user", "POST", f"/v1/jobs/{THEIRS}/{verb}").problem[:2] == (403, "forbidden")
    assert api.call("reader", "POST", f"/v1/jobs/{MINE}/{verb}").problem[:2] == (403, "forbidden")
    assert api.call("user", "POST", f"/v1/jobs/nothing/{verb}").problem[:2] == (404, "not-found")
    assert api.engine.jobs == before


def test_files_of_another_tenant_are_for_operators(api: Api) -> None:
    path, body = f"/v1/files/{'0' * 64}?tenant=theirs", {"total": 1024, "offset": 0, "data": ""}
    answers = {role: api.call(role, "POST", path, body).status for role in ("user", "operator", "admin")}
    assert answers == {"user": 403, "operator": 200, "admin": 200}


@pytest.mark.parametrize("body", [{}, {"tenant": "theirs"}, {"tenant": None, "app": "a"}, {"states": ["PENDING"]}])
def test_users_cancel_jobs_of_their_own_tenant_alone(body: dict[str, object], shared: Api) -> None:
    shared.renew()
    assert shared.call("user", "POST", "/v1/cancellations", body).problem[:2] == (403, "forbidden")
    assert not any(kept.state.is_final for kept in shared.engine.jobs.values())


def test_jobs_that_have_ended_cannot_be_cancelled_by_state(shared: Api) -> None:
    shared.renew()
    wrong: tuple[dict[str, object], ...] = (
        {"states": ["FAILED"]},
        {"states": ["GONE"]},
        {"state": "PENDING"},
        {"tenant": 1},
    )
    for body in wrong:
        assert shared.call("operator", "POST", "/v1/cancellations", body).problem[:2] == (400, "wrong-request"), body
    done = shared.call("operator", "POST", "/v1/cancellations", {"states": ["PENDING"]})
    assert (done.status, done.json) == (200, {"tenant": None, "jobs": 2})
