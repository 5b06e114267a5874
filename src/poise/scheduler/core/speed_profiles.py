"""What the core believes about speeds, as the policy perceives them, and what follows from it.

SpeedProfile      one kind of job: how fast it is with which GPUs, and which types it prefers
WorkloadBuilder   all active jobs as the arrays of a `Workload`, for policies that solve programs
ClaimShapes       the shapes of claims, made once and shared by all jobs that wait for the same
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import Holding, gpu_count
from poise.scheduler.model.job import Job
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.micro_batches import Mix, Tasks
from poise.scheduler.model.speed import Estimate, Locality, Rates
from poise.scheduler.model.topology import Topology
from poise.scheduler.model.units import counted, in_units
from poise.scheduler.model.workload import Workload
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import Placement, count


class SpeedProfile:
    """Rates of one kind of job as the policy perceives them.

    index        index among all profiles; a column of `JobTable` refers to it
    types        types that it can use, the fastest first;  best: steps per second on the fastest
    impossible   why no job of this kind can ever run here, with GPUs in units of `unit`; None if it can
    shapes       shapes of its jobs' claims, by GPUs, types, locality and unit: a cache of `ClaimShapes`
    """

    __slots__ = (
        "_mixed", "_others", "best", "estimate", "impossible", "index", "rates", "shapes", "skew", "tasks", "types", "unit",
    )  # fmt: skip

    def __init__(self, index: int, perceived: Estimate) -> None:
        self.index = index
        self.estimate = perceived
        self.rates: Rates = perceived.rates
        self.skew = perceived.skew
        usable = [index for index, row in enumerate(self.rates) if row[Locality.PACKED] > 0]
        self.types = tuple(sorted(usable, key=lambda index: -self.rates[index][Locality.PACKED]))
        self.best = perceived.best()
        self.impossible: str | None = None
        self.unit = 1
        self.shapes: dict[tuple[int, tuple[int, ...] | None, Locality, int], ClaimShape] = {}
        self.tasks = perceived.tasks
        self._others = dict(perceived.others)
        self._mixed: dict[tuple[Mix, Locality], float] = {}

    def rates_with(self, gpus: int) -> Rates:
        """Rates with this number of GPUs: the gang, or another number that jobs of this kind can do with."""
        return self._others.get(gpus, self.rates)

    def rate_on(self, holding: Holding, topology: Topology) -> float:
        """Steps per second on these GPUs, of one type or, where steps divide, of several."""
        locality = topology.locality(holding)
        if self.tasks is None:
            return self.rates_with(gpu_count(holding))[topology.type_of[holding[0].node]][locality]
        key = (topology.mix(holding), locality)
        rate = self._mixed.get(key)
        if rate is None:
            rate = self._mixed[key] = self.estimate.on(*key)
        return rate


def within(estimate: Estimate, gpus: Sequence[int]) -> Estimate:
    """The estimate of a job whose steps divide, where there are only this many GPUs of each type.

    Its gang shrinks to what one type has, so that policies that think in gangs can serve it.
    """
    tasks = estimate.tasks
    most = max((gpus[kind] for kind in tasks.types), default=0) if tasks else 0
    if tasks is None or tasks.gang <= most:
        return estimate
    fewer = {count: rates for count, rates in estimate.others if count <= most}
    if not fewer:
        return estimate
    gang = max(fewer)
    others = tuple((count, rates) for count, rates in fewer.items() if count != gang)
    return replace(estimate, rates=fewer[gang], others=others, tasks=replace(tasks, gang=gang))


NO_PROFILE = SpeedProfile(0, Estimate(rates=()))
"""The profile of a job that was rejected."""


def why_impossible(
    job: Job, profile: SpeedProfile, topology: Topology, reserved: list[int], pool: Holding = ()
) -> str | None:
    """Why the whole cluster cannot run this job, with the nearest that it could; None if it can.

    reserved   number of GPUs of each type that no job gets: those of the validation pool
    pool       the same GPUs by node
    """
    allowed = [index for index, name in enumerate(topology.types) if not job.gpu_types or name in job.gpu_types]
    if not allowed:
        return f"asks for {' or '.join(job.gpu_types)}; the cluster has {', '.join(topology.types)}"
    if job.unit > 1 and (problem := _why_not_in_units(job, allowed, topology, pool)):
        return problem
    usable = [index for index in allowed if index in profile.types]
    if not usable:
        names = ", ".join(topology.types[index] for index in allowed)
        return f"cannot run as model {job.model!r} on {names} with {counted(job.gpus, 'GPU')} (throughput 0)"
    totals = [total - kept for total, kept in zip(topology.totals, reserved, strict=True)]
    most = max(usable, key=totals.__getitem__)
    if profile.tasks is not None and totals[most] > 0:
        return None  # any GPU will do
    if job.gpus > totals[most]:
        gang = counted(job.gpus, "GPU")
        return f"needs {gang} of one type; the cluster has at most {totals[most]} ({topology.types[most]})"
    return None if job.unit == 1 else _why_not_in_units(job, usable, topology, pool)


def _why_not_in_units(job: Job, usable: Sequence[int], topology: Topology, pool: Holding) -> str | None:
    """Why a job does not fit whose GPUs come in units, though there are enough of them; None if it does."""
    sizes = [full.bit_count() for full in topology.full]
    for slots in pool:
        sizes[slots.node] -= slots.mask.bit_count()
    largest, units = dict.fromkeys(usable, 0), dict.fromkeys(usable, 0)
    for gpu_type, size in zip(topology.type_of, sizes, strict=True):
        if gpu_type in units:
            largest[gpu_type] = max(largest[gpu_type], size)
            units[gpu_type] += size // job.unit
    roomiest, most = max(usable, key=largest.__getitem__), max(usable, key=units.__getitem__)
    if largest[roomiest] < job.unit:
        return (
            f"needs {counted(job.unit, 'GPU')} on one node; the largest node that it can use "
            f"has {largest[roomiest]} ({topology.types[roomiest]})"
        )
    if units[most] * job.unit < job.gpus:
        return (
            f"needs {in_units(job.gpus, job.unit)}, of one type; "
            f"the cluster has room for {units[most]:,} × {job.unit:,} ({topology.types[most]})"
        )
    return None


NO_PRICE = 1.0
"""Price of a GPU-hour where the cluster states none."""


class WorkloadBuilder:
    """The estimates of all kinds, and the arrays that are made of them.

    Columns are GPU types with packed GPUs, and again with GPUs spread over nodes. The second half is left out while no kind
    is believed to lose speed by being spread: programs are half as large then. Arrays are cached until a new estimate comes.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._types = len(topology.types)
        self._estimates: list[Estimate] = []
        self._rates: list[tuple[float, ...]] = []
        self._is_split_costly = False
        self._table: Floats | None = None
        self._pairs: dict[tuple[int, int], tuple[float, ...]] = {}
        self._beside: Floats | None = None
        prices = topology.cluster.prices
        self._price = np.array([prices.get(name, NO_PRICE) for name in topology.types])

    def learn(self, perceived: Estimate) -> int:
        """Take in an estimate; return its index."""
        rates = _by_column(perceived)
        self._is_split_costly = self._is_split_costly or rates[: self._types] != rates[self._types :]
        self._estimates.append(perceived)
        self._rates.append(rates)
        self._table = self._beside = None
        return len(self._rates) - 1

    def learn_pair(self, one: int, other: int, rates: tuple[tuple[float, float], ...]) -> None:
        """Take in how fast two kinds are on the same GPUs, by type."""
        self._pairs[one, other] = tuple(mine for mine, _ in rates)
        self._pairs[other, one] = tuple(others for _, others in rates)
        self._beside = None

    def beside(self, one: int, other: int, gpu_type: int) -> float:
        """Steps per second of a kind beside another; 0 if nothing is known of the two, or they do not fit together."""
        return self._pairs[one, other][gpu_type] if (one, other) in self._pairs else 0.0

    @property
    def knows_pairs(self) -> bool:
        """Whether anything is known of pairs, which is so only under policies that share GPUs."""
        return bool(self._pairs)

    def _known_beside(self, columns: int) -> Floats | None:
        """Rates by (kind, other kind, column); None if nothing is known of pairs. Pairs are always packed."""
        if not self._pairs:
            return None
        if self._beside is None or self._beside.shape[2] != columns:
            kinds = len(self._rates)
            self._beside = np.zeros((kinds, kinds, columns))
            for (one, other), rates in self._pairs.items():
                self._beside[one, other, : self._types] = rates
        return self._beside

    def column(self, gpu_type: int, locality: Locality) -> int:
        """The column of a run on GPUs of this type and locality."""
        return gpu_type if locality is Locality.PACKED else gpu_type + self._types

    def workload(
        self, live: tuple[int, ...], partner: dict[int, int], placeless: frozenset[int], snapshot: Snapshot
    ) -> Workload:
        """The jobs of a snapshot as arrays.

        live        GPUs by type
        partner     by row, who shares GPUs with whom
        placeless   rows of jobs for which no nodes have room as they are now: they are as fast as on no GPU
        """
        columns = snapshot.columns
        if self._table is None:
            self._table = np.array(self._rates)
        kind = snapshot.ints(columns.kind)
        gang = snapshot.gang.astype(float)
        gpus = np.array(live, dtype=float)
        held = snapshot.ints(columns.place) - 1
        divides = snapshot.ints(columns.tasks) > 0
        has_divisible = bool(divides.any())
        speed = self._table[kind]
        if has_divisible:
            # Shrink gangs of jobs whose steps divide where no type has enough live GPUs.
            most = np.where(speed[:, : self._types] > 0, gpus, 0.0).max(axis=1)
            for job in np.flatnonzero(divides & (gang > most)).tolist():
                fewer = within(self._estimates[kind[job]], gpus.astype(int).tolist())
                if fewer.tasks is not None:
                    gang[job], speed[job] = fewer.tasks.gang, _by_column(fewer)
        if self._is_split_costly:
            speed[gang == 1.0, self._types :] = 0.0  # one GPU is never spread
        else:
            speed = speed[:, : self._types]
            held = np.where(held >= self._types, held - self._types, held)
        column_type = np.arange(speed.shape[1]) % self._types
        speed[gang[:, None] > gpus[column_type]] = 0.0
        if placeless:
            speed[snapshot.among(placeless)] = 0.0
        part = None
        if has_divisible:  # speed now ÷ that of the whole gang; 1 for jobs that wait, or whose column has no speed
            whole = speed[np.arange(len(held)), held]
            known = (held >= 0) & (whole > 0)
            part = np.where(known, snapshot.floats(columns.rate) / np.where(known, whole, 1.0), 1.0)
        places = np.full(len(snapshot.rows), -1)
        for row, other in partner.items():
            places[np.searchsorted(snapshot.rows, row)] = np.searchsorted(snapshot.rows, other)
        kept = np.zeros(self._types)
        for holding in snapshot.kept().values() if snapshot.pinned else ():
            kept += self._topology.mix(holding)
        return Workload(
            now=snapshot.now,
            rows=snapshot.rows,
            gang=gang,
            weight=snapshot.weight,
            submitted=snapshot.submitted,
            deadline=snapshot.floats(columns.deadline),
            steps_left=snapshot.steps_left,
            tenant=snapshot.ints(columns.tenant),
            speed=speed,
            held=held,
            partner=places,
            gpus=gpus,
            price=self._price,
            column_type=column_type,
            kind=kind,
            known_beside=self._known_beside(speed.shape[1]),
            divides=divides if has_divisible else None,
            part=part,
            tenant_weight=np.array(columns.tenant_weights),
            pinned=snapshot.among(snapshot.pinned) if snapshot.pinned else None,
            free=gpus - kept if snapshot.pinned else None,
        )


