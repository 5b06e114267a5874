"""A job as it was written down, before it is a request: options may still override it, and it may stand for many jobs.

`JobDraft.requests` is the one way from words to requests, for job files, `#SBATCH` scripts, command lines and Python alike.
Below it: arrays and sweeps (the variants of a draft), and commands (`run: python train.py --lr ${LR}`), which are split into
arguments here and in which `${NAME}` is replaced by the variables of each job.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from poise.scheduler.model.errors import RequestError, UnknownNameError, Where
from poise.service.wire.request import MOST_JOBS, JobRequest, first_problem

ARRAY_INDEX, ARRAY_COUNT = "ARRAY_INDEX", "ARRAY_COUNT"
LONGEST_NAME = 64
KEY_SHOWN = 4  # characters of a submission's key in the name of an app
KEY_OF = {"command": "run", "min_gpus": "gpus", "max_gpus": "gpus", "gpu_types": "gpus", "array_cap": "array"}
"""Fields of a request that a job file calls otherwise."""

_INDICES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")

Variant = Mapping[str, str]  # the variables that one job of many has in addition to those of the draft


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a variable. `otherwise`: the text if the variable is not set; None: that is an error."""

    name: str
    otherwise: str | None = None


Word = tuple[str | Slot, ...]  # one argument of a command: text and variables, to be joined


