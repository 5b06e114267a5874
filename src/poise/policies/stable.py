"""`+stable`: equal ranks keep the order that they had at the previous decision, as in the Tiresias authors' simulator.

That simulator keeps one list and sorts it stably at each event, so that ties depend on history (ALGORITHMS §7.3). Here the
list is the planner's memory: new jobs go to its end, jobs that changed queue go to its end by submission, then it is sorted
by rank, stably. Every active job is ranked at every decision: O(J log J), which is why it is not the default.
"""

from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from poise.model.columns import JobView, Snapshot
from poise.model.errors import RequestError
from poise.model.plan import Claim, Order, Plan, Policy, Preemption, Rank, nothing_learnt


@dataclass(frozen=True, slots=True)
class Kept:
    """Ranks by row in the order of the previous decision, and the moment of that decision."""

    ranks: MappingProxyType[int, Rank]
    planned: float


@dataclass(frozen=True, slots=True)
class StableOrder:
    """An order as a planner whose ties go by the previous decision."""

    order: Order

    def start(self) -> Kept:
        """No decision yet."""
        return Kept(MappingProxyType({}), -inf)

    def plan(self, snapshot: Snapshot, memory: Kept) -> tuple[Plan, Kept]:
        """All active jobs by rank, ties by their previous place.

        It asks to plan a second time at the same moment: only then it is known who runs, and so when ranks change next.
        """
        ranks = {job.row: self.order.rank(job, memory.ranks.get(job.row), None) for job in snapshot.jobs()}
        rows = sorted(_listed(ranks, memory), key=lambda row: _key(ranks[row]))
        if self.order.preemption is Preemption.NEVER:
            running = set(snapshot.rows[snapshot.running].tolist())
            rows.sort(key=lambda row: row not in running)
        settled = memory.planned == snapshot.now
        wake = min((rank.until for rank in ranks.values()), default=inf) if settled else snapshot.now
        claims = tuple(Claim(row, self.order.asks(JobView(snapshot.columns, row, snapshot.now))) for row in rows)
        plan = Plan(claims, self.order.unfitting, self.order.preemption, wake)
        return plan, Kept(MappingProxyType({row: ranks[row] for row in rows}), snapshot.now)


def _listed(ranks: dict[int, Rank], memory: Kept) -> list[int]:
    """The list before it is sorted: those that stayed in their queue, the new ones, those that changed queue."""
    old = memory.ranks
    stayed = [row for row in old if row in ranks and ranks[row].queue == old[row].queue]
    new = [row for row in ranks if row not in old]
    moved = [row for row in ranks if row in old and ranks[row].queue != old[row].queue]
    return stayed + new + moved


def _key(rank: Rank) -> tuple[int, int, float]:
    return rank.queue, rank.section, rank.value


def is_stable_able(policy: Policy) -> bool:
    """`+stable` applies: the policy is an order, and one that does not learn from finished jobs."""
    return isinstance(policy.answer, Order) and policy.answer.learn is nothing_learnt


def stable(policy: Policy) -> Policy:
    """The same order, with ties by the previous decision."""
    if not isinstance(policy.answer, Order) or policy.answer.learn is not nothing_learnt:
        raise RequestError(f"+stable applies to orders that do not learn; {policy.name!r} is none")
    return replace(policy, answer=StableOrder(policy.answer))
