"""What agents held over time, and what it is worth to each of them.

Time is cut where anything changes. To agent i a GPU of type j is worth s_ij, its speed there as a part of its best, on
average over its jobs by their work; and it has no use for more GPUs at once than its active jobs ask for:

    V_i(held, t) = Σ_j s_ij·held_j · min(1, demand_i(t) / Σ_j held_j)             in GPUs of its fastest type
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poise.audit.playing import Played
from poise.model.arithmetic import dot, times
from poise.model.arrays import Floats
from poise.model.job import Job


@dataclass(frozen=True)
class Bundles:
    """A row an agent, a column an interval; seconds and GPUs.

    held     (agents, types, intervals);  demand: GPUs that active jobs ask for
    active   number of agents with active jobs, of all that there are
    worth    (agents, types): s
    mix      (types,): parts of the cluster
    """

    agents: tuple[str, ...]
    seconds: Floats
    held: Floats
    demand: Floats
    active: Floats
    worth: Floats
    mix: Floats
    gpus: int

    @staticmethod
    def of(played: Played, chosen: Sequence[str]) -> "Bundles":
        """What these agents held."""
        crowd = played.agents
        place = {agent: index for index, agent in enumerate(chosen)}
        owner = {job.id: place[agent] for agent in chosen for job in crowd[agent]}
        spells = [spell for spell in played.spells if spell.job in owner]
        lives = {agent: _lives(played, jobs) for agent, jobs in crowd.items()}
        edges = {moment for spell in spells for moment in (spell.start, spell.end)}
        edges |= {moment for spans in lives.values() for start, end, _ in spans for moment in (start, end)}
        moments = np.array(sorted(edges))
        held = np.zeros((len(chosen), len(played.counts), len(moments)))
        for spell in spells:
            row = held[owner[spell.job], spell.gpu_type]
            row[np.searchsorted(moments, spell.start)] += spell.gpus
            row[np.searchsorted(moments, spell.end)] -= spell.gpus
        active = np.zeros(len(moments) - 1)
        for spans in lives.values():
            active += _level(moments, spans) > 0
        return Bundles(
            agents=tuple(chosen),
            seconds=np.diff(moments),
            held=np.cumsum(held, axis=2)[:, :, :-1],
            demand=np.array([_level(moments, lives[agent]) for agent in chosen]),
            active=active,
            worth=np.array([_worth(played, crowd[agent]) for agent in chosen]),
            mix=np.array(played.counts) / played.cluster.gpus,
            gpus=played.cluster.gpus,
        )

    def value(self, to: int, of: int) -> Floats:
        """What one agent's holdings are worth to another, from interval to interval."""
        held = self.held[of]
        total = held.sum(axis=0)
        useful = np.minimum(1.0, self.demand[to] / np.where(total > 0, total, 1.0))
        value: Floats = times(held.T, self.worth[to]) * useful
        return value

    def fair(self, of: int) -> Floats:
        """What an equal slice, as large as the agent can use, is worth to it, from interval to interval."""
        slices = np.minimum(self.demand[of], self.gpus / np.maximum(self.active, 1.0))
        value: Floats = slices * dot(self.worth[of], self.mix)
        return value


def _lives(played: Played, jobs: Sequence[Job]) -> list[tuple[float, float, int]]:
    return [(job.submitted, played.ended(job.id), job.gpus) for job in jobs]


def _level(moments: Floats, spans: Sequence[tuple[float, float, int]]) -> Floats:
    level = np.zeros(len(moments))
    for start, end, gpus in spans:
        level[np.searchsorted(moments, start)] += gpus
        level[np.searchsorted(moments, end)] -= gpus
    return np.cumsum(level)[:-1]


def _worth(played: Played, jobs: Sequence[Job]) -> Floats:
    """Speeds as parts of the best, by the work of each job in seconds on its fastest type."""
    total, parts = 0.0, np.zeros(len(played.counts))
    for job in jobs:
        rates = np.array(played.rates(job))
        best = float(rates.max())
        work = played.truths.steps(job) * job.gpus / best
        parts += work * rates / best
        total += work
    return parts / total if total > 0 else parts
