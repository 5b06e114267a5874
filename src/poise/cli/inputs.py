"""What users hand in besides traces: clusters as text or as files."""

import reprlib
import tomllib
from pathlib import Path
from typing import Any

import yaml

from poise.model.cluster import MOST_GPUS, Cluster, Node, parse_cluster
from poise.model.errors import ClusterError
from poise.wire.jobfile_tree import unfit

_LARGEST_FILE = 16 << 20
_LARGEST_FIGURE = 1_000_000
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_NODE_KEYS = {"name", "type", "gpus", "rack", "count"}
_TYPE_KEYS = {"speed", "price"}


def read_cluster(spec: str) -> Cluster:
    """A cluster from `v100:12,k80:8@4`, or from a YAML or TOML file.

    nodes: a list of {type, gpus, and optionally name, rack, count}; types: {name: {speed, price}}, both optional.
    """
    path = Path(spec)
    if path.suffix.lower() not in (".yaml", ".yml", ".toml"):
        if ":" not in spec and path.is_file():
            raise ClusterError(f"{path}: a file that describes a cluster ends in .yaml, .yml or .toml; rename it")
        return parse_cluster(spec)
    document = _document(path)
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
    speeds, prices = _figures(document, "speed", path), _figures(document, "price", path)
    try:
        return Cluster(tuple(nodes), speeds, prices)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def _document(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ClusterError(f"{path}: larger than {_LARGEST_FILE >> 20} MiB; that is no cluster")
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ClusterError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: not UTF-8 text") from None
    except RecursionError:
        raise ClusterError(f"{path}: nested too deeply; that is no cluster") from None
    except yaml.reader.ReaderError as error:
        raise ClusterError(f"{path}: {unfit(error)}") from None
    except (ValueError, yaml.YAMLError) as error:  # a date that is none is a ValueError
        raise ClusterError(f"{path}: {' '.join(str(error).split())}") from None


def _nodes(entry: object, where: str, before: int) -> list[Node]:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise ClusterError(f"{where}: expected {{type: NAME, gpus: COUNT}}, got {_SHORT.repr(entry)}")
    unknown = set(entry) - _NODE_KEYS
    if unknown:
        raise ClusterError(f"{where}: unknown key {min(map(str, unknown))!r}; known: {', '.join(sorted(_NODE_KEYS))}")
    count, gpus = _whole(entry, "count", 1, where), _whole(entry, "gpus", None, where)
    if count * gpus > MOST_GPUS:
        raise ClusterError(f"{where}: more than {MOST_GPUS:,} GPUs")
    kind, name, rack = entry["type"].lower(), entry.get("name"), str(entry.get("rack", "rack-0"))
    if name is None:
        return [Node(f"{kind}-{before + index}", kind, gpus, rack) for index in range(count)]
    return [Node(f"{name}-{index}" if count > 1 else str(name), kind, gpus, rack) for index in range(count)]


def _whole(entry: dict[str, object], key: str, default: int | None, where: str) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_GPUS:
        raise ClusterError(f"{where}: {key}: expected a whole number from 1 to {MOST_GPUS:,}, got {_SHORT.repr(value)}")
    return value


def _figures(document: dict[str, Any], key: str, path: Path) -> dict[str, float]:
    types = document.get("types") or {}
    if not isinstance(types, dict):
        raise ClusterError(f"{path}: types: expected {{NAME: {{speed: NUMBER, price: NUMBER}}}}")
    found: dict[str, float] = {}
    for name, figures in types.items():
        if not isinstance(figures, dict) or set(figures) - _TYPE_KEYS:
            known = ", ".join(sorted(_TYPE_KEYS))
            raise ClusterError(f"{path}: type {name!r}: expected some of {known}, got {_SHORT.repr(figures)}")
        value = figures.get(key)
        if value is not None:
            found[str(name).lower()] = _figure(value, f"{path}: type {name!r}: {key}")
    return found


def _figure(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST_FIGURE:
        want = f"expected a number above 0 and at most {_LARGEST_FIGURE:,}"
        raise ClusterError(f"{where}: {want}, got {_SHORT.repr(value)}")
    return float(value)
