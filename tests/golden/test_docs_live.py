"""What the pages about the live service say in tables is what the code has: metrics, causes of failure, reasons."""

import re

import pytest
from prometheus_client.metrics_core import Metric
from tests.docs_runner import ROOT, blocks
from tests.fake_engine import FakeEngine
from tests.shell import program_context

from poise.cli.serve import _setup, serve
from poise.scheduler.core.reasons import Code
from poise.scheduler.model.action import PreemptionCause
from poise.scheduler.model.failures import CATEGORIES, Verdict, verdict
from poise.service.backends.local import orders
from poise.service.backends.local.state_dir import KEPT_RUNS
from poise.service.server import logs
from poise.service.server.accounts import LONGEST_TOKEN, MOST_ACCOUNTS
from poise.service.server.batch import MOST_QUEUED
from poise.service.server.event_log import MOST_ENTRIES
from poise.service.server.http import connections, guard, listener
from poise.service.server.http.app import MOST_ROWS
from poise.service.server.http.guard import RequestLimits
from poise.service.server.metrics import Metrics
from poise.service.server.queue_view import IN_LINE
from poise.service.server.quotas import MIB, Allowance
from poise.service.server.records import MOST_RUNS
from poise.service.server.service import MOST_AWAITED_BY_ALL
from poise.service.server.start_conditions import StartCode
from poise.service.wire import request
from poise.service.wire.after import MOST_AWAITED
from poise.worker.checkpoints import KEPT
from poise.worker.testing import preempting

pytestmark = pytest.mark.docs

_OF_SAMPLES = {"le"}
"""Labels that every histogram has."""
_WAITING = {Code.HELD, Code.SHARE, Code.ORDER, Code.FRAGMENTATION, Code.CAPACITY, *StartCode}


def _page(*parts: str) -> str:
    return ROOT.joinpath("docs", *parts).read_text(encoding="utf-8")


def _rows(text: str) -> list[list[str]]:
    """The cells of every line of a table."""
    return [line.strip("| ").split(" | ") for line in text.replace("| |", "| - |").splitlines() if line.startswith("|")]


def _fed() -> list[Metric]:
    """Every metric with at least one sample."""
    metrics, engine = Metrics(), FakeEngine()
    engine.weights["a tenant"] = 1.0
    metrics.watch(engine)
    metrics.ended.labels("finished").inc()
    metrics.preempted.labels(PreemptionCause.OUTRANKED).inc()
    metrics.refused.labels("user-jobs").inc()
    metrics.requests.labels("/v1/jobs", "GET", "200").inc()
    metrics.request.labels("/v1/jobs").observe(0.1)
    return list(metrics.registry.collect())


def test_live_metrics_are_in_the_reference_with_their_types_and_labels() -> None:
    there = {
        (
            each.name + ("_total" if each.type == "counter" else ""),
            each.type,
            frozenset(label for sample in each.samples for label in sample.labels) - _OF_SAMPLES,
        )
        for each in _fed()
    }
    rows = [row for row in _rows(_page("reference", "live-metrics.md")) if row[0].startswith("`poise_")]
    assert len(rows) == len(there)
    assert {(row[0].strip("`"), row[1], frozenset(re.findall(r"`(\w+)`", row[2]))) for row in rows} == there


