"""A throughput table bound to a cluster: how fast jobs are on the GPU types of that cluster.

A job whose model the table knows has the table's rates; on a type where that model was not measured, its reference rate
times the type's relative speed. A job whose model the table does not know is as fast as its duration says: 1 step per second
on the reference type (steps ÷ duration, if it states both), times the type's relative speed, wherever its GPUs are.

The relative speed of a type is the table's `speedup`, else the cluster's own figure, else 1 for the generic type `gpu`.

A job whose steps divide into K micro-batches (`model/micro_batches.py`) is measured as a gang of g GPUs, each of which
computes ceil(K/g) of them in turn. Its speed on any other GPUs follows from that:

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
"""Suffix of kinds whose work is counted in seconds on the reference type although the table knows their steps."""

MOST_RATE = 1e100
"""Steps per second at most: a duration that gives more is a typing error."""

GENERIC = "gpu"
"""The GPU type of traces and clusters that name none."""


class Speeds:
    """The speeds of jobs on one cluster, believed or true. Estimates are made once per kind of job and kept."""

    def __init__(self, table: Throughputs, cluster: Cluster) -> None:
        self._table = table
        self._types = tuple(gpu_type.lower() for gpu_type in cluster.gpu_types)
        for gpu_type, speed in cluster.speeds.items():
            if not (math.isfinite(speed) and speed > 0):
                raise ThroughputError(f"speed of GPU type {gpu_type!r}: expected a finite number above 0, got {speed!r}")
        self._stated = {gpu_type.lower(): speed for gpu_type, speed in cluster.speeds.items()}
        self._named = {*table.gpu_types, *self._stated}
        for gpu_type in self._types:
            if gpu_type not in self._named and gpu_type != GENERIC:
                otherwise = "(another type needs a cluster file that states its speed)"
                raise UnknownNameError("GPU type", gpu_type, {*self._named, GENERIC}, otherwise)
        self._relative: dict[str, float | None] = {}
        for gpu_type in (*table.gpu_types, *self._types):
            speedup = table.speedup(gpu_type)
            stated = self._stated.get(gpu_type, 1.0 if gpu_type == GENERIC else None)
            self._relative[gpu_type] = stated if speedup is None else speedup
        self._gpus = tuple(cluster.gpus_of(gpu_type) for gpu_type in cluster.gpu_types)
        self._most_gpus = max(self._gpus, default=0)
        self._nodes = [[node.gpus for node in cluster.nodes if node.gpu_type == name] for name in cluster.gpu_types]
        self._known: dict[tuple[str | None, int | None], bool] = {}
        self._kinds: dict[tuple[object, ...], str] = {}
        self._estimates: dict[str, Estimate] = {}
        self._by_duration: dict[tuple[object, ...], tuple[str, Estimate]] = {}

    def kind(self, job: Job) -> str:
        """A stable name made of model, batch size, gang, unit, tasks and allowed types. Jobs of one kind share an Estimate.

        Raises ThroughputError for a job that states its work in steps of a model that the table does not know.
        """
        own = None if self.knows(job) else _own_rate(self._table, job)
        gang = (job.gpus, job.min_gpus, job.max_gpus, job.unit, job.micro_batches, job.sync)
        key = (job.model, job.batch_size, *gang, job.gpu_types, own, self._is_timed(job))
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _name(job, own) + (TIMED if self._is_timed(job) else "")
        return kind

    def estimate(self, job: Job) -> Estimate:
        """Steps per second of the whole gang, one row per type of the cluster; 0 on types that the job rules out."""
        kind = self.kind(job)
        if kind not in self._estimates:
            self._estimates[kind] = self._estimated(job)
        return self._estimates[kind]

    def _estimated(self, job: Job) -> Estimate:
        skew = None if job.model is None else self._table.skew(job.model)
        rates, tasks = self._rates(job, job.gpus), None
        if job.micro_batches is not None:
            tasks = self._tasks(job, job.micro_batches, rates)
            # Every number of GPUs of one type that makes a step shorter is worth having.
            numbers = [gpus for gpus in _worthwhile(tasks.count, self._most_of_use(rates)) if gpus != tasks.gang]
            others = tuple((gpus, _of_one_type(tasks, gpus)) for gpus in numbers)
            rates = _of_one_type(tasks, tasks.gang)
        else:
            least, most = job.min_gpus or job.gpus, min(job.max_gpus or job.gpus, self._most_gpus)
            others = tuple((gpus, self._rates(job, gpus)) for gpus in range(least, most + 1, job.unit) if gpus != job.gpus)
        return Estimate(rates, skew, others, tasks)

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
        """Steps of the table in one step of the job's work: one second's worth if the work is stated as a duration."""
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
        """Kind, estimate and work of a job. Fast for jobs that state only a duration: one look-up."""
        if job.steps is not None or job.duration is None:
            return self.kind(job), self.estimate(job), self.steps(job)
        gang = (job.gpus, job.min_gpus, job.max_gpus, job.unit, job.micro_batches, job.sync)
        key = (job.model, job.batch_size, job.gpu_types, gang)
        found = self._by_duration.get(key)
        if found is None:
            found = self._by_duration[key] = (self.kind(job), self.estimate(job))
        kind, estimate = found
        return kind, estimate, float(job.duration)

    def _is_timed(self, job: Job) -> bool:
        """Whether the table knows the job's model, but its work is stated as a duration."""
        return job.steps is None and job.duration is not None and self.knows(job)

    def knows(self, job: Job) -> bool:
        """Whether the table knows the job's model with its batch size."""
        key = (job.model, job.batch_size)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = job.model is not None and self._table.knows(job.model, job.batch_size)
        return known

    def _most_of_use(self, rates: Rates) -> int:
        """The most GPUs of one type on which these rates are above 0."""
        able = (gpus for gpus, row in zip(self._gpus, rates, strict=True) if row[Locality.PACKED] > 0)
        return max(able, default=self._most_gpus)

    def _tasks(self, job: Job, count: int, gang: Rates) -> Tasks:
        """The tasks of a step that together take the job's gang as long as these rates say.

        A step of work may be several of the table's, or a part of one; `sync` refers to one of the table's. Gang-scheduling
        policies ask for as many GPUs as the job's gang needs, but no more than there are of one type.
        """
        unit = self._unit(job)
        sync = job.sync * unit
        in_turn = _in_turn(count, job.gpus)
        seconds, syncs = [], []
        for gpu_type, row in zip(self._types, gang, strict=True):
            step = _seconds(row[Locality.PACKED])
            is_able = math.isfinite(step)
            if is_able and sync >= step:
                raise ThroughputError(
                    f"job {job.id!r}: sync: a step takes {step / unit:.6g} s on {gpu_type!r}, of which {job.sync:.6g} s of"
                    f" synchronisation leave none to compute; give less, or leave {gpu_type!r} out of its gpu_types"
                )
            seconds.append((step - sync) / in_turn if is_able else 0.0)
            packed, rack, cluster = (sync + max(0.0, _seconds(rate) - step) for rate in row)
            syncs.append((packed, rack, cluster) if is_able else CANNOT_RUN)
        # The fewest GPUs on which a step takes no longer than on the gang, if all are equally fast.
        fewest = -(-count // _in_turn(count, min(job.gpus, self._most_of_use(gang))))
        return Tasks(count, tuple(seconds), tuple(syncs), fewest)

    def _rates(self, job: Job, gpus: int) -> Rates:
        """Rates with this number of GPUs, in steps as they are counted for the gang that the job asks for."""
        allowed = {gpu_type.lower() for gpu_type in job.gpu_types} or set(self._types)
        with_them = job if gpus == job.gpus else replace(job, gpus=gpus)
        if self.knows(job):
            rates = tuple(self._measured(with_them, name) if name in allowed else CANNOT_RUN for name in self._types)
        else:
            # The same at any distance, and proportional to the number of GPUs.
            own = _own_rate(self._table, job) * (gpus / job.gpus)
            relative = (self._relative[name] if name in allowed else None for name in self._types)
            rates = tuple(_scaled((own, own, own), factor) for factor in relative)
        if self._is_timed(job):
            # Work is stated in seconds: on the reference type the rate must be 1 to the last bit, not d·r ÷ r.
            second = self._unit(job)  # a model that runs nowhere has no rates to divide
            rates = tuple((packed / second, rack / second, cluster / second) for packed, rack, cluster in rates)
        if job.unit > 1:  # a type whose nodes are too small for its units is one on which it cannot run
            room = (sum(size - size % job.unit for size in sizes) for sizes in self._nodes)
            rates = tuple(row if gpus <= most else CANNOT_RUN for row, most in zip(rates, room, strict=True))
        return rates

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
        was_tried = self._table.measures(job.model or "", job.batch_size, self._table.reference)
        does_not_run = was_tried and self._row(job, self._table.reference)[Locality.PACKED] == 0
        return self._row(job, self._fastest(job)) if reference is None or does_not_run else reference

    def _reference_row(self, job: Job) -> Row | None:
        """Rates on the reference type: measured, or derived from the fastest type measured; None if neither is possible."""
        row = self._row(job, self._table.reference)
        if row[Locality.PACKED] > 0:
            return row
        fastest = self._fastest(job)
        relative = self._relative[fastest]
        return _scaled(self._row(job, fastest), 1 / relative) if relative else None

    def _fastest(self, job: Job) -> str:
        """The type on which this gang was measured to be fastest, packed; the first of equals."""
        return max(self._table.gpu_types, key=lambda gpu_type: self._row(job, gpu_type)[Locality.PACKED])

    def _row(self, job: Job, gpu_type: str) -> Row:
        return self._table.row(job.model or "", job.batch_size, gpu_type, job.gpus)


def _scaled(row: Row, factor: float | None) -> Row:
    packed, rack, cluster = row
    return (packed * factor, rack * factor, cluster * factor) if factor else CANNOT_RUN


def _seconds(rate: float) -> float:
    """Seconds per step at this rate; infinite where it cannot run."""
    return 1.0 / rate if rate > 0 else math.inf


def _in_turn(count: int, gpus: int) -> int:
    """Tasks that the busiest of these GPUs computes, if all are equally fast."""
    return -(-count // gpus)


def _worthwhile(count: int, most: int) -> Iterator[int]:
    """The numbers of GPUs of one type, up to `most`, with which a step of `count` tasks is shorter than with one fewer."""
    gpus = 1
    while gpus <= most:
        yield gpus
        in_turn = _in_turn(count, gpus)
        if in_turn == 1:
            return
        gpus = -(-count // (in_turn - 1))


def _of_one_type(tasks: Tasks, gpus: int) -> Rates:
    """Steps per second with this number of GPUs, by type: what `Estimate.on` says, to the last bit. One GPU is packed."""
    in_turn = _in_turn(tasks.count, gpus)
    rates = []
    for each, sync in zip(tasks.seconds, tasks.sync, strict=True):
        packed, rack, cluster = (1.0 / (in_turn * each + apart) if each else 0.0 for apart in sync)
        rates.append((packed, packed, packed) if gpus == 1 else (packed, rack, cluster))
    return tuple(rates)


def _own_rate(table: Throughputs, job: Job) -> float:
    """Steps per second on the reference type of a job that the table does not know, from its own steps and duration."""
    if job.steps is None:
        return 1.0
    if job.duration is None:
        if job.model is None:
            problem = "states its work in steps but names no model; name one, or give the job's duration"
            raise ThroughputError(f"job {job.id!r} {problem}")
        batch = "" if job.batch_size is None else f" at batch size {job.batch_size}"
        # Batch sizes or models of the table that may have been meant.
        model, names = same_model(job.model), {same_model(name): name for name in table.models()}
        sizes = [str(each.batch_size or "not stated") for each in table.classes() if same_model(each.model) == model]
        near = ", ".join(names[name] for name in difflib.get_close_matches(model, names, n=3, cutoff=0.5))
        meant = f" (known batch sizes: {', '.join(sizes)})" if sizes else f" (nearest: {near})" if near else ""
        raise ThroughputError(
            f"job {job.id!r}: the throughput table {table.name!r} does not know model {job.model!r}{batch}"
            f"{meant}; give a throughput table that has it, or the job's duration"
        )
    return min(job.steps / job.duration, MOST_RATE) if job.steps and job.duration else 1.0


def _name(job: Job, own: float | None) -> str:
    """The name of a kind, e.g. `resnet50/b16/x4`. Different kinds have different names, because user input is quoted.

    `x4[1-8]` if it can run on 1 to 8 GPUs; `x8/u4` if those on each node come in multiples of 4; `x4/k8/s0.5` if a step
    divides into 8 tasks with 0.5 s of synchronisation; `@p100+v100` if it may only run on these types; `*2.5` if the job
    states its own steps per second.
    """
    model = "-" if job.model is None else quote(same_model(job.model), safe="")
    batch = "" if job.batch_size is None else f"/b{job.batch_size}"
    rate = "" if own in (None, 1.0) else f"*{own!r}"
    types = "+".join(quote(gpu_type, safe="") for gpu_type in sorted({name.lower() for name in job.gpu_types}))
    bounds = (job.min_gpus or job.gpus, job.max_gpus or job.gpus)
    elastic = "" if bounds == (job.gpus, job.gpus) else f"[{bounds[0]}-{bounds[1]}]"
    unit = "" if job.unit == 1 else f"/u{job.unit}"
    tasks = "" if job.micro_batches is None else f"/k{job.micro_batches}" + (f"/s{float(job.sync)!r}" if job.sync else "")
    return f"{model}{batch}/x{job.gpus}{elastic}{unit}{tasks}{rate}{'@' if types else ''}{types}"
