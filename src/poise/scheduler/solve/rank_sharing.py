"""GPUs shared out by rank: going through wishes in order, each takes the best of what is left (DESIGN §2).

A gang takes GPUs of the best type that has enough, or nothing. Who divides takes the fewest GPUs, of whatever types, on
which its round is shortest. Who has what it would be as fast on keeps it.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from poise.scheduler.model.micro_batches import Mix, Tasks
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology

NO_FASTER = 1.0 - 1e-9
"""A round that is shorter by less than this is not worth other GPUs."""


class Ownership(Enum):
    """Whether what somebody has is its own, or may go to those before it."""

    OWN = auto()
    LENT = auto()


class ShareRequest(NamedTuple):
    """What somebody would like to have.

    gang, types   GPUs of one of these types, the best first
    tasks         given, any GPUs will do instead
    single        so many GPUs, of whichever of the types, the best first, besides what it has: each for a task of its own
    has, title    what it has now, and whether that is its own
    """

    who: int
    gang: int
    types: tuple[int, ...]
    tasks: Tasks | None = None
    single: int = 0
    has: Mix | None = None
    title: Ownership = Ownership.LENT


class GpuSupply(NamedTuple):
    """The GPUs of each type that there are at all, how many of them can be close together, and the Locality of others."""

    gpus: Mix
    together: tuple[int, ...]
    apart: int

    @staticmethod
    def of(topology: Topology) -> "GpuSupply":
        """What fits on one node is close together; anything else is as far apart as the cluster is."""
        together = tuple(topology.largest_node(kind) for kind in range(len(topology.types)))
        return GpuSupply(tuple(topology.totals), together, Locality.RACK if len(topology.racks) == 1 else Locality.CLUSTER)


def share_out(
    wishes: Iterable[ShareRequest], left: list[int], ground: GpuSupply
) -> Iterator[tuple[ShareRequest, Mix | None]]:
    """Each wish with what it gets, in order, while anything is left; None if nothing that it could use is.

    left   GPUs of each type that are to be had, all that is lent included; it is counted down
    """
    for wish in wishes:
        if wish.title is Ownership.OWN and wish.has is not None:
            for kind, gpus in enumerate(wish.has):
                left[kind] += gpus
        mix = _granted(wish, left, ground)
        if mix is not None:
            for kind, gpus in enumerate(mix):
                left[kind] -= gpus
        yield wish, mix
        if not any(left):
            return


def _granted(wish: ShareRequest, left: Sequence[int], ground: GpuSupply) -> Mix | None:
    if wish.single:
        return _singles(wish, left)
    return _gang(wish, left) if wish.tasks is None else _division(wish.tasks, wish.has, left, ground)


def _singles(wish: ShareRequest, left: Sequence[int]) -> Mix | None:
    mix, need = [0] * len(left), wish.single
    for kind in wish.types:
        mix[kind] = min(left[kind], need)
        need -= mix[kind]
    return tuple(mix) if need < wish.single else None


def _gang(wish: ShareRequest, left: Sequence[int]) -> Mix | None:
    """What it has, unless that is gone or a type that is better has room."""
    keeps = wish.has is not None and all(gpus <= most for gpus, most in zip(wish.has, left, strict=True))
    for kind in wish.types:
        if keeps and wish.has is not None and wish.has[kind]:
            break
        if left[kind] >= wish.gang:
            return tuple([wish.gang if each == kind else 0 for each in range(len(left))])
    return wish.has if keeps else None


def _division(tasks: Tasks, has: Mix | None, left: Sequence[int], ground: GpuSupply) -> Mix | None:
    if has is None or any(gpus > most for gpus, most in zip(has, left, strict=True)):
        return _shortest(tasks, left, ground)[0]
    if not tasks.suffers_from_distance and computes_as_fast(tasks, has, ground.gpus):
        return has  # nothing could be better
    best, seconds = _shortest(tasks, left, ground)
    return has if seconds >= _seconds(tasks, has, ground) * NO_FASTER else best


def computes_as_fast(tasks: Tasks, mix: Mix, other: Mix) -> bool:
    """A round is computed as fast on these GPUs as on others, but for rounding."""
    mine, its = tasks.split(mix), tasks.split(other)
    return mine is not None and its is not None and mine.seconds * NO_FASTER <= its.seconds


def _shortest(tasks: Tasks, left: Sequence[int], ground: GpuSupply) -> tuple[Mix | None, float]:
    """The mix of the shortest round: of all that is left or, where distance costs, of one type close together."""
    best = tasks.fewest(left)
    if best is None:
        return None, 0.0
    seconds = _seconds(tasks, best, ground)
    if tasks.suffers_from_distance:
        for kind, gpus in enumerate(left):
            few = tuple([min(gpus, ground.together[kind]) if each == kind else 0 for each in range(len(left))])
            near = tasks.fewest(few)
            if near is not None and (its := _seconds(tasks, near, ground)) < seconds:
                best, seconds = near, its
    return best, seconds


def _seconds(tasks: Tasks, mix: Mix, ground: GpuSupply) -> float:
    """Of a round, if those that can be close together are."""
    is_near = not tasks.suffers_from_distance or _is_near(mix, ground)
    return tasks.round_seconds(mix, 0 if is_near else ground.apart) or 0.0


def _is_near(mix: Mix, ground: GpuSupply) -> bool:
    used = [kind for kind, gpus in enumerate(mix) if gpus]
    return len(used) == 1 and mix[used[0]] <= ground.together[used[0]]
