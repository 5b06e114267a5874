"""The rules that every decision keeps, checked on every decision against an account of its own.

No GPU twice, but for two jobs that are to share theirs · whole gangs of one type, but for jobs whose rounds divide, and
those only on types that they can use · no more than there is · only live nodes. Only what a decision changes is looked at;
everything else was checked when it changed.
"""

from poise.scheduler.model.cluster import Holding, Slots, merged
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.topology import Topology


class Ledger:
    """Who holds what, kept apart from the structure that placements search."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._held = [0] * len(topology.full)
        self._alive = [True] * len(topology.full)
        self.holdings: dict[int, Holding] = {}
        self.trials: dict[int, Holding] = {}
        """What jobs on trial hold, which policies do not see."""
        self.partner: dict[int, int] = {}
        """Jobs that share their GPUs with another one, both ways."""

    def join(self, row: int, other: int) -> Holding:
        """The job shares the GPUs of another one; returns them."""
        if row in self.holdings or other in self.partner:
            raise InvariantError(f"job in row {row} is to share GPUs with row {other}, which is not possible twice")
        self.holdings[row] = self.holdings[other]
        self.partner[row], self.partner[other] = other, row
        return self.holdings[row]

    def open(self, row: int, holding: Holding, least: int, most: int, mixed: tuple[int, ...] | None = None) -> int:
        """The job takes these GPUs, as many as it can do with; refused if that breaks a rule. Returns how many they are.

        mixed   types that it can use at once; None: it needs GPUs of one type
        """
        self._check_empty_handed(row)
        got = self._take(row, holding, mixed)
        if not least <= got <= most:
            raise InvariantError(f"job in row {row} needs {least} to {most} GPUs and is to get {got}")
        self.holdings[row] = holding
        return got

    def extend(self, row: int, holding: Holding, mixed: tuple[int, ...]) -> None:
        """The job takes these GPUs besides those that it holds; refused if that breaks a rule."""
        self._take(row, holding, mixed)
        self.holdings[row] = merged((*self.holdings.get(row, ()), *holding))

    def reduce(self, row: int, holding: Holding) -> None:
        """The job gives some of its GPUs back, perhaps all of them, and goes on."""
        left = dict(self.holdings[row])
        for node, mask in holding:
            if left.get(node, 0) & mask != mask:
                raise InvariantError(
                    f"job in row {row} is to give back slots {mask:b} of node {node}, which it does not hold"
                )
            left[node] &= ~mask
            self._held[node] &= ~mask
        self.holdings[row] = tuple(Slots(node, mask) for node, mask in left.items() if mask)

    def lend(self, row: int, holding: Holding) -> None:
        """The job is tried on these GPUs; refused if that breaks a rule."""
        self._check_empty_handed(row)
        self._take(row, holding, None)
        self.trials[row] = holding

    def _check_empty_handed(self, row: int) -> None:
        if row in self.holdings or row in self.trials:
            raise InvariantError(f"job in row {row} is to hold GPUs twice")

    def _take(self, row: int, holding: Holding, mixed: tuple[int, ...] | None) -> int:
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
            self._held[node] |= mask
        return got

    def close(self, row: int) -> Holding:
        """The job gives its GPUs back; returns those that nobody holds any more."""
        holding = self.holdings.pop(row) if row in self.holdings else self.trials.pop(row, None)
        if holding is None:
            raise InvariantError(f"job in row {row} is to give back GPUs and holds none")
        other = self.partner.pop(row, None)
        if other is not None:
            del self.partner[other]
            return ()
        for node, mask in holding:
            self._held[node] &= ~mask
        return holding

    def rows(self) -> set[int]:
        """The jobs that hold GPUs, but for those on trial."""
        return set(self.holdings)

    def held_by(self, row: int) -> Holding | None:
        """What a job holds, if it holds anything."""
        return self.holdings.get(row)

    def holding(self, row: int) -> Holding:
        """What a running job holds."""
        return self.holdings[row]

    def lose(self, node: int) -> list[int]:
        """The node is gone; returns the rows of the jobs that held GPUs there, ascending."""
        self._alive[node] = False
        held = (*self.holdings.items(), *self.trials.items())
        return sorted(row for row, holding in held if any(slots.node == node for slots in holding))

    def restore(self, node: int) -> None:
        """The node is there again."""
        self._alive[node] = True
