"""Where the pods of a gang can be, and where they go: GPU types for a gang, nodes for its pods."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.gangs import Gang, GangProblem
from poise.service.backends.kubernetes.objects import Json, NodeInfo, ObjectKey, PodInfo

MOST_SHAPES = 1024  # of pods that are remembered
PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")  # which Kubernetes itself sets and removes
BARRIERS = ("NoSchedule", "NoExecute")  # effects of taints that keep pods away
_DIGITS = re.compile(r"(\d+)")


def placement_of(gang: Gang, parts: Sequence[tuple[str, int]]) -> dict[ObjectKey, str] | None:
    """Assign the unbound pods of a gang to the nodes that were chosen for it, given the number of GPUs of each.

    With those that are bound, every node gets exactly the pods that its GPUs are for; pods that have finished leave places
    empty, from the end. Neighbours by rank are on one node. Helpers go to the first node. None: it does not come out even.
    """
    if gang.gpus < 1 or not parts or any(count < 1 or count % gang.gpus for _, count in parts):
        return None
    free: dict[str, int] = {}
    for node, count in parts:
        free[node] = free.get(node, 0) + count // gang.gpus
    unbound: list[PodInfo] = []
    for pod in sorted(gang.pods, key=_rank):
        if not pod.node:
            unbound.append(pod)
        elif pod.gpus:
            if free.get(pod.node, 0) < 1:
                return None
            free[pod.node] -= 1
    workers = [pod for pod in unbound if pod.gpus]
    left = sum(free.values()) - len(workers)
    if not 0 <= left <= gang.finished or any(pod.is_gated or pod.gpus not in (0, gang.gpus) for pod in unbound):
        return None
    places = (node for node, count in free.items() for _ in range(count))
    placed = {pod.key: next(places) for pod in workers}
    return placed | {pod.key: parts[0][0] for pod in unbound if not pod.gpus}


def _rank(pod: PodInfo) -> tuple[str, int, int, list[tuple[int, str]]]:
    """Order pods as their ranks usually are: by replicated job, job, index and name, numbers in it as such."""
    parts = [(int(each), "") if each.isdigit() else (-1, each) for each in _DIGITS.split(pod.name)]
    return (
        pod.labels.get("jobset.sigs.k8s.io/replicatedjob-name", ""),
        _index(pod.labels.get("jobset.sigs.k8s.io/job-index")),
        _index(
            pod.labels.get("batch.kubernetes.io/job-completion-index")
            or pod.annotations.get("batch.kubernetes.io/job-completion-index")
        ),
        parts,
    )


def _index(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else -1


class _Shape(NamedTuple):
    """What decides on which nodes a pod can be."""

    selector: tuple[tuple[str, str], ...]
    affinity: str
    tolerations: tuple[tuple[str, str, str, str], ...]
    gpus: int
    cpu: float
    memory: float


class NodeTypes:
    """The nodes with GPUs as they are now, and on which types of them gangs can be.

    Many gangs ask for the same, and nodes are many: what was found out once is remembered. `resource` is what GPUs are
    called, and so what a taint is called that keeps other pods away from them.
    """

    def __init__(self, nodes: Iterable[tuple[NodeInfo, str]], resource: str) -> None:
        self._resource = resource
        self._nodes = sorted(nodes, key=lambda each: each[0].name)
        self._types = sorted({kind for _, kind in self._nodes})
        self._known: dict[frozenset[_Shape], tuple[tuple[str, ...], GangProblem | None]] = {}

    def of(self, gang: Gang) -> tuple[tuple[str, ...], GangProblem | None]:
        """Return the GPU types on whose nodes all pods of a gang can be, and what is wrong with what it asks for.

        () means any type. Poise chooses among all nodes of a type, so a gang that can be
        on some of them and not on others is refused. Whether nodes are ready, or used by others, does not matter here.
        """
        shapes = frozenset(
            _Shape(tuple(sorted(pod.selector.items())), pod.affinity, pod.tolerations, pod.gpus, pod.cpu, pod.memory)
            for pod in gang.pods
        )
        found = self._known.get(shapes)
        if found is None:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            found = self._known[shapes] = self._find(shapes)
        types, problem = found
        return types, None if problem is None else problem._replace(text=f"{gang.what}: {problem.text}")

    def _find(self, shapes: Collection[_Shape]) -> tuple[tuple[str, ...], GangProblem | None]:
        if not shapes:
            return (), None
        if not self._nodes:
            return (), GangProblem("rejected", "the cluster has no node with GPUs that Poise may use")
        admitted = {node.name for node, _ in self._nodes if all(_admits(node, shape, self._resource) for shape in shapes)}
        if not admitted:
            text = (
                f"no node with GPUs matches what its pods demand ({_demands(shapes)}); correct it, or label or untaint nodes"
            )
            return (), GangProblem("rejected", text)
        for kind in self._types:
            inside = [node.name for node, each in self._nodes if each == kind and node.name in admitted]
            outside = [node.name for node, each in self._nodes if each == kind and node.name not in admitted]
            if inside and outside:
                text = (
                    f"its pods can be on {inside[0]}, but not on {outside[0]} ({_demands(shapes)}), both of type {kind}, and"
                    f" Poise chooses among all nodes of a type; label nodes that differ with {names.OWN_TYPE_LABEL}"
                )
                return (), GangProblem("cannot-run", text)
        those = [(node, kind) for node, kind in self._nodes if node.name in admitted]
        fitting = sorted({kind for node, kind in those if all(_has_room(node, shape) for shape in shapes)})
        if not fitting:
            return (), GangProblem("rejected", _too_large([node for node, _ in those], shapes))
        return (() if fitting == self._types else tuple(fitting)), None


def _admits(node: NodeInfo, shape: _Shape, resource: str) -> bool:
    if any(node.labels.get(label) != wanted for label, wanted in shape.selector):
        return False
    if any(not _tolerates(shape, taint, resource) for taint in node.taints):
        return False
    return not shape.affinity or any(_term_fits(node, term) for term in _terms(shape.affinity))


def _tolerates(shape: _Shape, taint: tuple[str, str, str], resource: str) -> bool:
    key, value, effect = taint
    if effect not in BARRIERS or key.startswith(PASSING_TAINTS):
        return True
    # The ExtendedResourceToleration plug-in tolerates it for pods that ask for GPUs. A helper without any is bound, which
    # asks for no toleration, and belongs to pods that have it; a kubelet would evict it, though.
    if key == resource and (shape.gpus or effect == "NoSchedule"):
        return True
    return any(
        wanted_effect in ("", effect)
        and (wanted == key or (not wanted and operator == "Exists"))
        and (operator == "Exists" or (operator == "Equal" and wanted_value == value))
        for wanted, operator, wanted_value, wanted_effect in shape.tolerations
    )


@lru_cache(maxsize=1024)
def _terms(affinity: str) -> tuple[Json, ...]:
    return tuple(json.loads(affinity).get("nodeSelectorTerms") or ())


def _term_fits(node: NodeInfo, term: Json) -> bool:
    """Whether a node matches all that a term asks for; an empty one matches none."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(label_fits(node.labels.get(each["key"]), each) for each in expressions) and all(
        each["key"] == "metadata.name" and label_fits(node.name, each) for each in fields
    )


