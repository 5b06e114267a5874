"""What the core knows of jobs and GPUs: tables, and questions about them.

Every part of the core reads this state; only three parts write to it, each its own share:
- `Lifecycle` changes what a job is (waiting, running, suspended, ended), together with all that follows from it;
- a `DecisionDraft` moves GPUs in `free` while a decision is being made, and `Lifecycle.apply` makes that decision true;
- `learn_speed` and `learn_pair` take in beliefs about speed.
"""

from functools import partial
from math import inf

from poise.scheduler.core.claim_shapes import ClaimShape, WaitClocks
from poise.scheduler.core.ledger import Ledger
from poise.scheduler.core.settings import DelayScheduling, Settings
from poise.scheduler.core.speed_profiles import (
    ClaimShapes,
    SpeedProfile,
    WorkloadBuilder,
    why_impossible,
    within,
)
from poise.scheduler.core.validation_pool import ValidationPool
from poise.scheduler.model.cluster import Cluster, Holding, site_of
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import Colocated
from poise.scheduler.model.job import Job, Status, Yields
from poise.scheduler.model.job_table import JobTable, Snapshot
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Estimate, Locality
from poise.scheduler.model.topology import PlacementView, Topology
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import Placement


class StoppingRuns:
    """Runs that were told to stop and whose end has not been reported yet.

    A run takes a while to leave, and may finish all its work before it does. So a later report about such a run counts,
    though the job may have a newer run by then.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, set[int]] = {}
        self._carried: dict[int, int] = {}

    def add(self, row: int, epoch: int) -> None:
        """Note that this run was told to stop."""
        self._epochs.setdefault(row, set()).add(epoch)

    def carry(self, row: int, epoch: int) -> None:
        """Note that runs up to this epoch belong to an earlier journal; which of them have ended is not known here."""
        self._carried[row] = epoch

    def has(self, row: int, epoch: int) -> bool:
        """Say whether the end of this run may still be reported."""
        return epoch in self._epochs.get(row, ()) or epoch <= self._carried.get(row, -1)

    def drop(self, row: int, epoch: int) -> None:
        """Forget a run whose end was reported."""
        epochs = self._epochs.get(row)
        if epochs is not None:
            epochs.discard(epoch)
            if not epochs:
                del self._epochs[row]

    def forget(self, row: int) -> None:
        """Forget all runs of a job that has ended."""
        self._epochs.pop(row, None)
        self._carried.pop(row, None)


class SchedulerState:
    """Jobs as columns, who holds which GPUs, and what waiting jobs wait for.

    Each job is a row of `columns`, given by `rows`, and is never removed. By its phase (see `lifecycle.py`) it is in
    - `active`: jobs that the policy sees, in ascending order of row: those that wait, and those that run;
    - `suspended`: jobs that the policy does not see, each with the time since when: held by the owner (`on_hold`), backing
      off after a failure, waiting for a validation trial, or on one (`pool.tries`);
    - neither, once it has ended.

    free          GPUs that no run holds; while a decision is drafted, GPUs that no run will hold
    ledger        who holds what, kept apart from `free` so that each checks the other
    clocks        what waiting jobs wait for and since when; `shape_of` and `waiting_shapes` are its tables
    protected     for some running jobs the time until which they must not be preempted; inf: not before something happens
    stopping      runs that were told to stop and may still report
    yields        when runs of a job may be preempted, for jobs that do not allow it at any time
    losses        (steps, loss) as reported by active jobs
    reasons       why a job was rejected, failed or was cancelled, by row
    divisible     number of unended jobs whose steps divide into micro-batches
    in_units      number of unended jobs whose GPUs come in units of more than one
    origin        time of the first event; rounds are counted from it
    draining      nodes from which runs that hold closed GPUs are to leave
    """

    def __init__(self, cluster: Cluster, placement: Placement, settings: Settings) -> None:
        self.topology = Topology(cluster)
        waits = (settings.packed_wait, settings.rack_wait)
        self.delay_scheduling = DelayScheduling(*waits) if any(waits) else None
        self.pool = ValidationPool(self.topology, settings.validation_gpus, settings.validation_time)
        self.placement = placement
        self.free = _all_free(self.topology, self.pool)
        self.ledger = Ledger(self.topology)
        self.placement_view = PlacementView(
            self.topology, self.free.masks, self.free.alive, self.ledger.holdings, self.ledger.partner, self.free.withheld
        )
        self.draining: set[int] = set()
        self.columns = JobTable()
        self.origin: float | None = None
        self.rows: dict[str, int] = {}
        self.active: dict[int, None] = {}
        self.suspended: dict[int, float] = {}
        self.on_hold: set[int] = set()
        self.clocks = WaitClocks()
        self.shape_of = self.clocks.shape_of
        self.waiting_shapes = self.clocks.waiting
        self.protected: dict[int, float] = {}
        self.stopping = StoppingRuns()
        self.yields: dict[int, Yields] = {}
        self.losses: dict[int, list[tuple[float, float]]] = {}
        self.reasons: dict[int, str] = {}
        self.divisible = 0
        self.in_units = 0
        self.workloads = WorkloadBuilder(self.topology)
        self.profile_of: list[SpeedProfile] = []
        self.asked: list[Locality] = []
        """The locality that the policy asks for each job, by row."""
        self.default_shapes: list[ClaimShape] = []
        """The shape of each job's claim at that locality, by row."""
        self._shapes = ClaimShapes(placement, partial(_all_free, self.topology, self.pool))
        self._profiles: dict[str, SpeedProfile] = {}
        self._unchecked: set[str] = set()

    # Beliefs about speed

    def learn_speed(self, kind: str, perceived: Estimate) -> None:
        """Take an estimate for jobs of this kind that are submitted from now on; earlier ones keep theirs."""
        usable = [total - kept for total, kept in zip(self.topology.totals, self.pool.reserved, strict=True)]
        perceived = within(perceived, usable)
        self._profiles[kind] = SpeedProfile(self.workloads.learn(perceived), perceived)
        self._unchecked.add(kind)

    def learn_pair(self, event: Colocated) -> None:
        """Take in how fast jobs of two kinds are on the same GPUs."""
        self.workloads.learn_pair(self._profiles[event.kind].index, self._profiles[event.other].index, event.rates)

    def profile(self, kind: str, job: Job) -> SpeedProfile:
        """The current profile of a job's kind. All jobs of one kind can run here, or none can, so one check is enough."""
        profile = self._profiles.get(kind)
        if profile is None:
            raise InvariantError(f"a job of kind {kind!r} was submitted before any estimate of its speed")
        if kind in self._unchecked or job.unit != profile.unit:
            self._unchecked.discard(kind)
            profile.unit = job.unit
            profile.impossible = why_impossible(job, profile, self.topology, self.pool.reserved, self.pool.slots)
        return profile

    def estimate(self, row: int) -> Estimate:
        """What is believed about the speed of a job."""
        return self.profile_of[row].estimate

    # Questions about jobs

    def running(self, row: int) -> bool:
        """Say whether the job holds GPUs, be it on trial."""
        return self.columns.status[row] == Status.RUNNING

    def waits(self, row: int) -> bool:
        """Say whether the job competes for GPUs and holds none."""
        return row in self.active and self.columns.status[row] == Status.WAITING

    def of(self, row: int) -> Holding:
        """The GPUs of a running job, be it on trial."""
        held = self.ledger.held_by(row)
        return self.ledger.trials[row] if held is None else held

    def type_of(self, row: int) -> int:
        """The GPU type that a running job holds."""
        return self.topology.type_of[self.ledger.holding(row)[0].node]

    def gpus_of(self, row: int, gpu_type: int) -> int:
        """The number of GPUs of a type that come free if a running job stops; 0 if it shares them with another job."""
        if row in self.ledger.partner:
            return 0
        if not self.columns.tasks[row]:
            return self.columns.gpus[row] if self.type_of(row) == gpu_type else 0
        return self.topology.mix(self.ledger.holding(row))[gpu_type]

    def pinned(self) -> frozenset[int]:
        """Running jobs that must not be preempted: never, or not before something happens to them.

        Under a policy that does not share GPUs, two jobs that share some since before are pinned too: stopping one of them
        frees nothing. So are runs that hold closed GPUs; but not those at task grain, which end with their step.
        """
        running = self.protected if self.yields else {}  # most jobs of `yields` wait
        pinned = frozenset(row for row, until in running.items() if until == inf and row in self.yields)
        if self.free.closed:
            pinned = pinned.union(row for row in self.on_closed() if row in self.yields or self.protected.get(row) != inf)
        return pinned if self.workloads.knows_pairs else pinned.union(self.ledger.partner)

    def on_closed(self) -> frozenset[int]:
        """Running jobs that hold closed GPUs. No decision stops or moves them: what they hold would not be free then."""
        found = (self.ledger.holders(node, closed) for node, closed in self.free.closed.items())
        return frozenset(row for rows in found for row in rows if row in self.ledger.holdings)

    def placeless(self) -> frozenset[int]:
        """Waiting jobs whose units would find no place if every run that can be stopped made way.

        Policies that plan count GPUs, not units, and would keep GPUs for such a job in vain.
        """
        rows = [row for row in self.active if self.columns.unit[row] > 1 and self.waits(row)] if self.in_units else []
        if not rows:
            return frozenset()
        pinned, partner = self.pinned(), self.ledger.partner
        room = [mask.bit_count() for mask in self.free.masks]
        for row, holding in self.ledger.holdings.items():
            if row not in pinned and partner.get(row, row) >= row:  # GPUs that two jobs share count once
                for node, mask in holding:
                    room[node] += mask.bit_count()
        whole: dict[int, list[int]] = {}
        for unit in {self.columns.unit[row] for row in rows}:
            whole[unit] = [0] * len(self.topology.types)
            for gpu_type, gpus in zip(self.topology.type_of, room, strict=True):
                whole[unit][gpu_type] += gpus - gpus % unit
        return frozenset(
            row
            for row in rows
            if all(
                whole[self.columns.unit[row]][gpu_type] < self.columns.least[row] for gpu_type in self.profile_of[row].types
            )
        )

    def snapshot(
        self, now: float, placeless: frozenset[int] = frozenset(), *, hidden: frozenset[int] = frozenset()
    ) -> Snapshot:
        """All active jobs at this time, as a policy sees them.

        placeless   waiting jobs that have no speed in the workload;  hidden: waiting jobs that are left out altogether
        """
        live = self.live_gpus()
        waiting = sum(shape.waiting for shape in self.waiting_shapes.values()) if hidden else len(self.waiting_shapes)
        return Snapshot(
            now=now,
            origin=now if self.origin is None else self.origin,
            gpus=sum(live),
            idle=tuple(self.free.idle),
            is_contended=waiting > len(hidden),
            active=tuple(row for row in self.active if row not in hidden) if hidden else tuple(self.active),
            columns=self.columns,
            placement=self.placement_view,
            survey=partial(self.workloads.workload, live, self.ledger.partner, placeless),
            estimate=self.estimate,
            losses=self.losses,
            pinned=self.pinned(),
        )

    def live_gpus(self) -> tuple[int, ...]:
        """The number of GPUs of live nodes that jobs have or can get, by type: a closed one counts while a run holds it."""
        if not self.pool and not self.free.closed and all(self.free.alive):
            return tuple(self.topology.totals)
        live = [0] * len(self.topology.types)
        for node, alive in enumerate(self.free.alive):
            live[self.topology.type_of[node]] += alive * (self.topology.full[node] ^ self.free.withheld[node]).bit_count()
        for slots in self.pool.slots:
            live[self.topology.type_of[slots.node]] -= self.free.alive[slots.node]
        return tuple(live)

    def open_gpus(self, unit: int = 1) -> list[int]:
        """By type, GPUs that jobs could get if no other job had any: of live nodes, not closed, and not the pool's.

        unit   only whole units of this many GPUs on one node count
        """
        gpus = [
            alive * (full & ~self.free.closed.get(node, 0)).bit_count()
            for node, (alive, full) in enumerate(zip(self.free.alive, self.topology.full, strict=True))
        ]
        for slots in self.pool.slots:
            gpus[slots.node] -= self.free.is_open((slots,))
        count = [0] * len(self.topology.types)
        for gpu_type, each in zip(self.topology.type_of, gpus, strict=True):
            count[gpu_type] += each - each % unit
        return count

    # What claims ask for

    def shape(
        self, row: int, locality: Locality, types: tuple[int, ...] | None = None, gpus: int | None = None
    ) -> ClaimShape:
        """The shape of a job's claim at this locality, or else at the nearest wider one that could ever be granted."""
        columns = self.columns
        return self._shapes.of(self.profile_of[row], gpus or columns.gang[row], types, locality, columns.unit[row])

    def default_shape(self, row: int, now: float) -> ClaimShape:
        """The shape that a waiting job waits with unless a plan says otherwise."""
        if not self.delay_scheduling:
            return self.default_shapes[row]
        return self.shape(row, self.required_locality(row, now, self.asked[row]))

    def over_share(self, shape: ClaimShape) -> ClaimShape:
        """The twin of a shape for jobs that would exceed their tenant's share."""
        return self._shapes.over_share(shape)

    def required_locality(self, row: int, now: float, asked: Locality) -> Locality:
        """The locality that a claim requires: what the policy asks, or what delay scheduling still requires if it waits."""
        if not self.delay_scheduling or self.running(row):
            return asked
        return min(asked, self.delay_scheduling.at(self.columns.waiting_since[row], now))

    def allows(self, claim: Claim) -> bool:
        """Say whether a running job may keep what it holds under this claim."""
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


def _all_free(topology: Topology, pool: ValidationPool) -> FreeGpus:
    """The cluster without any job. GPUs of the validation pool are never free: no decision gives them out."""
    free = FreeGpus(topology)
    free.take(pool.slots)
    return free
