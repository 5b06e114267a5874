"""What is known of the cluster at this moment: a copy of its nodes and of the pods that matter, kept by watches.

Pods matter that hold GPUs, that are to be placed by Poise, or that it has created; of the others, which may be many, nothing
is kept.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.objects import Json, NodeInfo, ObjectKey, PodInfo, read_node, read_pod


class ClusterView:
    """Nodes and pods as they were last told.

    on_node        called with the name of a node about which something has changed: itself, or the GPUs that its pods hold
    on_pod         called with a pod before and after a change; None: there was none before, there is none any more
    node_changes   how often a node has changed, not counting what its pods hold
    """

    def __init__(
        self,
        scheduler: str,
        resource: str,
        on_node: Callable[[str], None],
        on_pod: Callable[[PodInfo | None, PodInfo | None], None],
    ) -> None:
        self._scheduler, self._resource, self._on_node, self._on_pod = scheduler, resource, on_node, on_pod
        self.nodes: dict[str, NodeInfo] = {}
        self.node_changes = 0
        self.pods: dict[ObjectKey, PodInfo] = {}
        self._at: defaultdict[str, set[ObjectKey]] = defaultdict(set)

    def node_event(self, kind: str, found: Json) -> None:
        """Take an event of the watch on nodes."""
        name = found["metadata"]["name"]
        before = self.nodes.get(name)
        if kind == "DELETED":
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = read_node(found, self._resource)
        if self.nodes.get(name) != before:  # heartbeats change nothing that is read of it
            self.node_changes += 1
            self._on_node(name)

    def pod_event(self, kind: str, found: Json) -> None:
        """Take an event of the watch on pods."""
        meta, spec = found["metadata"], found.get("spec", {})
        key = meta.get("namespace", "default"), meta["name"]
        before = self.pods.get(key)
        after = None
        if kind != "DELETED":
            is_ours = spec.get("schedulerName") == self._scheduler or names.SERVICE in (meta.get("labels") or {})
            after = read_pod(found, self._resource)
            after = after if is_ours or after.gpus else None
        if before is None and after is None:
            return
        if before is not None and before.node:
            self._at[before.node].discard(key)
        if after is None:
            del self.pods[key]
        else:
            self.pods[key] = after
            if after.node:
                self._at[after.node].add(key)
        self._on_pod(before, after)
        # A pod of another identity may have taken the name, so both nodes are told.
        for pod in (before, after):
            if pod is not None and pod.node:
                self._on_node(pod.node)

    def is_served(self, node: str) -> bool:
        """Whether a node's kubelet can end pods. What was on one that cannot has lost its lease; else the run goes on."""
        found = self.nodes.get(node)
        return found is not None and found.is_ready

    def at(self, node: str) -> Iterator[PodInfo]:
        """Return the pods that hold GPUs of a node."""
        return (self.pods[key] for key in self._at.get(node, ()) if self.pods[key].holds_gpus)
