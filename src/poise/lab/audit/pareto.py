"""Pareto efficiency: could some agents be faster with none slower?

Two ways to be better are looked for:

    moments   other GPUs for some jobs, whole gangs; what that would gain, on average over the run (`TypeAssignment`)
    shares    other shares of time in a standing instance than those that agents had over the window (`TimeShares`)

Both are measured as what an agent could gain on average over its life, as a part of its fastest speed. The bound is two
turns as a part of that life: a policy that decides once a turn may be late by one when a job arrives, and when one leaves.

With θ* the speed of each now, a better answer leaves none below θ*, and its gain is counted in parts of the fastest speeds:

    gain = max Σ_m (θ_m − θ*_m) / fastest_m          subject to  θ_m >= θ*_m  and the GPUs of each type
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product
from math import prod

import highspy
import numpy as np
from highspy import HighsModelStatus

from poise.lab.audit.findings import TOO_SHORT, Case
from poise.lab.audit.instance_run import GpuHold, InstanceRun
from poise.lab.report.axes import amount
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import GaveUpError
from poise.scheduler.model.job import Job
from poise.scheduler.solve.program import GpuMarket, ShareProblem
from poise.scheduler.solve.solver import maximise

MOST_TRIED = 20_000
"""Assignments up to which all of them are tried."""
MOST_MOMENTS = 400
"""Intervals looked at per run; of more, as many that are evenly spread."""
NOISE = 1e-6
"""Parts of the fastest speed: gains below are the rounding of a solver."""
WAITS = -1
"""Instead of a type: holds none."""


class ParetoKind(StrEnum):
    """How agents could be better off."""

    MOMENTS = "moments"
    SHARES = "shares"


@dataclass(frozen=True, slots=True)
class UnchangedInterval:
    """An interval in which nothing changes: the active jobs, in order of submission, and what each held."""

    start: float
    end: float
    jobs: tuple[Job, ...]
    held: tuple[tuple[GpuHold, ...], ...]


def cases_at_moments(run: InstanceRun) -> Iterator[Case]:
    """One case per run, none if lives are too short.

    Jobs that hold anything but their whole gang of one type, unshared, stay as they are.
    """
    known: dict[tuple[object, ...], tuple[float, str]] = {}  # the same jobs on the same GPUs recur
    lived = gained = 0.0
    worst = (0.0, 0.0, "")
    for interval in _intervals(run):
        key = (interval.jobs, tuple(tuple((hold.gpu_type, hold.gpus) for hold in held) for held in interval.held))
        if key not in known:
            known[key] = _gain(run, interval)
        gain, how = known[key]
        lived += len(interval.jobs) * (interval.end - interval.start)
        gained += gain * (interval.end - interval.start)
        worst = max(worst, (gain, interval.start, how), key=lambda each: each[0])
    if not lived > 0:
        return
    lives = [run.ended(job.id) - job.submitted for job in run.jobs]
    bound = 2.0 * run.instance.turn * len(lives) / sum(lives)
    if bound > TOO_SHORT:
        return
    mean = gained / lived
    gain, moment, how = worst
    when = amount(moment - run.jobs[0].submitted, "seconds")
    text = (
        f"after {when} {how or 'no agent could have been faster'}; on average over their lives,"
        f" jobs could have had {amount(mean, 'percent')} more of their fastest speed"
    )
    yield run.case(mean, bound, text, moment=moment, gain=gain, mean_gain=mean, how=how)


def _intervals(run: InstanceRun) -> Iterator[UnchangedInterval]:
    """Intervals with active jobs; evenly spread ones if there are too many."""
    lives = [(job, run.ended(job.id)) for job in run.jobs]
    times = {time for hold in run.holds for time in (hold.start, hold.end)}
    edges = sorted(times | {time for job, ended in lives for time in (job.submitted, ended)})
    count = max(len(edges) - 1, 0)
    chosen = range(count) if count <= MOST_MOMENTS else [place * count // MOST_MOMENTS for place in range(MOST_MOMENTS)]
    for index in chosen:
        start = edges[index]
        active = tuple(job for job, ended in lives if job.submitted <= start < ended)
        if active:
            held = (tuple(hold for hold in run.held_by(job.id) if hold.start <= start < hold.end) for job in active)
            yield UnchangedInterval(start, edges[index + 1], active, tuple(held))


def _gain(run: InstanceRun, interval: UnchangedInterval) -> tuple[float, str]:
    """What all jobs of the interval could gain, and how: in words, the one that gains most."""
    staying = np.zeros(len(run.counts))
    jobs: list[Job] = []
    types: list[int] = []
    for job, held in zip(interval.jobs, interval.held, strict=True):
        if not held or (len(held) == 1 and held[0].gpus == job.gpus):
            jobs.append(job)
            types.append(held[0].gpu_type if held else WAITS)
        else:
            np.add.at(staying, [hold.gpu_type for hold in held], [hold.gpus for hold in held])
    if not jobs:
        return 0.0, ""
    now = TypeAssignment(
        speed=np.array([run.rates(job) for job in jobs]),
        gang=np.array([job.gpus for job in jobs]),
        gpus=np.array(run.counts) - np.ceil(staying).astype(np.int64),
        held=np.array(types),
    )
    gain, better = now.better()
    most = int(np.argmax((now.after(better) - now.now) / np.maximum(now.speed.max(axis=1), 1e-300)))
    names = run.cluster.gpu_types
    had = "waited" if now.held[most] == WAITS else f"ran on {names[now.held[most]]}"
    return gain, f"{jobs[most].id} {had} and could have run on {names[better[most]]} with no other job slower"


@dataclass(frozen=True)
class TypeAssignment:
    """Which GPU type each job holds; `WAITS` for those that hold none.

    speed   (jobs, types): of the whole gang;  gang, gpus: GPUs that each needs, and that there are of each type
    """

    speed: Floats
    gang: Ints
    gpus: Ints
    held: Ints

    @cached_property
    def now(self) -> Floats:
        """The speed of each job."""
        return self.after(self.held)

    @cached_property
    def worth(self) -> Floats:
        """(jobs, types): speeds as parts of the fastest."""
        fastest = self.speed.max(axis=1, keepdims=True)
        parts: Floats = self.speed / np.where(fastest > 0, fastest, 1.0)
        return parts

    def after(self, assignment: Ints) -> Floats:
        """The speed of each job under another assignment; 0 where it waits."""
        found: Floats = np.where(assignment >= 0, self.speed[np.arange(len(assignment)), assignment], 0.0)
        return found

    def value(self, assignment: Ints) -> float:
        """Sum of speeds under an assignment, as parts of the fastest."""
        placed = np.flatnonzero(assignment >= 0)
        return float(self.worth[placed, assignment[placed]].sum())

    def options(self) -> list[list[int]]:
        """For each job the types on which it is no slower; those that wait may go on waiting."""
        found = []
        for job, now in enumerate(self.now):
            types = [kind for kind, speed in enumerate(self.speed[job]) if speed > 0 and speed >= now]
            found.append(types if self.held[job] >= 0 else [WAITS, *types])
        return found

    def better(self) -> tuple[float, Ints]:
        """The most that could be gained with no job slower, and the assignment that gains it."""
        options = self.options()
        are_few = prod(map(len, options)) <= MOST_TRIED
        assignment = by_enumeration(self, options) if are_few else by_integer_program(self, options)
        return float(self.value(assignment) - self.value(self.held)), assignment


def by_enumeration(now: TypeAssignment, options: Sequence[Sequence[int]]) -> Ints:
    """Try each assignment; the first of the best is taken."""
    best, found = -1.0, now.held
    for each in product(*options):
        assignment = np.array(each, dtype=np.int64)
        used = np.bincount(assignment[assignment >= 0], now.gang[assignment >= 0], len(now.gpus))
        if (used <= now.gpus).all() and (value := now.value(assignment)) > best + 1e-12:
            best, found = value, assignment
    return found


def by_integer_program(now: TypeAssignment, options: Sequence[Sequence[int]]) -> Ints:
    """Solve an integer program with one variable for each job and type on which it is no slower.

    Its rows: each job has one type, or none if it waits; the GPUs of each type.
    """
    jobs, types = len(now.held), len(now.gpus)
    cells = [(job, kind) for job, kinds in enumerate(options) for kind in kinds if kind != WAITS]
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cells), jobs + types
    lp.col_cost_ = np.array([-now.worth[cell] for cell in cells])
    lp.col_lower_, lp.col_upper_ = np.zeros(len(cells)), np.ones(len(cells))
    lp.row_lower_ = np.array([0.0 if WAITS in kinds else 1.0 for kinds in options] + [0.0] * types)
    lp.row_upper_ = np.concatenate([np.ones(jobs), now.gpus.astype(np.float64)])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(len(cells) + 1) * 2
    lp.a_matrix_.index_ = np.array([place for job, kind in cells for place in (job, jobs + kind)])
    lp.a_matrix_.value_ = np.array([value for job, _ in cells for value in (1.0, float(now.gang[job]))])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * len(cells)
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("random_seed", 0)):
        model.setOptionValue(name, value)
    model.passModel(lp)
    model.run()
    if model.getModelStatus() != HighsModelStatus.kOptimal:
        raise GaveUpError(f"the integer program ended as {model.modelStatusToString(model.getModelStatus())!r}")
    found = np.full(jobs, WAITS)
    for (job, kind), value in zip(cells, model.getSolution().col_value, strict=True):
        if value > 0.5:
            found[job] = kind
    return found


def cases_of_shares(run: InstanceRun) -> Iterator[Case]:
    """One case per standing instance: jobs of an agent are alike, and none ends."""
    window = run.end - run.start
    agents, jobs_of = list(run.agents), list(run.agents.values())
    speed = np.array([np.sum([run.rates(job) for job in jobs], axis=0) for jobs in jobs_of])
    had = np.array([sum(run.progress(job) for job in jobs) for jobs in jobs_of]) / window
    size = np.array([float(sum(job.gpus for job in jobs)) for jobs in jobs_of])
    gain, better = TimeShares(speed, size, np.array(run.counts, dtype=np.float64), had).better()
    mean = gain / len(agents)
    gains = (better - had) / speed.max(axis=1)
    most = [place for place in np.argsort(-gains, kind="stable").tolist() if gains[place] > 0][:3]
    more = (
        f"{agents[place]} {amount(better[place], 'plain')} steps/s instead of {amount(had[place], 'plain')}"
        for place in most
    )
    text = f"other shares of time would have given {', '.join(more) or 'no agent more'}, with none slower"
    data = {"agents": agents, "had": had.tolist(), "could_have": np.maximum(better, had).tolist(), "mean_gain": mean}
    yield run.case(mean, 2.0 * run.instance.turn / window, text, **data)


@dataclass(frozen=True)
class TimeShares:
    """Agents over a long time: their speeds by type if all their jobs run at once, the GPUs that takes, and what each had.

    speed   (agents, types);  size, had: (agents,);  gpus: (types,)
    """

    speed: Floats
    size: Floats
    gpus: Floats
    had: Floats

    def better(self) -> tuple[float, Floats]:
        """The most that other shares of time could gain with no agent slower, and the speed of each under them."""
        fastest = self.speed.max(axis=1)
        market = GpuMarket(self.speed, self.size, self.gpus, np.arange(len(self.gpus)))
        asked = self.had * (1 - 1e-9)  # what was had can be had again, but for the last bits
        found = maximise(ShareProblem(market, base=asked, value=self.speed / fastest[:, None])).throughput
        gains = (found - self.had) / fastest
        return float(gains[gains > NOISE].sum()), found
