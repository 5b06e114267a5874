"""How equal ranks are ordered: by submission, or by the place they had at the previous decision.

The second is what one gets by keeping one list and sorting it stably at every event, as the Tiresias authors' simulator
does. No list is kept here, because the outcome follows from how ranks got to be equal:
- a job whose value falls came from above, so it stands behind one whose value stands still, and that behind one whose value
  rises: at equal value the larger slope comes first
- a job that has just arrived is at the end of the list, behind everybody
- running jobs of equal slope have been equal since the later one started: where values fall it was waiting below the other
  and stays ahead of it (unless it had just arrived), where they do not it came from behind
- likewise for a job that stops: behind the waiting ones if its value was falling, ahead of them if it was rising
- a job that changes queue goes to the end, by submission
A tie is a tuple that compares accordingly; by submission it is empty, and rows decide.
"""

from math import inf
from typing import Protocol

from poise.model.plan import Rank

Tie = tuple[float, ...]


class Ties(Protocol):
    """Gives every job a tie when something happens to it. `previous` is the rank it had until now."""

    def arrived(self, row: int) -> Tie:
        """It has just arrived."""

    def settled(self, tie: Tie) -> Tie:
        """It has come earlier than just now."""

    def started(self, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """It runs; those that start at one decision are told in order."""

    def stopped(self, tie: Tie, previous: Rank, rank: Rank, place: int) -> Tie:
        """It waits; `place` is its place among those that stopped at this decision."""

    def changed(self, row: int, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """It has another rank, and runs or waits as before."""

    def decided(self) -> None:
        """A decision is over."""


class BySubmission:
    """Rows decide: there is nothing to say about ties."""

    def arrived(self, _row: int) -> Tie:
        """Empty."""
        return ()

    def settled(self, _tie: Tie) -> Tie:
        """Empty."""
        return ()

    def started(self, _tie: Tie, _previous: Rank, _rank: Rank) -> Tie:
        """Empty."""
        return ()

    def stopped(self, _tie: Tie, _previous: Rank, _rank: Rank, _place: int) -> Tie:
        """Empty."""
        return ()

    def changed(self, _row: int, _tie: Tie, _previous: Rank, _rank: Rank) -> Tie:
        """Empty."""
        return ()

    def decided(self) -> None:
        """Nothing to count."""


class ByPreviousDecision:
    """Ties are (−slope, decision with a sign, what happened at it, place); who has just come has inf for its slope."""

    def __init__(self) -> None:
        self._decision = 1
        self._starts = 0

    def arrived(self, row: int) -> Tie:
        """At the end of the list."""
        return (inf, self._decision, 1, row)

    def settled(self, tie: Tie) -> Tie:
        """A waiting job's value stands still."""
        return (0.0, *tie[1:])

    def started(self, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """Ahead of its equals where values fall, unless it had just arrived."""
        if _stands_still(previous, rank):
            return self.settled(tie)
        self._starts += 1
        ahead = rank.slope < 0 and tie[0] < inf
        return (-rank.slope, -self._decision if ahead else self._decision, 0, self._starts)

    def stopped(self, tie: Tie, previous: Rank, rank: Rank, place: int) -> Tie:
        """Behind its equals, unless its value was rising."""
        if _stands_still(previous, rank):
            return self.settled(tie)
        return (0.0, -self._decision if previous.slope > 0 else self._decision, 0, place)

    def changed(self, row: int, tie: Tie, previous: Rank, rank: Rank) -> Tie:
        """Behind everybody, those that arrived now included, if it changed queue; otherwise where it was."""
        if rank.queue != previous.queue:
            return (inf if rank.queue < previous.queue else -rank.slope, self._decision, 2, row)
        return (-rank.slope, *tie[1:])

    def decided(self) -> None:
        """What happens from now on is later."""
        self._decision += 1


def _stands_still(previous: Rank, rank: Rank) -> bool:
    """Neither has the rank changed, nor does it as time goes by: among its equals the job stays where it was."""
    return previous[:3] == rank[:3] and previous.slope == rank.slope == 0
