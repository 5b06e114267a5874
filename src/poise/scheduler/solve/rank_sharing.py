"""GPUs shared out by rank: in order of rank, each request takes the best of what is left.

A gang takes GPUs of the best type that has enough, or nothing. A job whose rounds divide takes the fewest GPUs, of any type,
on which its round is shortest. A job keeps what it has if it would be as fast on it.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from poise.scheduler.model.micro_batches import Mix, Tasks
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology

NO_FASTER = 1.0 - 1e-9
"""A round must be shorter than this part of the present one to be worth other GPUs."""


class Ownership(Enum):
    """Whether the GPUs that a request has are its own, or may go to requests before it."""

    OWN = auto()
    LENT = auto()


class ShareRequest(NamedTuple):
    """What a job asks for.

    who           any number that identifies it to the caller
    gang, types   this many GPUs of one of these types, best first
    tasks         if given, any mix of GPUs will do instead
    single        if above 0: this many GPUs of any of the types, best first, besides what it has; each for one task
    has, title    what it has now, and whether that is its own; None if it has nothing
    """

    who: int
    gang: int
    types: tuple[int, ...]
    tasks: Tasks | None = None
    single: int = 0
    has: Mix | None = None
    title: Ownership = Ownership.LENT


class GpuSupply(NamedTuple):
    """The GPUs of a cluster.

    gpus       by type, all there are
    together   by type, how many can be close together
    apart      Locality of gangs that cannot
    """

    gpus: Mix
    together: tuple[int, ...]
    apart: int

    @staticmethod
    def of(topology: Topology) -> "GpuSupply":
        """What fits on one node is close together; anything else is as far apart as the cluster is wide."""
        together = tuple(topology.largest_node(kind) for kind in range(len(topology.types)))
        return GpuSupply(tuple(topology.totals), together, Locality.RACK if len(topology.racks) == 1 else Locality.CLUSTER)


def share_out(
    requests: Iterable[ShareRequest], left: list[int], supply: GpuSupply
) -> Iterator[tuple[ShareRequest, Mix | None]]:
    """Each request with the mix it gets, in order, until nothing is left; None if nothing that it could use is left.

    left   GPUs of each type to share out, those that are lent included; it is counted down
    """
    for request in requests:
        if request.title is Ownership.OWN and request.has is not None:
            for kind, gpus in enumerate(request.has):
                left[kind] += gpus
        if request.single:
            need, taken = request.single, [0] * len(left)
            for kind in request.types:
                taken[kind] = min(left[kind], need)
                need -= taken[kind]
            mix = tuple(taken) if need < request.single else None
        else:
            mix = _gang(request, left) if request.tasks is None else _division(request.tasks, request.has, left, supply)
        if mix is not None:
            for kind, gpus in enumerate(mix):
                left[kind] -= gpus
        yield request, mix
        if not any(left):
            return


def _gang(request: ShareRequest, left: Sequence[int]) -> Mix | None:
    """What it has, unless that is gone or a better type has room."""
    keeps = request.has is not None and all(gpus <= most for gpus, most in zip(request.has, left, strict=True))
    for kind in request.types:
        if keeps and request.has is not None and request.has[kind]:
            break
        if left[kind] >= request.gang:
            return tuple([request.gang if each == kind else 0 for each in range(len(left))])
    return request.has if keeps else None


def _division(tasks: Tasks, has: Mix | None, left: Sequence[int], supply: GpuSupply) -> Mix | None:
    if has is None or any(gpus > most for gpus, most in zip(has, left, strict=True)):
        return _shortest(tasks, left, supply)[0]
    if not tasks.suffers_from_distance and computes_as_fast(tasks, has, supply.gpus):
        return has  # nothing could be better
    best, seconds = _shortest(tasks, left, supply)
    return has if seconds >= _seconds(tasks, has, supply) * NO_FASTER else best


def computes_as_fast(tasks: Tasks, mix: Mix, other: Mix) -> bool:
    """Whether a round is computed as fast on `mix` as on `other`, up to rounding."""
    mine, its = tasks.split(mix), tasks.split(other)
    return mine is not None and its is not None and mine.seconds * NO_FASTER <= its.seconds


def _shortest(tasks: Tasks, left: Sequence[int], supply: GpuSupply) -> tuple[Mix | None, float]:
    """The mix of the shortest round: of all that is left or, where distance costs time, of one type close together."""
    best = tasks.fewest(left)
    if best is None:
        return None, 0.0
    seconds = _seconds(tasks, best, supply)
    if tasks.suffers_from_distance:
        for kind, gpus in enumerate(left):
            few = tuple([min(gpus, supply.together[kind]) if each == kind else 0 for each in range(len(left))])
            near = tasks.fewest(few)
            if near is not None and (its := _seconds(tasks, near, supply)) < seconds:
                best, seconds = near, its
    return best, seconds


def _seconds(tasks: Tasks, mix: Mix, supply: GpuSupply) -> float:
    """Seconds of a round, if GPUs that can be close together are."""
    used = [kind for kind, gpus in enumerate(mix) if gpus]
    is_near = not tasks.suffers_from_distance or (len(used) == 1 and mix[used[0]] <= supply.together[used[0]])
    return tasks.step_seconds(mix, Locality.PACKED if is_near else supply.apart) or 0.0
