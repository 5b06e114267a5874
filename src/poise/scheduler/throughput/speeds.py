"""A throughput table bound to a cluster: how fast the jobs of a trace are on the GPU types that are there.

A job whose model the table knows has the table's rates. On a type where that model was not measured it has its
reference rate times the type's relative speed. A job whose model the table does not know is as fast as its duration
says: 1 step a second on the reference type (steps ÷ duration, if it states both), times the type's relative speed,
wherever its GPUs are.

The relative speed of a type is the table's `speedup`, else the cluster's own figure, else 1 for the generic type `gpu`.

A job whose steps divide into K micro-batches (`scheduler/model/micro_batches.py`) is measured as a gang of g GPUs, each
of which computes
ceil(K/g) of them in turn; its speed on any other GPUs follows from that:

    step of the gang on type j   1/r_j = ceil(K/g)·t_j + s      t_j: seconds of a task;  s: the job's `sync`
    further apart                the synchronisation takes longer by as much as the gang's whole step does
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import quote

from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import ThroughputError, UnknownNameError
from poise.scheduler.model.job import Job
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate, Locality, Rates
from poise.scheduler.throughput.measurements import CANNOT_RUN, JobClass, Row, Throughputs, same_model

TIMED = "~"
"""Ends the kind of jobs whose work is counted in seconds on the reference type, though the table knows their steps."""

MOST_RATE = 1e100
"""Steps per second beyond which a duration is a slip of the pen."""

GENERIC = "gpu"
"""The GPU type of traces and clusters that name none."""


class Speeds:
    """What is believed, or true, of the speed of jobs on this cluster. Estimates are made once a kind of job."""

    def __init__(self, table: Throughputs, cluster: Cluster) -> None:
        self._table = table
        self._types = tuple(gpu_type.lower() for gpu_type in cluster.gpu_types)
        self._stated = {gpu_type.lower(): _checked(gpu_type, speed) for gpu_type, speed in cluster.speeds.items()}
        self._named = {*table.gpu_types, *self._stated}
        for gpu_type in self._types:
            if gpu_type not in self._named and gpu_type != GENERIC:
                otherwise = "(another type needs a cluster file that states its speed)"
                raise UnknownNameError("GPU type", gpu_type, {*self._named, GENERIC}, otherwise)
        self._relative = {gpu_type: self._relative_speed(gpu_type) for gpu_type in (*table.gpu_types, *self._types)}
        self._gpus = tuple(cluster.gpus_of(gpu_type) for gpu_type in cluster.gpu_types)
        self._most_gpus = max(self._gpus)
        self._known: dict[tuple[str | None, int | None], bool] = {}
        self._kinds: dict[tuple[object, ...], str] = {}
        self._estimates: dict[str, Estimate] = {}
        self._by_duration: dict[tuple[object, ...], tuple[str, Estimate]] = {}

    def kind(self, job: Job) -> str:
        """A stable name of the model, batch size, gang, tasks and types allowed: jobs of one kind share an Estimate.

        Raises ThroughputError for a job that states its work in steps of a model that the table does not know.
        """
        own = None if self.knows(job) else _own_rate(self._table, job)
        gang = (job.gpus, job.min_gpus, job.max_gpus, job.micro_batches, job.sync)
        key = (job.model, job.batch_size, *gang, job.gpu_types, own, self._is_timed(job))
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _name(job, own) + (TIMED if self._is_timed(job) else "")
        return kind

    def estimate(self, job: Job) -> Estimate:
        """Steps per second of the whole gang, one row a type of the cluster; 0 on types that the job rules out."""
        kind = self.kind(job)
        estimate = self._estimates.get(kind)
        if estimate is None:
            estimate = self._estimates[kind] = self._estimated(job)
        return estimate

    def pair(self, one: Job, other: Job) -> tuple[tuple[float, float], ...]:
        """Steps per second of two jobs of equal gang on the same GPUs, by type of the cluster; 0 where nothing is known.

        Jobs whose steps divide into tasks share no GPUs.
        """
        is_divided = one.micro_batches is not None or other.micro_batches is not None
        if is_divided or not (self.knows(one) and self.knows(other)):
            return ((0.0, 0.0),) * len(self._types)
        units = self._unit(one), self._unit(other)
        classes = (JobClass(one.model or "", one.batch_size), JobClass(other.model or "", other.batch_size))
        able = zip(self.estimate(one).rates, self.estimate(other).rates, strict=True)
        pairs = []
        for gpu_type, (mine, others) in zip(self._types, able, strict=True):
            measured = self._table.pair(*classes, gpu_type, one.gpus)
            if measured is None or not (mine[Locality.PACKED] and others[Locality.PACKED]):
                pairs.append((0.0, 0.0))
            else:
                pairs.append((measured[0] / units[0], measured[1] / units[1]))
        return tuple(pairs)

    def _unit(self, job: Job) -> float:
        """Steps of the table that are one step of the job's work: a second's worth, if it is stated as a duration."""
        return (self._duration_row(job)[Locality.PACKED] or 1.0) if self._is_timed(job) else 1.0

    def steps(self, job: Job) -> float:
        """The job's work: its steps, or else its duration, which is its work in seconds on the reference type."""
        if job.steps is None and job.duration is None:
            raise ThroughputError(f"job {job.id!r} states neither steps nor a duration; give one of the two")
        if not self.knows(job):
            _own_rate(self._table, job)
            return float(job.steps if job.steps is not None and job.duration else job.duration or 0.0)
        return float(job.steps if job.steps is not None else job.duration or 0.0)

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        """Kind, estimate and work of a job at once; jobs that state a duration and nothing else cost one look-up."""
        if job.steps is not None or job.duration is None:
            return self.kind(job), self.estimate(job), self.steps(job)
        key = (
            job.model, job.batch_size, job.gpu_types, job.gpus, job.min_gpus, job.max_gpus, job.micro_batches, job.sync
        )  # fmt: skip
        found = self._by_duration.get(key)
        if found is None:
            found = self._by_duration[key] = (self.kind(job), self.estimate(job))
        kind, estimate = found
        return kind, estimate, float(job.duration)

    def _is_timed(self, job: Job) -> bool:
        """The table knows the job's model, but its work is stated as a duration."""
        return job.steps is None and job.duration is not None and self.knows(job)

    def knows(self, job: Job) -> bool:
        """The table knows the job's model, with its batch size."""
        key = (job.model, job.batch_size)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = job.model is not None and self._table.knows(job.model, job.batch_size)
        return known

    def _estimated(self, job: Job) -> Estimate:
        skew = None if job.model is None else self._table.skew(job.model)
        rates = self._rates(job, job.gpus)
        if job.micro_batches is not None:
            return _divided(self._tasks(job, job.micro_batches, rates), self._most_of_use(rates), skew)
        least, most = job.min_gpus or job.gpus, min(job.max_gpus or job.gpus, self._most_gpus)
        bounded = (gpus for gpus in range(least, most + 1) if gpus != job.gpus)
        return Estimate(rates, skew, tuple((gpus, self._rates(job, gpus)) for gpus in bounded))

    def _most_of_use(self, rates: Rates) -> int:
        """The most GPUs of one type on which these rates are above 0."""
        able = (gpus for gpus, row in zip(self._gpus, rates, strict=True) if row[Locality.PACKED] > 0)
        return max(able, default=self._most_gpus)

    def _tasks(self, job: Job, count: int, gang: Rates) -> Tasks:
        """So many tasks a step, which together take the job's gang as long as these rates say.

        A step of work may be several of the table's, or a part of one; `sync` is of one of the table's. Policies that think
        in gangs ask for as many GPUs as the job's gang needs, and for no more than there are of one type.
        """
        unit = self._unit(job)
        sync = job.sync * unit
        in_turn = _in_turn(count, job.gpus)
        seconds, syncs = [], []
        for gpu_type, row in zip(self._types, gang, strict=True):
            step = _seconds(row[Locality.PACKED])
            is_able = math.isfinite(step)
            if is_able and sync >= step:
                raise ThroughputError(_too_slow(job, gpu_type, step / unit))
            seconds.append((step - sync) / in_turn if is_able else 0.0)
            syncs.append(_synced(row, step, sync) if is_able else CANNOT_RUN)
        return Tasks(count, tuple(seconds), tuple(syncs), _as_fast(count, min(job.gpus, self._most_of_use(gang))))

    def _rates(self, job: Job, gpus: int) -> Rates:
        """With so many GPUs; work is counted as it is with the gang that the job asks for."""
        allowed = {gpu_type.lower() for gpu_type in job.gpu_types} or set(self._types)
        with_them = job if gpus == job.gpus else replace(job, gpus=gpus)
        if self.knows(job):
            rates = tuple(self._measured(with_them, name) if name in allowed else CANNOT_RUN for name in self._types)
        else:
            scale = gpus / job.gpus
            rates = tuple(self._stated_by_owner(job, name, scale) if name in allowed else CANNOT_RUN for name in self._types)
        if self._is_timed(job):
            # Work is stated in seconds: on the reference type the rate must be 1 to the last bit, not d·r ÷ r.
            second = self._unit(job)  # a model that runs nowhere has no rates to divide
            rates = tuple((packed / second, rack / second, cluster / second) for packed, rack, cluster in rates)
        return rates

    def _stated_by_owner(self, job: Job, gpu_type: str, scale: float) -> Row:
        """Rates of a job that the table does not know: nothing is known of what distance does to it, either,

        and with other numbers of GPUs than it asks for it is taken to be faster or slower in proportion.
        """
        own = _own_rate(self._table, job) * scale
        return _scaled((own, own, own), self._relative[gpu_type])

    def _measured(self, job: Job, gpu_type: str) -> Row:
        """Rates of a job that the table knows."""
        if self._table.measures(job.model or "", job.batch_size, gpu_type):
            return self._row(job, gpu_type)
        if gpu_type == GENERIC and gpu_type not in self._named:
            return self._duration_row(job)
        reference = self._reference_row(job)
        return CANNOT_RUN if reference is None else _scaled(reference, self._relative[gpu_type])

    def _duration_row(self, job: Job) -> Row:
        """The rates that a duration refers to: on the reference type; if the job cannot run there, on its fastest."""
        reference = self._reference_row(job)
        return self._row(job, self._fastest(job)) if reference is None or self._is_refused(job) else reference

    def _reference_row(self, job: Job) -> Row | None:
        """Rates on the reference type: measured, or derived from the fastest type measured; None if neither can be."""
        row = self._row(job, self._table.reference)
        if row[Locality.PACKED] > 0:
            return row
        fastest = self._fastest(job)
        relative = self._relative[fastest]
        return _scaled(self._row(job, fastest), 1 / relative) if relative else None

    def _is_refused(self, job: Job) -> bool:
        """Whether the job was tried on the reference type and does not run there."""
        reference = self._table.reference
        was_tried = self._table.measures(job.model or "", job.batch_size, reference)
        return was_tried and self._row(job, reference)[Locality.PACKED] == 0

    def _fastest(self, job: Job) -> str:
        """The type on which this gang was measured to be fastest, packed; the first of equals."""
        return max(self._table.gpu_types, key=lambda gpu_type: self._row(job, gpu_type)[Locality.PACKED])

    def _row(self, job: Job, gpu_type: str) -> Row:
        return self._table.row(job.model or "", job.batch_size, gpu_type, job.gpus)

    def _relative_speed(self, gpu_type: str) -> float | None:
        speedup = self._table.speedup(gpu_type)
        if speedup is None:
            speedup = self._stated.get(gpu_type, 1.0 if gpu_type == GENERIC else None)
        return speedup


