"""Outages of nodes, read from a file or drawn from a seed; and drains, which are planned.

`mtbf=30d,repair=4h`: each node fails after an exponentially distributed time of that mean and returns after another.
A file has one JSON object per line: `{"node": "v100-0", "time": 3600, "duration": 900}`. With `"drain": true` it is a
drain: the node stays, and its GPUs, or those of `"slots": [0, 1]`, are closed for so long.
`v100-0@1h..3h` is a drain too, counted from the first submission; so is `v100-0:0,1@1h..`, of two GPUs and for good.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import inf, isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from poise.lab.traces.parsing import lines
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import RequestError, TraceError, UnknownNameError, Where
from poise.scheduler.model.event import NodeEvent, NodeLost, NodeRestricted, NodeReturned
from poise.scheduler.model.units import parse_seconds

MOST_OUTAGES = 1_000_000

_LEAVES = -1
"""Counted like a slot: drains of a node that runs have to leave."""
_DEFAULTS = {"mtbf": "30d", "repair": "4h"}


class Outage(NamedTuple):
    """The node with this index is lost at `time`, for `duration` seconds."""

    time: float
    node: int
    duration: float


class Drain(NamedTuple):
    """These slots of the node with this index are closed at `time` for `duration` seconds; runs there leave, or stay."""

    time: float
    node: int
    duration: float
    slots: tuple[int, ...]
    leaves: bool = True


def parse_drain(spec: str, cluster: Cluster, *, start: float) -> Drain:
    """Return the drain of a specification NODE[:SLOT,…]@FROM..[UNTIL], whose times are seconds after `start`."""
    name, at, times = spec.rpartition("@")
    since, to, until = times.partition("..")
    if not (name and at and to):
        raise RequestError(f"drain {spec!r:.100}: expected NODE@FROM..UNTIL, such as {cluster.nodes[0].name}@1h..3h")
    index = {node.name: place for place, node in enumerate(cluster.nodes)}
    slots: list[str] | None = None
    if name not in index and ":" in name:
        name, _, listed = name.rpartition(":")
        slots = listed.split(",")
    if name not in index:
        raise UnknownNameError("node", name, index)
    try:
        begin, end = parse_seconds(since), parse_seconds(until) if until else inf
        closed = None if slots is None else [_slot(each) for each in slots]
        return _drain(start + begin, index[name], end - begin, closed, cluster)
    except ValueError as error:
        raise RequestError(f"drain {spec!r:.100}: {error}") from None


def _slot(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected whole numbers after the colon, got {text!r:.60}") from None


def _drain(time: float, node: int, duration: float, slots: object, cluster: Cluster) -> Drain:
    """Return a drain of these slots, or of all; raises ValueError if there is no such slot or no time in between."""
    gpus = cluster.nodes[node].gpus
    if not duration > 0:
        raise ValueError("it ends before it begins")
    if slots is None:
        return Drain(time, node, duration, tuple(range(gpus)))
    if not (isinstance(slots, list) and slots and all(type(slot) is int and 0 <= slot < gpus for slot in slots)):
        raise ValueError(f"expected slots of {cluster.nodes[node].name}, which are 0 to {gpus - 1}")
    return Drain(time, node, duration, tuple(sorted(set(slots))))


def parse_outages(spec: str, cluster: Cluster, *, start: float, horizon: float, seed: int) -> list[Outage | Drain]:
    """Return the outages of a specification or a file, and the drains of a file.

    Drawn outages begin between `start` and `start + horizon`.
    """
    if "=" not in spec or os.path.exists(spec):
        return _read(Path(spec), cluster)
    values = dict(_DEFAULTS)
    for part in spec.split(","):
        name, _, text = part.partition("=")
        if name not in values:
            raise UnknownNameError("fault parameter", name, values)
        values[name] = text
    try:
        mtbf, repair = parse_seconds(values["mtbf"]), parse_seconds(values["repair"])
    except ValueError as error:
        raise RequestError(f"faults {spec!r:.100}: {error}") from None
    if mtbf <= 0 or repair <= 0:
        raise RequestError(f"faults {spec!r:.100}: mtbf and repair are longer than 0 seconds")
    if len(cluster.nodes) * horizon / (mtbf + repair) > MOST_OUTAGES:
        raise RequestError(f"faults: more than {MOST_OUTAGES:,} outages would be expected; give a longer mtbf")
    found: list[Outage | Drain] = []
    # One random stream per node: its outages stay the same whatever other nodes the cluster has.
    for node, child in enumerate(np.random.SeedSequence(seed).spawn(len(cluster.nodes))):
        draw = np.random.default_rng(child)
        time = float(draw.exponential(mtbf))
        while time < horizon:
            lasts = float(draw.exponential(repair))
            found.append(Outage(start + time, node, lasts))
            time += lasts + float(draw.exponential(mtbf))
    return found


def _read(path: Path, cluster: Cluster) -> list[Outage | Drain]:
    index = {node.name: place for place, node in enumerate(cluster.nodes)}
    try:
        with path.open("rb") as stream:
            return [_outage(line, cluster, index, Where(str(path), number)) for number, line in lines(stream, str(path))]
    except OSError as error:
        raise TraceError(Where(str(path)), error.strerror or str(error)) from None


def _outage(line: str, cluster: Cluster, index: dict[str, int], where: Where) -> Outage | Drain:
    try:
        row: dict[str, Any] = json.loads(line)
        node, time, duration = str(row["node"]), float(row["time"]), float(row["duration"])
        is_drain, slots = row.get("drain", False), row.get("slots")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        want = 'expected {"node": NAME, "time": SECONDS, "duration": SECONDS}'
        raise TraceError(where, f"{want}, got {line.strip()[:80]!r}") from None
    if node not in index:
        raise TraceError(Where(where.file, where.line, "node"), str(UnknownNameError("node", str(node), index)))
    if not (isfinite(time) and isfinite(duration) and duration > 0):
        raise TraceError(where, "expected a finite time and a finite duration above 0")
    if not isinstance(is_drain, bool):
        raise TraceError(Where(where.file, where.line, "drain"), f"expected true or false, got {is_drain!r:.80}")
    if not is_drain:
        return Outage(time, index[node], duration)
    try:
        return _drain(time, index[node], duration, slots, cluster)
    except ValueError as error:
        raise TraceError(Where(where.file, where.line, "slots"), f"{error}, got {slots!r:.80}") from None


def node_events(changes: Iterable[Outage | Drain]) -> list[tuple[float, NodeEvent]]:
    """Return losses, returns and restrictions by time; those of one time and node in this order.

    Overlapping outages of one node are merged into one, and so are drains that overlap.
    """
    outages, drains = list[Outage](), list[Drain]()
    for change in changes:
        (outages if isinstance(change, Outage) else drains).append(change)  # type: ignore[arg-type]
    return sorted([*_outage_events(outages), *_drain_events(drains)], key=lambda each: (each[0], each[1].node))


def _outage_events(outages: Iterable[Outage]) -> Iterator[tuple[float, NodeEvent]]:
    spans: dict[int, list[list[float]]] = {}
    for outage in sorted(outages):
        mine = spans.setdefault(outage.node, [])
        if mine and outage.time <= mine[-1][1]:
            mine[-1][1] = max(mine[-1][1], outage.time + outage.duration)
        else:
            mine.append([outage.time, outage.time + outage.duration])
    for node, mine in spans.items():
        for lost, returned in mine:
            yield lost, NodeLost(node)
            yield returned, NodeReturned(node)


def _drain_events(drains: Iterable[Drain]) -> Iterator[tuple[float, NodeEvent]]:
    """One restriction at each time at which what some drain closes is something else than before."""
    edges: list[tuple[int, float, int, tuple[int, ...]]] = []
    for time, node, duration, slots, leaves in drains:
        closes = (*slots, _LEAVES) if leaves else slots
        edges += [(node, time, 1, closes), (node, time + duration, -1, closes)]
    counts: dict[int, Counter[int]] = {}  # by node: for each slot the number of drains
    before: dict[int, NodeRestricted] = {}
    for (node, time), together in groupby(sorted(edges), key=itemgetter(0, 1)):
        mine = counts.setdefault(node, Counter())
        for _, _, more, closes in together:
            mine.update(dict.fromkeys(closes, more))
        closed = tuple(slot for slot in sorted(mine) if mine[slot] and slot != _LEAVES)
        now = NodeRestricted(node, closed, drained=mine[_LEAVES] > 0)
        if now != before.get(node, NodeRestricted(node, (), drained=False)):
            yield time, now
            before[node] = now
