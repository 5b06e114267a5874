"""What tenants were entitled to, what they traded and what they got, by GPU type: read off a journal.

An entitlement matters while a job waits. Only that time is counted for it, as long as the tenant has jobs, and what the
tenant held in the same time stands beside it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from poise.scheduler.model import action as actions
from poise.scheduler.model import event as events
from poise.scheduler.model.action import JournalEntry, Waited
from poise.scheduler.model.cluster import Cluster, Holding, Slots
from poise.scheduler.model.job import Job

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class TradeRecord:
    """A trade that held from `since` to `until`; `gpus` of the fast type on average over that time."""

    buyer: str
    seller: str
    fast: str
    slow: str
    gpus: float
    price: float
    since: float
    until: float


@dataclass
class Tenant:
    """One tenant. GPU-hours by type of the cluster.

    contended   seconds in which it had jobs and some job waited;  entitled, received: in that time
    held        in all
    now         GPUs that it is entitled to at the end of the journal; empty if the journal does not say
    jobs        its jobs that wait or run;  holds: GPUs that it holds, by type
    """

    entitled: list[float]
    received: list[float]
    held: list[float]
    contended: float = 0.0
    now: tuple[float, ...] = ()
    jobs: int = 0
    holds: list[int] = field(default_factory=list)

    @staticmethod
    def of(types: int) -> "Tenant":
        """Return a tenant that has had nothing yet."""
        return Tenant([0.0] * types, [0.0] * types, [0.0] * types, holds=[0] * types)

    def pass_time(self, seconds: float, *, is_contended: bool) -> None:
        """Count time in which nothing changes."""
        for gpu_type, gpus in enumerate(self.holds):
            self.held[gpu_type] += gpus * seconds / HOUR
        if is_contended and self.jobs:
            self.contended += seconds
            for gpu_type, gpus in enumerate(self.holds):
                self.received[gpu_type] += gpus * seconds / HOUR
            for gpu_type, due in enumerate(self.now):
                self.entitled[gpu_type] += due * seconds / HOUR


class TenantUsage:
    """All tenants in order of first submission, and all trades in the order in which they ended."""

    def __init__(self, cluster: Cluster) -> None:
        types = {name: index for index, name in enumerate(cluster.gpu_types)}
        self.types = cluster.gpu_types
        self.tenants: dict[str, Tenant] = {}
        self.trades: list[TradeRecord] = []
        self._type_of = [types[node.gpu_type] for node in cluster.nodes]
        self._owner: dict[str, Tenant] = {}  # of all jobs
        self._waiting: set[str] = set()
        self._runs: dict[str, tuple[int, Holding]] = {}  # of running jobs: epoch and GPUs
        self._open: dict[actions.Traded, float] = {}
        self._last: float | None = None

    @staticmethod
    def of(entries: Iterable[JournalEntry], cluster: Cluster) -> "TenantUsage":
        """Read a journal."""
        usage = TenantUsage(cluster)
        for entry in entries:
            usage.take(entry)
        usage.close()
        return usage

    def take(self, entry: JournalEntry) -> None:
        """Read one more entry."""
        now = entry.now
        if self._last is not None:
            for tenant in self.tenants.values():
                tenant.pass_time(now - self._last, is_contended=bool(self._waiting))
        self._last = now
        for event in entry.events:
            self._event(event)
        for action in entry.actions:
            self._action(action)
        if any(isinstance(each, actions.Traded | actions.Entitled) for each in entry.actions):
            self._renew_trades({each for each in entry.actions if isinstance(each, actions.Traded)}, now)

    def close(self) -> None:
        """End the journal here, and with it all trades."""
        self._renew_trades(set(), self._last or 0.0)

    def _renew_trades(self, traded: set[actions.Traded], now: float) -> None:
        """End trades that are not among these. When entitlements change, the journal names all trades in force."""
        for each, since in list(self._open.items()):
            if each not in traded:
                del self._open[each]
                self.trades.append(
                    TradeRecord(each.buyer, each.seller, each.fast, each.slow, each.gpus, each.price, since, now)
                )
        for each in sorted(traded - self._open.keys(), key=lambda each: (each.buyer, each.seller, each.fast, each.slow)):
            self._open[each] = now

    def _event(self, event: events.Event) -> None:  # noqa: C901 - one case per event
        match event:
            case events.Submitted():
                self._enter(event.job)
            case events.Carried():
                if event.job.id not in self._owner:
                    self._enter(event.job)
                    if event.gpus:
                        self._start(actions.Launch(event.job.id, event.epoch, event.gpus, Waited(0.0, 0.0, 0.0)))
                elif not event.gpus:
                    self._stop(event.job.id)
            case events.Computed():
                self._computed(event)
            case events.Failed() | events.Stopped() | events.Synchronised():
                if event.job in self._runs and self._runs[event.job][0] == event.epoch:
                    self._stop(event.job)
            case events.Finished() | events.Cancelled():
                self._stop(event.job, is_over=True)
            case events.NodeLost():
                for job in [job for job, (_, gpus) in self._runs.items() if any(each.node == event.node for each in gpus)]:
                    self._stop(job)  # a live service hears of the ends of such runs later
            case _:
                pass

    def _action(self, action: actions.Action) -> None:
        match action:
            case actions.Launch() | actions.Compute():
                self._start(action)
            case actions.Preempt():
                self._stop(action.job)
            case actions.Reject() | actions.Abandon() | actions.Cancel():
                self._stop(action.job, is_over=True)
            case actions.Entitled():
                if action.tenant in self.tenants:
                    self.tenants[action.tenant].now = action.gpus
            case _:
                pass

    def _enter(self, job: Job) -> None:
        owner = self._owner[job.id] = self.tenants.setdefault(job.tenant, Tenant.of(len(self.types)))
        owner.jobs += not self._is_active(job.id)
        self._waiting.add(job.id)

    def _start(self, action: actions.Launch | actions.Compute) -> None:
        """Begin a run, or give it GPUs for further tasks of its round."""
        job = action.job
        self._owner[job].jobs += not self._is_active(job)
        self._waiting.discard(job)
        _, held = self._runs.get(job, (0, ()))
        self._runs[job] = (action.epoch, (*held, *action.gpus))
        self._hold(job, action.gpus, 1)

    def _stop(self, job: str, *, is_over: bool = False) -> None:
        """End a job's run, if it has one. Then it waits again, unless it has come to its end."""
        was_active = self._is_active(job)
        if job in self._runs:
            self._hold(job, self._runs.pop(job)[1], -1)
        if not is_over and job in self._owner:
            self._owner[job].jobs += not was_active
            self._waiting.add(job)
        elif was_active:
            self._owner[job].jobs -= 1
            self._waiting.discard(job)

    def _is_active(self, job: str) -> bool:
        return job in self._runs or job in self._waiting

    def _computed(self, event: events.Computed) -> None:
        """Give back the GPUs of tasks that are done."""
        epoch, held = self._runs.get(event.job, (0, ()))
        if epoch == event.epoch:
            gone = dict(event.gpus)
            left = (Slots(node, mask & ~gone.get(node, 0)) for node, mask in held)
            self._runs[event.job] = (epoch, tuple(slots for slots in left if slots.mask))
            self._hold(event.job, event.gpus, -1)

    def _hold(self, job: str, gpus: Holding, sign: int) -> None:
        for node, mask in gpus:
            self._owner[job].holds[self._type_of[node]] += sign * mask.bit_count()
