"""The job file: a job, an array or a sweep in YAML with short keys (docs/reference/job-file.md).

    name: resnet50
    gpus: {count: 4, any_of: [A100, V100]}
    run: python train.py --lr ${LR}
    sweep: {LR: [0.1, 0.01]}

Unknown and repeated keys are errors that name the line.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from poise.model.errors import RequestError, Where
from poise.wire.jobfile_draft import Draft, Source, Variant, array_of, sweep_of
from poise.wire.jobfile_tree import MOST_BYTES, Items, Keys, Scalar, Tree, check_keys, parse_tree, refusal
from poise.wire.jobfile_values import (
    folder,
    gang,
    is_none,
    items,
    keys,
    number,
    scalar,
    seconds,
    size,
    text,
    truth,
    whole,
    whole_seconds,
)
from poise.wire.jobfile_words import Word, literal_words, parse_words
from poise.wire.request import Request

Reader = Callable[[Tree, Where], Any]

_SIMPLE: dict[str, Reader] = {
    "name": text,
    "tenant": text,
    "app": text,
    "model": text,
    "batch_size": whole,
    "micro_batches": whole,
    "steps": number,
    "duration": seconds,
    "weight": number,
    "priority": whole,
    "preemption": text,
    "replicas": text,
    "max_duration": seconds,
    "hold": truth,
}
_PARTS: dict[str, dict[str, Reader]] = {
    "checkpoint": {"every": seconds, "deadline": seconds},
    "retry": {
        "on_errors": whole,
        "exit_codes": lambda tree, where: tuple(whole(each, where) for each in items(tree, where)),
    },
    "limits": {"memory": size, "cpu_seconds": whole_seconds, "open_files": whole, "processes": whole},
}
_GPU_KEYS = ("count", "any_of", "in_order", "memory")
KEYS = ("run", "setup", "gpus", "env", "cwd", "venv", "array", "sweep", *_SIMPLE, *_PARTS)
"""Every key that a job file may have."""


def read_job_file(source: Path | str) -> tuple[Request, ...]:
    """The jobs of a job file: a Path is a file, a str is the text itself."""
    return read_draft(source).requests()


def read_draft(source: Path | str) -> Draft:
    """What a job file says, before options are laid over it. A relative `cwd` begins at the file's folder."""
    if isinstance(source, str):
        return _draft(parse_tree(source, "job"), "job", Path())
    return _draft(parse_tree(read_text(source), str(source)), str(source), source.parent)


def read_text(path: Path, kind: str = "job file") -> str:
    """The text of a file that a person wrote, bounded; `kind` is what one that is too large is not."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    if len(content) > MOST_BYTES:
        raise RequestError(f"{path}: larger than {MOST_BYTES >> 10} KiB; that is no {kind}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"{path}: not UTF-8 text") from None


def _draft(tree: Tree, file: str, base: Path) -> Draft:
    if not isinstance(tree, Keys):
        raise refusal(Where(file, tree.line), "expected keys such as `run` and `gpus`; that is no job file")
    check_keys(tree, KEYS, Where(file))
    places = {key: Where(file, line, key) for key, line in tree.lines.items()}
    fields: dict[str, Any] = {}
    for key, value in tree.entries.items():
        if key in _SIMPLE:
            fields[key] = _SIMPLE[key](value, places[key])
        elif key in _PARTS:
            fields[key] = _parts(value, places[key], _PARTS[key])
        elif key == "gpus":
            fields |= _gpus(value, places[key])
        elif key == "cwd":
            fields[key] = folder(value, places[key], base)
        elif key == "venv":
            fields[key] = None if is_none(value) else folder(value, places[key], base)
    commands = {key: _command(tree.entries[key], places[key]) for key in ("run", "setup") if key in tree.entries}
    env = _env(tree.entries["env"], places["env"]) if "env" in tree.entries else {}
    source = Source(file, {**tree.lines, **_inner_lines(tree)})
    return Draft(commands.get("run", ()), commands.get("setup", ()), env, fields, _variants(tree, file), source)


def _inner_lines(tree: Keys) -> dict[str, int]:
    """The lines of keys in keys, by both names."""
    found = {key: value for key, value in tree.entries.items() if isinstance(value, Keys)}
    return {f"{key}.{inner}": line for key, value in found.items() for inner, line in value.lines.items()}


def _parts(tree: Tree, where: Where, readers: dict[str, Reader]) -> dict[str, Any]:
    """A key that has keys of its own."""
    found = keys(tree, where)
    check_keys(found, readers, where)
    return {key: readers[key](value, _inner(where, found, key)) for key, value in found.entries.items()}


def _inner(where: Where, found: Keys, key: str) -> Where:
    return Where(where.file, found.lines[key], f"{where.field}.{key}")


def _gpus(tree: Tree, where: Where) -> dict[str, Any]:
    """`4`, `1..4`, or keys: how many, and of which types."""
    if isinstance(tree, Scalar):
        return gang(tree, where).fields()
    found = keys(tree, where)
    check_keys(found, _GPU_KEYS, where)
    for key in ("in_order", "memory"):
        if key in found.entries:
            raise refusal(_inner(where, found, key), "is not supported yet; name the types with any_of")
    fields: dict[str, Any] = {}
    if "count" in found.entries:
        fields |= gang(found.entries["count"], _inner(where, found, "count")).fields()
    if "any_of" in found.entries:
        place = _inner(where, found, "any_of")
        fields["gpu_types"] = tuple(text(each, place) for each in items(found.entries["any_of"], place))
        if not fields["gpu_types"]:
            raise refusal(place, "expected at least one GPU type; leave it out for any")
    return fields


def _command(tree: Tree, where: Where) -> tuple[Word, ...]:
    """A line that is split into words, or a list of them."""
    if isinstance(tree, Items):
        return literal_words(text(each, Where(where.file, each.line, where.field)) for each in tree.items)
    try:
        return parse_words(scalar(tree, where).text)
    except ValueError as error:
        raise refusal(where, str(error)) from None


def _env(tree: Tree, where: Where) -> dict[str, str]:
    found = keys(tree, where)
    return {name: text(value, _inner(where, found, name)) for name, value in found.entries.items()}


def _variants(tree: Keys, file: str) -> tuple[Variant, ...]:
    """The jobs of an array or a sweep."""
    key = next((each for each in ("array", "sweep") if each in tree.entries), None)
    if key is None:
        return ()
    where, value = Where(file, tree.lines[key], key), tree.entries[key]
    if {"array", "sweep"} <= tree.entries.keys():
        raise refusal(where, "a job is an array or a sweep, not both; give the index as one more variable of the sweep")
    try:
        return array_of(whole(value, where)) if key == "array" else sweep_of(_values(value, where))
    except ValueError as error:
        raise refusal(where, str(error)) from None


def _values(tree: Tree, where: Where) -> dict[str, tuple[str, ...]]:
    found = keys(tree, where)
    return {
        name: tuple(text(each, _inner(where, found, name)) for each in items(value, _inner(where, found, name)))
        for name, value in found.entries.items()
    }
