"""What Prometheus may ask: counters that the engine and the API feed, and gauges read from the engine when asked.

Every label has a bounded number of values. Seconds are seconds, shares are fractions of 1.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from poise import __version__
from poise.service.server.engine_api import EngineApi
from poise.service.wire.views import JobState, TenantShare

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_TENANTS = 100
"""Tenants that have a time series of their own: those that hold most."""

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LONG = (1.0, 10.0, 60.0, 300.0, 900.0, 3_600.0, 4 * 3_600.0, 86_400.0, 7 * 86_400.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second time series for each, which nobody asks for


class Metrics:
    """The registry of one service. Methods may be called from any thread and take microseconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decision = self._histogram("poise_decision_seconds", "What one scheduling decision took", _SHORT)
        self._commit = self._histogram("poise_journal_commit_seconds", "What one commit of the journal took", _SHORT)
        self._wait = self._histogram("poise_job_wait_seconds", "Time from submission to the first start", _LONG)
        self._commits = self._counter("poise_journal_commits_total", "Commits of the journal")
        self._entries = self._counter("poise_journal_entries_total", "Instants written to the journal")
        self._launched = self._counter("poise_runs_launched_total", "Runs that were ordered")
        self._ended = self._counter("poise_runs_ended_total", "Runs that ended", "how")
        self._preempted = self._counter("poise_preemptions_total", "Runs whose lease was ended", "reason")
        self._requests = self._counter("poise_http_requests_total", "HTTP requests", "route", "method", "status")
        self._request = self._histogram("poise_http_request_seconds", "What one HTTP request took", _SHORT, "route")
        self._refused = self._counter("poise_submissions_refused_total", "Submissions that a bound refused", "bound")
        build = Gauge("poise_build", "1, with the version", ("version",), registry=self.registry)
        build.labels(__version__).set(1)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def decision(self, seconds: float) -> None:
        """The core has decided."""
        self._decision.observe(seconds)

    def committed(self, seconds: float, entries: int) -> None:
        """So many instants are in the journal."""
        self._commit.observe(seconds)
        self._commits.inc()
        self._entries.inc(entries)

    def launched(self) -> None:
        """A run was ordered."""
        self._launched.inc()

    def ended(self, how: str) -> None:
        """A run ended; `how` is one of a few words."""
        self._ended.labels(how).inc()

    def preempted(self, reason: str) -> None:
        """A run's lease was ended; `reason` is a stable code."""
        self._preempted.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        """A job started for the first time, so long after it was submitted."""
        self._wait.observe(seconds)

    def requested(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered; `route` is the template of a path, never a path."""
        self._requests.labels(route, method, str(status)).inc()
        self._request.labels(route).observe(seconds)

    def refused(self, bound: str) -> None:
        """A submission was refused; `bound` is one of a few words."""
        self._refused.labels(bound).inc()

    def watch(self, engine: EngineApi) -> None:
        """From now on what is asked of this engine is part of the answer."""
        self.registry.register(EngineGauges(engine))

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)


class EngineGauges:
    """Reads the engine's state at each scrape."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: the engine is asked only when somebody wants to know."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All gauges."""
        yield self._jobs()
        yield self._reasons()
        yield self._gpus()
        yield from self._tenants()
        service = self._engine.service()
        yield GaugeMetricFamily("poise_ready", "1 while the service decides and keeps what it decides", int(service.ready))
        yield GaugeMetricFamily("poise_start_time_seconds", "When the service started, since 1970", service.started)

    def _reasons(self) -> Metric:
        family = GaugeMetricFamily("poise_reasons", "Jobs that have not ended, by reason", labels=("code",))
        for code, count in sorted(self._engine.reasons().items()):
            family.add_metric((code,), count)
        return family

    def _jobs(self) -> Metric:
        family = GaugeMetricFamily("poise_jobs", "Jobs by state", labels=("state",))
        counts = self._engine.states()
        for state in JobState:
            family.add_metric((state.value,), counts.get(state.value, 0))
        return family

    def _gpus(self) -> Metric:
        counts: dict[tuple[str, str], int] = {}
        for node in self._engine.nodes().nodes:
            gone = 0 if node.alive else node.free
            free = node.free - gone
            for state, count in (("held", node.gpus - node.free), ("free", free), ("lost", gone)):
                counts[node.gpu_type, state] = counts.get((node.gpu_type, state), 0) + count
        family = GaugeMetricFamily("poise_gpus", "GPUs by type and state", labels=("type", "state"))
        for labels, count in counts.items():
            family.add_metric(labels, count)
        return family

    def _tenants(self) -> Iterator[Metric]:
        tenants = self._engine.shares().tenants
        most = sorted(tenants, key=_standing)[:MOST_TENANTS]
        share = GaugeMetricFamily("poise_tenant_share", "Part of all held GPUs that a tenant holds", labels=("tenant",))
        due = GaugeMetricFamily(
            "poise_tenant_entitled",
            "Part of all GPUs that the policy promises a tenant, if it promises any",
            labels=("tenant",),
        )
        for each in most:
            share.add_metric((each.tenant,), each.held)
            if each.entitled is not None:
                due.add_metric((each.tenant,), each.entitled)
        yield share
        yield due
        yield GaugeMetricFamily("poise_tenants", "Tenants that the service knows", len(tenants))


def _standing(each: TenantShare) -> tuple[float, int, float, str]:
    return (-each.held, -each.waiting, -each.gpu_seconds, each.tenant)
