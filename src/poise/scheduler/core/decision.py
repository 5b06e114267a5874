"""One decision in the making: claims in order get GPUs, taken from running jobs further back if need be.

What a decision means: go through all jobs in order and give each its gang if it still fits; running jobs keep what they
have. What is computed (`grant`): only waiting claims are looked at, because before a claim there is available what no job
holds plus what jobs further back hold. A job that loses its GPUs competes again from its own place, and gets them back if
no claim needed them.

    ClaimSource      waiting claims in order, and the running jobs behind each: `RankedClaims` or `PlannedClaims`
    grant            the loop: seat the claim, else make room for it by preemption, else by moving small jobs
    DecisionDraft    the changes so far, as GPUs before and after for each job concerned; nothing else changes meanwhile

The draft changes `free` as it goes and nothing else. So a claim that cannot be served is undone by giving GPUs back, and
`Lifecycle.apply` turns the finished draft into transitions.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush, nlargest
from math import inf
from typing import Protocol, Self

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.core.rank_index import Key, RankIndex
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.action import Note
from poise.scheduler.model.cluster import Holding, Site, Slots, gpu_count, merged, site_of
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.plan import Claim, JobEnding, Plan, PreemptionRule, Unfitting
from poise.scheduler.model.speed import Locality
from poise.scheduler.placement.free_gpus import FreeGpus, lowest_slots
from poise.scheduler.placement.strategies import Placement


class ClaimSource(Protocol):
    """Waiting claims in order, and the running jobs behind each."""

    unfitting: Unfitting
    preemption: PreemptionRule

    def next(self) -> tuple[int, ClaimShape] | None:
        """The next claim that may fit; None if there is no other."""

    def served(self, row: int) -> None:
        """Note that this claim got its GPUs."""

    def behind(self, row: int) -> Iterator[int]:
        """Running jobs further back than this claim, the last one first: those that it may preempt."""

    def returned(self, row: int) -> None:
        """Note that a running job lost its GPUs: from now on it is a claim like others."""


Defragmenting = Callable[["DecisionDraft", int, ClaimShape], bool]
"""Makes room for a claim by moving running jobs; says whether it could."""


def grant(
    candidates: ClaimSource, draft: "DecisionDraft", state: SchedulerState, defragment: Defragmenting | None = None
) -> bool:
    """Serve the claims in order; say whether one that does not fit left the queue blocked."""
    preempting = candidates.preemption is PreemptionRule.BY_RANK
    needs_idle = not preempting and candidates.unfitting is Unfitting.SKIPPED
    while (claim := candidates.next()) is not None:
        row, shape = claim
        if needs_idle and not any(draft.idle):
            break  # nothing is free, and nothing can be made free
        if (
            draft.seat(row, shape)
            or (preempting and draft.make_room(row, shape, candidates, state))
            or (defragment is not None and defragment(draft, row, shape))
        ):
            candidates.served(row)
        elif candidates.unfitting is Unfitting.BLOCKS:
            draft.keep_in_place()
            return True
    draft.keep_in_place()
    return False


class DecisionDraft:
    """The changes of one decision: for each job concerned, the GPUs it holds `before` and `after`; None: none.

    `after` lists launches in the order in which they were granted. A row of `before` is in `after`, and the other way round.

    beneficiary       for each job that lost its GPUs, the job that they were taken for
    unworked          says whether a run has worked for less time than it took to start, and so is spared; None: none is
    fixed             jobs that stay where they are, because they hold closed GPUs
    joins             jobs that will share GPUs, each with the job that holds them
    sites             nodes that a claim requires;  mixes: number of GPUs of each type that a claim asks for
    computes          GPUs on which tasks will be computed, by job
    ends              jobs that their app gives up; what they held is available to the claims
    notes             remarks on the decision, for people
    protected_until   first time at which a job that was spared for having just started may be preempted
    """

    __slots__ = (
        "_fixed", "_placement", "_protected", "_shapes", "_short", "_unworked", "after", "before", "beneficiary", "computes",
        "ends", "free", "joins", "mixes", "notes", "now", "protected_until", "sites",
    )  # fmt: skip

    def __init__(
        self,
        free: FreeGpus,
        placement: Placement,
        *,
        now: float,
        protected: dict[int, float],
        unworked: Callable[[int], bool] | None,
        fixed: Collection[int] = (),
    ) -> None:
        self.free = free
        self._placement = placement
        self.now = now
        self._protected = protected
        self._fixed = fixed
        self._unworked = unworked
        self.before: dict[int, Holding | None] = {}
        self.after: dict[int, Holding | None] = {}
        self.beneficiary: dict[int, int] = {}
        self.protected_until = inf
        self.notes: tuple[Note, ...] = ()
        self.joins: dict[int, int] = {}
        self.sites: dict[int, Site] = {}
        self.mixes: dict[int, Mix] = {}
        self.computes: dict[int, Holding] = {}
        self.ends: tuple[JobEnding, ...] = ()
        self._shapes: dict[int, ClaimShape] = {}
        self._short: dict[ClaimShape, tuple[int, ...]] = {}
        """For claims of a shape that got no room by preemption: what was idle then. No other one gets room with less."""

    @property
    def idle(self) -> list[int]:
        """The number of free GPUs by type."""
        return self.free.idle

    def evict(self, row: int, holding: Holding, partner: int | None = None) -> None:
        """Take the GPUs of a running job; they come free once the job that it shares them with has lost them too."""
        self.before.setdefault(row, holding)
        self.after[row] = None
        if partner is None or (partner in self.before and self.after[partner] is None):
            self.free.give(holding)

    def join(self, row: int, other: int, holding: Holding) -> None:
        """Let a job share what another one holds after the decision."""
        self.before.setdefault(row, None)
        self.after.pop(row, None)
        self.after[row] = holding
        self.joins[row] = other

    def settle_stops(
        self, stopped: Collection[int], partner: Mapping[int, int], kept: Collection[int] = frozenset()
    ) -> None:
        """Let stopped jobs go on whose GPUs no claim took, and note for the others who took them.

        Two that shared their GPUs go on together. A job whose partner goes on alone on purpose was stopped for that one.

        kept   jobs that the plan wanted to stop too, and that must not be preempted
        """
        for row in sorted(stopped):
            if self.after[row] is not None:
                continue
            other = partner.get(row, -1)
            if self._spare(row):
                if other in stopped and self.after[other] is None:
                    self.after[other] = self.before[other]
            elif other in kept and other not in self.joins.values():
                self.after[row] = self.before[row]
        takers: dict[int, list[tuple[int, int]]] = {}
        for row, holding in (*self.after.items(), *self.computes.items()):
            for node, mask in holding or ():
                takers.setdefault(node, []).append((mask, row))
        for row in stopped:
            if self.after[row] is None:
                had = self.before[row] or ()
                taker = next((each for node, mask in had for its, each in takers.get(node, ()) if its & mask), None)
                # A stopped job whose GPUs no claim took, and that could not go on, shares them with one that goes on alone.
                self.beneficiary[row] = partner[row] if taker is None else taker

    def seat(self, row: int, shape: ClaimShape) -> bool:
        """Give a claim free GPUs: those that it had, or what the placement chooses on the best type that has room."""
        self._shapes[row] = shape
        if self.sites and row in self.sites:
            return self._seat_at(row, self.sites[row])
        if row in self.mixes:
            return self._seat_mix(row, self.mixes[row]) or self._seat_part(row, shape)
        had = self.before.get(row)
        if had is not None and self.free.are_free(had) and self._suits(had, shape):
            self._take(row, had)
            return True
        idle = self.free.idle
        for gpu_type in shape.types:
            if idle[gpu_type] >= shape.gang:
                holding = shape.place(self.free, self._placement, gpu_type)
                if holding is not None:
                    self._take(row, holding)
                    return True
        return self._seat_part(row, shape)

    def _seat_part(self, row: int, shape: ClaimShape) -> bool:
        """Give a job whose steps divide what is free and of use to it, of whatever types."""
        mix = shape.tasks.fewest(self.free.idle) if shape.tasks else None
        return mix is not None and self._seat_mix(row, mix)

    def _seat_mix(self, row: int, mix: Mix) -> bool:
        """Give a claim this number of GPUs of each type, those that it had among them."""
        if any(gpus > idle for gpus, idle in zip(mix, self.free.idle, strict=True)):
            return False
        left = list(mix)
        parts: list[Slots] = []
        for node, mask in self.before.get(row) or ():
            kind, free = self.free.topology.type_of[node], mask & self.free.masks[node]
            if gpus := min(free.bit_count(), left[kind]):
                left[kind] -= gpus
                parts.append(Slots(node, lowest_slots(free, gpus)))
        self.free.take(tuple(parts))
        parts += self._found(left)
        self.free.give(tuple(parts))  # `_take` takes all of them at once
        self._take(row, merged(parts))
        return True

    def _found(self, mix: Sequence[int]) -> list[Slots]:
        """GPUs that the placement takes, this number of each type; that many are free."""
        parts: list[Slots] = []
        for kind, gpus in enumerate(mix):
            found = self._placement(self.free, kind, gpus, Locality.CLUSTER) if gpus else None
            if found is not None:
                self.free.take(found)
                parts += found
        return parts

    def start_tasks(self, row: int, mix: Mix) -> None:
        """Compute one task per GPU on this number of GPUs of each type, or on as many as are free."""
        self._compute(row, self._found([min(gpus, idle) for gpus, idle in zip(mix, self.free.idle, strict=True)]))

    def start_tasks_at(self, row: int, site: Site) -> None:
        """Compute one task per GPU on these nodes, or on as many of these GPUs as are free."""
        masks = self.free.masks
        wanted = [(node, min(gpus, masks[node].bit_count())) for node, gpus in site]
        found = tuple(Slots(node, lowest_slots(masks[node], gpus)) for node, gpus in wanted if gpus)
        self.free.take(found)
        self._compute(row, found)

    def _compute(self, row: int, found: Iterable[Slots]) -> None:
        gpus = merged([*self.computes.get(row, ()), *found])
        if gpus:
            self.computes[row] = gpus

    def _seat_at(self, row: int, site: Site) -> bool:
        """Give a claim GPUs of exactly these nodes."""
        had = self.before.get(row)
        if had is not None and site_of(had) == site and self.free.are_free(had):
            self._take(row, had)
            return True
        masks = self.free.masks
        if any(masks[node].bit_count() < gpus for node, gpus in site):
            return False
        self._take(row, tuple(Slots(node, lowest_slots(masks[node], gpus)) for node, gpus in site))
        return True

    def _suits(self, holding: Holding, shape: ClaimShape) -> bool:
        """Say whether these GPUs are what the claim asks for; a plan may want a job elsewhere than where it was."""
        topology = self.free.topology
        if gpu_count(holding) != shape.gang or not shape.is_for(holding, topology.type_of):
            return False
        return shape.locality is Locality.CLUSTER or topology.locality(holding) <= shape.locality

    def _take(self, row: int, holding: Holding) -> None:
        self.free.take(holding)
        self.before.setdefault(row, None)
        self.after.pop(row, None)  # so that `after` lists launches in the order in which they were granted
        self.after[row] = holding

    def beneficiary_of(self, row: int) -> int | None:
        """The job that a victim's GPUs were taken for in the end: follow victims that got their own GPUs back."""
        found = self.beneficiary.get(row)
        while found is not None and self.before.get(found) is not None and self.before[found] == self.after[found]:
            found = self.beneficiary.get(found)
        return found

    def keep_in_place(self) -> None:
        """Give victims that got other GPUs their own ones back, if the starting jobs fit on the rest: saves migrations."""
        shared = {*self.joins, *self.joins.values()}  # who shares GPUs stays with them
        after = {row: holding for row, holding in self.after.items() if holding is not None and row not in shared}
        moved = [row for row, holding in after.items() if self.before[row] not in (None, holding)]
        if not moved:
            return
        starting = [row for row in after if self.before[row] is None]
        agreed = {row: holding for row in (*moved, *starting) if (holding := self.after[row]) is not None}
        idle = list(self.free.idle)
        for holding in agreed.values():
            self.free.give(holding)
        # Seated in this order, victims find their own GPUs free. Another set of types left idle could serve claims that
        # this decision has passed over, so only an arrangement that leaves the same is taken.
        all_fit = all(self.seat(row, self._shapes[row]) for row in (*moved, *starting))
        if not all_fit or self.free.idle != idle:  # other GPUs left over would be another decision
            for row, holding in agreed.items():
                found = self.after[row]
                if found is not None and found is not holding:
                    self.free.give(found)
            for row, holding in agreed.items():
                self._take(row, holding)

    def retract(self, row: int, movers: Iterable[int]) -> None:
        """Undo the seat of a claim, and the moves of the jobs that made room for it."""
        for each in (row, *movers):
            found = self.after.get(each)
            if found is not None:
                self.free.give(found)
        for mover in movers:
            del self.after[mover]
            had = self.before.pop(mover)
            if had is not None:
                self.free.take(had)
        self.sites.pop(row, None)
        if self.before.get(row) is None:  # otherwise it had lost its GPUs to another claim, and still has
            self.before.pop(row, None)
            self.after.pop(row, None)
        else:
            self.after[row] = None

    def make_room(self, row: int, shape: ClaimShape, candidates: ClaimSource, state: SchedulerState) -> bool:
        """Preempt jobs further back, as few and as far back as possible, and seat the claim on their GPUs."""
        if shape in self._short and all(self.free.idle[each] <= self._short[shape][each] for each in shape.types):
            return False
        for gpu_type in shape.types:
            victims = self._victims(shape, gpu_type, candidates.behind(row), state)
            if not victims:
                continue
            for victim in victims:
                self.evict(victim, state.of(victim))
            if not self.seat(row, shape):
                for victim in victims:
                    self._spare(victim)
                continue
            for victim in reversed(victims):
                if not self._spare(victim):
                    self.beneficiary[victim] = row
                    candidates.returned(victim)
            return True
        # Claims come in order: where GPUs are only counted, what this one could not get, a later one like it cannot get.
        if shape.locality is Locality.CLUSTER and shape.unit == 1 and row not in self.sites and row not in self.mixes:
            self._short[shape] = tuple(self.free.idle)
        return False

    def _spare(self, victim: int) -> bool:
        """Give a victim its GPUs back if they are still free."""
        holding = self.before[victim]
        if holding is None or not self.free.are_free(holding):
            return False
        self._take(victim, holding)
        return True

    def _victims(self, shape: ClaimShape, gpu_type: int, rows: Iterator[int], state: SchedulerState) -> list[int]:
        """The jobs furthest back whose GPUs, with what is free, hold the claim; empty if all together do not."""
        if shape.locality is not Locality.CLUSTER:
            return self._victims_on_nodes(shape, gpu_type, rows, state)
        if shape.unit > 1:
            return self._victims_in_units(shape, gpu_type, rows, state)
        need = shape.gang - self.free.idle[gpu_type]
        victims: list[int] = []
        for row in rows:
            gpus = state.gpus_of(row, gpu_type)
            if gpus and self.may_preempt(row):
                victims.append(row)
                need -= gpus
                if need <= 0:
                    break
        else:
            return []
        surplus = -need
        for victim in reversed(victims):  # spare those that stand further ahead first
            gpus = state.gpus_of(victim, gpu_type)
            if gpus <= surplus:
                surplus -= gpus
                victims.remove(victim)
        return victims

    def _victims_on_nodes(self, shape: ClaimShape, gpu_type: int, rows: Iterator[int], state: SchedulerState) -> list[int]:
        """As `_victims`, for a claim that requires locality: GPUs count where enough of them come together."""
        topology = self.free.topology
        most = topology.fewest_nodes(gpu_type, shape.gang) if shape.locality is Locality.PACKED else len(topology.full)
        room = [mask.bit_count() for mask in self.free.masks]
        racks: dict[int, list[int]] = {}
        for node, kind in enumerate(topology.type_of):
            if kind == gpu_type:
                racks.setdefault(topology.rack_of[node], []).append(node)
        unit = shape.unit
        whole = room.__getitem__ if unit == 1 else lambda node: room[node] - room[node] % unit
        victims: list[int] = []
        for row in rows:
            if not (state.gpus_of(row, gpu_type) and self.may_preempt(row)):
                continue
            victims.append(row)
            for node, mask in state.of(row):
                room[node] += mask.bit_count()
            for rack in racks.values():
                chosen = nlargest(most, rack, key=whole)
                if sum(map(whole, chosen)) >= shape.gang:
                    return [each for each in victims if any(slots.node in chosen for slots in state.of(each))]
        return []

    def _victims_in_units(self, shape: ClaimShape, gpu_type: int, rows: Iterator[int], state: SchedulerState) -> list[int]:
        """As `_victims`, for a claim whose GPUs come in units: those of a node count as far as they are whole units."""
        room = {
            node: mask.bit_count()
            for node, mask in enumerate(self.free.masks)
            if self.free.topology.type_of[node] == gpu_type
        }
        unit = shape.unit
        has = sum(gpus - gpus % unit for gpus in room.values())

        def change(row: int, sign: int) -> int:
            """Count the GPUs of a job as free, or no longer; return by how much the whole units change, in GPUs."""
            gained = 0
            for node, mask in state.of(row):
                if node in room:
                    gpus = room[node] + sign * mask.bit_count()
                    gained += gpus - gpus % unit - (room[node] - room[node] % unit)
                    room[node] = gpus
            return gained

        victims: list[int] = []
        for row in rows:
            if state.gpus_of(row, gpu_type) and self.may_preempt(row):
                victims.append(row)
                has += change(row, 1)
                if has >= shape.gang:
                    break
        else:
            return []
        for victim in reversed(victims):  # spare those that stand further ahead first
            less = change(victim, -1)
            if has + less >= shape.gang:
                has += less
                victims.remove(victim)
            else:
                change(victim, 1)
        return victims

    def move_for(self, row: int, shape: ClaimShape, state: SchedulerState) -> bool:
        """Seat a claim that fits by number but not in units, by moving running jobs to as many GPUs of the same type.

        Runs that began last move first, and no job is stopped for it: if one finds no other place, all stay.
        """
        for gpu_type in shape.types:
            if self.free.idle[gpu_type] < shape.gang:
                continue
            # Those that this decision has changed already stay as they are.
            unchanged = (each for each in reversed(state.ledger.holdings) if each not in self.before)
            movers = (each for each in unchanged if not state.columns.tasks[each])
            victims = self._victims_in_units(shape, gpu_type, movers, state)
            if not victims:
                continue
            for victim in victims:
                self.evict(victim, state.of(victim))
            gpus = state.columns.gpus
            asked = {each: state.shape(each, Locality.CLUSTER, (gpu_type,), gpus[each]) for each in victims}
            if self.seat(row, shape) and all(self.seat(each, its) for each, its in asked.items()):
                return True
            self.retract(row, victims)
        return False

    def may_preempt(self, row: int) -> bool:
        """Say whether a running job may be stopped: it is not protected, and this decision has not moved it."""
        if self.before.get(row) != self.after.get(row) or row in self._fixed:
            return False
        until = self._protected.get(row)
        if until is None or until <= self.now:
            return self._unworked is None or not self._unworked(row)
        self.protected_until = min(self.protected_until, until)
        return False


