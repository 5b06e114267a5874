"""What the scheduler tells the driver of a policy, and what it asks of it.

A policy answers in one of two ways, and each has a driver: `RankDriver` keeps the ranks of an order up to date job by job,
`PlanDriver` asks a planner for a whole plan. The scheduler and the life cycle know this protocol alone.
"""

from typing import Protocol

from poise.scheduler.core.decision import DecisionDraft
from poise.scheduler.core.rank_index import Tie
from poise.scheduler.model.plan import PreemptionRule


class PolicyDriver(Protocol):
    """Called by `Lifecycle` after each transition of a job that the policy sees, and by `Scheduler` for decisions."""

    @property
    def drifts(self) -> bool:
        """Whether time alone may change the decision."""

    # Transitions, told after the state has changed

    def arrived(self, row: int, now: float) -> None:
        """A job began to compete: it was submitted, released, or its suspension is over."""

    def started(self, row: int, now: float) -> None:
        """A decision gave GPUs to a waiting job."""

    def preempted(self, row: int, now: float) -> None:
        """A decision took the GPUs of a running job."""

    def interrupted(self, row: int, now: float) -> None:
        """A running job lost its GPUs outside a decision and waits again; `catch_up` was called before."""

    def reported(self, row: int, now: float) -> None:
        """The known progress of a job has changed."""

    def reshaped(self, row: int, now: float) -> None:
        """A waiting job waits with another shape."""

    def ended(self, row: int, now: float) -> None:
        """A job ended or was suspended; its status says whether it did all its work."""

    def catch_up(self, now: float) -> None:
        """Do what was put off about running jobs: something unusual is about to happen to one of them."""

    # Decisions

    def opened(self) -> None:
        """Look at all claims in the next decision: there may be room for any of them."""

    def refresh(self, now: float) -> bool:
        """Take in how ranks have changed by now; say whether any has, which calls for a decision."""

    def is_due(self, now: float) -> bool:
        """Say whether the policy wants to be asked now although nothing happened."""

    def is_idle(self) -> bool:
        """Say whether no decision could change anything."""

    def decide(self, now: float, draft: DecisionDraft, allowed: PreemptionRule) -> None:
        """Grant claims in the draft, without preemption if that is not allowed."""

    def settle(self, now: float) -> bool:
        """Clean up once the draft was applied; say whether to decide once more at this time."""

    def next_change(self) -> float:
        """The next time at which `refresh` will find something that matters."""

    # Questions of people

    def line(self, most: int) -> list[int]:
        """Rows of the first waiting jobs, in the order in which they stand in line."""

    def place(self, row: int) -> tuple[float | Tie, ...]:
        """Where a waiting job stands in line; the smallest is first."""
