"""The job file: a job, an array or a sweep in YAML with short keys (docs/reference/job-file.md).

    name: resnet50
    gpus: {count: 4, any_of: [A100, V100]}
    run: python train.py --lr ${LR}
    sweep: {LR: [0.1, 0.01]}

PyYAML parses the text into nodes, `_YamlReader` turns these into dicts, lists and texts and notes the line of each key, and
`_JobFile` reads the keys. Values stay as their author wrote them until the parser of their key reads them: YAML's own idea
of `1_000` or `no` would change what a script is given. What a value may be beyond its form is checked by JobRequest.

Unknown and repeated keys are errors that name the line. No object is built from a tag, and size, depth and the number of
values are bounded, those that aliases repeat included: a file of a few lines cannot become a document of a billion values.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from poise.lab.clusters import unreadable
from poise.scheduler.model.errors import RequestError, UnknownNameError, Where
from poise.scheduler.model.units import parse_seconds
from poise.service.wire import draft
from poise.service.wire.draft import Array, DraftSource, JobDraft, Word
from poise.service.wire.environments import parse_export
from poise.service.wire.moments import moment_from_now
from poise.service.wire.request import LEAST_MEMORY, MOST_GPUS, JobRequest

MOST_BYTES = 256 << 10
MOST_VALUES = 20_000
MOST_DEPTH = 8

Plain: TypeAlias = "str | list[Plain] | dict[str, Plain] | None"
"""A YAML value: the text that was written, without quotes; None: the key has no value."""
Parsed = TypeVar("Parsed")


def read_job_file(source: Path | str) -> tuple[JobRequest, ...]:
    """The jobs of a job file: a Path is a file, a str is the text itself."""
    return read_draft(source).requests()


def read_draft(source: Path | str) -> JobDraft:
    """The draft that a job file describes. A relative `cwd` or `venv` is relative to the file's folder."""
    if isinstance(source, str):
        text, file, base = source, "job", Path()
    else:
        text, file, base = read_text(source), str(source), source.parent
    root = _composed(text, file)
    reader = _YamlReader(file)
    document = reader.value(root)
    if not isinstance(document, dict):
        at = Where(file, root.start_mark.line + 1)
        raise RequestError(f"{at}: expected keys such as `run` and `gpus`; that is no job file")
    return _JobFile(DraftSource(file, reader.lines), base).draft(document)


def read_text(path: Path, kind: str = "job file") -> str:
    """The text of a file that a person wrote, of bounded size; `kind` says in the error what a larger one cannot be."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RequestError(f"{path}: larger than {MOST_BYTES >> 10} KiB; that is no {kind}")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path}: not UTF-8 text") from None


# Values

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B|[KMGT]i|B)?")
_COUNT = re.compile(r"([0-9]+)(?:\.\.([0-9]+))?")
VOLUME_KINDS = ("claim", "secret", "config")
_VOLUME = re.compile(rf"(?:({'|'.join(VOLUME_KINDS)}):)?([a-z0-9][a-z0-9.-]*):(/[^:]*)(?::(ro))?")
_NONE = ("none", "no", "false", "off")
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_gang(text: str) -> dict[str, int | None]:
    """The fields `gpus`, `min_gpus` and `max_gpus` of a request from `4`, or `1..4` for an elastic job, or ValueError."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a number of GPUs such as 4, or 1..4 for an elastic job, got {text!r}")
    least = parse_gpu_count(match[1], text)
    if match[2] is None:
        return {"gpus": least, "min_gpus": None, "max_gpus": None}
    most = parse_gpu_count(match[2], text)
    if not 1 <= least <= most:
        raise ValueError(f"expected the lower number first and at least 1, got {text!r}")
    return {"gpus": most, "min_gpus": least, "max_gpus": most}


def parse_gpu_count(digits: str, text: str) -> int:
    """A number of GPUs that a job may have; ValueError shows `text`. Python refuses to parse very many digits."""
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(MOST_GPUS)) or int(digits) > MOST_GPUS:
        raise ValueError(f"expected at most {MOST_GPUS:,} GPUs, got {text[:40]!r}")
    return int(digits)


