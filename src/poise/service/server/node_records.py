"""Node records: what is known of each node of the cluster, and the facts about it that the core is told.

A node is UP, UNREACHABLE or LOST, as the back end reports it (`NodeReport`), and some of its GPUs may be withheld by it. An
operator may drain a node, whatever its state. A record is stored in the same commit as the facts that the core was told, so
that a restart knows everything again before the back end reports anew. Nodes that never were reported nor drained have no
record: they are up.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.event import NodeLost, NodeRestricted
from poise.scheduler.model.units import counted
from poise.service.backends.api import NodeReport, NodeState
from poise.service.wire.views import NodeCondition


@dataclass(slots=True)
class NodeRecord:
    """One node. Times are seconds since 1970. Field names are stored: they must not change.

    since      when it came into its state; None: the back end never reported it
    evidence   why it is in that state, in the words of the back end
    withheld   slots that others use, which are not given out
    drained    since when an operator keeps it free of runs; None: it is not drained. `by` whom, and for what `reason`
    emptied    since when nothing runs there, once it is drained
    """

    name: str
    state: NodeState = NodeState.UP
    since: float | None = None
    evidence: str = ""
    withheld: tuple[int, ...] = ()
    drained: float | None = None
    by: str | None = None
    reason: str | None = None
    emptied: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether nothing runs there, and nothing can."""
        return self.state is NodeState.LOST

    @property
    def condition(self) -> NodeCondition:
        """Its state in one word: what keeps runs away comes first."""
        if self.is_lost:
            return NodeCondition.LOST
        if self.drained is not None:
            return NodeCondition.DRAINING if self.emptied is None else NodeCondition.DRAINED
        return NodeCondition.UP if self.state is NodeState.UP else NodeCondition.UNREACHABLE

    def restriction(self, index: int, gpus: int) -> NodeRestricted:
        """Which of its GPUs new runs may get: none while it is drained, or cannot be told to start any."""
        if self.drained is not None or self.state is NodeState.UNREACHABLE:
            return NodeRestricted(index, tuple(range(gpus)), drained=self.drained is not None)
        return NodeRestricted(index, tuple(slot for slot in self.withheld if slot < gpus), drained=False)

    def drain(self, now: float, by: str, reason: str | None) -> None:
        """Note that an operator wants it free of runs."""
        self.drained, self.by, self.reason, self.emptied = now, by, reason, None

    def open(self) -> None:
        """Note that an operator gives it back."""
        self.drained = self.by = self.reason = self.emptied = None

    def report(self, news: NodeReport, now: float) -> None:
        """Note how the back end says it is. What a lost node withholds is not known, and stays as it was."""
        if news.state is not self.state or self.since is None:
            self.state, self.since = news.state, min(news.at, now)
        self.evidence = news.evidence
        if not self.is_lost:
            self.withheld = withheld_slots(news)

    def drain_text(self) -> str:
        """By whom it is drained, and why."""
        return f"drained by {self.by}" + (f": {self.reason}" if self.reason else "")

    def text(self) -> str:
        """The record as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @staticmethod
    def read(text: str) -> "NodeRecord":
        """The record that `text` wrote."""
        document = json.loads(text)
        document["state"] = NodeState(document["state"])
        document["withheld"] = tuple(document["withheld"])
        return NodeRecord(**document)


def withheld_slots(news: NodeReport) -> tuple[int, ...]:
    """The slots that a report withholds, ascending; numbers that the node does not have are dropped."""
    return tuple(sorted({slot for slot in news.withheld if 0 <= slot < news.node.gpus}))


def node_facts(records: Mapping[str, NodeRecord], cluster: Cluster) -> Iterator[NodeLost | NodeRestricted]:
    """What a new core has to be told of the nodes of its cluster."""
    for index, node in enumerate(cluster.nodes):
        record = records.get(node.name)
        if record is None:
            continue
        if record.is_lost:
            yield NodeLost(index)
        restriction = record.restriction(index, node.gpus)
        if restriction.closed:
            yield restriction


def joined(cluster: Cluster, nodes: Iterable[Node]) -> Cluster:
    """The cluster with these nodes: in the places of those of the same names, or at the end."""
    every = {node.name: node for node in cluster.nodes} | {node.name: node for node in nodes}
    return Cluster(tuple(every.values()), cluster.speeds, cluster.prices)


def out_of_use(records: Mapping[str, NodeRecord], cluster: Cluster, types: Iterable[str]) -> Iterator[str]:
    """One sentence per node of these types whose GPUs new runs cannot get, or not all of them: why, and since when."""
    usable = frozenset(types)
    for node in cluster.nodes:
        record = records.get(node.name)
        if record is None or node.gpu_type not in usable:
            continue
        what = f"node {node.name} ({counted(node.gpus, 'GPU')}, {node.gpu_type})"
        if record.is_lost:
            yield f"{what} is lost{_since(record.since)}: {record.evidence}"
        if record.drained is not None:
            yield f"{what} is {record.drain_text()}{_since(record.drained)}"
        elif record.state is NodeState.UNREACHABLE:
            yield f"{what} cannot be reached{_since(record.since)}: {record.evidence}"
        elif record.withheld and not record.is_lost:
            used = counted(len(record.withheld), "GPU")
            yield f"node {node.name} ({node.gpu_type}) withholds {used}, which others use: {record.evidence}"


def _since(moment: float | None) -> str:
    if moment is None:
        return ""
    return f" since {datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
