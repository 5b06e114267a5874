"""Envy: would anybody rather have what another one has?

Over the time that agents i and k are both active, with the values of `bundles.py` and i's own true speeds:

    measured   ( V_i(what k held) − V_i(what i held) ) ÷ V_i(an equal slice)          bound: two turns of i's whole demand

0 is no envy, 1 is that i would gain a whole equal slice by changing places. A difference, not a ratio, since somebody who
has got nothing at all envies by a number, too.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from poise.audit.bundles import Bundles
from poise.audit.findings import TOO_SHORT, Case
from poise.audit.playing import Played
from poise.model.arithmetic import dot
from poise.model.job import Job
from poise.report.amounts import amount

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