def parse_bytes(text: str) -> int:
    """Bytes from `8GB` (8·10⁹), `8GiB` or `8Gi` (8·2³⁰) or a plain number; raises ValueError on anything else."""
    match = _BYTES.fullmatch(text)
    if match is None or len(text) > 40:
        raise ValueError(f"expected a size such as 8GB or 512MiB, got {text[:40]!r}")
    unit = (match[2] or "B").upper()
    return round(float(match[1]) * (1024.0 if "I" in unit else 1000.0) ** "BKMGT".index(unit[0]))


def parse_memory(text: str) -> int:
    """Bytes of memory that a pod asks for; ValueError also if they are so few that a unit was forgotten."""
    found = parse_bytes(text)
    if found < LEAST_MEMORY:
        raise ValueError(f"{text} is {found:,} bytes; expected at least 1MiB, such as 64GiB")
    return found


def parse_volume(text: str) -> dict[str, Any]:
    """The fields of a volume from `[claim:|secret:|config:]NAME:/PATH[:ro]`; raises ValueError on anything else."""
    match = _VOLUME.fullmatch(text)
    kind, name, _ = f"{text}::".split(":", 2)
    if match is None and kind not in VOLUME_KINDS and name and not name.startswith("/"):
        raise ValueError(f"{kind[:60]!r} is no kind of volume; expected claim, secret or config")
    if match is None:
        raise ValueError(f"expected a volume such as datasets:/data or secret:wandb:/secrets:ro, got {text[:60]!r}")
    return {"kind": match[1] or "claim", "name": match[2], "path": match[3], "read_only": match[4] is not None}


def _parse_whole(text: str) -> int:
    if not re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        raise ValueError(f"expected a whole number, got {text[:40]!r}")
    return int(text)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text[:40]!r}") from None


