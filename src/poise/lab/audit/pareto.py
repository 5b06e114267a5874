"""Pareto efficiency: could some be faster with nobody slower?

Two ways to be better are looked for (`dominating.py`):

    moments   other GPUs for some, whole gangs; what that would gain, on average over the run
    shares    other shares of time in a standing crowd than those that everybody had over the window

Both are measured as what an agent could gain on average over its life, as a part of its fastest speed. The bound is two
turns as a part of that life: a policy that looks once a turn may be late by one when somebody comes, and when somebody goes.
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
from poise.lab.audit.playback import Played, Spell
from poise.lab.report.axes import amount
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import GaveUpError
from poise.scheduler.model.job import Job
from poise.scheduler.solve.program import GpuMarket, ShareProblem
from poise.scheduler.solve.solver import maximise

# Whether all could be as well off and some better: by trying everything, by an integer program, or over shares of time.
#
# Rows are jobs (or agents) with speeds by GPU type and a gang; θ* is what each has now. A better answer leaves nobody below
# θ*, and what it gains is counted in parts of everybody's fastest speed:
#
# gain = max Σ_m (θ_m − θ*_m) / fastest_m          subject to  θ_m >= θ*_m  and the GPUs there are

MOST_TRIED = 20_000
"""Assignments up to which all of them are tried."""

NOISE = 1e-6
"""Parts of the fastest speed: gains below are the rounding of a solver."""

WAITS = -1
"""Instead of a type: holds none."""


@dataclass(frozen=True)
class AuditMoment:
    """Who holds GPUs of which type at a moment; `WAITS` of those who hold none.

    speed   (jobs, types): of the whole gang;  gang, gpus: GPUs that each needs, and that there are of each type
    """

    speed: Floats
    gang: Ints
    gpus: Ints
    held: Ints

    @cached_property
    def now(self) -> Floats:
        """How fast each is."""
        return self.after(self.held)

    @cached_property
    def worth(self) -> Floats:
        """(jobs, types): speeds as parts of the fastest."""
        fastest = self.speed.max(axis=1, keepdims=True)
        parts: Floats = self.speed / np.where(fastest > 0, fastest, 1.0)
        return parts

    def after(self, assignment: Ints) -> Floats:
        """How fast each would be; 0 where it waits."""
        found: Floats = np.where(assignment >= 0, self.speed[np.arange(len(assignment)), assignment], 0.0)
        return found

    def better(self) -> tuple[float, Ints]:
        """The most that could be gained without anybody being slower, and who would hold what."""
        options = [self._options(job) for job in range(len(self.held))]
        are_few = prod(map(len, options)) <= MOST_TRIED
        assignment = _tried(self, options) if are_few else _programmed(self, options)
        return float(self._value(assignment) - self._value(self.held)), assignment

    def _options(self, job: int) -> list[int]:
        """Types on which a job is no slower; those who wait may go on waiting."""
        now = self.now[job]
        types = [kind for kind, speed in enumerate(self.speed[job]) if speed > 0 and speed >= now]
        return types if self.held[job] >= 0 else [WAITS, *types]

    def _value(self, assignment: Ints) -> float:
        placed = np.flatnonzero(assignment >= 0)
        return float(self.worth[placed, assignment[placed]].sum())


def _tried(moment: AuditMoment, options: Sequence[Sequence[int]]) -> Ints:
    """Every assignment is looked at; the first of the best is taken."""
    best, found = -1.0, moment.held
    for each in product(*options):
        assignment = np.array(each, dtype=np.int64)
        used = np.bincount(assignment[assignment >= 0], moment.gang[assignment >= 0], len(moment.gpus))
        if (used <= moment.gpus).all() and (value := moment._value(assignment)) > best + 1e-12:
            best, found = value, assignment
    return found


def _programmed(moment: AuditMoment, options: Sequence[Sequence[int]]) -> Ints:
    """An integer program: one variable for each job and type on which it is no slower."""
    cells = [(job, kind) for job, kinds in enumerate(options) for kind in kinds if kind != WAITS]
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("random_seed", 0)):
        model.setOptionValue(name, value)
    model.passModel(_program(moment, cells, {job for job, kinds in enumerate(options) if WAITS not in kinds}))
    model.run()
    if model.getModelStatus() != HighsModelStatus.kOptimal:
        raise GaveUpError(f"the integer program ended as {model.modelStatusToString(model.getModelStatus())!r}")
    found = np.full(len(moment.held), WAITS)
    for (job, kind), value in zip(cells, model.getSolution().col_value, strict=True):
        if value > 0.5:
            found[job] = kind
    return found


def _program(moment: AuditMoment, cells: Sequence[tuple[int, int]], running: set[int]) -> highspy.HighsLp:
    """Rows: each job has one type, or none if it waits; the GPUs of each type."""
    jobs, types = len(moment.held), len(moment.gpus)
    worth = moment.worth
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cells), jobs + types
    lp.col_cost_ = np.array([-worth[cell] for cell in cells])
    lp.col_lower_, lp.col_upper_ = np.zeros(len(cells)), np.ones(len(cells))
    lp.row_lower_ = np.array([1.0 if job in running else 0.0 for job in range(jobs)] + [0.0] * types)
    lp.row_upper_ = np.concatenate([np.ones(jobs), moment.gpus.astype(np.float64)])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(len(cells) + 1) * 2
    lp.a_matrix_.index_ = np.array([place for job, kind in cells for place in (job, jobs + kind)])
    lp.a_matrix_.value_ = np.array([value for job, _ in cells for value in (1.0, float(moment.gang[job]))])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * len(cells)
    return lp


@dataclass(frozen=True)
class Lasting:
    """Agents over a long time: their speeds by type if all their jobs run at once, the GPUs that takes, and what each had.

    speed   (agents, types);  size, had: (agents,);  gpus: (types,)
    """

    speed: Floats
    size: Floats
    gpus: Floats
    had: Floats

    def better(self) -> tuple[float, Floats]:
        """The most that other shares of time could gain without anybody being slower, and everybody's speed under them."""
        fastest = self.speed.max(axis=1)
        market = GpuMarket(self.speed, self.size, self.gpus, np.arange(len(self.gpus)))
        asked = self.had * (1 - 1e-9)  # what was had can be had again, but for the last bits
        found = maximise(ShareProblem(market, base=asked, value=self.speed / fastest[:, None])).throughput
        gains = (found - self.had) / fastest
        return float(gains[gains > NOISE].sum()), found