def _checked(gpu_type: str, speed: float) -> float:
    if not (math.isfinite(speed) and speed > 0):
        raise ThroughputError(f"speed of GPU type {gpu_type!r}: expected a finite number above 0, got {speed!r}")
    return speed


def _scaled(row: Row, factor: float | None) -> Row:
    packed, rack, cluster = row
    return (packed * factor, rack * factor, cluster * factor) if factor else CANNOT_RUN


def _seconds(rate: float) -> float:
    """Of a step, at so many a second; infinite where it cannot run."""
    return 1.0 / rate if rate > 0 else math.inf


def _synced(row: Row, step: float, sync: float) -> Row:
    """Seconds of synchronisation by locality, of a gang whose step takes so long packed; infinite where it cannot run."""
    packed, rack, cluster = (sync + max(0.0, _seconds(rate) - step) for rate in row)
    return packed, rack, cluster


def _divided(tasks: Tasks, most: int, skew: float | None) -> Estimate:
    """Of a job of such tasks, with every number of GPUs of one type up to `most` that is worth having."""
    others = (gpus for gpus in _worthwhile(tasks.count, most) if gpus != tasks.gang)
    with_others = tuple((gpus, _of_one_type(tasks, gpus)) for gpus in others)
    return Estimate(_of_one_type(tasks, tasks.gang), skew, with_others, tasks)


