"""A journal as records, as far as it can be read."""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from poise.analysis.history import History
from poise.analysis.overtaking import Change, Supply
from poise.analysis.recording import records_of
from poise.analysis.records import Records
from poise.core.trials import Pool
from poise.engine.collector import without_collector
from poise.engine.journal_file import NAME, JournalReader
from poise.model.action import Compute, Launch
from poise.model.cluster import LONGEST_SHOWN, MOST_GPUS, Cluster, Holding, Slots
from poise.model.errors import JournalError
from poise.model.event import Computed, Estimated, Finished, NodeLost, NodeReturned, Revealed, Submitted
from poise.model.journal import Entry
from poise.model.topology import Topology
from poise.studies.subject import Source, Subject
from poise.traces.registry import recognise
from poise.traces.sources import HEAD_BYTES

_HEADER = re.compile(rb'\s*\{\s*"journal"\s*:')
_GZIP = 16 + zlib.MAX_WBITS
"""What zlib calls a file with gzip's header."""


def subject_of(path: str | Path) -> Subject:
    """What can be read of a journal: all of it, or what comes before the first thing that is wrong.

    Raises JournalError if its header is damaged, RequestError if it is no journal.
    """
    reader = JournalReader(path)
    header = reader.header
    reading = Reading(header.cluster, header.settings.validation_gpus, name=str(path))
    with without_collector():
        problem = reader.feed(reading.take)
        records = reading.records()
    about = (
        ("trace", header.trace),
        ("policy", header.policy),
        ("cluster", str(header.cluster)),
        ("placement", header.placement),
    )
    return Subject(Source.JOURNAL, str(path), records, about, problem=None if problem is None else str(problem))


class Reading:
    """The history so far, and what it does not keep: which nodes were there when."""

    def __init__(self, cluster: Cluster, validation_gpus: int = 0, name: str = "journal") -> None:
        self.history = History(cluster)
        self._name = name
        self._topology = Topology(cluster)
        self._pool = _pool(self._topology, validation_gpus)
        self._alive = [True] * len(cluster.nodes)
        self._changes: list[Change] = []
        self._kinds: set[str] = set()

    def take(self, entry: Entry) -> None:
        """Take in one more instant; raises KeyError or IndexError for names that are not there, JournalError for values."""
        self.history.end = entry.now  # so that what is read of a bad instant lies before the end
        try:
            self._check(entry)
            self.history.take(entry)
        except ValueError as error:
            words = " ".join(str(error).split())[:LONGEST_SHOWN]
            raise JournalError(f"{self._name}: at {entry.now:g} s: a fact that cannot be: {words}") from None

    def records(self) -> Records:
        """The journal ends here; what it tells."""
        self.history.close()
        with np.errstate(over="ignore", invalid="ignore"):  # moments may be anything that a float can be
            return records_of(self.history, Supply(tuple(self._changes), self._pool))

    def _check(self, entry: Entry) -> None:
        """Raise for what a history would take in and choke on later."""
        for fact in (*entry.events, *entry.actions):
            check = _CHECKS.get(type(fact))
            if check is not None:
                check(self, fact, entry.now)

    def _estimated(self, fact: Estimated, _now: float) -> None:
        if len(fact.estimate.rates) != len(self._topology.types):
            raise ValueError(f"{len(fact.estimate.rates)} rates of {fact.kind!r} on {len(self._topology.types)} GPU types")
        self._kinds.add(fact.kind)

    def _submitted(self, fact: Submitted, _now: float) -> None:
        if fact.kind not in self._kinds:
            raise KeyError(fact.kind)
        if not 1 <= fact.job.gpus <= MOST_GPUS:
            raise ValueError(f"a job {fact.job.id!r} of {fact.job.gpus!r} GPUs")
        if fact.job.id in self.history.jobs:
            raise ValueError(f"job {fact.job.id!r} is submitted a second time")

    def _revealed(self, fact: Revealed, _now: float) -> None:
        if len(fact.rates) != len(self._topology.types):
            raise ValueError(f"{len(fact.rates)} rates of job {fact.job!r} on {len(self._topology.types)} GPU types")

    def _started(self, fact: Launch | Compute, _now: float) -> None:
        self._check_gpus(fact.gpus)
        life = self.history.jobs.get(fact.job)
        last = life.epoch if life else 0
        goes_on = isinstance(fact, Compute) and fact.epoch == last  # further tasks of the round under way
        if fact.epoch != last + 1 and not goes_on:
            raise ValueError(f"run {fact.epoch} of job {fact.job!r} after run {last}")

    def _computed(self, fact: Computed, _now: float) -> None:
        self._check_gpus(fact.gpus)

    def _finished(self, fact: Finished, _now: float) -> None:
        if self.history.jobs[fact.job].status.is_final:
            raise ValueError(f"job {fact.job!r} ends a second time")

    def _check_gpus(self, gpus: Holding) -> None:
        if not gpus:
            raise ValueError("a run without GPUs")
        for node, mask in gpus:
            if not (0 <= node < len(self._alive)) or not 0 < mask <= self._topology.full[node]:
                raise IndexError(f"node {node}, slots {mask}")

    def _node_changed(self, fact: NodeLost | NodeReturned, now: float) -> None:
        if not 0 <= fact.node < len(self._alive):
            raise IndexError(f"node {fact.node}")
        is_back = isinstance(fact, NodeReturned)
        if self._alive[fact.node] is not is_back:
            self._alive[fact.node] = is_back
            reserved = sum(slots.node == fact.node for slots in self._pool)
            gpus = self.history.cluster.nodes[fact.node].gpus - reserved
            self._changes.append(Change(now, self._topology.type_of[fact.node], gpus if is_back else -gpus))


_CHECKS: dict[type, Callable[[Reading, Any, float], None]] = {
    Estimated: Reading._estimated,
    Submitted: Reading._submitted,
    Revealed: Reading._revealed,
    Finished: Reading._finished,
    Launch: Reading._started,
    Compute: Reading._started,
    Computed: Reading._computed,
    NodeLost: Reading._node_changed,
    NodeReturned: Reading._node_changed,
}


def _pool(topology: Topology, gpus: int) -> frozenset[Slots]:
    """GPUs on which jobs are tried; none if the header asks for what cannot be."""
    return frozenset(Pool(topology, gpus, 0.0).slots) if 0 < gpus < sum(topology.totals) else frozenset()


def journal_at(source: str) -> Path | None:
    """The journal that a user names by its file or by the folder that `--out` wrote; None if it is something else.

    It is known by its first bytes; one that has lost them, by its name, unless it is a trace.
    """
    path = Path(source)
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        return None
    head = _head(file)
    if _HEADER.match(head) or (file.name == NAME and recognise(head) is None):
        return file
    return None


def _head(file: Path) -> bytes:
    """The first bytes, unpacked, as far as they can be had: a file may be cut off before there are so many."""
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        return zlib.decompressobj(_GZIP).decompress(head, HEAD_BYTES) if file.suffix == ".gz" else head
    except (OSError, zlib.error):
        return b""
