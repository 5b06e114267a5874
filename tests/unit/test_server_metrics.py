"""Metrics: names as documented, bounded numbers of time series, gauges that are read when asked for."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fake_engine import FakeEngine, Kept, an_api

from poise.service.server.http.guard import ApiOptions
from poise.service.server.logs import Level, Logbook
from poise.service.server.metrics import MOST_TENANTS, Metrics
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState, NodeList, NodeRow


def read(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and values of labels, in the order of the labels' names."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (each.name, tuple(each.labels[label] for label in sorted(each.labels))): each.value
        for family in families
        for each in family.samples
    }


def test_counters_and_histograms_hold_what_they_were_fed() -> None:
    metrics = Metrics()
    metrics.decision.observe(0.02)
    metrics.commit.observe(0.001)
    metrics.commits.inc()
    metrics.entries.inc(3)
    metrics.commit.observe(0.001)
    metrics.commits.inc()
    metrics.entries.inc(4)
    metrics.launched.inc()
    metrics.ended.labels("finished").inc()
    metrics.preempted.labels("outranked").inc()
    metrics.wait.observe(30.0)
    metrics.requests.labels("/v1/jobs", "GET", "200").inc()
    metrics.request.labels("/v1/jobs").observe(0.004)
    found = read(metrics)
    assert found["poise_decision_seconds_count", ()] == 1
    assert found["poise_decision_seconds_sum", ()] == 0.02
    assert found["poise_journal_commits_total", ()] == 2
    assert found["poise_journal_entries_total", ()] == 7
    assert found["poise_runs_launched_total", ()] == 1
    assert found["poise_runs_ended_total", ("finished",)] == 1
    assert found["poise_preemptions_total", ("outranked",)] == 1
    assert found["poise_job_wait_seconds_sum", ()] == 30.0
    assert found["poise_http_requests_total", ("GET", "/v1/jobs", "200")] == 1


def test_gauges_are_read_at_each_scrape() -> None:
    metrics, engine = Metrics(), FakeEngine()
    metrics.watch(engine)
    assert read(metrics)["poise_jobs", ("RUNNING",)] == 0
    engine.jobs["a"] = Kept("t", JobRequest(command=("x",)), JobState.RUNNING)
    found = read(metrics)
    assert found["poise_jobs", ("RUNNING",)] == 1
    assert {labels[0] for name, labels in found if name == "poise_jobs"} == {state.value for state in JobState}
    assert (found["poise_gpus", ("free", "gpu")], found["poise_gpus", ("held", "gpu")]) == (3, 1)
    assert found["poise_ready", ()] == 1


def test_gpus_of_a_lost_node_are_neither_free_nor_held(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, engine = Metrics(), FakeEngine()
    lost = NodeRow(name="n", gpu_type="k80", gpus=2, free=2, rack="r", alive=False, jobs=(None, None))
    monkeypatch.setattr(engine, "nodes", lambda: NodeList(nodes=(*FakeEngine().nodes().nodes, lost)))
    metrics.watch(engine)
    found = read(metrics)
    assert [found["poise_gpus", (state, "k80")] for state in ("held", "free", "lost")] == [0, 0, 2]


def test_tenants_have_a_bounded_number_of_time_series() -> None:
    metrics, engine = Metrics(), FakeEngine()
    metrics.watch(engine)
    for number in range(MOST_TENANTS + 20):
        engine.weights[f"tenant-{number}"] = 1.0
    found = read(metrics)
    assert sum(name == "poise_tenant_share" for name, _ in found) == MOST_TENANTS
    assert found["poise_tenants", ()] == MOST_TENANTS + 20


def test_requests_are_counted_by_route_and_never_by_path(tmp_path: Path) -> None:
    metrics = Metrics()
    api = an_api(tmp_path, ApiOptions(metrics=metrics, log=Logbook(least=Level.ERROR)))
    for number in range(5):
        api.call("user", "GET", f"/v1/jobs/unknown-{number}")
        api.call("user", f"METHOD{number}", f"/nowhere-{number}")
        api.call(None, "GET", "/v1/me")
    found = {labels: value for (name, labels), value in read(metrics).items() if name == "poise_http_requests_total"}
    assert found == {
        ("GET", "/v1/jobs/{job}", "404"): 5,
        ("other", "other", "404"): 5,
        ("GET", "other", "401"): 5,
    }


def test_metrics_are_text_that_prometheus_reads(tmp_path: Path) -> None:
    reply = an_api(tmp_path, ApiOptions(log=Logbook(least=Level.ERROR))).call("reader", "GET", "/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert list(text_string_to_metric_families(reply.body.decode()))


def test_reference_names_every_metric_and_no_other() -> None:
    metrics = Metrics()
    metrics.watch(FakeEngine())
    there = {
        re.sub(r"(?<!time)_(total|bucket)$", "", line.split()[2])
        for line in metrics.text().decode().splitlines()
        if line[0] == "#"
    }
    page = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    table = page.partition("## Metrics")[2].partition("## Logs")[0]
    assert {name.removesuffix("_total") for name in re.findall(r"`(poise_\w+)`", table)} == there
