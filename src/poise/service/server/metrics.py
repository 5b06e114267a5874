"""Metrics for Prometheus: counters that the engine and the API feed, and gauges read from the service at each scrape.

Every label has a bounded number of values. Times are in seconds, shares are fractions of 1.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from poise import __version__
from poise.service.server.service_api import ServiceApi
from poise.service.wire.views import JobState, NodeCondition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_TENANTS = 100  # tenants that have a time series of their own: those that hold most

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG = (1.0, 10.0, 60.0, 300.0, 900.0, 3_600.0, 4 * 3_600.0, 86_400.0, 7 * 86_400.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second, unused time series for each


class Metrics:
    """The registry of one service; its counters and histograms are attributes, which any thread may feed.

    Labels have few values: `route` is the template of a path, never a path; `reason` and `bound` are stable codes.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decision = self._histogram("poise_decision_seconds", "What one scheduling decision took", _SHORT)
        self.commit = self._histogram("poise_journal_commit_seconds", "What one commit of the journal took", _SHORT)
        self.wait = self._histogram("poise_job_wait_seconds", "Time from submission to the first start", _LONG)
        self.commits = self._counter("poise_journal_commits_total", "Commits of the journal")
        self.entries = self._counter("poise_journal_entries_total", "Instants written to the journal")
        self.launched = self._counter("poise_runs_launched_total", "Runs that were ordered")
        self.ended = self._counter("poise_runs_ended_total", "Runs that ended", "how")
        self.preempted = self._counter("poise_preemptions_total", "Runs whose lease was ended", "reason")
        self.requests = self._counter("poise_http_requests_total", "HTTP requests", "route", "method", "status")
        self.request = self._histogram("poise_http_request_seconds", "What one HTTP request took", _SHORT, "route")
        self.refused = self._counter("poise_submissions_refused_total", "Submissions that a bound refused", "bound")
        build = Gauge("poise_build", "1, with the version", ("version",), registry=self.registry)
        build.labels(__version__).set(1)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def watch(self, service: ServiceApi) -> None:
        """Add gauges of this service."""
        self.registry.register(ServiceGauges(service))

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class ServiceGauges:
    """A collector that reads the state of the service at each scrape."""

    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    def describe(self) -> Iterator[Metric]:
        """Nothing: `register` would call `collect` otherwise, before the service has started."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All gauges."""
        service = self._service
        counts = service.states()
        yield _family("poise_jobs", "Jobs by state", ("state",), (((s.value,), counts.get(s.value, 0)) for s in JobState))
        reasons = (((code,), count) for code, count in sorted(service.reasons().items()))
        yield _family("poise_reasons", "Jobs that have not ended, by reason", ("code",), reasons)
        gpus: dict[tuple[str, str], int] = {}
        conditions: dict[NodeCondition, int] = dict.fromkeys(NodeCondition, 0)
        for node in service.nodes().nodes:
            conditions[node.state] += 1
            free = 0 if not node.alive else node.free if node.available is None else node.available
            lost, closed = (0, node.free - free) if node.alive else (node.free, 0)
            for state, count in (("held", node.gpus - node.free), ("free", free), ("lost", lost), ("closed", closed)):
                gpus[node.gpu_type, state] = gpus.get((node.gpu_type, state), 0) + count
        yield _family("poise_gpus", "GPUs by type and state", ("type", "state"), gpus.items())
        by_state = (((each.value,), conditions[each]) for each in NodeCondition)
        yield _family("poise_nodes", "Nodes by state", ("state",), by_state)
        tenants = service.shares().tenants
        most = sorted(tenants, key=lambda each: (-each.held, -each.waiting, -each.gpu_seconds, each.tenant))[:MOST_TENANTS]
        text = "Part of all held GPUs that a tenant holds"
        yield _family("poise_tenant_share", text, ("tenant",), (((each.tenant,), each.held) for each in most))
        entitled = (((each.tenant,), each.entitled) for each in most if each.entitled is not None)
        text = "Part of all GPUs that the policy promises a tenant, if it promises any"
        yield _family("poise_tenant_entitled", text, ("tenant",), entitled)
        yield GaugeMetricFamily("poise_tenants", "Tenants that the service knows", len(tenants))
        described = service.service()
        yield GaugeMetricFamily("poise_ready", "1 while the service decides and keeps what it decides", int(described.ready))
        yield GaugeMetricFamily("poise_start_time_seconds", "When the service started, since 1970", described.started)


def _family(
    name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, sample in samples:
        family.add_metric(values, sample)
    return family
