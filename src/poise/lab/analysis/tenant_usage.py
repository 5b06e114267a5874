"""What tenants were entitled to, what they traded and what they got, by GPU type: read off a journal.

An entitlement matters while somebody waits: only that time is counted for it, as long as the tenant has jobs, and what the
tenant held in the same time is set beside it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from poise.scheduler.model.action import (
    Abandon,
    Action,
    Cancel,
    Compute,
    Entitled,
    JournalEntry,
    Launch,
    Preempt,
    Reject,
    Traded,
    Waited,
)
from poise.scheduler.model.cluster import Cluster, Holding, Slots
from poise.scheduler.model.event import (
    Cancelled,
    Carried,
    Computed,
    Event,
    Failed,
    Finished,
    Stopped,
    Submitted,
    Synchronised,
)
from poise.scheduler.model.job import Job

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class TradeRecord:
    """A trade that held from one moment to another; GPUs of the fast type on average over that time."""

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

    contended   seconds in which it had jobs and somebody waited;  entitled, received: in that time
    held        in all
    now         GPUs that it is entitled to at the end of the journal; empty: nobody said
    """

    entitled: list[float]
    received: list[float]
    held: list[float]
    contended: float = 0.0
    now: tuple[float, ...] = ()
    _waiting: int = 0
    _running: int = 0
    _holds: list[int] = field(default_factory=list)

    @staticmethod
    def of(types: int) -> "Tenant":
        """Somebody who has had nothing yet."""
        return Tenant([0.0] * types, [0.0] * types, [0.0] * types, _holds=[0] * types)

    def hold_for(self, seconds: float) -> None:
        """Nothing changes for so long."""
        for gpu_type, gpus in enumerate(self._holds):
            self.held[gpu_type] += gpus * seconds / HOUR

    def compete_for(self, seconds: float) -> None:
        """Somebody waits for so long."""
        if self._waiting or self._running:
            self.contended += seconds
            for gpu_type, gpus in enumerate(self._holds):
                self.received[gpu_type] += gpus * seconds / HOUR
            for gpu_type, due in enumerate(self.now):
                self.entitled[gpu_type] += due * seconds / HOUR

    def wait(self, jobs: int) -> None:
        """So many more of its jobs wait."""
        self._waiting += jobs

    def run(self, jobs: int) -> None:
        """So many more of its jobs run."""
        self._running += jobs

    def hold(self, gpu_type: int, gpus: int) -> None:
        """It has so many more GPUs."""
        self._holds[gpu_type] += gpus


