"""Workloads for tests of share policies: a builder with sensible defaults, the running example, and random ones."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
from hypothesis import strategies as st

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.workload import Allocation, Workload


def a_workload(
    speed: Sequence[Sequence[float]],
    gpus: Sequence[float],
    *,
    gang: Sequence[float] | None = None,
    weight: Sequence[float] | None = None,
    submitted: Sequence[float] | None = None,
    deadline: Sequence[float] | None = None,
    steps: Sequence[float] | None = None,
    price: Sequence[float] | None = None,
    rows: Sequence[int] | None = None,
    kind: Sequence[int] | None = None,
    held: Sequence[int] | None = None,
    beside: Any = None,
    now: float = 0.0,
) -> Workload:
    """Jobs of these speeds on so many GPUs of each type; columns beyond the types are the types again, spread."""
    table = np.array(speed, dtype=float).reshape(len(speed), -1) if len(speed) else np.zeros((0, len(gpus)))
    n, columns = table.shape

    def each(given: Sequence[float] | None, default: float) -> Floats:
        return np.full(n, default) if given is None else np.array(given, dtype=float)

    return Workload(
        now=now,
        rows=np.arange(n) if rows is None else np.array(rows, dtype=np.int64),
        gang=each(gang, 1.0),
        weight=each(weight, 1.0),
        submitted=each(submitted, 0.0),
        deadline=each(deadline, inf),
        steps_left=each(steps, 1000.0),
        tenant=np.zeros(n, dtype=np.int64),
        speed=table,
        held=np.full(n, -1) if held is None else np.array(held, dtype=np.int64),
        partner=np.full(n, -1, dtype=np.int64),
        gpus=np.array(gpus, dtype=float),
        price=np.ones(len(gpus)) if price is None else np.array(price, dtype=float),
        column_type=np.arange(columns) % len(gpus),
        kind=np.unique(table, axis=0, return_inverse=True)[1].reshape(-1) if kind is None else np.array(kind),
        beside=None if beside is None else np.array(beside, dtype=float),
    )


def example_g(**changes: Any) -> Workload:
    """One V100, one K80; the running example of docs/algorithms/gavel.md."""
    given: dict[str, Any] = {"steps": (4000, 2400, 20000), "price": (2.48, 0.45), **changes}
    return a_workload([[40, 10], [12, 4], [100, 50]], [1, 1], **given)


def throughput(workload: Workload, allocation: Allocation) -> Floats:
    """θ of each job, time together included."""
    theta: Floats = (workload.speed * allocation.share).sum(axis=1)
    pairs = allocation.pairs
    if len(pairs.share):
        assert workload.beside is not None
        one, other = workload.kind[pairs.first], workload.kind[pairs.second]
        np.add.at(theta, pairs.first, pairs.share * workload.beside[one, other, pairs.column])
        np.add.at(theta, pairs.second, pairs.share * workload.beside[other, one, pairs.column])
    return theta


def overdrawn(workload: Workload, allocation: Allocation) -> float:
    """By how much an allocation breaks the worst kept rule; 0 if it is feasible."""
    share, pairs = allocation.share, allocation.pairs
    time = share.sum(axis=1)
    used = np.zeros(workload.types)
    np.add.at(used, workload.column_type, workload.gang @ share)
    for jobs in (pairs.first, pairs.second):
        np.add.at(time, jobs, pairs.share)
    np.add.at(used, workload.column_type[pairs.column], workload.gang[pairs.first] * pairs.share)
    short = workload.gang[:, None] > workload.gpus[workload.column_type]
    useless = share[(workload.speed <= 0) | short].max(initial=0.0)
    unlike = (workload.gang[pairs.first] != workload.gang[pairs.second]) | (pairs.first == pairs.second)
    return float(
        max(
            (time - 1.0).max(initial=0.0),
            (used - workload.gpus).max(initial=0.0),
            -share.min(initial=0.0),
            useless,
            pairs.share[unlike].max(initial=0.0),
        )
    )


def drawn(seed: int, jobs: int, types: int, *, kinds: int = 8, spread: bool = False, together: bool = False) -> Workload:
    """A random workload: kinds of jobs with speeds over three decades, some of them impossible, gangs, weights, ages."""
    rng = np.random.default_rng(seed)
    gpus = rng.integers(1, 2 + 2 * jobs // types, types).astype(float)
    speed = 10.0 ** rng.uniform(-1, 2, (kinds, 1)) * rng.uniform(0.1, 1.0, (kinds, types))
    speed[rng.random(speed.shape) < 0.2] = 0.0
    gangs = rng.choice([1.0, 1.0, 2.0, 4.0], kinds)
    columns = np.hstack([speed, speed * rng.uniform(0.3, 1.0, speed.shape) * (gangs > 1)[:, None]]) if spread else speed
    kind = rng.integers(0, kinds, jobs)
    beside = None
    if together:
        alone = columns[:, None, :] * (columns > 0)[None, :, :] * (gangs[:, None] == gangs)[:, :, None]
        beside = alone * rng.uniform(0.3, 0.95, alone.shape)
    submitted = -(10.0 ** rng.uniform(0, 4, jobs))
    return a_workload(
        columns[kind].tolist(),
        gpus.tolist(),
        gang=gangs[kind].tolist(),
        weight=rng.choice([1.0, 1.0, 0.5, 3.0], jobs).tolist(),
        submitted=submitted.tolist(),
        steps=(columns[kind].max(axis=1) * 10.0 ** rng.uniform(2, 6, jobs)).tolist(),
        price=rng.uniform(0.3, 3.0, types).tolist(),
        rows=np.sort(rng.choice(4 * jobs, jobs, replace=False)).tolist(),
        kind=kind.tolist(),
        beside=beside,
    )


@st.composite
def workloads(draw: st.DrawFn, *, most: int = 12, spread: bool | None = None, together: bool = False) -> Workload:
    """Random workloads of a few jobs."""
    split = draw(st.booleans()) if spread is None else spread
    jobs, types, kinds = draw(st.integers(1, most)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    return drawn(draw(st.integers(0, 2**32 - 1)), jobs, types, kinds=kinds, spread=split, together=together)
