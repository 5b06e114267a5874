"""What Gandiva does every period (OSDI'18 §4.2): judge pairs, make new ones, draw jobs together, grow them.

Packing is by trial: two jobs share GPUs for a period, and stay together if together they get more done than one at a time
would, i.e. if the sum of their throughputs, each over its own when alone, is above 1. What was found is remembered.
"""

from collections.abc import Iterable, Sequence
from math import inf, nextafter

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import NodeGpus, site_of
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import PlacementView
from poise.scheduler.policies.gandiva.reaction import Combination, GandivaPlan, PlacedUnit

WORTH = 1.0
"""Sum of normalised throughputs above which two jobs do more together than in turns."""
UNTRIED = nextafter(WORTH, inf)
"""Worth of a combination that has not been tried yet: worth a trial, after all that have proved themselves."""


class Pairing:
    """What is known of pairs: what they did where they were tried, and what they would do.

    verdicts   sums of normalised throughputs that were found, by combination
    """

    def __init__(self, plan: GandivaPlan, beside: Floats) -> None:
        self.verdicts = dict(plan.memory.verdicts)
        self._plan = plan
        self._beside = beside
        self._worth: dict[Combination, float] = {}

    def combination(self, row: int, other: int, gpu_type: int) -> Combination:
        """What two jobs are an instance of."""
        kind = self._plan.columns.kind
        low, high = sorted((kind[row], kind[other]))
        return Combination(low, high, gpu_type)

    def worth(self, row: int, other: int, gpu_type: int) -> float:
        """Sum of the normalised throughputs of two jobs on the same GPUs; 0 if they do not fit there together."""
        combination = self.combination(row, other, gpu_type)
        worth = self._worth.get(combination)
        if worth is None:
            kind, estimate = self._plan.columns.kind, self._plan.snapshot.estimate
            mine = float(self._beside[kind[row], kind[other], gpu_type])
            others = float(self._beside[kind[other], kind[row], gpu_type])
            alone = [estimate(each).rates[gpu_type][Locality.PACKED] for each in (row, other)]
            fits = mine > 0 and others > 0 and min(alone) > 0
            worth = self._worth[combination] = mine / alone[0] + others / alone[1] if fits else 0.0
        return worth

    def promise(self, row: int, other: int, gpu_type: int) -> float:
        """What was found; just above the worthwhile if nothing was yet; 0 if they do not fit together."""
        if self.worth(row, other, gpu_type) == 0:
            return 0.0
        return self.verdicts.get(self.combination(row, other, gpu_type), UNTRIED)


def known_pairs(plan: GandivaPlan) -> Pairing | None:
    """What is known of pairs; None if nothing is known of any."""
    beside = plan.snapshot.workload.known_beside
    return None if beside is None else Pairing(plan, beside)


def judge(plan: GandivaPlan, pairing: Pairing) -> None:
    """Part pairs that do not get more done together: the later job goes. What they did is remembered."""
    for row, other in _pairs(plan):
        gpu_type = plan.type_of(row)
        worth = pairing.worth(row, other, gpu_type)
        pairing.verdicts[pairing.combination(row, other, gpu_type)] = worth
        leaver = _later(plan, row, other)
        if worth <= WORTH and leaver is not None:
            plan.stop((leaver,), tuple(slots.node for slots in plan.snapshot.placement.holdings[row]))


def _pairs(plan: GandivaPlan) -> list[tuple[int, int]]:
    return sorted((row, other) for row, other in plan.snapshot.placement.partner.items() if row < other)


def _later(plan: GandivaPlan, row: int, other: int) -> int | None:
    """The job of a pair that joined the other, of those that can be stopped at all."""
    able = [each for each in (row, other) if each not in plan.snapshot.pinned]
    return max(able, key=lambda each: (plan.columns.started[each], each), default=None)


def part(plan: GandivaPlan) -> None:
    """There is room for all jobs: those that joined another get GPUs of their own."""
    for row, other in _pairs(plan):
        joined = _later(plan, row, other)
        if joined is None:
            continue
        gang, types = plan.columns.gang[joined], plan.types_of(joined)
        found = plan.affinities.place(gang, types) if plan.has_idle(gang, types) else None
        if found is not None:
            plan.stops[joined] = None  # it may stay on its node, but not on these GPUs
            plan.move(joined, gang, found)


def pack(plan: GandivaPlan, pairing: Pairing) -> None:
    """Waiting jobs join running ones, the best combination known first; of those not tried yet, one trial each at a time."""
    tried: set[Combination] = set()
    claimed = plan.claimed()
    # Hosts: running jobs that have their GPUs to themselves, packed; by gang, by kind and type, in order of arrival.
    floor, columns = plan.snapshot.placement, plan.columns
    changed = claimed.union(plan.stops, floor.partner)
    hosts: dict[int, dict[tuple[int, int], list[int]]] = {}
    for row in sorted(floor.holdings):
        is_alone = row not in changed and columns.gpus[row] == columns.gang[row]
        if is_alone and floor.topology.locality(floor.holdings[row]) is Locality.PACKED:
            alike = (columns.kind[row], plan.type_of(row))
            hosts.setdefault(columns.gang[row], {}).setdefault(alike, []).append(row)
    for row in plan.waiting:
        if row in claimed:
            continue
        able: list[tuple[float, int, list[int]]] = []
        for (_, gpu_type), rows in hosts.get(plan.columns.gang[row], {}).items():
            if rows and pairing.combination(row, rows[0], gpu_type) not in tried:
                able.append((-pairing.promise(row, rows[0], gpu_type), rows[0], rows))
        promise, host, rows = min(able, default=(0.0, 0, []))
        if -promise > WORTH:
            rows.pop(0)
            combination = pairing.combination(row, host, plan.type_of(host))
            if combination not in pairing.verdicts:
                tried.add(combination)
            plan.claims.append(Claim(host, beside=row))
            plan.homes.pop(row, None)