MOST_MOMENTS = 400
"""Moments looked at in one run; of more, so many evenly spread ones."""


class ParetoKind(StrEnum):
    """How others could be better off."""

    MOMENTS = "moments"
    SHARES = "shares"


@dataclass(frozen=True, slots=True)
class Scene:
    """Who was there from a moment to another, in order of submission, and what they held."""

    start: float
    end: float
    jobs: tuple[Job, ...]
    held: tuple[tuple[Spell, ...], ...]


def at_moments(played: Played) -> Iterator[Case]:
    """One case a run, none if lives are too short. Jobs that hold anything but their whole gang of one type for themselves

    stay as they are.
    """
    known: dict[tuple[object, ...], tuple[float, str]] = {}
    lived = gained = 0.0
    worst = (0.0, 0.0, "")
    for scene in _scenes(played):
        key = (scene.jobs, tuple(tuple((spell.gpu_type, spell.gpus) for spell in held) for held in scene.held))
        if key not in known:
            known[key] = _gain(played, scene)
        gain, text = known[key]
        lived += len(scene.jobs) * (scene.end - scene.start)
        gained += gain * (scene.end - scene.start)
        worst = max(worst, (gain, scene.start, text), key=lambda each: each[0])
    if lived > 0 and (case := _at_moments_case(played, gained / lived, worst)).bound <= TOO_SHORT:
        yield case


def _at_moments_case(played: Played, measured: float, worst: tuple[float, float, str]) -> Case:
    gain, moment, what = worst
    lives = [played.ended(job.id) - job.submitted for job in played.jobs]
    when = amount(moment - played.jobs[0].submitted, "seconds")
    text = (
        f"after {when} {what or 'nobody could have been faster'}; on average over their lives,"
        f" jobs could have had {amount(measured, 'percent')} more of their fastest speed"
    )
    data = {"instance": played.instance.name, "moment": moment, "gain": gain, "mean_gain": measured, "how": what}
    bound = 2.0 * played.instance.turn * len(lives) / sum(lives)
    return Case(measured, bound, f"{played.instance.name}: {text}", data)


