"""Clusters as people write them: `v100:12,k80:8@4`, YAML and TOML files, and nodes listed in Python."""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from poise.lab.arguments import as_number, items_of, shown
from poise.scheduler.model.cluster import MOST_GPUS, Cluster, Node, parse_cluster, populated
from poise.scheduler.model.errors import ClusterError

_LARGEST_FILE = 16 << 20
_LARGEST_FIGURE = 1_000_000
_NODE_KEYS = {"name", "type", "gpus", "rack", "count"}
_TYPE_KEYS = {"speed", "price"}


ClusterLike = Cluster | str | Path | Mapping[str, Any] | Iterable[Node | Mapping[str, Any]]
"""What `cluster` makes a cluster of."""


def cluster(given: ClusterLike) -> Cluster:
    """Return a cluster, however it is given.

    given   text such as `v100:12,k80:8@4` (GPUs of each type, 4 a node unless @n); the path of a YAML or TOML file; a
            mapping with what such a file holds; nodes, each a `Node` or a mapping such as {"type": "v100", "gpus": 8,
            "count": 4}; or a cluster

    Raises ClusterError if it describes none.
    """
    if isinstance(given, Cluster):
        return _checked(given)
    if isinstance(given, str | Path):
        return read_cluster(given)
    if isinstance(given, Mapping):
        return _described(given, "cluster")
    items = items_of(given)
    if items is not None:
        entries = list(items)
        nodes = tuple(each for each in entries if isinstance(each, Node))
        if nodes and len(nodes) == len(entries):
            _check_nodes(nodes)
            return populated(Cluster(nodes))
        return _described({"nodes": [_as_entry(each) for each in entries]}, "cluster")
    wanted = "expected text such as v100:8,k80:16, a path, nodes, or a Cluster"
    raise ClusterError(f"cluster: {wanted}, got {shown(given)}")


def _as_entry(node: object) -> object:
    """A node as a file would describe it."""
    if isinstance(node, Node):
        return {"name": node.name, "type": node.gpu_type, "gpus": node.gpus, "rack": node.rack}
    return dict(node) if isinstance(node, Mapping) else node


def _checked(given: Cluster) -> Cluster:
    """The cluster, if the values of its nodes are those of nodes."""
    _check_nodes(populated(given).nodes)
    for key, figures in (("speed", given.speeds), ("price", given.prices)):
        if not isinstance(figures, Mapping):
            raise ClusterError(f"cluster: {key}s: expected a number for each GPU type, got {shown(figures)}")
        for name, value in figures.items():
            _figure(value, f"cluster: type {name!r}: {key}")
    return given


def _figure(value: object, where: str) -> float:
    """A speed or a price of a GPU type."""
    number = as_number(value)
    if not 0 < number <= _LARGEST_FIGURE:
        raise ClusterError(f"{where}: expected a number above 0 and at most {_LARGEST_FIGURE:,}, got {shown(value)}")
    return number


def _check_nodes(nodes: Iterable[object]) -> None:
    gpus = 0
    for node in nodes:
        if not isinstance(node, Node) or not all(isinstance(name, str) for name in (node.name, node.gpu_type, node.rack)):
            raise ClusterError(f"cluster: expected nodes with name, GPU type and rack as text, got {shown(node)}")
        if not _is_count(node.gpus):
            wanted = f"expected a whole number of GPUs from 1 to {MOST_GPUS:,}"
            raise ClusterError(f"cluster: node {node.name!r}: {wanted}, got {shown(node.gpus)}")
        gpus += node.gpus
    if gpus > MOST_GPUS:
        raise ClusterError(f"cluster: more than {MOST_GPUS:,} GPUs")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_GPUS


def read_cluster(spec: str | Path) -> Cluster:
    """Read a cluster from `v100:12,k80:8@4`, or from a YAML or TOML file.

    nodes: a list of {type, gpus, and optionally name, rack, count}; types: {name: {speed, price}}, both optional.
    """
    path = Path(spec)
    if path.suffix.lower() not in (".yaml", ".yml", ".toml"):
        if ":" not in str(spec) and os.path.isfile(path):
            raise ClusterError(f"{path}: a file that describes a cluster ends in .yaml, .yml or .toml; rename it")
        return parse_cluster(str(spec))
    return _described(_document(path), str(path))


