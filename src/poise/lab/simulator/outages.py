"""Outages of nodes: read from a file, or drawn from a seed.

`mtbf=30d,repair=4h`: each node fails after an exponentially distributed time of that mean and returns after another.
A file has one JSON object per line: `{"node": "v100-0", "time": 3600, "duration": 900}`.
"""

import json
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from poise.lab.traces.parsing import lines
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import RequestError, TraceError, UnknownNameError, Where
from poise.scheduler.model.event import NodeLost, NodeReturned
from poise.scheduler.model.units import parse_seconds

MOST_OUTAGES = 1_000_000

_DEFAULTS = {"mtbf": "30d", "repair": "4h"}


class Outage(NamedTuple):
    """The node with this index is lost at `time`, for `duration` seconds."""

    time: float
    node: int
    duration: float


def parse_outages(spec: str, cluster: Cluster, *, start: float, horizon: float, seed: int) -> list[Outage]:
    """Return the outages of a specification or a file; drawn ones begin between `start` and `start + horizon`."""
    if "=" not in spec or Path(spec).exists():
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
        raise RequestError(f"faults {spec!r}: {error}") from None
    if mtbf <= 0 or repair <= 0:
        raise RequestError(f"faults {spec!r}: mtbf and repair are longer than 0 seconds")
    if len(cluster.nodes) * horizon / (mtbf + repair) > MOST_OUTAGES:
        raise RequestError(f"faults: more than {MOST_OUTAGES:,} outages would be expected; give a longer mtbf")
    found: list[Outage] = []
    # One random stream per node: its outages stay the same whatever other nodes the cluster has.
    for node, child in enumerate(np.random.SeedSequence(seed).spawn(len(cluster.nodes))):
        draw = np.random.default_rng(child)
        time = float(draw.exponential(mtbf))
        while time < horizon:
            lasts = float(draw.exponential(repair))
            found.append(Outage(start + time, node, lasts))
            time += lasts + float(draw.exponential(mtbf))
    return found


def _read(path: Path, cluster: Cluster) -> list[Outage]:
    index = {node.name: place for place, node in enumerate(cluster.nodes)}
    try:
        with path.open("rb") as stream:
            return [_outage(line, index, Where(str(path), number)) for number, line in lines(stream, str(path))]
    except OSError as error:
        raise TraceError(Where(str(path)), error.strerror or str(error)) from None


def _outage(line: str, index: dict[str, int], where: Where) -> Outage:
    try:
        row = json.loads(line)
        node, time, duration = str(row["node"]), float(row["time"]), float(row["duration"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        want = 'expected {"node": NAME, "time": SECONDS, "duration": SECONDS}'
        raise TraceError(where, f"{want}, got {line.strip()[:80]!r}") from None
    if node not in index:
        raise TraceError(Where(where.file, where.line, "node"), str(UnknownNameError("node", str(node), index)))
    if not (isfinite(time) and isfinite(duration) and duration > 0):
        raise TraceError(where, "expected a finite time and a finite duration above 0")
    return Outage(time, index[node], duration)


def node_events(outages: Iterable[Outage]) -> list[tuple[float, NodeLost | NodeReturned]]:
    """Return losses and returns by time; overlapping outages of one node are merged into one."""
    spans: dict[int, list[list[float]]] = {}
    for outage in sorted(outages):
        mine = spans.setdefault(outage.node, [])
        if mine and outage.time <= mine[-1][1]:
            mine[-1][1] = max(mine[-1][1], outage.time + outage.duration)
        else:
            mine.append([outage.time, outage.time + outage.duration])
    found: list[tuple[float, NodeLost | NodeReturned]] = []
    for node, mine in spans.items():
        for lost, returned in mine:
            found += [(lost, NodeLost(node)), (returned, NodeReturned(node))]
    return sorted(found, key=lambda each: (each[0], each[1].node))