@dataclass(frozen=True, slots=True)
class DraftSource:
    """Where a draft was written down, and the line of each key (`gpus`, `gpus.count`), so that errors can name it."""

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, key: str | None, problem: str, line: int | None = None) -> RequestError:
        """An error that names file, line and key; `line` where it is not the line of the key."""
        if self.file is None:
            return RequestError(f"{key}: {problem}" if key else problem)
        return RequestError(f"{Where(self.file, line or self.lines.get(key or ''), key)}: {problem}")


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job, or a family of jobs that differ in their environments."""

    command: tuple[Word, ...] = ()
    setup: tuple[Word, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)  # those given of a JobRequest, besides the three above
    variants: tuple[Variant, ...] = ()  # one for each job of an array or a sweep; empty: a single job
    source: DraftSource = DraftSource()
    notes: tuple[str, ...] = ()  # what its author should know, such as options that mean nothing here

    @classmethod
    def of(cls, request: JobRequest) -> Self:
        """A request as a draft, so that it can become many."""
        fields = {name: getattr(request, name) for name in request.model_fields_set - {"command", "setup", "env"}}
        return cls(literal_words(request.command), literal_words(request.setup), request.env, fields)

    def overridden(self, fields: Mapping[str, Any], env: Mapping[str, str]) -> Self:
        """The draft with these fields and variables instead; fields that have parts are merged part by part."""
        merged = {
            name: {**self.fields.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in fields.items()
        }
        # What an option set is not the fault of the file's line.
        changed = {KEY_OF.get(name, name) for name in fields}
        source = replace(self.source, lines={key: line for key, line in self.source.lines.items() if key not in changed})
        return replace(self, fields={**self.fields, **merged}, env={**self.env, **env}, source=source)

    def requests(self, key: str = "") -> tuple[JobRequest, ...]:
        """One request, or one for each variant; RequestError says what is wrong, and where.

        key   of the submission: distinguishes unnamed apps that run the same script
        """
        if not self.command:
            raise self.source.error("run", "is missing; it says what to run, e.g. `run: python train.py`")
        if not self.variants:
            return (self._request(self.env, self.fields),)
        twice = next((name for name in self.variants[0] if name in self.env), None)
        if twice is not None:
            raise self.source.error("env", f"{twice} is set for each job of the array or sweep; leave it out here")
        requests = []
        for place, variant in enumerate(self.variants):
            env = {**self.env, **variant}
            name = self.fields.get("name")
            fields = {**self.fields, "app": self.fields.get("app") or name or self._app_name(env, key)}
            if self.fields.get("array_cap") is not None and key:
                fields["array"] = self.fields.get("array") or clean_name(
                    key
                )  # that of another submission has a cap of its own
            if isinstance(name, str):
                suffix = f"-{variant.get(ARRAY_INDEX, place)}"
                fields["name"] = name[: LONGEST_NAME - len(suffix)] + suffix
            requests.append(self._request(env, fields))
        return tuple(requests)

    def _app_name(self, env: Mapping[str, str], key: str) -> str:
        """Name an app after its script or program, and the submission, if its owner gave it no name."""
        words = fill(self.command, env)
        script = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
        suffix = f"-{key[:KEY_SHOWN]}" if key else ""
        return clean_name(re.sub(r"\.(py|sh)$", "", script.rsplit("/", 1)[-1]))[: LONGEST_NAME - len(suffix)] + suffix

    def _request(self, env: Mapping[str, str], fields: Mapping[str, Any]) -> JobRequest:
        given = {**fields, "env": dict(env)}
        for name, words in (("command", self.command), ("setup", self.setup)):
            try:
                given[name] = fill(words, env)
            except ValueError as error:
                raise self.source.error(KEY_OF.get(name, name), str(error)) from None
        try:
            return JobRequest.model_validate(given)
        except ValidationError as error:
            field_name, problem = first_problem(error)
            key = KEY_OF.get(field_name or "", field_name) if self.source.file else field_name
            raise self.source.error(key, problem) from None


def clean_name(text: str) -> str:
    """The nearest allowed name."""
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]", "-", text))[:LONGEST_NAME] or "job"


class Array(NamedTuple):
    """An array: its jobs, and how many of them may hold GPUs at once; None: as many as there are."""

    variants: tuple[Variant, ...]
    cap: int | None


def parse_array(text: str) -> Array:
    """An array from `10` (indices 0 to 9), `0-99`, `0-99:2` or `1,3,7`, each also with a cap, as `0-99%10`.

    Each job knows its index and the number of jobs. ValueError: that is none, or too many.
    """
    listed, cap = _split_cap(text)
    if not re.fullmatch(r"[0-9]{1,9}", listed):
        return Array(_indexed(parse_indices(listed)), cap)
    count = int(listed)
    if count < 1:
        raise ValueError(f"expected at least 1 job, got {count}")
    _check_jobs(count)
    return Array(_indexed(range(count)), cap)


def parse_slurm_array(text: str) -> Array:
    """An array as Slurm reads it: a single number is an index."""
    listed, cap = _split_cap(text)
    return Array(_indexed(parse_indices(listed)), cap)


def parse_indices(text: str) -> list[int]:
    """Indices from `0-9`, `1,3,5` or `0-15:4`, in order and each once; ValueError says what is expected."""
    found: set[int] = set()
    for part in text.split(","):
        match = _INDICES.fullmatch(part.strip())
        if match is None or (match[3] and int(match[3]) < 1) or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"expected indices such as 0-9, 1,3,5 or 0-15:4, got {text[:40]!r}")
        indices = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        if len(indices) + len(found) > MOST_JOBS:
            raise ValueError(f"more than the {MOST_JOBS:,} jobs that one submission may have; divide it")
        found.update(indices)
    return sorted(found)


def _split_cap(text: str) -> tuple[str, int | None]:
    listed, percent, cap = text.strip().partition("%")
    if not percent:
        return listed, None
    if not re.fullmatch(r"[0-9]{1,9}", cap) or not 1 <= int(cap) <= MOST_JOBS:
        raise ValueError(f"after % expected how many of its jobs may hold GPUs at once, such as 0-99%10, got {text[:40]!r}")
    return listed, int(cap)


def _indexed(indices: Sequence[int]) -> tuple[Variant, ...]:
    return tuple({ARRAY_INDEX: str(index), ARRAY_COUNT: str(len(indices))} for index in indices)


def sweep_of(values: Mapping[str, Sequence[str]]) -> tuple[Variant, ...]:
    """Every combination of values; the last variable changes fastest. ValueError: none, or too many."""
    empty = next((name for name, each in values.items() if not each), None)
    if empty is not None or not values:
        raise ValueError(f"{f'{empty} has no values' if empty else 'nothing to vary'}; e.g. LR: [0.1, 0.01]")
    _check_jobs(prod(len(each) for each in values.values()))
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))


def _check_jobs(jobs: int) -> None:
    if jobs > MOST_JOBS:
        raise ValueError(f"{jobs:,} jobs are more than the {MOST_JOBS:,} that one submission may have; divide them")


# Folders


def current_folder() -> Path:
    """The current folder; RequestError if it was deleted."""
    try:
        return Path.cwd()
    except OSError:
        raise RequestError("the current folder is not there any more; go to another one") from None


def parse_folder(text: str, base: Path = Path()) -> str:
    """The absolute path of a folder, relative to `base` or a home (`~`, `~ann`); ValueError: no such home."""
    try:
        path = base / Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home folder {text[:40]!r}") from None
    return str(path if path.is_absolute() else current_folder() / path)


# Commands that people write in one line, as argument lists. No shell is involved, ever.
#
# Words are split and quoted as in a shell, and `${NAME}` stands for a variable of the job, replaced once and never split
# again. Everything else that only a shell understands is refused with a hint: passed on as plain text it would do something
# else than its author meant.

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SET_AT_RUN_TIME = re.compile(r"POISE_\w+|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_TOKEN = re.compile(
    r"(?P<blank>[ \t]+|\\\n)"  # a backslash at the end of a line continues the line
    r"|'(?P<single>[^']*)'"
    r'|"(?P<double>(?:[^"\\]|\\.)*)"'
    r"|\\(?P<escaped>.)"
    r"|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}"
    r"|(?P<shell>&&|\|\||>>|<<|\$\(|[|&;<>()`*?])"
    r"|(?P<refused>[\n\r$'\"\\])"
    r"|(?P<plain>.)",
    re.DOTALL,
)
_TOKEN_IN_DOUBLE_QUOTES = re.compile(
    r'\\(?P<escaped>[$`"\\])|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<shell>`|\$\()|(?P<refused>\$)|(?P<plain>.)',
    re.DOTALL,
)
_SEVERAL_LINES = "it has several lines, and only a shell runs those; put them into a script and run that"
_REFUSALS = {
    "\n": _SEVERAL_LINES,
    "\r": _SEVERAL_LINES,
    "$": "after `$` only ${NAME} is understood; write '$' in single quotes to mean the letter",
    "'": "a single quote is not closed",
    '"': "a double quote is not closed",
    "\\": "it ends with a backslash",
}


def parse_words(text: str) -> tuple[Word, ...]:
    """A command written in one line; ValueError says what only a shell would understand, and what to do instead."""
    text = text.strip()
    if assignment := _ASSIGNMENT.match(text):
        raise ValueError(f"`{assignment[0]}` before the program is for a shell; put {assignment[1]} into `env`")
    words: list[list[str | Slot]] = []
    is_inside = False
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "blank":
            is_inside = is_inside and token[0] == "\\\n"
            continue
        if not is_inside:
            if token[0] in ("~", "#"):
                raise _only_for_a_shell(token[0])
            words.append([])
            is_inside = True
        parts = _TOKEN_IN_DOUBLE_QUOTES.finditer(token["double"]) if token.lastgroup == "double" else [token]
        words[-1] += map(_piece, parts)
    return tuple(map(tuple, words))


def _piece(token: re.Match[str]) -> str | Slot:
    kind = token.lastgroup or ""
    if kind == "name":
        return Slot(token[kind])
    if kind == "shell":
        raise _only_for_a_shell(token[kind])
    if kind == "refused":
        raise ValueError(_REFUSALS[token[kind]])
    return token[kind]


def _only_for_a_shell(syntax: str) -> ValueError:
    return ValueError(
        f"{syntax!r} is for a shell, and no shell sees a command; put it into a script and run that, or quote it"
    )


def literal_words(arguments: Iterable[str]) -> tuple[Word, ...]:
    """A command that is a list already: each argument is kept, except that variables which the job sets are replaced."""
    return tuple(
        # Every second part of the split is a name.
        tuple(Slot(part, f"${{{part}}}") if place % 2 else part for place, part in enumerate(_VARIABLE.split(argument)))
        for argument in arguments
    )


def fill(words: Iterable[Word], env: Mapping[str, str]) -> tuple[str, ...]:
    """The argument list for these variables; ValueError names one that is not set."""
    return tuple("".join(each if isinstance(each, str) else _value(each, env) for each in word) for word in words)


def _value(slot: Slot, env: Mapping[str, str]) -> str:
    found = env.get(slot.name, slot.otherwise)
    if found is not None:
        return found
    if _SET_AT_RUN_TIME.fullmatch(slot.name):
        raise ValueError(f"${{{slot.name}}} is set where the job runs: let the program read it from its environment")
    if not env:
        raise ValueError(f"${{{slot.name}}} is not set; give it in `env`")
    raise ValueError(str(UnknownNameError("variable", slot.name, env)))
