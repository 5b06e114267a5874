"""Turns on nodes where more jobs are at home than fit (Gandiva, OSDI'18 §3.1: suspend and resume).

Who has waited longest comes first. Then those who run go on, the last to start first, as far as there is room; the others
wait for the next turn. Gangs that no node holds take turns with all that is at home on their nodes.
"""

from poise.model.cluster import Part, Site, site_of
from poise.policies.gandiva.reacting import Moment, Unit


def take_turns(moment: Moment) -> None:
    """The turns that begin now, on every node where somebody waits for one."""
    Turns(moment).take()


class Turns:
    """Turns in the making.

    guests   who waits at home on a node, longest first;  taken: nodes whose turn is settled
    """

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._claimed = moment.claimed().union(moment.stops, moment.snapshot.pinned)
        self._guests: dict[int, list[int]] = {}
        self._wide: list[int] = []
        self._taken: set[int] = set()
        for row in moment.waiting:
            home = moment.homes.get(row)
            if home is None or row in self._claimed:
                continue
            if len(home) > 1:
                self._wide.append(row)
            else:
                self._guests.setdefault(home[0], []).append(row)

    def take(self) -> None:
        """Wide gangs make room first, so that everybody at home there can be chosen from."""
        self._yield_nodes()
        for row in self._wide:
            self._seat_wide(row)
        for node, rows in self._guests.items():
            if node not in self._taken:
                self._rotate(node, rows)

    def _yield_nodes(self) -> None:
        """Running gangs on several nodes stop where somebody waits for one of these."""
        moment, floor = self._moment, self._moment.snapshot.floor
        awaited = {*self._guests, *(node for row in self._wide for node in moment.homes[row])}
        for row, holding in sorted(floor.holdings.items()):
            if len(holding) > 1 and row not in self._claimed and moment.columns.started[row] < moment.snapshot.now:
                other = floor.partner.get(row)
                is_paired = other is not None and (row > other or other in moment.snapshot.pinned)
                if awaited.intersection(slots.node for slots in holding) and not is_paired:
                    moment.stop((row,) if other is None else (row, other), tuple(slots.node for slots in holding))
                    moment.sketch.give(site_of(holding))

    def _seat_wide(self, row: int) -> None:
        """A gang takes its nodes, if nobody there has waited longer."""
        moment = self._moment
        site = moment.affinities.parts(moment.homes[row], moment.columns.gang[row])
        since = moment.columns.waiting_since
        first = min((since[rows[0]] for node, _ in site if (rows := self._guests.get(node))), default=since[row])
        if since[row] <= first and all(self._room(node) >= gpus for node, gpus in site):
            for node, gpus in site:
                self._clear(node, gpus)
            self._settle(row, site)

    def _units(self, node: int) -> list[Unit]:
        """Who runs there, and may be stopped; the last to start first."""
        units = self._moment.residents.get(node, ())
        able = [unit for unit in units if not self._claimed.intersection(unit.rows)]
        return sorted(able, key=lambda unit: (-unit.since, unit.rows))

    def _room(self, node: int) -> int:
        """GPUs of a node that can be given to others; none once its turn is settled."""
        if node in self._taken:
            return 0
        return self._moment.sketch.free[node] + sum(unit.gpus for unit in self._units(node))

    def _clear(self, node: int, gpus: int) -> None:
        """Stop who has run longest until so many GPUs are free."""
        units = self._units(node)
        while self._moment.sketch.free[node] < gpus:
            self._stop(units.pop(), node)

    def _stop(self, unit: Unit, node: int) -> None:
        self._moment.stop(unit.rows, (node,))
        self._moment.sketch.give((Part(node, unit.gpus),))

    def _settle(self, row: int, site: Site) -> None:
        gang = self._moment.columns.gang[row]
        self._moment.affinities.take(site, gang)
        self._moment.move(row, gang, site)
        self._taken.update(node for node, _ in site)

    def _rotate(self, node: int, guests: list[int]) -> None:
        """The turn of a node."""
        room = self._room(node)
        chosen: list[int] = []
        for row in guests:
            gang = self._moment.columns.gang[row]
            if gang <= room:
                room -= gang
                chosen.append(row)
        for unit in self._units(node) if chosen else ():
            if unit.gpus <= room:
                room -= unit.gpus
            else:
                self._stop(unit, node)
        for row in chosen:
            self._settle(row, (Part(node, self._moment.columns.gang[row]),))
