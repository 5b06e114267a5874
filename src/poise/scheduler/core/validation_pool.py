"""The validation pool: a few GPUs on which gangs first run for a while, so that broken ones fail cheaply.

This is Philly's third guideline (docs/algorithms/philly.md). A job of several GPUs begins with a trial on one GPU of the
pool. Its progress there is thrown away, unless it can do with one GPU. A broken job dies having cost one GPU instead of its
gang, and without having queued for it. Policies see neither the pool nor jobs on trial. Where the whole pool is lost or
closed, jobs compete untried. A trial on a GPU that is closed goes on to its end, which is near.
"""

from collections.abc import Callable, Iterator
from math import inf

from poise.scheduler.model.cluster import Holding, Slots
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.topology import Topology
from poise.scheduler.model.units import counted


class ValidationPool:
    """The GPUs of the pool, which are the last ones of the cluster, and the jobs on them, in order of arrival.

    reserved   number of GPUs of the pool by type
    """

    def __init__(self, topology: Topology, gpus: int, seconds: float) -> None:
        if gpus and gpus >= sum(topology.totals):
            pool = counted(gpus, "GPU")
            raise RequestError(f"a validation pool of {pool} leaves none of {sum(topology.totals)} for the jobs")
        self._type_of = topology.type_of
        self._seconds = seconds
        every = (Slots(node, 1 << slot) for node, full in enumerate(topology.full) for slot in range(full.bit_count()))
        self._free = [*every][::-1][:gpus]
        self.slots = tuple(self._free)
        self.reserved = [0] * len(topology.types)
        for slots in self.slots:
            self.reserved[topology.type_of[slots.node]] += 1
        self._queue: dict[int, tuple[int, ...]] = {}
        self._until: dict[int, float] = {}
        self._at: dict[int, Slots] = {}

    def __bool__(self) -> bool:
        return bool(self.slots)

    def suits(self, gang: int, types: tuple[int, ...]) -> bool:
        """Say whether a trial would tell something: the job needs more than one GPU and runs on what the pool has."""
        return gang > 1 and any(self.reserved[gpu_type] for gpu_type in types)

    def add(self, row: int, types: tuple[int, ...]) -> None:
        """Queue a job for a trial on one of these types."""
        self._queue[row] = types

    def drop(self, row: int) -> None:
        """Take a job out of the queue or off its GPU, which is free again."""
        if row in self._at:
            self._free.append(self._at.pop(row))
            del self._until[row]
        self._queue.pop(row, None)

    def tries(self, row: int) -> bool:
        """Say whether the job is on trial."""
        return row in self._at

    def waits(self, row: int) -> bool:
        """Say whether the job waits for its trial."""
        return row in self._queue

    def on(self, node: int) -> int:
        """The GPUs of the pool on a node, as a bit mask of slots."""
        return sum(slots.mask for slots in self.slots if slots.node == node)

    def passed(self, now: float) -> list[int]:
        """Rows of the jobs whose trial is over, ascending; their GPUs are free again."""
        over = sorted(row for row, until in self._until.items() if until <= now)
        for row in over:
            self.drop(row)
        return over

    def begin(self, now: float, is_open: Callable[[Holding], bool]) -> Iterator[tuple[int, Holding]]:
        """Rows of the jobs whose trial begins now, each with its GPU."""
        usable = [slots for slots in self._free if is_open((slots,))]
        for row, types in list(self._queue.items()) if usable else ():
            slots = next((each for each in reversed(usable) if self._type_of[each.node] in types), None)
            if slots is not None:
                usable.remove(slots)
                self._free.remove(slots)
                del self._queue[row]
                self._at[row] = slots
                self._until[row] = now + self._seconds
                yield row, (slots,)

    def waived(self, is_open: Callable[[Holding], bool]) -> list[int]:
        """Rows of the queued jobs that no GPU of the pool can try, all being lost or closed; they leave the queue."""
        there = {self._type_of[slots.node] for slots in self.slots if is_open((slots,))}
        rows = [row for row, types in self._queue.items() if there.isdisjoint(types)]
        for row in rows:
            del self._queue[row]
        return rows

    def next_change(self) -> float:
        """When the next trial is over."""
        return min(self._until.values(), default=inf)
