"""Options that several verbs share, and inputs that they name: journals, and clusters as text or as files.

What only simulations need is in `experiment`, and tables are in `output`, so that a verb of a live service imports neither
the simulator nor what draws tables unless it needs them.
"""

import json
import reprlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click
import yaml

from poise.scheduler.model.cluster import MOST_GPUS, Cluster, Node, parse_cluster, populated
from poise.scheduler.model.errors import ClusterError, RequestError
from poise.scheduler.model.units import parse_seconds
from poise.service.wire.jobfile import unreadable

SHORTEST_ROUND = 0.001
"""Seconds; as calendar timestamps, the ends of shorter rounds would coincide."""

Command = TypeVar("Command", bound=Callable[..., Any])


class Duration(click.ParamType[float]):
    """Seconds, or `90s`, `15m`, `1h30m`."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """The duration in seconds."""
        if isinstance(value, float):
            return value
        try:
            return parse_seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = Duration()
FILE, FOLDER = click.Path(dir_okay=False, path_type=Path), click.Path(file_okay=False, path_type=Path)


def json_flag(help: str) -> Callable[[Command], Command]:
    """The option --json with a help text of its own."""
    return click.option("--json", "as_json", is_flag=True, help=help)


json_option = json_flag("One JSON document on stdout.")
only_json_option = json_flag("One JSON document on stdout, nothing else there.")
force_option = click.option("--force", is_flag=True, help="Write over files and folders of other kinds too.")


def print_json(document: object) -> None:
    """Print one JSON document on standard output."""
    click.echo(json.dumps(document, allow_nan=False))


def examples(*lines: str) -> str:
    """The end of a command's help."""
    heading = "Examples" if len(lines) > 1 else "Example"
    return "\n".join(("\b", f"{heading}:", *(f"  {line}" for line in lines))) + "\n"


def with_options(options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """A decorator that adds options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def choice_of(kind: type[StrEnum]) -> "click.Choice[str]":
    """A choice between the values of an enumeration; click would offer their names."""
    return click.Choice([each.value for each in kind])


def check_round(length: float) -> None:
    """Refuse a round that is too short."""
    if length < SHORTEST_ROUND:
        raise RequestError(f"--round: expected at least {SHORTEST_ROUND} seconds, got {length}")


@contextmanager
def journal_file(path: Path) -> Iterator[Path]:
    """A journal as a path that can be read: of a service's state directory, its last chapter as a temporary file."""
    from poise.engine.journal import NAME
    from poise.service.server.storage.replay import last_chapter, store_of  # most journals are none of a service

    store = store_of(path)
    if store is None:
        yield path
        return
    with TemporaryDirectory(prefix="poise-") as folder:
        file = Path(folder) / NAME
        with file.open("w") as stream:
            stream.writelines(f"{line}\n" for line in last_chapter(store))
        yield file


# Clusters

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
    figures = _figures(document.get("types") or {}, path)
    try:
        return populated(Cluster(tuple(nodes), figures["speed"], figures["price"]))
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


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
        raise ClusterError(f"{where}: expected {{type: NAME, gpus: COUNT}}, got {_SHORT.repr(entry)}")
    unknown = set(entry) - _NODE_KEYS
    if unknown:
        raise ClusterError(f"{where}: unknown key {min(map(str, unknown))!r}; known: {', '.join(sorted(_NODE_KEYS))}")
    counts = {"count": entry.get("count", 1), "gpus": entry.get("gpus")}
    for key, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_GPUS:
            wanted = f"expected a whole number from 1 to {MOST_GPUS:,}"
            raise ClusterError(f"{where}: {key}: {wanted}, got {_SHORT.repr(value)}")
    count, gpus = counts["count"], counts["gpus"]
    if count * gpus > MOST_GPUS:
        raise ClusterError(f"{where}: more than {MOST_GPUS:,} GPUs")
    kind, name, rack = entry["type"].lower(), entry.get("name"), str(entry.get("rack", "rack-0"))
    if name is None:
        return [Node(f"{kind}-{before + index}", kind, gpus, rack) for index in range(count)]
    return [Node(f"{name}-{index}" if count > 1 else str(name), kind, gpus, rack) for index in range(count)]


def _figures(types: object, path: Path) -> dict[str, dict[str, float]]:
    """Speed and price of the GPU types that have one: {"speed": {type: …}, "price": {type: …}}."""
    if not isinstance(types, dict):
        raise ClusterError(f"{path}: types: expected {{NAME: {{speed: NUMBER, price: NUMBER}}}}")
    found: dict[str, dict[str, float]] = {key: {} for key in _TYPE_KEYS}
    for name, figures in types.items():
        if not isinstance(figures, dict) or set(figures) - _TYPE_KEYS:
            known = ", ".join(sorted(_TYPE_KEYS))
            raise ClusterError(f"{path}: type {name!r}: expected some of {known}, got {_SHORT.repr(figures)}")
        for key, value in figures.items():
            if value is None:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST_FIGURE:
                wanted = f"expected a number above 0 and at most {_LARGEST_FIGURE:,}"
                raise ClusterError(f"{path}: type {name!r}: {key}: {wanted}, got {_SHORT.repr(value)}")
            found[key][str(name).lower()] = float(value)
    return found
