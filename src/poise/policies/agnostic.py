"""`+agnostic`: the policy takes all GPU types for equally fast (Gavel's heterogeneity-agnostic world, ALGORITHMS §2.1).

Every type on which the job can run at all is believed to be equally fast; what the world does with the job is unchanged.
Queue policies take the speed of the fastest type, and types in the cluster's order instead of the job's fastest type first;
share policies take that of the cluster's first type (`blind.py`), and types are served in an order drawn for each round.
"""

from dataclasses import replace

from poise.model.plan import Policy
from poise.model.speed import Estimate, Rates
from poise.model.tasks import Tasks
from poise.model.workload import Allocator
from poise.policies.blind import Blind
from poise.policies.combining import on_shares


def agnostic(policy: Policy) -> Policy:
    """The same policy, blind to differences between GPU types."""
    if isinstance(policy.answer, Allocator):
        return on_shares(policy, "agnostic", Blind)
    seen = policy.perceive
    return replace(policy, perceive=lambda estimate: _levelled(seen(estimate)))


def _levelled(estimate: Estimate) -> Estimate:
    others = tuple((gpus, _level(rates)) for gpus, rates in estimate.others)
    tasks = None if estimate.tasks is None else _tasks_levelled(estimate.tasks)
    return replace(estimate, rates=_level(estimate.rates), others=others, tasks=tasks)


def _level(rates: Rates) -> Rates:
    best = max(rates, key=lambda row: row[0], default=(0.0, 0.0, 0.0))
    return tuple(best if row[0] > 0 else row for row in rates)


def _tasks_levelled(tasks: Tasks) -> Tasks:
    if not tasks.best:
        return tasks
    sync = tasks.sync[tasks.seconds.index(tasks.best)]
    rows = zip(tasks.seconds, tasks.sync, strict=True)
    return replace(
        tasks,
        seconds=tuple(tasks.best if each > 0 else each for each in tasks.seconds),
        sync=tuple(sync if each > 0 else row for each, row in rows),
    )
