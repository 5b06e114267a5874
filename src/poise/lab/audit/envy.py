"""Envy: would anybody rather have what another one has?

Over the time that agents i and k are both active, with the values of `bundles.py` and i's own true speeds:

    measured   ( V_i(what k held) − V_i(what i held) ) ÷ V_i(an equal slice)          bound: two turns of i's whole demand

0 is no envy, 1 is that i would gain a whole equal slice by changing places. A difference, not a ratio, since somebody who
has got nothing at all envies by a number, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from poise.lab.audit.findings import TOO_SHORT, Case
from poise.lab.audit.playback import Played
from poise.lab.report.axes import amount
from poise.scheduler.model.arithmetic import Floats, dot, times
from poise.scheduler.model.job import Job

# What agents held over time, and what it is worth to each of them.
#
# Time is cut where anything changes. To agent i a GPU of type j is worth s_ij, its speed there as a part of its best, on
# average over its jobs by their work; and it has no use for more GPUs at once than its active jobs ask for:
#
# V_i(held, t) = Σ_j s_ij·held_j · min(1, demand_i(t) / Σ_j held_j)             in GPUs of its fastest type


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


MOST_AGENTS = 40
"""Who are compared with one another; of more, those with most to do are taken."""


def cases(played: Played) -> Iterator[Case]:
    """One case for each agent and each other."""
    if not played.jobs:
        return
    bundles = Bundles.of(played, _chosen(played))
    for mine in range(len(bundles.agents)):
        for other in range(len(bundles.agents)):
            case = None if mine == other else _case(played, bundles, mine, other)
            if case is not None:
                yield case


def _chosen(played: Played) -> Sequence[str]:
    """The agents with the most GPU-seconds to do, in order of submission."""
    work = {agent: sum(_gpu_seconds(played, job) for job in jobs) for agent, jobs in played.agents.items()}
    most = set(sorted(work, key=lambda agent: -work[agent])[:MOST_AGENTS])
    return [agent for agent in work if agent in most]


def _gpu_seconds(played: Played, job: Job) -> float:
    """On its fastest type."""
    return played.truths.steps(job) * job.gpus / max(played.rates(job))


def _case(played: Played, bundles: Bundles, mine: int, other: int) -> Case | None:
    """None where the two did not meet for long enough."""
    both = (bundles.demand[mine] > 0) & (bundles.demand[other] > 0)
    seconds = np.where(both, bundles.seconds, 0.0)
    met, fair = float(seconds.sum()), dot(bundles.fair(mine), seconds)
    if not fair > 0:
        return None
    slack = 2.0 * played.instance.turn * dot(bundles.demand[mine], seconds) / met / fair
    if slack > TOO_SHORT:
        return None
    own, others = (dot(bundles.value(mine, of), seconds) for of in (mine, other))
    me, them = bundles.agents[mine], bundles.agents[other]
    hours = [amount(each / 3600, "plain") for each in (own, others, fair)]
    text = (
        f"{me} held what is worth {hours[0]} hours of its fastest GPU to it, {them} what would be worth {hours[1]};"
        f" an equal slice is worth {hours[2]}"
    )
    data = {
        "instance": played.instance.name,
        "agent": me,
        "envies": them,
        "own_value": own,
        "other_value": others,
        "fair_value": fair,
    }
    return Case((others - own) / fair, slack, f"{played.instance.name}: {text}", data)
