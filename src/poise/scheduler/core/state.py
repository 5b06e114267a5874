"""Everything the core knows of jobs and GPUs. Only `Scheduler` changes it, and only through these methods."""

from collections.abc import Callable
from functools import partial
from math import inf

from poise.scheduler.core.claim_shapes import NO_WAIT, ClaimShape, added, less
from poise.scheduler.core.delay_scheduling import DelayScheduling
from poise.scheduler.core.ledger import Ledger
from poise.scheduler.core.settings import Settings
from poise.scheduler.core.speed_profiles import (
    NO_PROFILE,
    ClaimShapes,
    SpeedProfile,
    WorkloadBuilder,
    why_impossible,
    within,
)
from poise.scheduler.core.validation_pool import ValidationPool
from poise.scheduler.model.action import Waited
from poise.scheduler.model.cluster import Cluster, Holding, site_of
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import Colocated
from poise.scheduler.model.job import Job, Status, Yields
from poise.scheduler.model.job_table import JobTable, JobView, Snapshot
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Estimate, Locality
from poise.scheduler.model.topology import PlacementView, Topology
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import Placement

# Runs that were preempted and have not left yet: what is said of them later still counts.


class StoppingRuns:
    """By job: runs that nobody has told the end of. A run takes a while to leave, and may do all its work before it does."""

    def __init__(self) -> None:
        self._runs: dict[int, set[int]] = {}
        self._carried: dict[int, int] = {}

    def add(self, row: int, epoch: int) -> None:
        """This run was preempted."""
        self._runs.setdefault(row, set()).add(epoch)

    def carry(self, row: int, epoch: int) -> None:
        """Runs of the job up to this one belong to an earlier journal: which of them are over is not known here."""
        self._carried[row] = epoch

    def has(self, row: int, epoch: int) -> bool:
        """The end of this run may still be told."""
        return epoch in self._runs.get(row, ()) or epoch <= self._carried.get(row, -1)

    def drop(self, row: int, epoch: int) -> None:
        """This run is over."""
        runs = self._runs.get(row)
        if runs is not None:
            runs.discard(epoch)
            if not runs:
                del self._runs[row]

    def forget(self, row: int) -> None:
        """The job has come to its end."""
        self._runs.pop(row, None)
        self._carried.pop(row, None)