class TenantUsage:
    """All tenants in order of first submission, and all deals in the order in which they ended."""

    def __init__(self, cluster: Cluster) -> None:
        types = {name: index for index, name in enumerate(cluster.gpu_types)}
        self.types = cluster.gpu_types
        self.tenants: dict[str, Tenant] = {}
        self.deals: list[TradeRecord] = []
        self._type_of = [types[node.gpu_type] for node in cluster.nodes]
        self._owner: dict[str, str] = {}
        self._runs: dict[str, tuple[int, Holding]] = {}
        self._waits: set[str] = set()
        self._open: dict[Traded, float] = {}
        self._last: float | None = None

    @staticmethod
    def of(entries: Iterable[JournalEntry], cluster: Cluster) -> "TenantUsage":
        """Read a journal."""
        books = TenantUsage(cluster)
        for entry in entries:
            books.take(entry)
        books.close()
        return books

    def take(self, entry: JournalEntry) -> None:
        """Read one more instant."""
        now, events, actions = entry
        self._pass_time(now)
        for event in events:
            self._event(event)
        for action in actions:
            self._action(action)
        if any(isinstance(each, Traded | Entitled) for each in actions):
            self._renew_deals({each for each in actions if isinstance(each, Traded)}, now)

    def close(self) -> None:
        """The journal ends here, and with it all trades."""
        self._renew_deals(set(), self._last or 0.0)

    def _pass_time(self, now: float) -> None:
        if self._last is not None:
            for tenant in self.tenants.values():
                tenant.hold_for(now - self._last)
                if self._waits:
                    tenant.compete_for(now - self._last)
        self._last = now

    def _renew_deals(self, traded: set[Traded], now: float) -> None:
        """Whenever entitlements change, all trades that are in force from then on are told."""
        for each, since in list(self._open.items()):
            if each not in traded:
                del self._open[each]
                self.deals.append(
                    TradeRecord(each.buyer, each.seller, each.fast, each.slow, each.gpus, each.price, since, now)
                )
        for each in sorted(traded - self._open.keys(), key=lambda each: (each.buyer, each.seller, each.fast, each.slow)):
            self._open[each] = now

    def _event(self, event: Event) -> None:
        match event:
            case Submitted():
                self._enter(event.job)
            case Carried():
                if event.job.id not in self._owner:
                    self._enter(event.job)
                    if event.gpus:
                        self._begin_run(Launch(event.job.id, event.epoch, event.gpus, Waited(0.0, 0.0, 0.0)))
                elif not event.gpus:
                    self._end_run(event.job.id)
                    self._begin_waiting(event.job.id)
            case Computed():
                self._give_back(event)
            case Failed() | Stopped() | Synchronised():
                if event.job in self._runs and self._runs[event.job][0] == event.epoch:
                    self._end_run(event.job)
                    self._begin_waiting(event.job)
            case Finished() | Cancelled():
                self._end(event.job)
            case _:
                pass

    def _enter(self, job: Job) -> None:
        self._owner[job.id] = job.tenant
        self.tenants.setdefault(job.tenant, Tenant.of(len(self.types)))
        self._begin_waiting(job.id)

    def _action(self, action: Action) -> None:
        match action:
            case Launch() | Compute():
                self._begin_run(action)
            case Preempt():
                self._end_run(action.job)
                self._begin_waiting(action.job)
            case Reject() | Abandon() | Cancel():
                self._end(action.job)
            case Entitled():
                if action.tenant in self.tenants:
                    self.tenants[action.tenant].now = action.gpus
            case _:
                pass

    def _begin_waiting(self, job: str) -> None:
        if job in self._owner and job not in self._waits:
            self._waits.add(job)
            self.tenants[self._owner[job]].wait(1)

    def _end_waiting(self, job: str) -> None:
        if job in self._waits:
            self._waits.discard(job)
            self.tenants[self._owner[job]].wait(-1)

    def _begin_run(self, action: Launch | Compute) -> None:
        """A run begins, or gets GPUs for further tasks of its round."""
        job = action.job
        self._end_waiting(job)
        if job not in self._runs:
            self.tenants[self._owner[job]].run(1)
        _, has = self._runs.get(job, (0, ()))
        self._runs[job] = (action.epoch, (*has, *action.gpus))
        self._hold(job, action.gpus, 1)

    def _give_back(self, event: Computed) -> None:
        """Tasks of a round are done."""
        epoch, has = self._runs.get(event.job, (0, ()))
        if epoch == event.epoch:
            gone = dict(event.gpus)
            left = (Slots(node, mask & ~gone.get(node, 0)) for node, mask in has)
            self._runs[event.job] = (epoch, tuple(slots for slots in left if slots.mask))
            self._hold(event.job, event.gpus, -1)

    def _end_run(self, job: str) -> None:
        if job in self._runs:
            _, holding = self._runs.pop(job)
            self._hold(job, holding, -1)
            self.tenants[self._owner[job]].run(-1)

    def _end(self, job: str) -> None:
        self._end_run(job)
        self._end_waiting(job)

    def _hold(self, job: str, holding: Holding, sign: int) -> None:
        for node, mask in holding:
            self.tenants[self._owner[job]].hold(self._type_of[node], sign * mask.bit_count())