def _in_turn(count: int, gpus: int) -> int:
    """How many of so many tasks the busiest of these GPUs computes, if all are equally fast."""
    return -(-count // gpus)


def _as_fast(count: int, gpus: int) -> int:
    """The fewest GPUs on which so many tasks take no longer than on these, if all are equally fast."""
    return -(-count // _in_turn(count, gpus))


def _worthwhile(count: int, most: int) -> Iterator[int]:
    """The numbers of GPUs of one type, up to `most`, with which a round of so many tasks is shorter than with one fewer."""
    gpus = 1
    while gpus <= most:
        yield gpus
        in_turn = _in_turn(count, gpus)
        if in_turn == 1:
            return
        gpus = -(-count // (in_turn - 1))


def _of_one_type(tasks: Tasks, gpus: int) -> Rates:
    """Steps per second with so many GPUs, by their type: what `Estimate.on` says, to the last bit; one GPU is packed."""
    in_turn = _in_turn(tasks.count, gpus)
    rates = []
    for each, sync in zip(tasks.seconds, tasks.sync, strict=True):
        packed, rack, cluster = (1.0 / (in_turn * each + apart) if each else 0.0 for apart in sync)
        rates.append((packed, packed, packed) if gpus == 1 else (packed, rack, cluster))
    return tuple(rates)


def _too_slow(job: Job, gpu_type: str, step: float) -> str:
    return (
        f"job {job.id!r}: sync: a step takes {step:.6g} s on {gpu_type!r}, of which {job.sync:.6g} s of synchronisation"
        f" leave none to compute; give less, or leave {gpu_type!r} out of its gpu_types"
    )


def _own_rate(table: Throughputs, job: Job) -> float:
    """Steps per second on the reference type of a job that only its own statements tell about."""
    if job.steps is None:
        return 1.0
    if job.duration is None:
        raise ThroughputError(_unknown(table, job))
    return min(job.steps / job.duration, MOST_RATE) if job.steps and job.duration else 1.0


def _unknown(table: Throughputs, job: Job) -> str:
    remedy = "give a table that has it (--throughputs FILE), or the job's duration"
    if job.model is None:
        return f"job {job.id!r} states its work in steps but names no model; name one, or give the job's duration"
    batch = "" if job.batch_size is None else f" at batch size {job.batch_size}"
    return (
        f"job {job.id!r}: the throughput table {table.name!r} does not know model {job.model!r}{batch}"
        f"{_near(table, job.model)}; {remedy}"
    )


def _near(table: Throughputs, model: str) -> str:
    """What the table knows that may have been meant."""
    names = {same_model(name): name for name in table.models()}
    sizes = [each.batch_size for each in table.classes() if same_model(each.model) == same_model(model)]
    if sizes:
        return f" (known batch sizes: {', '.join('not stated' if size is None else str(size) for size in sizes)})"
    near = difflib.get_close_matches(same_model(model), names, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(names[name] for name in near)})" if near else ""


def _name(job: Job, own: float | None) -> str:
    """`resnet50/b16/x4`; `x4[1-8]` if other numbers of GPUs will do; `x4/k8/s0.5` if a step divides into 8 tasks and takes

    0.5 s of synchronisation; `@p100+v100` if types are ruled out; `*2.5` if the job states its own steps per second.
    Different keys give different names: whatever comes from outside is quoted.
    """
    model = "-" if job.model is None else quote(same_model(job.model), safe="")
    batch = "" if job.batch_size is None else f"/b{job.batch_size}"
    rate = "" if own in (None, 1.0) else f"*{own!r}"
    types = "+".join(quote(gpu_type, safe="") for gpu_type in sorted({name.lower() for name in job.gpu_types}))
    bounds = (job.min_gpus or job.gpus, job.max_gpus or job.gpus)
    elastic = "" if bounds == (job.gpus, job.gpus) else f"[{bounds[0]}-{bounds[1]}]"
    tasks = "" if job.micro_batches is None else f"/k{job.micro_batches}" + (f"/s{float(job.sync)!r}" if job.sync else "")
    return f"{model}{batch}/x{job.gpus}{elastic}{tasks}{rate}{'@' if types else ''}{types}"