class SchedulerState:
    """Jobs as columns, who holds which GPUs, and the shapes of the claims that wait."""

    def __init__(self, cluster: Cluster, placement: Placement, settings: Settings) -> None:
        self.topology = Topology(cluster)
        waits = (settings.packed_wait, settings.rack_wait)
        self.insistence = DelayScheduling(*waits) if any(waits) else None
        self.pool = ValidationPool(self.topology, settings.validation_gpus, settings.validation_time)
        self.placement = placement
        self._restart_overhead = settings.restart_overhead
        self.free = _all_free(self.topology, self.pool)
        self.ledger = Ledger(self.topology)
        self.placement_view = PlacementView(
            self.topology, self.free.masks, self.free.alive, self.ledger.holdings, self.ledger.partner
        )
        self.columns = JobTable()
        self._view = JobView(self.columns)
        self.origin: float | None = None
        """The first moment there was; rounds are counted from it."""
        self.rows: dict[str, int] = {}
        self.active: dict[int, None] = {}
        """Jobs that policies see, ascending."""
        self.away: dict[int, float] = {}
        """Jobs that they do not see for a while, each since when: on trial, waiting for it, or backing off."""
        self.shape_of: list[ClaimShape] = []
        self.waiting_shapes: dict[int, ClaimShape] = {}
        self.protected: dict[int, float] = {}
        self.leaving = StoppingRuns()
        self.yields: dict[int, Yields] = {}
        """When runs of a job may be preempted, unless at any time."""
        self.on_hold: set[int] = set()
        """Jobs that are away until their owners release them."""
        self.losses: dict[int, list[tuple[float, float]]] = {}
        """What active jobs have reported: (steps, loss)."""
        self.reasons: dict[int, str] = {}
        """Why a job ended badly, by row."""
        self.dividing = 0
        """How many active jobs have rounds that divide."""
        self._shapes = ClaimShapes(placement, partial(_all_free, self.topology, self.pool))
        self.survey = WorkloadBuilder(self.topology)
        self._beliefs: dict[str, SpeedProfile] = {}
        self._unchecked: set[str] = set()
        self._belief_of: list[SpeedProfile] = []
        self._asked: list[Locality] = []
        self._usual: list[ClaimShape] = []
        self._wait_began: dict[int, Waited] = {}
        self._waited_before: dict[int, Waited] = {}
        self._new_waits: list[int] = []

    def believe(self, kind: str, perceived: Estimate) -> None:
        """Take an estimate for jobs of this kind that are submitted from now on."""
        there = [total - kept for total, kept in zip(self.topology.totals, self.pool.reserved, strict=True)]
        perceived = within(perceived, there)
        self._beliefs[kind] = SpeedProfile(self.survey.learn(perceived), perceived)
        self._unchecked.add(kind)

    def believe_pair(self, event: Colocated) -> None:
        """Take in what jobs of two kinds do to each other on the same GPUs."""
        self.survey.learn_pair(self._beliefs[event.kind].index, self._beliefs[event.other].index, event.rates)

    def belief(self, kind: str, job: Job) -> SpeedProfile:
        """The current estimate for a job's kind; jobs of one kind can all run here, or none of them can."""
        belief = self._beliefs.get(kind)
        if belief is None:
            raise InvariantError(f"a job of kind {kind!r} was submitted before any estimate of its speed")
        if kind in self._unchecked:
            self._unchecked.discard(kind)
            belief.impossible = why_impossible(job, belief, self.topology, self.pool.reserved)
        return belief

    def enter(self, job: Job, steps: float, belief: SpeedProfile, asks: Callable[[JobView], Locality], now: float) -> int:
        """A job that can run here arrives; returns its row."""
        row = self.columns.append(job, steps, kind=belief.index, best=belief.best, skew=belief.skew, now=now)
        self.rows[job.id] = row
        self.active[row] = None
        self._belief_of.append(belief)
        if job.yields is not Yields.ANY_TIME:
            self.yields[row] = job.yields
        if belief.tasks is not None:
            self.columns.divide(row, belief.tasks)
            self.dividing += 1
        self._view.row, self._view.now = row, now
        self._asked.append(asks(self._view))
        self._usual.append(self.shape(row, self._asked[row]))
        self.shape_of.append(self._usual[row])
        self.begin_waiting(row, now)
        return row

    def leave(self, row: int, now: float, waited: Waited = NO_WAIT) -> None:
        """A job that waits goes out of the policy's sight; how long it had waited until then is kept."""
        self.away[row] = now
        self.active.pop(row, None)
        if waited is not NO_WAIT:
            self._waited_before[row] = waited

    def come_back(self, row: int, now: float) -> None:
        """A job that waits is to be seen again; it was held back while it was away."""
        since = self.away.pop(row)
        self._waited_before[row] = added(self._waited_before.get(row, NO_WAIT), Waited(now - since, 0.0, 0.0))
        last = next(reversed(self.active), -1)
        self.active[row] = None
        if row < last:
            self.active = dict.fromkeys(sorted(self.active))
        self.begin_waiting(row, now)

    def try_out(self, row: int, holding: Holding, now: float) -> Waited:
        """A trial begins on a GPU of the pool; returns how long the job waited for it.

        No progress is made there but by jobs that can do with one GPU.
        """
        self.ledger.lend(row, holding)
        gpu_type = self.topology.type_of[holding[0].node]
        place = self.survey.column(gpu_type, Locality.PACKED)
        rate = self._belief_of[row].rates_with(1)[gpu_type][Locality.PACKED] if self.columns.least[row] == 1 else 0.0
        self.columns.start(row, now, place=place, gpus=1, rate=rate, overhead=self._overhead(row))
        return Waited(now - self.away[row], 0.0, 0.0)

    def end_trial(self, row: int, now: float) -> None:
        """A trial ends, however: what it held is back in the pool, and it does not count as service."""
        held = self.columns.held[row]
        self.stop(row, now, Status.WAITING)
        self.columns.held[row] = held
        self.away[row] = now

    def refuse(self, job: Job, reason: str, now: float) -> None:
        """A job that can never run here arrives; it is remembered with the reason."""
        row = self.columns.append(job, 0.0, kind=NO_PROFILE.index, best=1.0, skew=None, now=now)
        self.rows[job.id] = row
        self.columns.status[row] = Status.REJECTED
        self.reasons[row] = reason
        self._belief_of.append(NO_PROFILE)
        self._asked.append(Locality.CLUSTER)
        self._usual.append(self.shape(row, Locality.CLUSTER))
        self.shape_of.append(self._usual[row])

    def snapshot(self, now: float) -> Snapshot:
        """All active jobs at this moment."""
        live = self.live_gpus()
        survey = partial(self.survey.workload, live, self.ledger.partner)
        return Snapshot(
            now=now,
            origin=now if self.origin is None else self.origin,
            gpus=sum(live),
            idle=tuple(self.free.idle),
            is_contended=bool(self.waiting_shapes),
            active=tuple(self.active),
            columns=self.columns,
            placement=self.placement_view,
            survey=survey,
            estimate=self.estimate,
            losses=self.losses,
            pinned=self.pinned(),
        )

    def pinned(self) -> frozenset[int]:
        """Running jobs that may not be preempted: never, or not before something happens to them.

        Under a policy that does not share GPUs so do two that share them since before: to stop one of them frees none.
        """
        running = self.protected if self.yields else {}  # most jobs of `yields` wait
        pinned = frozenset(row for row, until in running.items() if until == inf and row in self.yields)
        return pinned if self.survey.knows_pairs else pinned.union(self.ledger.partner)

    def estimate(self, row: int) -> Estimate:
        """What is believed of the speed of a job."""
        return self._belief_of[row].estimate

    def live_gpus(self) -> tuple[int, ...]:
        """GPUs of live nodes, by type."""
        if not self.pool and all(self.free.alive):
            return tuple(self.topology.totals)
        live = [0] * len(self.topology.types)
        for node, alive in enumerate(self.free.alive):
            live[self.topology.type_of[node]] += alive * self.topology.full[node].bit_count()
        for slots in self.pool.slots:
            live[self.topology.type_of[slots.node]] -= self.free.alive[slots.node]
        return tuple(live)

    def restore(self, node: int) -> None:
        """A lost node is back."""
        if not self.free.alive[node]:
            self.free.restore(node)
            self.free.take(self.pool.on(node))
        self.ledger.restore(node)

    def shape(
        self, row: int, locality: Locality, types: tuple[int, ...] | None = None, gpus: int | None = None
    ) -> ClaimShape:
        """The shape of a job's claim at some locality, or else at the nearest wider one that could ever be granted."""
        return self._shapes.of(self._belief_of[row], gpus or self.columns.gang[row], types, locality)

    def allows(self, claim: Claim) -> bool:
        """A running job may keep what it holds under this claim."""
        holding = self.ledger.holding(claim.row)
        if claim.site is not None:
            return site_of(holding) == claim.site
        if claim.mix is not None:
            return self.topology.mix(holding) == claim.mix
        shape = self.shape(claim.row, claim.locality, claim.types, claim.gpus)
        if shape.gang != self.columns.gpus[claim.row]:
            return False
        is_near = self.topology.locality(holding) <= shape.locality
        return claim.types is None or (is_near and shape.is_for(holding, self.topology.type_of))

    def insisted(self, row: int, now: float, asked: Locality) -> Locality:
        """The locality that a job's claim insists on: what the policy asks, or what the job still waits for if it waits."""
        if not self.insistence or self.running(row):
            return asked
        return min(asked, self.insistence.at(self.columns.waiting_since[row], now))

    def relax(self, row: int, now: float) -> None:
        """The job has waited: its claim insists on no more than is due by now."""
        shape = self._usual_shape(row, now)
        self.reshape(row, self.held_back(shape) if self.shape_of[row].is_held else shape, now)

    def unhold(self, row: int, now: float) -> None:
        """The job waits on, but not for its tenant's share."""
        self.reshape(row, self._usual_shape(row, now), now)

    def _usual_shape(self, row: int, now: float) -> ClaimShape:
        """What a waiting job waits for unless a plan says otherwise."""
        return self.shape(row, self.insisted(row, now, self._asked[row])) if self.insistence else self._usual[row]

    def reshape(self, row: int, shape: ClaimShape, now: float) -> None:
        """A waiting job waits for something else from now on; what it waited so far is kept."""
        before = self.shape_of[row]
        if shape is before:
            return
        began = self._wait_began.pop(row, None)
        if began is not None:
            past = self._waited_before.get(row, NO_WAIT)
            self._waited_before[row] = added(past, less(before.reading(now), began))
            self._wait_began[row] = shape.reading(now)
        self._leave_shape(before)
        self.shape_of[row] = shape
        shape.waiting += 1
        self.waiting_shapes[shape.index] = shape

    def held_back(self, shape: ClaimShape) -> ClaimShape:
        """The shape of such jobs that are held back for their tenant's share."""
        return self._shapes.held_back(shape)

    def _leave_shape(self, shape: ClaimShape) -> None:
        shape.waiting -= 1
        if not shape.waiting:
            del self.waiting_shapes[shape.index]

    def begin_waiting(self, row: int, now: float) -> None:
        """From now on the job's waiting is clocked."""
        shape = self.shape_of[row] = self._usual_shape(row, now) if self.insistence else self._usual[row]
        shape.waiting += 1
        self.waiting_shapes[shape.index] = shape
        self._new_waits.append(row)

    def new_waits(self) -> list[int]:
        """Those who began to wait in this moment and still do, as policies see it."""
        return [row for row in self._new_waits if self.waits(row)]

    def read_clocks(self, now: float) -> None:
        """At the end of a moment: note what the clocks say for those who began to wait in it and still do."""
        if self._new_waits:
            status = self.columns.status
            for row in self._new_waits:
                if status[row] == Status.WAITING and row in self.active:
                    self._wait_began[row] = self.shape_of[row].reading(now)
            self._new_waits.clear()

    def end_waiting(self, row: int, now: float) -> Waited:
        """The job no longer waits; returns how long it did, by cause."""
        shape = self.shape_of[row]
        self._leave_shape(shape)
        began = self._wait_began.pop(row, None) if self._wait_began else None
        before = self._waited_before.pop(row, None) if self._waited_before else None
        if self.columns.waiting_since[row] == now:
            return NO_WAIT
        waited = NO_WAIT if began is None else less(shape.reading(now), began)  # none: back since this moment
        return waited if before is None else added(before, waited)

    def start(self, row: int, holding: Holding, now: float) -> Waited:
        """A run begins on GPUs that `free` has already given out; returns how long the job waited."""
        columns = self.columns
        if columns.status[row] != Status.WAITING:
            raise InvariantError(f"job in row {row} is to start though it does not wait")
        belief = self._belief_of[row]
        locality = self.topology.locality(holding)
        if belief.tasks is None:
            gpus = self.ledger.open(row, holding, columns.least[row], columns.most[row])
            gpu_type = self.topology.type_of[holding[0].node]
            rate = belief.rates_with(gpus)[gpu_type][locality]
        else:
            gpus = self.ledger.open(row, holding, columns.least[row], columns.most[row], belief.types)
            gpu_type = self.topology.main_type(holding)
            rate = belief.rate_on(holding, self.topology)
        waited = self.end_waiting(row, now)
        place = self.survey.column(gpu_type, locality)
        columns.start(row, now, place=place, gpus=gpus, rate=rate, overhead=self._overhead(row))
        return waited

    def _overhead(self, row: int) -> float:
        """Seconds without progress at a start, as they are believed.

        What turning to a job whose rounds divide costs depends on where it was; that is the world's to tell, and little.
        """
        return 0.0 if self.columns.tasks[row] else self._restart_overhead

    def join(self, row: int, other: int, now: float) -> Waited:
        """A run begins on the GPUs of another job, which goes on beside it; returns how long the job waited.

        Of two runs of an earlier journal the other one may be the younger: they share since it is there.
        """
        holding = self.ledger.join(row, other)
        gpu_type = self.topology.type_of[holding[0].node]
        gpus, place = self.columns.gpus[other], self.columns.place[other] - 1
        waited = self.end_waiting(row, now)
        rate, both = self._rate_beside(row, other, gpu_type), max(now, self.columns.started[other])
        first = self._belief_of[row].rate_on(holding, self.topology) if both > now else rate
        self.columns.start(row, now, place=place, gpus=gpus, rate=first, overhead=self._overhead(row))
        self.columns.change_rate(row, both, rate)
        self.columns.change_rate(other, both, self._rate_beside(other, row, gpu_type))
        return waited

    def _rate_beside(self, row: int, other: int, gpu_type: int) -> float:
        """Speed of a job on GPUs that it shares; half its speed alone where nothing is known of the two."""
        kinds = self.columns.kind
        known = self.survey.beside(kinds[row], kinds[other], gpu_type)
        return known or 0.5 * self._belief_of[row].rate_on(self.ledger.holding(row), self.topology)

    def stop(self, row: int, now: float, status: Status) -> Holding:
        """A run ends; returns the GPUs, which the caller gives back to `free` unless it has done so.

        A job that shared them goes on alone, and they stay with it.
        """
        other = self.ledger.partner.get(row)
        holding = self.ledger.close(row)
        if other is not None:
            left = self.ledger.holding(other)
            self.columns.change_rate(other, now, self._belief_of[other].rate_on(left, self.topology))
        self.protected.pop(row, None)
        self.columns.stop(row, now, status)
        return holding

    def end(self, row: int, status: Status) -> None:
        """The job has come to its end."""
        self.columns.status[row] = status
        self.dividing -= self.columns.tasks[row] > 0
        self.losses.pop(row, None)
        self._waited_before.pop(row, None)
        self.leaving.forget(row)
        self.yields.pop(row, None)
        self.on_hold.discard(row)
        self.active.pop(row, None)
        self.away.pop(row, None)

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

    def waits(self, row: int) -> bool:
        """The job holds no GPUs and is to have some; policies see it."""
        return row in self.active and self.columns.status[row] == Status.WAITING

    def of(self, row: int) -> Holding:
        """The GPUs of a running job, be it on trial."""
        held = self.ledger.held_by(row)
        return self.ledger.trials[row] if held is None else held

    def type_of(self, row: int) -> int:
        """The GPU type that a running job holds."""
        return self.topology.type_of[self.ledger.holding(row)[0].node]

    def gpus_of(self, row: int, gpu_type: int) -> int:
        """The GPUs of a type that would come free if a running job stopped; none if it shares them."""
        if row in self.ledger.partner:
            return 0
        if not self.columns.tasks[row]:
            return self.columns.gpus[row] if self.type_of(row) == gpu_type else 0
        return self.topology.mix(self.ledger.holding(row))[gpu_type]


def _all_free(topology: Topology, pool: ValidationPool) -> FreeGpus:
    """The cluster without any job; the pool's GPUs are not to be had."""
    free = FreeGpus(topology)
    free.take(pool.slots)
    return free
