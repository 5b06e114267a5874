"""Envy: would an agent rather have what another one has?

Over the time that agents i and k are both active, with i's own true speeds and the values of `Bundles`:

    measured   ( V_i(what k held) − V_i(what i held) ) ÷ V_i(an equal slice)          bound: two turns of i's whole demand

0 is no envy; at 1, i would gain a whole equal slice by changing places. A difference, not a ratio: it is defined even for an
agent that got nothing at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from poise.lab.audit.findings import TOO_SHORT, Case
from poise.lab.audit.instance_run import InstanceRun
from poise.lab.report.axes import amount
from poise.scheduler.model.arithmetic import Floats, dot, times
from poise.scheduler.model.job import Job

MOST_AGENTS = 40
"""Agents that are compared with one another; of more, those with the most work."""


def cases(run: InstanceRun) -> Iterator[Case]:
    """One case for each agent and each other that it met for long enough."""
    if not run.jobs:
        return
    work = {  # in GPU-seconds, each job on its fastest type
        agent: sum(run.truths.steps(job) * job.gpus / max(run.rates(job)) for job in jobs)
        for agent, jobs in run.agents.items()
    }
    most = set(sorted(work, key=lambda agent: -work[agent])[:MOST_AGENTS])
    bundles = Bundles.of(run, [agent for agent in work if agent in most])
    for mine in range(len(bundles.agents)):
        for other in range(len(bundles.agents)):
            if mine != other:
                yield from _case(run, bundles, mine, other)


def _case(run: InstanceRun, bundles: "Bundles", mine: int, other: int) -> Iterator[Case]:
    """None where the two did not meet for long enough."""
    both = (bundles.demand[mine] > 0) & (bundles.demand[other] > 0)
    seconds = np.where(both, bundles.seconds, 0.0)
    met, fair = float(seconds.sum()), dot(bundles.fair(mine), seconds)
    slack = 2.0 * run.instance.turn * dot(bundles.demand[mine], seconds) / met / fair if fair > 0 else inf
    if slack <= TOO_SHORT:
        own, others = (dot(bundles.value(mine, of), seconds) for of in (mine, other))
        me, them = bundles.agents[mine], bundles.agents[other]
        hours = [amount(each / 3600, "plain") for each in (own, others, fair)]
        text = (
            f"{me} held what is worth {hours[0]} hours of its fastest GPU to it, {them} what would be worth {hours[1]};"
            f" an equal slice is worth {hours[2]}"
        )
        data = {"agent": me, "envies": them, "own_value": own, "other_value": others, "fair_value": fair}
        yield run.case((others - own) / fair, slack, text, **data)


@dataclass(frozen=True)
class Bundles:
    """What agents held over time, and what it is worth to each of them.

    Time is cut where anything changes: rows are agents, columns intervals. To agent i a GPU of type j is worth s_ij, its
    speed there as a part of its best, averaged over its jobs by their work; and it has no use for more GPUs at once than its
    active jobs ask for:

        V_i(held, t) = Σ_j s_ij·held_j · min(1, demand_i(t) / Σ_j held_j)             in GPUs of its fastest type

    held     (agents, types, intervals): GPUs;  demand: (agents, intervals): GPUs that active jobs ask for
    active   (intervals,): number of all agents, chosen or not, that have active jobs
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
    def of(run: InstanceRun, chosen: Sequence[str]) -> "Bundles":
        """Read off what these agents held."""
        place = {agent: index for index, agent in enumerate(chosen)}
        owner = {job.id: place[agent] for agent in chosen for job in run.agents[agent]}
        holds = [hold for hold in run.holds if hold.job in owner]
        lives = {agent: [(job.submitted, run.ended(job.id), job.gpus) for job in jobs] for agent, jobs in run.agents.items()}
        edges = {time for hold in holds for time in (hold.start, hold.end)}
        edges |= {time for spans in lives.values() for start, end, _ in spans for time in (start, end)}
        cuts = np.array(sorted(edges))
        held = np.zeros((len(chosen), len(run.counts), len(cuts)))
        for hold in holds:
            row = held[owner[hold.job], hold.gpu_type]
            row[np.searchsorted(cuts, hold.start)] += hold.gpus
            row[np.searchsorted(cuts, hold.end)] -= hold.gpus
        demand = {}
        for agent, spans in lives.items():
            changes = np.zeros(len(cuts))
            for start, end, gpus in spans:
                changes[np.searchsorted(cuts, start)] += gpus
                changes[np.searchsorted(cuts, end)] -= gpus
            demand[agent] = np.cumsum(changes)[:-1]
        active = np.zeros(len(cuts) - 1)
        for asked in demand.values():
            active += asked > 0
        return Bundles(
            agents=tuple(chosen),
            seconds=np.diff(cuts),
            held=np.cumsum(held, axis=2)[:, :, :-1],
            demand=np.array([demand[agent] for agent in chosen]),
            active=active,
            worth=np.array([_worth(run, run.agents[agent]) for agent in chosen]),
            mix=np.array(run.counts) / run.cluster.gpus,
            gpus=run.cluster.gpus,
        )

    def value(self, to: int, of: int) -> Floats:
        """What one agent's holdings are worth to another, by interval."""
        held = self.held[of]
        total = held.sum(axis=0)
        useful = np.minimum(1.0, self.demand[to] / np.where(total > 0, total, 1.0))
        value: Floats = times(held.T, self.worth[to]) * useful
        return value

    def fair(self, of: int) -> Floats:
        """What an equal slice, as large as the agent can use, is worth to it, by interval."""
        slices = np.minimum(self.demand[of], self.gpus / np.maximum(self.active, 1.0))
        value: Floats = slices * dot(self.worth[of], self.mix)
        return value


def _worth(run: InstanceRun, jobs: Sequence[Job]) -> Floats:
    """Speeds as parts of the best, averaged over jobs by their GPU-seconds on the fastest type."""
    total, parts = 0.0, np.zeros(len(run.counts))
    for job in jobs:
        rates = np.array(run.rates(job))
        best = float(rates.max())
        work = run.truths.steps(job) * job.gpus / best
        parts += work * rates / best
        total += work
    return parts / total if total > 0 else parts
