"""What Gandiva does from time to time (OSDI'18 §4.2): judge pairs, make new ones, draw jobs together, grow them.

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
from poise.scheduler.policies.gandiva.reaction import Combination, GandivaMoment, PlacedUnit

WORTH = 1.0
"""Sum of normalised throughputs above which two jobs do more together than in turns."""
UNTRIED = nextafter(WORTH, inf)
"""What a combination that nobody has tried yet is taken for: worth a trial, after all that have proved themselves."""


class Pairing:
    """What is known of pairs: what they did where they were tried, and what they would do.

    verdicts   sums of normalised throughputs that were found, by combination
    """

    def __init__(self, moment: GandivaMoment, beside: Floats) -> None:
        self.verdicts = dict(moment.habits.verdicts)
        self._moment = moment
        self._beside = beside
        self._worth: dict[Combination, float] = {}

    def combination(self, row: int, other: int, gpu_type: int) -> Combination:
        """What two jobs are an instance of."""
        kind = self._moment.columns.kind
        low, high = sorted((kind[row], kind[other]))
        return Combination(low, high, gpu_type)

    def worth(self, row: int, other: int, gpu_type: int) -> float:
        """Sum of the normalised throughputs of two jobs on the same GPUs; 0 if they do not fit there together."""
        combination = self.combination(row, other, gpu_type)
        worth = self._worth.get(combination)
        if worth is None:
            worth = self._worth[combination] = self._summed(row, other, gpu_type)
        return worth

    def _summed(self, row: int, other: int, gpu_type: int) -> float:
        kind, estimate = self._moment.columns.kind, self._moment.snapshot.estimate
        mine = float(self._beside[kind[row], kind[other], gpu_type])
        others = float(self._beside[kind[other], kind[row], gpu_type])
        alone = [estimate(each).rates[gpu_type][Locality.PACKED] for each in (row, other)]
        return mine / alone[0] + others / alone[1] if mine > 0 and others > 0 and min(alone) > 0 else 0.0

    def promise(self, row: int, other: int, gpu_type: int) -> float:
        """What was found; just above the worthwhile if nothing was yet; 0 if they do not fit together."""
        if self.worth(row, other, gpu_type) == 0:
            return 0.0
        return self.verdicts.get(self.combination(row, other, gpu_type), UNTRIED)


def known_pairs(moment: GandivaMoment) -> Pairing | None:
    """None if nothing is known of any pair."""
    beside = moment.snapshot.workload.known_beside
    return None if beside is None else Pairing(moment, beside)


def judge(moment: GandivaMoment, pairing: Pairing) -> None:
    """Pairs that do not do more together are parted, the later job going; what they did is remembered."""
    for row, other in _pairs(moment):
        gpu_type = moment.type_of(row)
        worth = pairing.worth(row, other, gpu_type)
        pairing.verdicts[pairing.combination(row, other, gpu_type)] = worth
        leaver = _later(moment, row, other)
        if worth <= WORTH and leaver is not None:
            moment.stop((leaver,), tuple(slots.node for slots in moment.snapshot.placement.holdings[row]))


def _pairs(moment: GandivaMoment) -> list[tuple[int, int]]:
    return sorted((row, other) for row, other in moment.snapshot.placement.partner.items() if row < other)


def _later(moment: GandivaMoment, row: int, other: int) -> int | None:
    """Of a pair, who joined the other; of those who can be made to leave at all."""
    able = [each for each in (row, other) if each not in moment.snapshot.pinned]
    return max(able, key=lambda each: (moment.columns.started[each], each), default=None)


def part(moment: GandivaMoment) -> None:
    """There is room for everybody: who joined another gets GPUs of its own."""
    for row, other in _pairs(moment):
        joined = _later(moment, row, other)
        if joined is None:
            continue
        gang, types = moment.columns.gang[joined], moment.types_of(joined)
        found = moment.affinities.place(gang, types) if moment.has_idle(gang, types) else None
        if found is not None:
            moment.stops[joined] = None  # it may stay on its node, but not on these GPUs
            moment.move(joined, gang, found)


def pack(moment: GandivaMoment, pairing: Pairing) -> None:
    """Jobs that wait join jobs that run, the best combination known first; of those not tried yet, one each at a time."""
    tried: set[Combination] = set()
    hosts = _hosts(moment)
    claimed = moment.claimed()
    for row in moment.waiting:
        if row in claimed:
            continue
        able: list[tuple[float, int, list[int]]] = []
        for (_, gpu_type), rows in hosts.get(moment.columns.gang[row], {}).items():
            if rows and pairing.combination(row, rows[0], gpu_type) not in tried:
                able.append((-pairing.promise(row, rows[0], gpu_type), rows[0], rows))
        promise, host, rows = min(able, default=(0.0, 0, []))
        if -promise > WORTH:
            rows.pop(0)
            combination = pairing.combination(row, host, moment.type_of(host))
            if combination not in pairing.verdicts:
                tried.add(combination)
            moment.claims.append(Claim(host, beside=row))
            moment.homes.pop(row, None)


def _hosts(moment: GandivaMoment) -> dict[int, dict[tuple[int, int], list[int]]]:
    """Running jobs that have their GPUs to themselves, close together: by gang, by kind and type, in order of arrival."""
    floor, columns = moment.snapshot.placement, moment.columns
    changed = moment.claimed().union(moment.stops, floor.partner)
    hosts: dict[int, dict[tuple[int, int], list[int]]] = {}
    for row in sorted(floor.holdings):
        is_alone = row not in changed and columns.gpus[row] == columns.gang[row]
        if is_alone and floor.topology.locality(floor.holdings[row]) is Locality.PACKED:
            alike = (columns.kind[row], moment.type_of(row))
            hosts.setdefault(columns.gang[row], {}).setdefault(alike, []).append(row)
    return hosts


def draw_together(moment: GandivaMoment, since: float) -> None:
    """Gangs on more nodes than they need go where they fit, if that is anywhere now. Who came later than `since` stays."""
    floor, sketch = moment.snapshot.placement, moment.sketch
    moment.spread.intersection_update(floor.holdings)
    for row in sorted(moment.spread):
        if row in floor.partner or row in moment.snapshot.pinned or moment.is_young(row, since):
            continue
        site, gang = site_of(floor.holdings[row]), moment.columns.gpus[row]
        sketch.give(site)
        better = sketch.tightest(moment.type_of(row), gang)
        if better is not None and len(better) < len(site):
            moment.affinities.take(better, gang)
            moment.move(row, gang, better)
        else:
            sketch.take(site)


def fragments(free: Sequence[int], floor: PlacementView, fragmented: float) -> list[int]:
    """Nodes that are not empty, but have at least this part of their GPUs free."""
    sizes = [mask.bit_count() for mask in floor.topology.full]
    return [node for node, gpus in enumerate(free) if sizes[node] > gpus >= fragmented * sizes[node] and gpus]


def defragment(moment: GandivaMoment, fragmented: float, since: float) -> None:
    """Empty nodes that are all but empty, the emptiest first: their jobs go to nodes that are no emptier.

    A node is emptied as a whole or left as it is. Jobs that came later than `since` stay where they are.
    """
    claimed = moment.claimed()
    free = moment.sketch.free
    for node in sorted(fragments(free, moment.snapshot.placement, fragmented), key=lambda node: (-free[node], node)):
        units = moment.residents.get(node, [])
        used = moment.sketch.topology.full[node].bit_count() - free[node]
        may_move = all(len(unit.rows) == 1 and unit.rows[0] not in claimed for unit in units)
        if not (may_move and units and sum(unit.gpus for unit in units) == used):
            continue
        if not any(moment.is_young(unit.rows[0], since) for unit in units):
            claimed.update(_emptied(moment, node, units))


def _emptied(moment: GandivaMoment, node: int, units: Iterable[PlacedUnit]) -> list[int]:
    """Move all units off a node, the largest first; nothing changes if one of them finds no place."""
    free, moves = moment.sketch.free, list[tuple[int, int, int]]()
    most = free[node]
    for unit in sorted(units, key=lambda unit: (-unit.gpus, unit.rows)):
        target = _no_emptier(moment, node, unit.gpus, most)
        if target is None:
            for _, other, gpus in moves:
                moment.sketch.give((NodeGpus(other, gpus),))
            return []
        moment.sketch.take((NodeGpus(target, unit.gpus),))
        moves.append((unit.rows[0], target, unit.gpus))
    for row, target, gpus in moves:
        moment.sketch.give((NodeGpus(node, gpus),))
        moment.move(row, gpus, (NodeGpus(target, gpus),))
    return [row for row, _, _ in moves]


def _no_emptier(moment: GandivaMoment, node: int, gpus: int, most: int) -> int | None:
    """The node of the same type for a gang: one that serves such gangs, if there is one; of those the fullest."""
    free, topology, serves = moment.sketch.free, moment.sketch.topology, moment.affinities.of
    roomy = [each for each, room in enumerate(free) if gpus <= room <= most and each != node]
    alike = [each for each in roomy if topology.type_of[each] == topology.type_of[node]]
    able = [each for each in alike if free[each] < topology.full[each].bit_count()]
    return min(able, key=lambda each: (serves.get(each) != gpus, free[each], each), default=None)


def grow(moment: GandivaMoment, since: float) -> None:
    """Elastic jobs take in GPUs of their node that nobody uses, as far as that makes them faster, in order of arrival."""
    columns, floor, sketch = moment.columns, moment.snapshot.placement, moment.sketch
    claimed = moment.claimed()
    for row in sorted(floor.holdings):
        holding = floor.holdings[row]
        most, held = columns.most[row], columns.gpus[row]
        may_grow = most > held and most > columns.gang[row] and len(holding) == 1 and row not in floor.partner
        may_grow = may_grow and row not in moment.snapshot.pinned
        if not may_grow or row in claimed or not sketch.free[holding[0].node] or moment.is_young(row, since):
            continue
        node = holding[0].node
        gpus = _fastest(moment, row, held, min(most, held + sketch.free[node]))
        if gpus > held:
            sketch.take((NodeGpus(node, gpus - held),))
            moment.move(row, gpus, (NodeGpus(node, gpus),))


def _fastest(moment: GandivaMoment, row: int, held: int, most: int) -> int:
    """The number of GPUs, from what it holds, with which the job is fastest; the least of equals."""
    estimate, gpu_type = moment.snapshot.estimate(row), moment.type_of(row)
    return max(range(held, most + 1), key=lambda gpus: (estimate.at(gpus)[gpu_type][Locality.PACKED], -gpus))
