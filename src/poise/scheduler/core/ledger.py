"""The ledger of who holds which GPUs. It checks the rules that every decision must keep, and raises where one breaks a rule.

- No GPU is held twice, except by two jobs that share all of theirs.
- Gangs are whole and of one type, except for jobs whose steps divide, which hold types that they can use.
- The GPUs that a job holds on each node are whole units of that job.
- Only GPUs that exist are held, and only on live nodes.
- No run starts on a closed GPU. One that was there before goes on.

The ledger is kept apart from `FreeGpus`, the structure that placements search, so that a mistake in one shows in the other.
It looks only at what changes: everything else was checked when it changed.
"""

from poise.scheduler.model.cluster import Holding, Slots, is_whole, merged
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.topology import Topology


class Ledger:
    """Holdings by row. A row is in at most one of `holdings` and `trials`."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._held = [0] * len(topology.full)
        self._alive = [True] * len(topology.full)
        self._closed: dict[int, int] = {}
        self._rows: list[set[int]] = [set() for _ in topology.full]
        """By node: rows of the jobs that hold GPUs there, those on trial included."""
        self.holdings: dict[int, Holding] = {}
        self.trials: dict[int, Holding] = {}
        """What jobs on a validation trial hold, which policies do not see."""
        self.partner: dict[int, int] = {}
        """For jobs that share their GPUs: the other job, both ways."""

    def join(self, row: int, other: int, unit: int = 1, *, is_carried: bool = False) -> Holding:
        """Let a job share the GPUs of another one; return them. `unit` and `is_carried` as for `open`."""
        if row in self.holdings or other in self.partner:
            raise InvariantError(f"job in row {row} is to share GPUs with row {other}, which is not possible twice")
        self._check_units(row, self.holdings[other], unit)
        for node, mask in self.holdings[other]:
            if not is_carried:
                self._check_open(row, node, mask)
            self._rows[node].add(row)
        self.holdings[row] = self.holdings[other]
        self.partner[row], self.partner[other] = other, row
        return self.holdings[row]

    def open(
        self,
        row: int,
        holding: Holding,
        least: int,
        most: int,
        mixed: tuple[int, ...] | None = None,
        *,
        unit: int = 1,
        is_carried: bool = False,
    ) -> int:
        """Let a job take these GPUs; return their number, which is within its bounds.

        mixed        types that it can use at once; None: it needs GPUs of one type
        unit         those on each node are a multiple of this
        is_carried   its run was there before, so that GPUs may be closed
        """
        self._check_empty_handed(row)
        self._check_units(row, holding, unit)
        got = self._take(row, holding, mixed, is_carried=is_carried)
        if not least <= got <= most:
            raise InvariantError(f"job in row {row} needs {least} to {most} GPUs and is to get {got}")
        self.holdings[row] = holding
        return got

    def extend(self, row: int, holding: Holding, mixed: tuple[int, ...]) -> None:
        """Let a job take these GPUs besides those that it holds."""
        self._take(row, holding, mixed)
        self.holdings[row] = merged((*self.holdings.get(row, ()), *holding))

    def reduce(self, row: int, holding: Holding) -> None:
        """Take some GPUs of a job back, perhaps all of them; it goes on."""
        left = dict(self.holdings[row])
        for node, mask in holding:
            if left.get(node, 0) & mask != mask:
                slots = f"slots {mask:b} of node {node}"
                raise InvariantError(f"job in row {row} is to give back {slots}, which it does not hold")
            left[node] &= ~mask
            self._held[node] &= ~mask
            if not left[node]:
                self._rows[node].discard(row)
        self.holdings[row] = tuple(Slots(node, mask) for node, mask in left.items() if mask)

    def lend(self, row: int, holding: Holding, unit: int = 1) -> None:
        """Let a job on trial take these GPUs. `unit` as for `open`."""
        self._check_empty_handed(row)
        self._check_units(row, holding, unit)
        self._take(row, holding, None)
        self.trials[row] = holding

    def _check_empty_handed(self, row: int) -> None:
        if row in self.holdings or row in self.trials:
            raise InvariantError(f"job in row {row} is to hold GPUs twice")

    @staticmethod
    def _check_units(row: int, holding: Holding, unit: int) -> None:
        if not is_whole(holding, unit):
            parts = ", ".join(f"{mask.bit_count()} on node {node}" for node, mask in holding)
            raise InvariantError(f"job in row {row} takes GPUs in units of {unit} and is to get {parts}")

    def _check_open(self, row: int, node: int, mask: int) -> None:
        if closed := self._closed.get(node, 0) & mask:
            raise InvariantError(f"job in row {row} is to run on node {node}, whose slots {closed:b} are closed")

    def _take(self, row: int, holding: Holding, mixed: tuple[int, ...] | None, *, is_carried: bool = False) -> int:
        first = self._topology.type_of[holding[0].node]
        got = 0
        for node, mask in holding:
            got += mask.bit_count()
            if not self._alive[node]:
                raise InvariantError(f"job in row {row} is to run on node {node}, which is lost")
            if mask <= 0 or mask & ~self._topology.full[node]:
                raise InvariantError(f"node {node} has no such slots: {mask:b}")
            if self._held[node] & mask:
                raise InvariantError(f"node {node}: slots {self._held[node] & mask:b} are to be held twice")
            kind = self._topology.type_of[node]
            if kind != first if mixed is None else kind not in mixed:
                why = "GPUs of two types" if mixed is None else f"{self._topology.types[kind]}, which it cannot use"
                raise InvariantError(f"job in row {row} is to run on {why}")
            if self._closed and not is_carried:
                self._check_open(row, node, mask)
            self._held[node] |= mask
            self._rows[node].add(row)
        return got

    def close(self, row: int) -> Holding:
        """Take all GPUs of a job back; return those that no other job holds."""
        holding = self.holdings.pop(row) if row in self.holdings else self.trials.pop(row, None)
        if holding is None:
            raise InvariantError(f"job in row {row} is to give back GPUs and holds none")
        for slots in holding:
            self._rows[slots.node].discard(row)
        other = self.partner.pop(row, None)
        if other is not None:
            del self.partner[other]
            return ()
        for node, mask in holding:
            self._held[node] &= ~mask
        return holding

    def rows(self) -> set[int]:
        """Rows of the jobs that hold GPUs, except those on trial."""
        return set(self.holdings)

    def held_by(self, row: int) -> Holding | None:
        """The GPUs of a job; None if it holds none."""
        return self.holdings.get(row)

    def holding(self, row: int) -> Holding:
        """The GPUs of a running job."""
        return self.holdings[row]

    def holders(self, node: int, mask: int) -> list[int]:
        """Rows of the jobs that hold any of these slots of a node, ascending, those on trial included."""
        held = ((row, self.holdings.get(row) or self.trials.get(row, ())) for row in sorted(self._rows[node]))
        return [row for row, holding in held if any(slots.node == node and slots.mask & mask for slots in holding)]

    def restrict(self, node: int, closed: int) -> None:
        """Mark these slots of a node as closed, and all others as open."""
        if closed:
            self._closed[node] = closed
        else:
            self._closed.pop(node, None)

    def lose(self, node: int) -> list[int]:
        """Mark a node as lost; return the rows of the jobs that hold GPUs there, ascending."""
        self._alive[node] = False
        return sorted(self._rows[node])

    def restore(self, node: int) -> None:
        """Mark a node as live."""
        self._alive[node] = True