def _parse_truth(text: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise ValueError(f"expected true or false, got {text[:40]!r}")
    return _TRUTHS[text.lower()]


def _parse_names(text: str) -> str:
    """What is exported, without values: those belong into `env`."""
    export, given = parse_export(text)
    if given:
        raise ValueError(f"put {next(iter(given))} into `env`, with its value; here are `all`, `none`, or names")
    return export


# Keys

_PARSERS: dict[str, Callable[[str], Any]] = {
    "name": str, "tenant": str, "app": str, "model": str, "preemption": str, "replicas": str,
    "batch_size": _parse_whole, "micro_batches": _parse_whole, "priority": _parse_whole,
    "steps": _parse_number, "weight": _parse_number, "hold": _parse_truth, "image": str, "export": _parse_names,
    "duration": parse_seconds, "max_duration": parse_seconds, "begin": moment_from_now, "deadline": moment_from_now,
}  # fmt: skip
_PARTS: dict[str, dict[str, Callable[[str], Any]]] = {
    "checkpoint": {"every": parse_seconds, "deadline": parse_seconds, "url": str},
    "retry": {"on_errors": _parse_whole, "exit_codes": _parse_whole},
    "limits": {
        "memory": parse_bytes, "cpu_seconds": lambda text: round(parse_seconds(text)),
        "open_files": _parse_whole, "processes": _parse_whole,
    },
    "pod": {
        "cpu": _parse_number, "memory": parse_memory, "volumes": parse_volume, "service_account": str, "user": _parse_whole,
        "pull_secrets": str,
    },
}  # fmt: skip
_LISTS = ("retry.exit_codes", "pod.volumes", "pod.pull_secrets")
_GPU_KEYS = ("count", "any_of", "in_order", "memory")
KEYS = ("run", "setup", "gpus", "env", "cwd", "venv", "array", "sweep", "after", *_PARSERS, *_PARTS)
"""Every key that a job file may have."""


class _JobFile:
    """Reads the keys of one file. Errors name the key by its path: `checkpoint.every`."""

    def __init__(self, source: DraftSource, base: Path) -> None:
        self._source = source
        self._base = base

    def draft(self, document: dict[str, Plain]) -> JobDraft:
        """The draft of the whole file."""
        self._check_keys(document, KEYS, None)
        fields: dict[str, Any] = {}
        for key, value in document.items():
            if key == "export" and isinstance(value, list):
                fields[key] = self._parsed(key, ",".join(self._items(key, value, str)), _parse_names)
            elif key in _PARSERS:
                fields[key] = self._parsed(key, value, _PARSERS[key])
            elif key in _PARTS:
                fields[key] = self._part(key, value)
            elif key == "gpus":
                fields |= self._gpus(value)
            elif key == "after":
                fields[key] = self._items(key, value, str)
            elif key == "venv" and isinstance(value, str) and value.lower() in _NONE:
                fields[key] = None
            elif key in ("cwd", "venv"):
                fields[key] = self._parsed(key, value, lambda text: draft.parse_folder(text, self._base))
        run, setup = (self._command(key, document[key]) if key in document else () for key in ("run", "setup"))
        env = self._keys("env", document["env"]) if "env" in document else {}
        variables = {name: self._parsed(f"env.{name}", value, str) for name, value in env.items()}
        array = self._array(document)
        if array.cap is not None:
            fields["array_cap"] = array.cap
        return JobDraft(run, setup, variables, fields, array.variants, self._source)

    def _part(self, key: str, value: Plain) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, each in self._keys(key, value, _PARTS[key]).items():
            path, parse = f"{key}.{name}", _PARTS[key][name]
            found[name] = (self._items if path in _LISTS else self._parsed)(path, each, parse)
        return found

    def _gpus(self, value: Plain) -> dict[str, Any]:
        """`4`, `1..4`, or keys: how many, and of which types."""
        if not isinstance(value, dict | list):
            return self._parsed("gpus", value, parse_gang)
        found = self._keys("gpus", value, _GPU_KEYS)
        for key in ("in_order", "memory"):
            if key in found:
                raise self._source.error(f"gpus.{key}", "is not supported yet; name the types with any_of")
        fields: dict[str, Any] = self._parsed("gpus.count", found["count"], parse_gang) if "count" in found else {}
        if "any_of" in found:
            fields["gpu_types"] = self._items("gpus.any_of", found["any_of"], str)
            if not fields["gpu_types"]:
                raise self._source.error("gpus.any_of", "expected at least one GPU type; leave it out for any")
        return fields

    def _command(self, key: str, value: Plain) -> tuple[Word, ...]:
        """A line that is split into words, or a list of them."""
        if isinstance(value, list):
            return draft.literal_words(self._items(key, value, str))
        return self._parsed(key, value, draft.parse_words)

    def _array(self, document: Mapping[str, Plain]) -> Array:
        """The jobs of an array or a sweep."""
        if {"array", "sweep"} <= document.keys():
            problem = "a job is an array or a sweep, not both; give the index as one more variable of the sweep"
            raise self._source.error("array", problem)
        if "array" in document:
            value = document["array"]
            listed = ",".join(self._items("array", value, str)) if isinstance(value, list) else value
            return self._parsed("array", listed, draft.parse_array)
        if "sweep" not in document:
            return Array((), None)
        found = self._keys("sweep", document["sweep"])
        try:
            values = {name: self._items(f"sweep.{name}", each, str) for name, each in found.items()}
            return Array(draft.sweep_of(values), None)
        except ValueError as error:
            raise self._source.error("sweep", str(error)) from None

    def _parsed(self, key: str, value: Plain, parse: Callable[[str], Parsed], line: int | None = None) -> Parsed:
        """A single value, which must be there."""
        if isinstance(value, list | dict):
            got = "a list" if isinstance(value, list) else "keys"
            raise self._source.error(key, f"expected a single value, got {got}", line)
        if value is None:
            raise self._source.error(key, "has no value; give one, or leave the key out", line)
        try:
            return parse(value)
        except ValueError as error:
            raise self._source.error(key, str(error), line) from None

    def _items(self, key: str, value: Plain, parse: Callable[[str], Parsed]) -> tuple[Parsed, ...]:
        """A list, or the single value that stands for a list of one."""
        if isinstance(value, dict):
            raise self._source.error(key, "expected a list, got keys")
        if not isinstance(value, list):
            return (self._parsed(key, value, parse),)
        lines = (self._source.lines.get(f"{key}.{place}") for place in range(len(value)))
        return tuple(self._parsed(key, each, parse, line) for each, line in zip(value, lines, strict=True))

    def _keys(self, key: str, value: Plain, known: Iterable[str] | None = None) -> dict[str, Plain]:
        """A mapping; `known` are the keys that it may have, None: any."""
        if not isinstance(value, dict):
            got = "a list" if isinstance(value, list) else f"a single value, {self._parsed(key, value, str)[:40]!r}"
            raise self._source.error(key, f"expected keys with values, got {got}")
        if known is not None:
            self._check_keys(value, known, key)
        return value

    def _check_keys(self, found: Iterable[str], known: Iterable[str], path: str | None) -> None:
        for key in found:
            if key not in known:
                line = self._source.lines[f"{path}.{key}" if path else key]
                raise self._source.error(path, str(UnknownNameError("key", key, known)), line)


# YAML

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "value")}
_COLLECTION_TAGS = {_TAG + "seq", _TAG + "map"}


