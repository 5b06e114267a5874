"""The job file: a job, an array or a sweep in YAML with short keys (docs/reference/job-file.md).

    name: resnet50
    gpus: {count: 4, any_of: [A100, V100]}
    run: python train.py --lr ${LR}
    sweep: {LR: [0.1, 0.01]}

Unknown and repeated keys are errors that name the line.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from poise.scheduler.model.errors import RequestError, UnknownNameError, Where
from poise.service.wire.jobfile_syntax import (
    MOST_BYTES,
    Items,
    Keys,
    Scalar,
    Tree,
    Word,
    check_keys,
    fill,
    folder,
    gang,
    is_none,
    items,
    keys,
    literal_words,
    number,
    parse_tree,
    parse_words,
    scalar,
    seconds,
    size,
    syntax_refusal,
    text,
    truth,
    whole,
    whole_seconds,
)
from poise.service.wire.request import MOST_JOBS, Checkpoint, JobRequest, Limits, RetrySpec, Wire

# What is wrong with a request, in a line for people: the field, what was expected there, and what was given.

_NAMES = {"name", "tenant", "app", "gpu_types"}
_A_NAME = "letters, digits, `.`, `_` and `-`, at most 64, the first a letter or a digit"
_SPOKEN_PARTS: dict[str, type[Wire]] = {"checkpoint": Checkpoint, "retry": RetrySpec, "limits": Limits}
_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
_SHOWN = 60


def complaint(error: ValidationError) -> tuple[str | None, str]:
    """The first thing that is wrong: its field, if it is one field's fault, and the line.

    A name that is not known comes before everything else: what is missing may have been meant by it.
    """
    wrong = error.errors(include_url=False)
    first = next((each for each in wrong if each["type"] == "extra_forbidden"), wrong[0])
    path = [str(part) for part in first["loc"]]
    if first["type"] == "value_error":
        name, colon, text = first["msg"].removeprefix("Value error, ").partition(": ")
        return (name, text) if colon else (None, name)
    if first["type"] == "extra_forbidden":
        known = _SPOKEN_PARTS[path[0]].model_fields if path[0] in _SPOKEN_PARTS else JobRequest.model_fields
        return ".".join(path[:-1]) or None, str(UnknownNameError("field", path[-1], known))
    inner = [part for part in path[1:] if not part.isdigit()] if path[0] != "env" else []
    return ".".join([path[0], *inner]), _expectation(first, path)


def _expectation(first: Any, path: Sequence[str]) -> str:  # noqa: ANN401 - what pydantic tells of an error
    kind, context, got = first["type"], first.get("ctx", {}), _shown(first["input"])
    bound = next((f"{words} {context[name]:,.15g}" for name, words in _BOUNDS if name in context), None)
    if kind == "missing":
        return "is missing"
    if path[-1] == "[key]":
        return f"expected names of letters, digits and `_`, got {got}"
    if kind.startswith("string_"):
        return _text(kind, path[0], got)
    if bound is not None:
        return f"expected {bound}, got {got}"
    if "max_length" in context:
        return f"expected at most {context['max_length']:,} of them"
    if kind == "too_short":
        return f"expected at least {context['min_length']:,} of them, got {context['actual_length']:,}"
    wanted = {"tuple_type": "a list", "enum": context.get("expected"), "dict_type": "names with values"}.get(kind)
    return f"expected {wanted}, got {got}" if wanted else f"{first['msg'].replace('Input should be', 'expected')}, got {got}"


def _text(kind: str, field: str, got: str) -> str:
    if field in _NAMES:
        return f"expected {_A_NAME}, got {got}"
    if field == "key":
        return f"expected 8 to 64 letters, digits, `_` and `-`, got {got}"
    if kind == "string_pattern_mismatch":
        return (
            f"expected an absolute path, got {got}" if field in ("cwd", "venv") else "a character in it cannot be passed on"
        )
    if kind in ("string_too_long", "string_too_short"):
        return f"expected a text that is neither empty nor too long, got {got}"
    return f"expected text, got {got}"


def _shown(value: object) -> str:
    if isinstance(value, dict | list | tuple):
        return "several values"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


# A job as it was written down, before it is a request: options may still be laid over it, and it may become many.
#
# `JobDraft.requests` is the one way from words to requests, for job files, `#SBATCH` scripts, command lines and Python
# alike.

ARRAY_INDEX, ARRAY_COUNT = "ARRAY_INDEX", "ARRAY_COUNT"
LONGEST_NAME = 64
KEY_SHOWN = 4
"""Characters of a submission's key in the name of an app."""
KEY_OF = {"command": "run", "min_gpus": "gpus", "max_gpus": "gpus", "gpu_types": "gpus"}
"""Fields of a request that go by another word in a job file."""