def _by_column(estimate: Estimate) -> tuple[float, ...]:
    """Rates by type: packed, then spread."""
    packed = [row[Locality.PACKED] for row in estimate.rates]
    return (*packed, *[row[Locality.CLUSTER] for row in estimate.rates])


ShapeKey = tuple[int, tuple[int, ...], Locality, Tasks | None, int]
"""Number of GPUs, types by preference, locality, the tasks that steps divide into, and the unit."""


def _wider(key: ShapeKey) -> ShapeKey:
    """The same with the next wider locality."""
    gang, types, locality, tasks, unit = key
    return gang, types, Locality(locality + 1), tasks, unit


class ClaimShapes:
    """All shapes so far. `empty` makes the cluster without any job, to see what could ever be granted."""

    def __init__(self, placement: Placement, empty: Callable[[], FreeGpus]) -> None:
        self._placement = placement
        self._empty = empty
        self._known: dict[ShapeKey, ClaimShape] = {}
        self._made = 0

    def of(
        self, profile: SpeedProfile, gpus: int, types: tuple[int, ...] | None, locality: Locality, unit: int
    ) -> ClaimShape:
        """The shape of a claim at this locality, or else at the nearest wider one that could ever be granted.

        A job whose steps divide requires no locality: it takes the GPUs that there are.
        """
        shape = profile.shapes.get((gpus, types, locality, unit))
        if shape is None:
            rates = profile.rates_with(gpus)
            able = profile.types if types is None else (each for each in types if each in profile.types)
            asked = tuple(each for each in able if rates[each][Locality.PACKED] > 0)
            nearest = locality if profile.tasks is None else Locality.CLUSTER
            shape = self._shape((gpus, asked, nearest, profile.tasks, unit))
            profile.shapes[gpus, types, locality, unit] = shape
        return shape

    def over_share(self, shape: ClaimShape) -> ClaimShape:
        """The twin of a shape for jobs that would exceed their tenant's share."""
        if shape.over_share is None:
            shape.over_share = self._make(shape.gang, shape.types, shape.locality, shape.tasks, shape.unit)
            shape.over_share.over_share = shape.over_share
        return shape.over_share

    def _shape(self, key: ShapeKey) -> ClaimShape:
        shape = self._known.get(key)
        if shape is None:
            gang, types, locality, _, unit = key
            could_be_granted = locality is Locality.CLUSTER
            if not could_be_granted and self._placement is not count:  # placement `count` knows no distances
                empty = self._empty()
                offers = ((each, empty.in_units(each, unit)) for each in types)
                could_be_granted = any(self._placement(offer, each, gang, locality) is not None for each, offer in offers)
            shape = self._make(*key) if could_be_granted else self._shape(_wider(key))
            self._known[key] = shape
        return shape

    def _make(self, gang: int, types: tuple[int, ...], locality: Locality, tasks: Tasks | None, unit: int) -> ClaimShape:
        self._made += 1
        return ClaimShape(self._made - 1, gang, types, locality, tasks, unit)