def _composed(text: str, file: str) -> Any:  # noqa: ANN401 - PyYAML has no types
    """The root node of the one document that this text is."""
    line = None
    try:
        if len(text) > MOST_BYTES:
            problem = f"larger than {MOST_BYTES >> 10} KiB; that is no job file"
        elif (node := yaml.compose(text, yaml.SafeLoader)) is not None:
            return node
        else:
            problem = "is empty; expected keys such as `run` and `gpus`"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        said = error.problem or ""
        whole = f"{error.context or ''} {said}" if said.startswith("but ") or not said else said
        problem = f"not YAML: {whole.strip()}"
    except yaml.reader.ReaderError as error:
        problem = unreadable(error)
    except yaml.YAMLError as error:
        problem = f"not YAML: {' '.join(str(error).split())}"
    except RecursionError:
        problem = "nested too deeply; that is no job file"
    raise RequestError(f"{Where(file, line)}: {problem}")


class _YamlReader:
    """Turns the nodes of a document into plain values, and notes the line of each key and item by its path."""

    def __init__(self, file: str) -> None:
        self.lines: dict[str, int] = {}
        self._file = file
        self._left = MOST_VALUES

    def value(self, node: yaml.Node, path: str = "", depth: int = 0) -> Plain:
        """A node and all that is below it."""
        self._left -= 1
        if self._left < 0:
            raise self._error(node, f"more than {MOST_VALUES:,} values, aliases counted; that is no job file")
        if depth > MOST_DEPTH:
            raise self._error(node, "nested too deeply; that is no job file")
        if node.tag not in (_SCALAR_TAGS if isinstance(node, yaml.ScalarNode) else _COLLECTION_TAGS):
            raise self._error(node, f"the tag {node.tag!r} has no meaning here")
        if isinstance(node, yaml.ScalarNode):
            return None if node.tag == _TAG + "null" else node.value
        if isinstance(node, yaml.MappingNode):
            return self._keys(node, path, depth)
        paths = [f"{path}.{place}" for place in range(len(node.value))]
        self.lines |= {each: item.start_mark.line + 1 for each, item in zip(paths, node.value, strict=True)}
        return [self.value(item, each, depth + 1) for each, item in zip(paths, node.value, strict=True)]

    def _keys(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Plain]:
        found: dict[str, Plain] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key must be a word")
            below = f"{path}.{key.value}" if path else key.value
            if key.value in found:
                raise self._error(key, f"the key {key.value!r} stands in line {self.lines[below]} already")
            self.lines[below] = key.start_mark.line + 1
            found[key.value] = self.value(value, below, depth + 1)
        return found

    def _error(self, node: yaml.Node, problem: str) -> RequestError:
        return RequestError(f"{Where(self._file, node.start_mark.line + 1)}: {problem}")
