"""Gangs spread evenly over few nodes, as Optimus places them (EuroSys'18 §4.2): with equal parts nobody lags behind."""

from enum import StrEnum

from poise.model.cluster import Part, Site
from poise.policies.sketch import Sketch


class Nodes(StrEnum):
    """Which nodes a gang goes to: evenly to the emptiest, as published, or to the tightest that hold it."""

    EMPTIEST = "emptiest"
    TIGHTEST = "tightest"


def site_for(sketch: Sketch, gpu_type: int, gpus: int, nodes: Nodes) -> Site | None:
    """Where so many GPUs of a type are to be had; None if there are not as many."""
    if nodes is Nodes.TIGHTEST or sketch.idle[gpu_type] < gpus:
        return sketch.tightest(gpu_type, gpus)
    return sketch.roomiest(gpu_type, gpus) or _evenly(sketch, gpu_type, gpus) or sketch.tightest(gpu_type, gpus)


def _evenly(sketch: Sketch, gpu_type: int, gpus: int) -> Site | None:
    """The least k such that the k emptiest nodes hold the gang in parts that differ by one GPU at most; None if none is."""
    free = sketch.free
    able = [node for node, kind in enumerate(sketch.topology.type_of) if kind == gpu_type and free[node]]
    able.sort(key=lambda node: (-free[node], node))
    for count in range(2, min(gpus, len(able)) + 1):
        part, larger = divmod(gpus, count)
        if free[able[count - 1]] >= part and (not larger or free[able[larger - 1]] > part):
            return tuple(sorted(Part(node, part + (place < larger)) for place, node in enumerate(able[:count])))
    return None