def _gain(played: Played, scene: Scene) -> tuple[float, str]:
    """What all who were there could gain, and how."""
    staying = np.zeros(len(played.counts))
    here: list[Job] = []
    types: list[int] = []
    for job, held in zip(scene.jobs, scene.held, strict=True):
        if not held or (len(held) == 1 and held[0].gpus == job.gpus):
            here.append(job)
            types.append(held[0].gpu_type if held else WAITS)
        else:
            np.add.at(staying, [spell.gpu_type for spell in held], [spell.gpus for spell in held])
    if not here:
        return 0.0, ""
    moment = AuditMoment(
        speed=np.array([played.rates(job) for job in here]),
        gang=np.array([job.gpus for job in here]),
        gpus=np.array(played.counts) - np.ceil(staying).astype(np.int64),
        held=np.array(types),
    )
    gain, better = moment.better()
    return gain, _told(played, here, moment, better)


def _told(played: Played, jobs: list[Job], moment: AuditMoment, better: Ints) -> str:
    """The one who gains most."""
    types = played.cluster.gpu_types
    gains = (moment.after(better) - moment.now) / np.maximum(moment.speed.max(axis=1), 1e-300)
    most = int(np.argmax(gains))
    had = "waited" if moment.held[most] == WAITS else f"ran on {types[moment.held[most]]}"
    where = types[better[most]]
    return f"{jobs[most].id} {had} and could have run on {where} with nobody slower"


def _scenes(played: Played) -> Iterator[Scene]:
    """Intervals in which nothing changes; evenly spread ones if there are too many."""
    lives = [(job, played.ended(job.id)) for job in played.jobs]
    moments = {moment for spell in played.spells for moment in (spell.start, spell.end)}
    edges = sorted(moments | {moment for job, ended in lives for moment in (job.submitted, ended)})
    count = max(len(edges) - 1, 0)
    chosen = range(count) if count <= MOST_MOMENTS else [place * count // MOST_MOMENTS for place in range(MOST_MOMENTS)]
    for index in chosen:
        start = edges[index]
        there = tuple(job for job, ended in lives if job.submitted <= start < ended)
        held = (played.held_by(job.id) for job in there)
        if there:
            now = tuple(tuple(spell for spell in spells if spell.start <= start < spell.end) for spells in held)
            yield Scene(start, edges[index + 1], there, now)


def in_the_long(played: Played) -> Iterator[Case]:
    """One case a standing crowd: jobs of an agent are alike, and none ends."""
    crowd = played.agents
    window = played.end - played.instance.trace.jobs[0].job.submitted
    speed = np.array([np.sum([played.rates(job) for job in jobs], axis=0) for jobs in crowd.values()])
    had = np.array([sum(played.progress(job) for job in jobs) for jobs in crowd.values()]) / window
    size = np.array([float(sum(job.gpus for job in jobs)) for jobs in crowd.values()])
    gain, better = Lasting(speed, size, np.array(played.counts, dtype=np.float64), had).better()
    measured = gain / len(crowd)
    text = _shares_told(list(crowd), had, better, speed.max(axis=1))
    data = {
        "instance": played.instance.name,
        "agents": list(crowd),
        "had": had.tolist(),
        "could_have": np.maximum(better, had).tolist(),
        "mean_gain": measured,
    }
    yield Case(measured, 2.0 * played.instance.turn / window, f"{played.instance.name}: {text}", data)


def _shares_told(agents: list[str], had: Floats, better: Floats, fastest: Floats) -> str:
    gains = (better - had) / fastest
    order = [place for place in np.argsort(-gains, kind="stable").tolist() if gains[place] > 0][:3]
    told = (
        f"{agents[place]} {amount(better[place], 'plain')} steps/s instead of {amount(had[place], 'plain')}"
        for place in order
    )
    return f"other shares of time would have given {', '.join(told) or 'nobody more'}, with nobody slower"