def draw_together(plan: GandivaPlan, since: float) -> None:
    """Gangs on more nodes than they need go where they fit, if that is anywhere now. Runs younger than `since` stay."""
    floor, draft = plan.snapshot.placement, plan.draft
    plan.spread.intersection_update(floor.holdings)
    for row in sorted(plan.spread):
        if row in floor.partner or row in plan.snapshot.pinned or plan.is_young(row, since):
            continue
        site, gang = site_of(floor.holdings[row]), plan.columns.gpus[row]
        draft.give(site)
        better = draft.tightest(plan.type_of(row), gang)
        if better is not None and len(better) < len(site):
            plan.affinities.take(better, gang)
            plan.move(row, gang, better)
        else:
            draft.take(site)


def fragments(free: Sequence[int], floor: PlacementView, fragmented: float) -> list[int]:
    """Nodes that are not empty, but have at least this part of their GPUs free."""
    sizes = [mask.bit_count() for mask in floor.topology.full]
    return [node for node, gpus in enumerate(free) if sizes[node] > gpus >= fragmented * sizes[node] and gpus]


def defragment(plan: GandivaPlan, fragmented: float, since: float) -> None:
    """Empty nodes that are all but empty, the emptiest first: their jobs go to nodes that are no emptier.

    A node is emptied as a whole or left as it is. Jobs that came later than `since` stay where they are.
    """
    claimed = plan.claimed()
    free = plan.draft.free
    for node in sorted(fragments(free, plan.snapshot.placement, fragmented), key=lambda node: (-free[node], node)):
        units = plan.residents.get(node, [])
        used = plan.draft.topology.full[node].bit_count() - free[node]
        may_move = all(len(unit.rows) == 1 and unit.rows[0] not in claimed for unit in units)
        if not (may_move and units and sum(unit.gpus for unit in units) == used):
            continue
        if not any(plan.is_young(unit.rows[0], since) for unit in units):
            claimed.update(_emptied(plan, node, units))


def _emptied(plan: GandivaPlan, node: int, units: Iterable[PlacedUnit]) -> list[int]:
    """Move all units off a node, the largest first; nothing changes if one of them finds no place.

    Each goes to a node in use of the same type that is no emptier: one that serves such gangs, if there is one; of those
    the fullest.
    """
    free, topology, serves = plan.draft.free, plan.draft.topology, plan.affinities.of
    moves: list[tuple[int, int, int]] = []
    most = free[node]
    for unit in sorted(units, key=lambda unit: (-unit.gpus, unit.rows)):
        gpus = unit.gpus
        roomy = [each for each, room in enumerate(free) if gpus <= room <= most and each != node]
        alike = [each for each in roomy if topology.type_of[each] == topology.type_of[node]]
        able = [
            (serves.get(each) != gpus, free[each], each) for each in alike if free[each] < topology.full[each].bit_count()
        ]
        if not able:
            for _, other, taken in moves:
                plan.draft.give((NodeGpus(other, taken),))
            return []
        target = min(able)[2]
        plan.draft.take((NodeGpus(target, gpus),))
        moves.append((unit.rows[0], target, gpus))
    for row, target, gpus in moves:
        plan.draft.give((NodeGpus(node, gpus),))
        plan.move(row, gpus, (NodeGpus(target, gpus),))
    return [row for row, _, _ in moves]


def grow(plan: GandivaPlan, since: float) -> None:
    """Elastic jobs take in idle GPUs of their node, as far as that makes them faster, in order of arrival."""
    columns, floor, draft = plan.columns, plan.snapshot.placement, plan.draft
    claimed = plan.claimed()
    for row in sorted(floor.holdings):
        holding = floor.holdings[row]
        most, held = columns.most[row], columns.gpus[row]
        may_grow = most > held and most > columns.gang[row] and len(holding) == 1 and row not in floor.partner
        may_grow = may_grow and row not in plan.snapshot.pinned
        if not may_grow or row in claimed or not draft.free[holding[0].node] or plan.is_young(row, since):
            continue
        node = holding[0].node
        estimate, gpu_type = plan.snapshot.estimate(row), plan.type_of(row)
        speeds = {
            each: estimate.at(each)[gpu_type][Locality.PACKED]
            for each in range(held, min(most, held + draft.free[node]) + 1)
        }
        gpus = max(speeds, key=lambda each: (speeds[each], -each))  # the fewest of those with which it is fastest
        if gpus > held:
            draft.take((NodeGpus(node, gpus - held),))
            plan.move(row, gpus, (NodeGpus(node, gpus),))
