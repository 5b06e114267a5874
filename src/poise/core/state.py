"""Everything the core knows of jobs and GPUs. Only `Scheduler` changes it, and only through these methods."""

from collections.abc import Callable
from functools import partial

from poise.core.beliefs import NO_BELIEF, Belief, why_impossible
from poise.core.survey import Survey
from poise.core.verify import Ledger
from poise.core.waiting import NO_WAIT, Shape
from poise.model.action import Waited
from poise.model.cluster import Cluster, Holding
from poise.model.columns import JobColumns, JobView, Snapshot
from poise.model.errors import InvariantError
from poise.model.event import Colocated
from poise.model.job import Job, Status
from poise.model.plan import Claim
from poise.model.speed import Estimate, Locality
from poise.model.topology import Topology
from poise.placement.free import FreeGpus
from poise.placement.strategies import Placement, count


class State:
    """Jobs as columns, who holds which GPUs, and the shapes of the claims that wait."""

    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        self.topology = Topology(cluster)
        self.placement = placement
        self.free = FreeGpus(self.topology)
        self.ledger = Ledger(self.topology)
        self.columns = JobColumns()
        self._view = JobView(self.columns)
        self.origin: float | None = None
        """The first moment there was; rounds are counted from it."""
        self.rows: dict[str, int] = {}
        self.active: dict[int, None] = {}
        self.shape_of: list[Shape] = []
        self.waiting_shapes: dict[int, Shape] = {}
        self.protected: dict[int, float] = {}
        self.reasons: dict[int, str] = {}
        """Why a job ended badly, by row."""
        self._shapes: dict[tuple[int, tuple[int, ...], Locality], Shape] = {}
        self.survey = Survey(self.topology)
        self._beliefs: dict[str, Belief] = {}
        self._unchecked: set[str] = set()
        self._belief_of: list[Belief] = []
        self._wait_began: dict[int, Waited] = {}
        self._new_waits: list[int] = []

    def believe(self, kind: str, perceived: Estimate) -> None:
        """Take an estimate for jobs of this kind that are submitted from now on."""
        self._beliefs[kind] = Belief(self.survey.learn(perceived), perceived)
        self._unchecked.add(kind)

    def believe_pair(self, event: Colocated) -> None:
        """Take in what jobs of two kinds do to each other on the same GPUs."""
        self.survey.learn_pair(self._beliefs[event.kind].index, self._beliefs[event.other].index, event.rates)

    def belief(self, kind: str, job: Job) -> Belief:
        """The current estimate for a job's kind; jobs of one kind can all run here, or none of them can."""
        belief = self._beliefs.get(kind)
        if belief is None:
            raise InvariantError(f"a job of kind {kind!r} was submitted before any estimate of its speed")
        if kind in self._unchecked:
            self._unchecked.discard(kind)
            belief.impossible = why_impossible(job, belief, self.topology)
        return belief

    def enter(self, job: Job, steps: float, belief: Belief, asks: Callable[[JobView], Locality], now: float) -> int:
        """A job that can run here arrives; returns its row."""
        row = self.columns.append(job, steps, kind=belief.index, best=belief.best, skew=belief.skew, now=now)
        self.rows[job.id] = row
        self.active[row] = None
        self._belief_of.append(belief)
        self._view.row, self._view.now = row, now
        asked = asks(self._view)
        self.shape_of.append(self.shape(row, asked))
        self.begin_waiting(row)
        return row

    def refuse(self, job: Job, reason: str, now: float) -> None:
        """A job that can never run here arrives; it is remembered with the reason."""
        row = self.columns.append(job, 0.0, kind=NO_BELIEF.index, best=1.0, skew=None, now=now)
        self.rows[job.id] = row
        self.columns.status[row] = Status.REJECTED
        self.reasons[row] = reason
        self._belief_of.append(NO_BELIEF)
        self.shape_of.append(self.shape(row, Locality.CLUSTER))

    def snapshot(self, now: float) -> Snapshot:
        """All active jobs at this moment."""
        live = self.live_gpus()
        survey = partial(self.survey.workload, live, self.ledger.partner)
        origin = now if self.origin is None else self.origin
        waits = bool(self.waiting_shapes)
        return Snapshot(now, origin, sum(live), tuple(self.free.idle), waits, tuple(self.active), self.columns, survey)

    def live_gpus(self) -> tuple[int, ...]:
        """GPUs of live nodes, by type."""
        if all(self.free.alive):
            return tuple(self.topology.totals)
        live = [0] * len(self.topology.types)
        for node, alive in enumerate(self.free.alive):
            live[self.topology.type_of[node]] += alive * self.topology.full[node].bit_count()
        return tuple(live)

    def shape(self, row: int, locality: Locality, types: tuple[int, ...] | None = None) -> Shape:
        """The shape of a job's claim at some locality, or else at the nearest wider one that could ever be granted."""
        belief = self._belief_of[row]
        shape = belief.shapes.get((types, locality))
        if shape is None:
            asked = belief.types if types is None else tuple(each for each in types if each in belief.types)
            shape = belief.shapes[types, locality] = self._shape((self.columns.gang[row], asked, locality))
        return shape

    def _shape(self, key: tuple[int, tuple[int, ...], Locality]) -> Shape:
        shape = self._shapes.get(key)
        if shape is None:
            gang, types, locality = key
            wider = not self._could_be_granted(*key)
            shape = self._shape((gang, types, Locality(locality + 1))) if wider else Shape(len(self._shapes), *key)
            self._shapes[key] = shape
        return shape

    def allows(self, claim: Claim) -> bool:
        """A running job may keep what it holds under this claim."""
        holding = self.ledger.holding(claim.row)
        shape = self.shape(claim.row, claim.locality, claim.types)
        return self.type_of(claim.row) in shape.types and self.topology.locality(holding) <= shape.locality

    def _could_be_granted(self, gang: int, types: tuple[int, ...], locality: Locality) -> bool:
        """The empty cluster has room for such a claim; where GPUs are only counted, none are close together."""
        if locality is Locality.CLUSTER:
            return True
        empty = FreeGpus(self.topology)
        fits = (self.placement(empty, gpu_type, gang, locality) is not None for gpu_type in types)
        return self.placement is not count and any(fits)

    def begin_waiting(self, row: int) -> None:
        """From now on the job's waiting is clocked."""
        shape = self.shape_of[row]
        shape.waiting += 1
        self.waiting_shapes[shape.index] = shape
        self._new_waits.append(row)

    def read_clocks(self, now: float) -> None:
        """At the end of a moment: note what the clocks say for those who began to wait in it and still do."""
        for row in self._new_waits:
            if self.columns.status[row] == Status.WAITING:
                self._wait_began[row] = self.shape_of[row].reading(now)
        self._new_waits.clear()

    def end_waiting(self, row: int, now: float) -> Waited:
        """The job no longer waits; returns how long it did, by cause."""
        shape = self.shape_of[row]
        shape.waiting -= 1
        if not shape.waiting:
            del self.waiting_shapes[shape.index]
        if self.columns.waiting_since[row] == now:
            self._wait_began.pop(row, None)
            return NO_WAIT
        began = self._wait_began.pop(row)
        ended = shape.reading(now)
        return Waited(*(late - early for late, early in zip(ended, began, strict=True)))

    def start(self, row: int, holding: Holding, now: float, overhead: float) -> Waited:
        """A run begins on GPUs that `free` has already given out; returns how long the job waited."""
        self.ledger.open(row, holding, self.columns.gang[row])
        gpu_type = self.topology.type_of[holding[0].node]
        locality = self.topology.locality(holding)
        rate = self._belief_of[row].rates[gpu_type][locality]
        waited = self.end_waiting(row, now)
        self.columns.start(row, now, place=self.survey.column(gpu_type, locality), rate=rate, overhead=overhead)
        return waited

    def join(self, row: int, other: int, now: float, overhead: float) -> Waited:
        """A run begins on the GPUs of another job, which goes on beside it; returns how long the job waited."""
        holding = self.ledger.join(row, other)
        gpu_type = self.topology.type_of[holding[0].node]
        kinds = self.columns.kind
        waited = self.end_waiting(row, now)
        rate = self.survey.beside(kinds[row], kinds[other], gpu_type)
        self.columns.start(row, now, place=self.columns.place[other] - 1, rate=rate, overhead=overhead)
        self.columns.change_rate(other, now, self.survey.beside(kinds[other], kinds[row], gpu_type))
        return waited

    def stop(self, row: int, now: float, status: Status) -> Holding:
        """A run ends; returns the GPUs, which the caller gives back to `free` unless it has done so.

        A job that shared them goes on alone, and they stay with it.
        """
        other = self.ledger.partner.get(row)
        holding = self.ledger.close(row)
        if other is not None:
            left = self.ledger.holding(other)
            rates = self._belief_of[other].rates[self.topology.type_of[left[0].node]]
            self.columns.change_rate(other, now, rates[self.topology.locality(left)])
        self.protected.pop(row, None)
        self.columns.stop(row, now, status)
        return holding

    def end(self, row: int, status: Status) -> None:
        """The job has come to its end."""
        self.columns.status[row] = status
        del self.active[row]

    def clock_causes(self, now: float) -> None:
        """Say of every shape that still waits why it does."""
        free, placement = self.free, self.placement
        for shape in self.waiting_shapes.values():
            cause = shape.classify(free, placement)
            if cause is not shape.cause:
                shape.because(cause, now)

    def running(self, row: int) -> bool:
        """The job holds GPUs."""
        return self.columns.status[row] == Status.RUNNING

    def of(self, row: int) -> Holding:
        """The GPUs of a running job."""
        return self.ledger.holding(row)

    def type_of(self, row: int) -> int:
        """The GPU type that a running job holds."""
        return self.topology.type_of[self.ledger.holding(row)[0].node]

    def gang(self, row: int) -> int:
        """The GPUs that a job needs at once."""
        return self.columns.gang[row]
