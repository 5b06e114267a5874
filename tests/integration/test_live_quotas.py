"""A user who queues too much, and an operator who undoes it: over HTTP and from the command line, against a real service."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.test_api_serve import Server, a_server
from tests.shell import COMMAND, poise

BOUNDS = ("--user-jobs", 1_500, "--user-rate", 2_000, "--user-mib", 1)


@contextmanager
def served(state: Path, *options: object) -> Iterator[Server]:
    """A service of its own, of which nothing is left."""
    running = a_server(state, "--quiet", *options, command=[COMMAND, "serve"])
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(tmp_path / "state", *BOUNDS) as running:
        yield running


def a_token(server: Server, name: str, tenant: str) -> str:
    body = json.dumps({"name": name, "tenant": tenant, "role": "user"})
    token: str = json.loads(server.call("POST", "/v1/tokens", body)[2])["token"]
    return token


def submitted(server: Server, token: str, jobs: int, filler: int = 0) -> tuple[int, dict[str, str], dict[str, str]]:
    job = {"command": ["x"], "hold": True, "env": {"F": "x" * filler}}
    body = json.dumps({"jobs": [job] * jobs})
    status, headers, answer = server.call("POST", "/v1/jobs", body, authorization=f"Bearer {token}")
    return status, headers, json.loads(answer)


def test_flood_of_jobs_is_refused_and_undone_and_others_are_not_concerned(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = a_token(server, "ann", "vision"), a_token(server, "bob", "speech")
    assert submitted(server, ann, 1_000)[0] == 201
    status, headers, problem = submitted(server, ann, 600)
    assert (status, problem["code"], headers["retry-after"]) == (429, "over-quota", "60")
    text = "token 'ann' has 1,000 jobs that have not ended, and 600 more would be over 1,500 (--user-jobs)"
    assert problem["detail"] == f"{text}; cancel some, or wait for them to end"
    assert submitted(server, bob, 100)[0] == 201
    assert submitted(server, server.token, 1_000)[0] == submitted(server, server.token, 1_000)[0] == 201

    monkeypatch.setenv("POISE_URL", server.url)
    monkeypatch.setenv("POISE_TOKEN", bob)
    refusal = poise("cancel", "--tenant", "vision").refusal
    assert refusal == "token 'bob' is of tenant speech, not of vision; only operators may do that"
    monkeypatch.setenv("POISE_TOKEN", server.token)
    assert poise("cancel", "--tenant", "vision").out == "1,000 jobs of tenant vision cancelled\n"
    assert poise("cancel", "--tenant", "vision").refusal == "the tenant 'vision' has no jobs that have not ended"
    assert poise("cancel", "--tenant", "speech", "--json").json == {"tenant": "speech", "jobs": 100}
    assert json.loads(server.call("GET", "/v1/jobs")[2])["total"] == 2_000

    assert submitted(server, ann, 1_000)[0] == 201
    assert poise("cancel", "--tenant", "vision", "--yes").code == 0
    status, headers, problem = submitted(server, ann, 1)
    assert (status, problem["code"]) == (429, "too-fast")
    assert 1 < int(headers["retry-after"]) <= 3_660
    assert 'poise_submissions_refused_total{bound="user-rate"} 1.0' in server.call("GET", "/metrics")[2].decode()


def test_bytes_that_a_user_submits_are_bounded_also_after_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with served(state, *BOUNDS) as server:
        ann = a_token(server, "ann", "vision")
        assert [submitted(server, ann, 10, 60_000)[0] for _ in range(3)] == [201, 429, 429]
    with served(state, *BOUNDS) as again:
        status, _, problem = submitted(again, ann, 10, 60_000)
        assert (status, problem["code"]) == (429, "over-quota")
        text = "token 'ann' has 0.5726 MiB of jobs that have not ended, and 0.5726 MiB more would"
        assert problem["detail"].startswith(text)
    with served(state, "--user-mib", 0) as wide:
        assert submitted(wide, ann, 10, 60_000)[0] == 201


def test_whoever_sits_at_a_terminal_is_asked_first(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_URL", server.url)
    monkeypatch.setenv("POISE_TOKEN", server.token)
    submitted(server, server.token, 2)
    monkeypatch.setattr("poise.cli.control.can_ask", lambda: True)
    no = poise("cancel", "--tenant", "default", stdin=b"n\n")
    assert (no.code, no.out) == (1, "")
    assert no.err.startswith("Cancel 2 jobs of tenant default? [y/N]")
    assert no.err.endswith("poise: nothing was cancelled\n")
    assert poise("cancel", "--tenant", "default", stdin=b"y\n").out == "2 jobs of tenant default cancelled\n"


def test_a_tenant_is_not_named_beside_jobs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_URL", server.url)
    monkeypatch.setenv("POISE_TOKEN", server.token)
    assert poise("cancel", "17", "--tenant", "a").refusal.startswith("--tenant names all jobs of a tenant")