class RankedClaims:
    """Claims by rank: the head of each shape. If the head of a shape does not fit, no job behind it does.

    current   key of the claim that `next` gave last
    lost      keys of the jobs that lost GPUs, whether they got them back or not
    """

    __slots__ = (
        "_catch_up", "_index", "_left_out", "_now", "_open", "_shape", "current", "lost", "preemption", "unfitting",
    )  # fmt: skip

    def __init__(
        self,
        index: RankIndex,
        shapes: Iterable[ClaimShape],
        unfitting: Unfitting,
        preemption: PreemptionRule,
        now: float,
        catch_up: Callable[[float], None],
    ) -> None:
        self.unfitting = unfitting
        self.preemption = preemption
        self.lost: dict[int, Key] = {}
        self._index = index
        self._now = now
        self._catch_up = catch_up
        self._left_out: Iterable[ClaimShape] = ()
        self.current: Key
        self._shape: ClaimShape
        head = index.head
        self._open = [(key, shape) for shape in shapes if (key := head(shape))]
        heapify(self._open)

    def but_later(self, shapes: Iterable[ClaimShape]) -> Self:
        """Look at these shapes too once a job has lost GPUs: what is left over may be enough for them."""
        self._left_out = shapes
        return self

    def next(self) -> tuple[int, ClaimShape] | None:
        """The claim with the least key."""
        if not self._open:
            return None
        self.current, self._shape = heappop(self._open)
        return self.current[4], self._shape

    def served(self, row: int) -> None:
        """Take a waiting job off its heap, so that the next of its shape can come; a victim is in no heap."""
        if row in self.lost:
            return
        self._index.stop_waiting(row)
        if key := self._index.head(self._shape):
            heappush(self._open, (key, self._shape))

    def behind(self, _row: int) -> Iterator[int]:
        """Running jobs behind the current claim, last first. Their ranks may have been put off until now."""
        self._catch_up(self._now)
        return self._index.running_behind(self.current, self._now)

    def returned(self, row: int) -> None:
        """Let a victim compete from the place that it had."""
        key = self.lost[row] = self._index.running_key(row, self._now)
        self._index.stop_running(row)
        heappush(self._open, (key, self._index.shape_of[row]))
        for shape in self._left_out:
            if head := self._index.head(shape):
                heappush(self._open, (head, shape))
        self._left_out = ()


class PlannedClaims:
    """Claims as a plan lists them. Running jobs are passed over, unless they lost their GPUs on the way."""

    def __init__(
        self, plan: Plan, preemption: PreemptionRule, holds: set[int], shape: Callable[[Claim], ClaimShape]
    ) -> None:
        self.unfitting = plan.unfitting
        self.preemption = preemption
        self._claims = plan.claims
        self._shape = shape
        self._at = -1
        self._holds = holds

    @cached_property
    def _place(self) -> dict[int, int]:
        """The place of each job in the plan."""
        return {claim.row: place for place, claim in enumerate(self._claims)}

    @cached_property
    def _running(self) -> list[int]:
        """Jobs that ran before the decision and are planned, in the plan's order."""
        return [claim.row for claim in self._claims if claim.row in self._holds]

    def next(self) -> tuple[int, ClaimShape] | None:
        """The next claim of a job without GPUs."""
        while (at := self._at + 1) < len(self._claims):
            self._at = at
            claim = self._claims[at]
            if claim.row not in self._holds:
                return claim.row, self._shape(claim)
        return None

    def served(self, row: int) -> None:
        """Note that it holds GPUs now."""
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
        """Note that it holds none: the plan comes to it later."""
        self._holds.discard(row)