Variant = Mapping[str, str]
"""What one job of many has in its environment besides what all have."""


@dataclass(frozen=True, slots=True)
class JobFileSource:
    """Where a draft was written down, and the lines of its keys, so that errors can be found again."""

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, key: str | None, problem: str) -> RequestError:
        """What is wrong with a key."""
        if self.file is None:
            return RequestError(f"{key}: {problem}" if key else problem)
        return RequestError(f"{Where(self.file, self.lines.get(key or ''), key)}: {problem}")


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job, or a family of jobs that differ in their environments.

    fields     of a Request, as far as they were given; all but `command`, `setup` and `env`
    variants   one for each job of an array or a sweep; empty: a single job
    notes      what its author should know: options that mean nothing here
    """

    command: tuple[Word, ...] = ()
    setup: tuple[Word, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    source: JobFileSource = JobFileSource()
    notes: tuple[str, ...] = ()

    def overlaid(self, fields: Mapping[str, Any], env: Mapping[str, str]) -> Self:
        """The same with these fields and variables instead; of fields that have parts, the parts that are given."""
        merged = {
            name: {**self.fields.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in fields.items()
        }
        lines = {
            key: line for key, line in self.source.lines.items() if key not in {KEY_OF.get(each, each) for each in fields}
        }
        return replace(
            self,
            fields={**self.fields, **merged},
            env={**self.env, **env},
            source=replace(self.source, lines=lines),
        )

    def requests(self, key: str = "") -> tuple[JobRequest, ...]:
        """One request, or one for each variant; RequestError says what is wrong, and where.

        key   of the submission: it tells apps apart whose owner gave them no name, though they are of one script
        """
        if not self.command:
            raise self.source.error("run", "is missing; it says what to run, e.g. `run: python train.py`")
        if not self.variants:
            return (self._request(self.env, self.fields),)
        return tuple(self._of_variant(place, variant, key) for place, variant in enumerate(self.variants))

    def _of_variant(self, place: int, variant: Variant, key: str) -> JobRequest:
        twice = next((name for name in variant if name in self.env), None)
        if twice is not None:
            raise self.source.error("env", f"{twice} is set for each job of the array or sweep; leave it out here")
        env = {**self.env, **variant}
        name = self.fields.get("name")
        fields = {**self.fields, "app": self.fields.get("app") or name or self._own_app(env, key)}
        if isinstance(name, str):
            suffix = f"-{variant.get(ARRAY_INDEX, place)}"
            fields["name"] = name[: LONGEST_NAME - len(suffix)] + suffix
        return self._request(env, fields)

    def _own_app(self, env: Mapping[str, str], key: str) -> str:
        """What an app is called whose owner gave it no name: as its script or program, and by the submission."""
        words = fill(self.command, env)
        script = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
        suffix = f"-{key[:KEY_SHOWN]}" if key else ""
        return clean_name(re.sub(r"\.(py|sh)$", "", script.rsplit("/", 1)[-1]))[: LONGEST_NAME - len(suffix)] + suffix

    def _request(self, env: Mapping[str, str], fields: Mapping[str, Any]) -> JobRequest:
        given = {**fields, "env": dict(env), "command": self._filled("run", self.command, env)}
        given["setup"] = self._filled("setup", self.setup, env)
        try:
            return JobRequest.model_validate(given)
        except ValidationError as error:
            name, problem = complaint(error)
            raise self.source.error(KEY_OF.get(name or "", name) if self.source.file else name, problem) from None

    def _filled(self, key: str, words: Sequence[Word], env: Mapping[str, str]) -> tuple[str, ...]:
        try:
            return fill(words, env)
        except ValueError as error:
            raise self.source.error(key, str(error)) from None


def draft_of(request: JobRequest) -> JobDraft:
    """A request as a draft, so that it can become many."""
    fields = {name: getattr(request, name) for name in request.model_fields_set - {"command", "setup", "env"}}
    return JobDraft(literal_words(request.command), literal_words(request.setup), request.env, fields)


def clean_name(text: str) -> str:
    """A name that is allowed, as near as can be."""
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]", "-", text))[:LONGEST_NAME] or "job"


def array_of(count: int) -> tuple[Variant, ...]:
    """An array of so many jobs: each knows its index, from 0, and how many there are. ValueError: none, or too many."""
    if count < 1:
        raise ValueError(f"expected at least 1 job, got {count}")
    _check_count(count)
    return tuple({ARRAY_INDEX: str(index), ARRAY_COUNT: str(count)} for index in range(count))


def sweep_of(values: Mapping[str, Sequence[str]]) -> tuple[Variant, ...]:
    """Every combination of values; the last variable changes fastest. ValueError: none, or too many."""
    empty = next((name for name, each in values.items() if not each), None)
    if empty is not None or not values:
        raise ValueError(f"{f'{empty} has no values' if empty else 'nothing to vary'}; e.g. LR: [0.1, 0.01]")
    _check_count(prod(len(each) for each in values.values()))
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))


def _check_count(jobs: int) -> None:
    if jobs > MOST_JOBS:
        raise ValueError(f"{jobs:,} jobs are more than the {MOST_JOBS:,} that one submission may have; divide them")


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


def read_job_file(source: Path | str) -> tuple[JobRequest, ...]:
    """The jobs of a job file: a Path is a file, a str is the text itself."""
    return read_draft(source).requests()


def read_draft(source: Path | str) -> JobDraft:
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


def _draft(tree: Tree, file: str, base: Path) -> JobDraft:
    if not isinstance(tree, Keys):
        raise syntax_refusal(Where(file, tree.line), "expected keys such as `run` and `gpus`; that is no job file")
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
    source = JobFileSource(file, {**tree.lines, **_inner_lines(tree)})
    return JobDraft(commands.get("run", ()), commands.get("setup", ()), env, fields, _variants(tree, file), source)


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
            raise syntax_refusal(_inner(where, found, key), "is not supported yet; name the types with any_of")
    fields: dict[str, Any] = {}
    if "count" in found.entries:
        fields |= gang(found.entries["count"], _inner(where, found, "count")).fields()
    if "any_of" in found.entries:
        place = _inner(where, found, "any_of")
        fields["gpu_types"] = tuple(text(each, place) for each in items(found.entries["any_of"], place))
        if not fields["gpu_types"]:
            raise syntax_refusal(place, "expected at least one GPU type; leave it out for any")
    return fields


def _command(tree: Tree, where: Where) -> tuple[Word, ...]:
    """A line that is split into words, or a list of them."""
    if isinstance(tree, Items):
        return literal_words(text(each, Where(where.file, each.line, where.field)) for each in tree.items)
    try:
        return parse_words(scalar(tree, where).text)
    except ValueError as error:
        raise syntax_refusal(where, str(error)) from None


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
        raise syntax_refusal(
            where, "a job is an array or a sweep, not both; give the index as one more variable of the sweep"
        )
    try:
        return array_of(whole(value, where)) if key == "array" else sweep_of(_values(value, where))
    except ValueError as error:
        raise syntax_refusal(where, str(error)) from None


def _values(tree: Tree, where: Where) -> dict[str, tuple[str, ...]]:
    found = keys(tree, where)
    return {
        name: tuple(text(each, _inner(where, found, name)) for each in items(value, _inner(where, found, name)))
        for name, value in found.entries.items()
    }