def _described(document: object, path: str) -> Cluster:
    """The cluster that a document describes; `path` names the document in messages."""
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise ClusterError(f"{path}: expected a list `nodes`, e.g. nodes: [{{type: v100, gpus: 8, count: 4}}]")
    unknown = set(document) - {"nodes", "types"}
    if unknown:
        raise ClusterError(f"{path}: unknown key {min(map(str, unknown))!r}; known: nodes, types")
    nodes: list[Node] = []
    gpus = 0
    for number, entry in enumerate(document["nodes"], start=1):
        more = _nodes(entry, f"{path}: node {number}", len(nodes))
        nodes += more
        gpus += more[0].gpus * len(more)
        if gpus > MOST_GPUS:
            raise ClusterError(f"{path}: more than {MOST_GPUS:,} GPUs")
    figures = _figures({} if document.get("types") is None else document["types"], path)
    try:
        return populated(Cluster(tuple(nodes), figures["speed"], figures["price"]))
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def unreadable(error: yaml.reader.ReaderError) -> str:
    """The message about a character that YAML does not allow."""
    code = error.character if isinstance(error.character, int) else 0
    if 0xD800 <= code <= 0xDFFF:  # bytes of standard input that are not UTF-8 arrive as surrogates
        return "not UTF-8 text"
    return f"not YAML: it holds the control character U+{code:04X}; take it out"


def _document(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ClusterError(f"{path}: larger than {_LARGEST_FILE >> 20} MiB; that is no cluster")
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.safe_load(text)
    except OSError as error:
        problem = error.strerror or str(error)
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except RecursionError:
        problem = "nested too deeply; that is no cluster"
    except yaml.reader.ReaderError as error:
        problem = unreadable(error)
    except (ValueError, yaml.YAMLError) as error:  # a date that is none is a ValueError
        problem = " ".join(str(error).split())
    raise ClusterError(f"{path}: {problem}")


def _nodes(entry: object, where: str, before: int) -> list[Node]:
    """The nodes of one entry. Those without a name are numbered after the `before` nodes of earlier entries."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise ClusterError(f"{where}: expected {{type: NAME, gpus: COUNT}}, got {shown(entry)}")
    unknown = set(entry) - _NODE_KEYS
    if unknown:
        raise ClusterError(f"{where}: unknown key {min(map(str, unknown))!r}; known: {', '.join(sorted(_NODE_KEYS))}")
    counts = {"count": entry.get("count", 1), "gpus": entry.get("gpus")}
    for key, value in counts.items():
        if not _is_count(value):
            wanted = f"expected a whole number from 1 to {MOST_GPUS:,}"
            raise ClusterError(f"{where}: {key}: {wanted}, got {shown(value)}")
    count, gpus = counts["count"], counts["gpus"]
    if count * gpus > MOST_GPUS:
        raise ClusterError(f"{where}: more than {MOST_GPUS:,} GPUs")
    kind, name, rack = entry["type"].lower(), entry.get("name"), entry.get("rack", "rack-0")
    for key, value in (("name", name), ("rack", rack)):
        if not isinstance(value, str | int | None):
            raise ClusterError(f"{where}: {key}: expected text, got {shown(value)}")
    if name is None:
        return [Node(f"{kind}-{before + index}", kind, gpus, str(rack)) for index in range(count)]
    return [Node(f"{name}-{index}" if count > 1 else str(name), kind, gpus, str(rack)) for index in range(count)]


def _figures(types: object, path: str) -> dict[str, dict[str, float]]:
    """Speed and price of the GPU types that have one: {"speed": {type: …}, "price": {type: …}}."""
    if not isinstance(types, dict):
        raise ClusterError(f"{path}: types: expected {{NAME: {{speed: NUMBER, price: NUMBER}}}}")
    found: dict[str, dict[str, float]] = {key: {} for key in _TYPE_KEYS}
    for name, figures in types.items():
        if not isinstance(figures, dict) or set(figures) - _TYPE_KEYS:
            known = ", ".join(sorted(_TYPE_KEYS))
            raise ClusterError(f"{path}: type {name!r}: expected some of {known}, got {shown(figures)}")
        for key, value in figures.items():
            if value is not None:
                found[key][str(name).lower()] = _figure(value, f"{path}: type {name!r}: {key}")
    return found
