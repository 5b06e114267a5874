"""What Kubernetes says of its nodes, as nodes of Poise. Pure: what was read of nodes and pods goes in.

A node's GPUs are numbered from 0 by Poise alone: the kubelet counts, and the device plug-in chooses. So which slots are
withheld because pods of others use GPUs is a matter of number; they are taken from the end, where none of our runs is.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from poise.scheduler.model.cluster import Node
from poise.service.backends.api import NodeState
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.objects import NodeInfo, PodInfo
from poise.service.backends.kubernetes.places import BARRIERS, PASSING_TAINTS
from poise.service.backends.local.gpus import gpu_type
from poise.service.wire.request import NAME

ONE_RACK = "rack-0"
NO_TYPE = "MIG-INVALID"  # in the product that GPU feature discovery names where a node's GPUs are divided differently
PART = re.compile(r"-(MIG-[A-Za-z0-9.-]+|SHARED)$")  # at its end where what counts as a GPU is a part of one
PASSING_STATES = {f"node.kubernetes.io/{each}" for each in ("not-ready", "unreachable", "unschedulable")}
"""Keys of taints that repeat what is known of a node otherwise."""
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_FIT = re.compile(NAME)


class ObservedNode(NamedTuple):
    """How a node is: what `NodeReport` says, without the time."""

    node: Node
    state: NodeState
    evidence: str
    withheld: tuple[int, ...]


class Discovery(NamedTuple):
    """How nodes are read.

    type_labels   labels that name the type of GPU, the first that is there: the product as its vendor calls it, or, in a
                  label of Poise's own, the type itself;  rack_labels: the same for the rack
    resource      what a GPU is called
    tolerated     keys of taints that keep none of our jobs away
    """

    type_labels: Sequence[str] = (names.OWN_TYPE_LABEL, names.PRODUCT_LABEL)
    rack_labels: Sequence[str] = names.RACK_LABELS
    resource: str = names.GPU_RESOURCE
    tolerated: Collection[str] = ()

    def node_of(self, found: NodeInfo) -> Node | None:
        """Return the node as Poise knows it; None: it has no GPUs, none of one type, or a name that Poise cannot use."""
        if found.gpus < 1 or not _FIT.fullmatch(found.name):
            return None
        kind = self._type_of(found)
        rack = next((found.labels[each] for each in self.rack_labels if found.labels.get(each)), ONE_RACK)
        return None if kind is None else Node(found.name, kind, found.gpus, _UNFIT.sub("-", rack)[:64])

    def type_label(self, found: NodeInfo) -> str | None:
        """Return the label that says what its GPUs are; None: it has none."""
        return next((each for each in self.type_labels if found.labels.get(each)), None)

    def _type_of(self, found: NodeInfo) -> str | None:
        """Return the type of its GPUs, also if it is not known; None: they are of several."""
        label = self.type_label(found)
        if label is None:
            return "unknown"
        said = found.labels[label]
        if label == names.OWN_TYPE_LABEL:
            return said.lower() if said[0].isalpha() else f"gpu{said.lower()}"  # types begin with a letter
        if NO_TYPE in said:
            return None
        part = PART.search(said)  # slices are slower than the whole, so they are a type of their own
        return gpu_type(said) if part is None else f"{gpu_type(said[: part.start()])}-{part[1].lower()}"

    def barrier_of(self, found: NodeInfo) -> str | None:
        """Return the taint that keeps jobs away from a node; None: there is none.

        Pods that are created on a node or bound to it bypass its taints, so Poise has to heed them itself.
        """
        for key, value, effect in found.taints:
            is_for_all = key != self.resource and key not in self.tolerated and not key.startswith(PASSING_TAINTS)
            if effect in BARRIERS and is_for_all:
                return f"{key}={value}:{effect}" if value else f"{key}:{effect}"
        return None

    def why_closed(self, found: NodeInfo) -> str | None:
        """Say why a node that is Ready takes no new jobs; None: it does."""
        if found.is_cordoned:
            return "it is cordoned (kubectl uncordon gives it back)"
        for key, _, effect in found.taints:
            if effect in BARRIERS and key.startswith(PASSING_TAINTS) and key not in PASSING_STATES:
                return f"its taint {key}:{effect} keeps new jobs away until it passes"
        barrier = self.barrier_of(found)
        if barrier is not None:
            key = barrier.partition(":")[0].partition("=")[0]
            return f"its taint {barrier} keeps jobs away (poise serve --tolerate {key} lets them in)"
        if self.node_of(found) is None:  # it had some, or Poise would not know it
            return f"it offers no {self.resource} of one type any more"
        return None

    def problem_of(self, found: NodeInfo) -> str | None:
        """Say what is odd about a node that has GPUs, in one sentence for the operator; None: nothing."""
        if found.gpus < 1:
            return None
        if not _FIT.fullmatch(found.name):
            return f"node {found.name[:80]}: its name is longer than Poise can use (64 characters); it gets no jobs"
        given = self.type_label(found)
        if given is None:
            label = self.type_labels[-1]
            return (
                f"node {found.name}: it has {found.gpus} GPUs and no label {label}, so their type is unknown;"
                f" run GPU feature discovery, or: kubectl label node {found.name} {names.OWN_TYPE_LABEL}=v100"
            )
        if self._type_of(found) is None:
            said = found.labels[given]
            return f"node {found.name}: {said}: its GPUs are divided in a way that has no one type; it gets no jobs"
        return None


def observed(
    node: Node,
    found: NodeInfo | None,
    others: Iterable[PodInfo],
    ours: Collection[int],
    lost: str | None,
    closed: str | None,
) -> ObservedNode:
    """Say how a node is.

    found       what Kubernetes says of it; None: it was deleted
    others      pods that hold GPUs there and are none of our runs
    ours        slots of our runs
    lost        why nothing of ours can run there any more; None: it can
    closed      why it takes no new jobs, if it is Ready; None: it does
    """
    if found is None:
        text = "it was deleted from the Kubernetes cluster"
        return ObservedNode(node, NodeState.UNREACHABLE if lost is None else NodeState.LOST, lost or text, ())
    if not found.is_ready:
        text = f"it is not Ready: {found.message or 'its kubelet does not report'}"
        return ObservedNode(node, NodeState.UNREACHABLE if lost is None else NodeState.LOST, lost or text, ())
    if closed is not None:
        return ObservedNode(node, NodeState.UP, closed, tuple(range(node.gpus)))
    pods = sorted(others, key=lambda pod: pod.key)
    taken = sum(pod.gpus for pod in pods)
    free = [slot for slot in range(node.gpus - 1, -1, -1) if slot not in ours]
    evidence = "it is Ready"
    if pods:
        first = f"{pods[0].namespace}/{pods[0].name}" + (f" and {len(pods) - 1} more" if len(pods) > 1 else "")
        evidence = f"others use {taken} of its GPUs: {first}"
    return ObservedNode(node, NodeState.UP, evidence, tuple(sorted(free[:taken])))