def test_bounds_of_the_service_are_on_the_page_of_limits() -> None:
    found = _rows(_page("reference", "limits.md").partition("## Kept for ever")[0])
    rows = {row[0].partition(";")[0].partition(",")[0]: row[1] for row in found if len(row) == 2}
    bounds, room, allowance = RequestLimits(), connections.LIMITS, Allowance()
    for of, values in {
        "connections at once that have brought no token yet": (room.anonymous, room.grace, connections.BACKLOG),
        "connections at once that have brought one": (room.authenticated, room.per_token),
        "open files that connections leave to the rest of the service": (
            connections.SPARE_FILES,
            room.total + connections.SPARE_FILES,
            connections.FILES_PER_RUN,
        ),
        "the time of a TLS handshake": (connections.HEAD_SECONDS,),
        "the time of a body": (bounds.upload,),
        "those of one token": (bounds.per_token,),
        "lines of the log that one address": (logs.LINES, logs.MOST_SOURCES),
        "the time of a head": (connections.HEAD_SECONDS, listener.MOST_HEAD >> 10),
        "the time between two requests of a connection": (listener.IDLE_SECONDS,),
        "requests under way at once": (bounds.requests, bounds.reserved),
        "the time of a request": (bounds.seconds,),
        "the time for a client to take what it is sent": (connections.READ_SECONDS,),
        "requests under way when the service stops": (listener.STOP_SECONDS,),
        "what is read of a body that is too large": (guard.MOST_DRAINED >> 20, guard.DRAIN_SECONDS),
        "the body of a request": (bounds.body >> 20,),
        "its headers": (bounds.headers, bounds.header_bytes >> 10, bounds.path, bounds.query),
        "a token": (LONGEST_TOKEN,),
        "tokens": (MOST_ACCOUNTS,),
        "jobs of a submission": (request.MOST_JOBS,),
        "jobs that have not ended": (MOST_QUEUED,),
        "those of one user (a token of the role `user`)": (allowance.user_jobs, allowance.tenant_jobs),
        "arguments of a command": (request.MOST_ARGUMENTS, request.MOST_COMMAND),
        "variables of a job's environment": (request.MOST_VARIABLES, request.MOST_ENVIRONMENT),
        "one argument": (orders.MOST_BYTES,),
        "a working directory": (request.MOST_PATH,),
        "GPUs of a job": (request.MOST_GPUS,),
        "what a job waits for (`after`): terms": (
            request.MOST_AFTER,
            request.MOST_AFTER_TERM,
            MOST_AWAITED,
            MOST_AWAITED_BY_ALL,
        ),
        "waiting jobs whose place in line (`position`": (IN_LINE,),
        "things that happened in an answer to `GET /v1/events`": (MOST_ROWS, MOST_ENTRIES),
        "jobs in an answer to `GET /v1/jobs`": (MOST_ROWS,),
        "runs of a job that `poise show` lists one by one": (MOST_RUNS,),
        "checkpoints of a job on disk": (KEPT, KEPT_RUNS),
    }.items():
        for value in values:
            assert re.search(rf"(?<![\d,]){value:,.0f}(?![\d,]*\d)", rows[of]), (of, value)


def test_what_users_may_queue_is_on_the_page_of_limits() -> None:
    section = _page("reference", "limits.md").partition("## What users may queue")[2].partition("\n## ")[0]
    found = {row[0].strip("`"): row[2] for row in _rows(section)[2:]}
    allowed = Allowance()
    assert found == {
        "--user-jobs": f"{allowed.user_jobs:,}",
        "--tenant-jobs": f"{allowed.tenant_jobs:,}",
        "--user-rate": f"{allowed.user_rate:,}",
        "--user-mib": f"{allowed.user_bytes // MIB:,}",
        "--tenant-mib": f"{allowed.tenant_bytes // MIB:,}",
    }
    setup = _setup(serve.make_context("serve", ["--cluster", "v100:1"], parent=program_context()).params)
    assert setup.allowance == allowed


def test_causes_of_failure_are_in_the_troubleshooting_with_what_comes_of_them() -> None:
    section = _page("how-to", "why-is-my-job-not-running.md").partition("## Is it tried again?")[2].partition("\n## ")[0]
    for row, expected in zip(_rows(section)[2:5], Verdict, strict=True):
        listed = set(re.findall(r"`([a-z-]+)`", row[0]))
        assert {each.name for each in CATEGORIES if each.verdict is expected} <= listed
        assert {name: verdict(name) for name in listed} == dict.fromkeys(listed, expected)


def test_every_reason_to_wait_has_an_answer_in_the_troubleshooting() -> None:
    headings = re.findall(r"^## (.+)$", _page("how-to", "why-is-my-job-not-running.md"), re.MULTILINE)
    for code in _WAITING:
        assert any(f"`{code}`" in heading for heading in headings), code


def test_the_training_loop_of_the_readme_resumes() -> None:
    """By itself it never saves; and it asserts what it comes to."""
    found = ["\n".join(block.lines) for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"))]
    (script,) = [text for text in found if text.startswith("from pathlib") and "attach(save=save" in text]
    with preempting(after_steps=30) as poise:
        poise.run(lambda: exec(script, {}))
    assert poise.starts == 4
