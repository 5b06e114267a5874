"""What Ray says of its nodes, as nodes of Poise. Pure: the answer of `ray.nodes()` goes in."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from poise.service.backends.local.gpus import gpu_type

NAME_LABELS = ("node-name", "ray.io/node-name")
TYPE_LABELS = ("ray.io/accelerator-type", "accelerator")
RACK_LABELS = ("ray.io/rack", "rack", "ray.io/availability-zone", "topology.kubernetes.io/zone", "zone")
UNKNOWN_TYPE = "unknown"
ONE_RACK = "rack-0"
_TYPE_RESOURCE = "accelerator_type:"  # Ray adds a resource of this prefix for a type that it has found by itself
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


class RayNode(NamedTuple):
    """A node with GPUs.

    key      Ray's id, which is another one after each start of the node
    death    why Ray says that it is dead; None: it is not
    """

    key: str
    name: str
    gpu_type: str
    gpus: int
    rack: str
    address: str
    death: str | None


def gpu_nodes(found: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """Select the nodes that have GPUs, one for each name, by name: of two, the one that lives, or that Ray names last.

    A node that lives and whose name is taken by another one that lives is left out; `namesakes` tells of those.
    """
    chosen: dict[str, RayNode] = {}
    for each in found:
        node = _read(each)
        if node is not None and (node.name not in chosen or chosen[node.name].death is not None):
            chosen[node.name] = node
    return [chosen[name] for name in sorted(chosen)]


def namesakes(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the living nodes of which there are several."""
    names = [node.name for node in map(_read, found) if node is not None and node.death is None]
    return sorted({name for name in names if names.count(name) > 1})


def _read(node: Mapping[str, Any]) -> RayNode | None:
    labels, resources = node.get("Labels") or {}, node.get("Resources") or {}
    is_alive, address = bool(node.get("Alive")), str(node.get("NodeManagerAddress"))
    gpus = int(resources.get("GPU", 0))
    # The resources of a dead node are gone from Ray's answer, so whether it had GPUs is told by those who saw it alive.
    if is_alive and gpus < 1:
        return None
    resource = (name.removeprefix(_TYPE_RESOURCE) for name in resources if name.startswith(_TYPE_RESOURCE))
    kind = _label(labels, TYPE_LABELS) or next(resource, UNKNOWN_TYPE)
    name = _label(labels, NAME_LABELS) or address
    death = None if is_alive else (node.get("DeathReasonMessage") or "no reason given")
    rack = _label(labels, RACK_LABELS) or ONE_RACK
    return RayNode(str(node["NodeID"]), _fit(name), _fit(gpu_type(kind)), gpus, _fit(rack), address, death)


def _label(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def _fit(text: str) -> str:
    """Make a name of Poise of a label's value, which may have other characters."""
    return _UNFIT.sub("-", text).strip("-.")[:64] or "node"
