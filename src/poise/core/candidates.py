"""The two sources of claims: lanes that are kept in order, and a plan that a planner wrote down."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Self

from poise.core.lanes import Key, Lanes
from poise.core.waiting import Shape
from poise.model.plan import Claim, Plan, Preemption, Unfitting


class LaneCandidates:
    """Claims by rank: of each shape the head; a shape whose head does not fit has nobody behind it that does.

    current   key of the claim that was asked for last
    lost      keys of the jobs that lost GPUs, whether they got them back or not
    """

    __slots__ = (
        "_catch_up", "_lanes", "_left_out", "_now", "_open", "_shape", "current", "lost", "preemption", "unfitting",
    )  # fmt: skip

    def __init__(
        self,
        lanes: Lanes,
        shapes: Iterable[Shape],
        unfitting: Unfitting,
        preemption: Preemption,
        now: float,
        catch_up: Callable[[float], None],
    ) -> None:
        self.unfitting = unfitting
        self.preemption = preemption
        self.lost: dict[int, Key] = {}
        self._lanes = lanes
        self._now = now
        self._catch_up = catch_up
        self._left_out: Iterable[Shape] = ()
        self.current: Key
        self._shape: Shape
        head = lanes.head
        self._open = [(key, shape) for shape in shapes if (key := head(shape))]
        heapify(self._open)

    def but_later(self, shapes: Iterable[Shape]) -> Self:
        """Look at these shapes too once somebody has lost GPUs: what is left over may be enough for them."""
        self._left_out = shapes
        return self

    def next(self) -> tuple[int, Shape] | None:
        """The claim of least key."""
        if not self._open:
            return None
        self.current, self._shape = heappop(self._open)
        return self.current[4], self._shape

    def served(self, row: int) -> None:
        """A waiting job leaves its heap, and the next of its shape may come; a victim has no heap to leave."""
        if row in self.lost:
            return
        self._lanes.stop_waiting(row)
        if key := self._lanes.head(self._shape):
            heappush(self._open, (key, self._shape))

    def behind(self, _row: int) -> Iterator[int]:
        """Running jobs behind the current claim, last first; their ranks are brought up to date first."""
        self._catch_up(self._now)
        return self._lanes.running_behind(self.current, self._now)

    def returned(self, row: int) -> None:
        """A victim competes from the place it had."""
        key = self.lost[row] = self._lanes.running_key(row, self._now)
        self._lanes.stop_running(row)
        heappush(self._open, (key, self._lanes.shape_of[row]))
        for shape in self._left_out:
            if head := self._lanes.head(shape):
                heappush(self._open, (head, shape))
        self._left_out = ()


class PlanCandidates:
    """Claims as a plan lists them; running jobs are passed over unless they lost their GPUs on the way."""

    def __init__(
        self,
        plan: Plan,
        preemption: Preemption,
        holds: set[int],
        shape: Callable[[Claim], Shape],
    ) -> None:
        self.unfitting = plan.unfitting
        self.preemption = preemption
        self._claims = plan.claims
        self._shape = shape
        self._at = -1
        self._holds = holds

    @cached_property
    def _place(self) -> dict[int, int]:
        """Where each job stands in the plan."""
        return {claim.row: place for place, claim in enumerate(self._claims)}

    @cached_property
    def _running(self) -> list[int]:
        """Jobs that ran before the decision and are planned, in the plan's order."""
        return [claim.row for claim in self._claims if claim.row in self._holds]

    def next(self) -> tuple[int, Shape] | None:
        """The next claim of a job without GPUs."""
        while (at := self._at + 1) < len(self._claims):
            self._at = at
            claim = self._claims[at]
            if claim.row not in self._holds:
                return claim.row, self._shape(claim)
        return None

    def served(self, row: int) -> None:
        """It holds GPUs now."""
        self._holds.add(row)

    def behind(self, row: int) -> Iterator[int]:
        """Running jobs that the plan lists later, last first."""
        place = self._place[row]
        while self._running and self._running[-1] not in self._holds:
            self._running.pop()  # it has lost its GPUs; once it gets others, it stands ahead of all claims that are left
        for each in reversed(self._running):
            if self._place[each] <= place:
                return
            if each in self._holds:
                yield each

    def returned(self, row: int) -> None:
        """The plan will come to it."""
        self._holds.discard(row)
