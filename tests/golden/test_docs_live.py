"""What the pages about the live service say in tables is what the code has: metrics, causes of failure, reasons."""

import re

from prometheus_client.metrics_core import Metric
from tests.docs_runner import ROOT
from tests.fake_engine import FakeEngine

from poise.core.reasons import Code
from poise.model.action import Why
from poise.model.failures import CATEGORIES, Verdict
from poise.server.metrics import Metrics

_OF_SAMPLES = {"le"}
"""Labels that every histogram has."""
_WAITING = {Code.HELD, Code.SHARE, Code.ORDER, Code.FRAGMENTATION, Code.CAPACITY}


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
    metrics.ended("finished")
    metrics.preempted(Why.OUTRANKED)
    metrics.requested("/v1/jobs", "GET", 200, 0.1)
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


def test_causes_of_failure_are_in_the_troubleshooting_with_what_comes_of_them() -> None:
    section = _page("how-to", "why-is-my-job-not-running.md").partition("## Is it tried again?")[2].partition("\n## ")[0]
    hopeless, transient, unknown = (set(re.findall(r"`([a-z-]+)`", row[0])) for row in _rows(section)[2:5])
    assert hopeless == {each.name for each in CATEGORIES if each.verdict is Verdict.HOPELESS}
    assert transient == {each.name for each in CATEGORIES if each.verdict is Verdict.TRANSIENT}
    assert unknown == {each.name for each in CATEGORIES if each.verdict is Verdict.UNKNOWN}


def test_every_reason_to_wait_has_an_answer_in_the_troubleshooting() -> None:
    headings = re.findall(r"^## (.+)$", _page("how-to", "why-is-my-job-not-running.md"), re.MULTILINE)
    for code in _WAITING:
        assert any(f"`{code}`" in heading for heading in headings), code
