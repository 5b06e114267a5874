"""Pareto efficiency: could some be faster with nobody slower?

Two ways to be better are looked for (`dominating.py`):

    moments   other GPUs for some, whole gangs; what that would gain, on average over the run
    shares    other shares of time in a standing crowd than those that everybody had over the window

Both are measured as what an agent could gain on average over its life, as a part of its fastest speed. The bound is two
turns as a part of that life: a policy that looks once a turn may be late by one when somebody comes, and when somebody goes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from poise.audit.dominating import WAITS, Lasting, Moment
from poise.audit.findings import TOO_SHORT, Case
from poise.audit.playing import Played, Spell
from poise.model.arrays import Floats, Ints
from poise.model.job import Job
from poise.report.amounts import amount

MOST_MOMENTS = 400
"""Moments looked at in one run; of more, so many evenly spread ones."""


class Kind(StrEnum):
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
    moment = Moment(
        speed=np.array([played.rates(job) for job in here]),
        gang=np.array([job.gpus for job in here]),
        gpus=np.array(played.counts) - np.ceil(staying).astype(np.int64),
        held=np.array(types),
    )
    gain, better = moment.better()
    return gain, _told(played, here, moment, better)


def _told(played: Played, jobs: list[Job], moment: Moment, better: Ints) -> str:
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