def label_fits(found: str | None, expression: Json) -> bool:
    """Whether a label, or None, fits an expression of a node selector or a label selector."""
    operator = expression.get("operator")
    values: Sequence[str] = expression.get("values") or ()
    match operator:
        case "In":
            return found in values
        case "NotIn":
            return found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt" | "Lt":
            try:
                number, limit = int(found or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return number > limit if operator == "Gt" else number < limit
        case _:
            return False


def _has_room(node: NodeInfo, shape: _Shape) -> bool:
    return shape.gpus <= node.gpus and shape.cpu <= node.cpu and shape.memory <= node.memory


def _demands(shapes: Iterable[_Shape]) -> str:
    """Say what pods demand of nodes, in few words."""
    found = {f"{label}={wanted}" for shape in shapes for label, wanted in shape.selector}
    if any(shape.affinity for shape in shapes):
        found.add("node affinity")
    return ", ".join(sorted(found))[:200] or "no toleration of their taints"


def _too_large(nodes: Sequence[NodeInfo], shapes: Collection[_Shape]) -> str:
    asked = {"GPUs": max(shape.gpus for shape in shapes), "cores": max(shape.cpu for shape in shapes)}
    asked["GiB of memory"] = max(shape.memory for shape in shapes) / 2**30
    for what, amount in asked.items():
        has = {node.name: {"GPUs": node.gpus, "cores": node.cpu}.get(what, node.memory / 2**30) for node in nodes}
        largest = max(has, key=lambda name: has[name])
        if amount > has[largest]:
            most = f"the largest node ({largest}) has {has[largest]:.6g}"
            return f"a pod asks for {amount:.6g} {what}, {most}; ask for less per pod"
    return "no node has the GPUs, cores and memory together that a pod asks for; ask for less per pod"
