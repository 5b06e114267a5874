"""The shapes of claims: made once, and shared by all jobs that wait for the same."""

from collections.abc import Callable

from poise.core.beliefs import Belief
from poise.core.waiting import Shape
from poise.model.speed import Locality
from poise.model.tasks import Tasks
from poise.placement.free import FreeGpus
from poise.placement.strategies import Placement, count

Key = tuple[int, tuple[int, ...], Locality, Tasks | None]
"""GPUs, types by preference, locality, and what rounds divide into."""


class Shapes:
    """All shapes there have been. `empty` makes the cluster without any job."""

    def __init__(self, placement: Placement, empty: Callable[[], FreeGpus]) -> None:
        self._placement = placement
        self._empty = empty
        self._known: dict[Key, Shape] = {}
        self._made = 0

    def of(self, belief: Belief, gpus: int, types: tuple[int, ...] | None, locality: Locality) -> Shape:
        """The shape of a claim at some locality, or else at the nearest wider one that could ever be granted.

        A job whose rounds divide insists on no locality: it takes the GPUs that there are.
        """
        shape = belief.shapes.get((gpus, types, locality))
        if shape is None:
            rates = belief.rates_with(gpus)
            able = belief.types if types is None else (each for each in types if each in belief.types)
            asked = tuple(each for each in able if rates[each][Locality.PACKED] > 0)
            nearest = locality if belief.tasks is None else Locality.CLUSTER
            shape = belief.shapes[gpus, types, locality] = self._shape((gpus, asked, nearest, belief.tasks))
        return shape

    def held_back(self, shape: Shape) -> Shape:
        """The shape of such jobs that are held back for their tenant's share."""
        if shape.held is None:
            shape.held = self._made_anew(shape.gang, shape.types, shape.locality, shape.tasks)
            shape.held.held = shape.held
        return shape.held

    def _shape(self, key: Key) -> Shape:
        shape = self._known.get(key)
        if shape is None:
            gang, types, locality, tasks = key
            wider = not self._could_be_granted(gang, types, locality)
            shape = self._shape((gang, types, Locality(locality + 1), tasks)) if wider else self._made_anew(*key)
            self._known[key] = shape
        return shape

    def _made_anew(self, gang: int, types: tuple[int, ...], locality: Locality, tasks: Tasks | None) -> Shape:
        self._made += 1
        return Shape(self._made - 1, gang, types, locality, tasks)

    def _could_be_granted(self, gang: int, types: tuple[int, ...], locality: Locality) -> bool:
        """The empty cluster has room for such a claim; where GPUs are only counted, none are close together."""
        if locality is Locality.CLUSTER:
            return True
        empty = self._empty()
        fits = (self._placement(empty, gpu_type, gang, locality) is not None for gpu_type in types)
        return self._placement is not count and any(fits)
