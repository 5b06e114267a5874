"""The journal: everything that a core was told and asked for, as text. One JSON document per line, the same bytes per run.

    {"journal": 2, "trace": ..., "policy": ..., "settings": {...}, "nodes": [...]}     header: what the core was built from
    [now, [[event, field, ...], ...], [[action, field, ...], ...]]                      one entry per timestamp
    {"end": "complete"}                                                                 or "interrupted"; missing: cut off

Events and actions are lists: the name of the class in lower case, then its fields in order. A job is an object of the fields
that differ from their defaults. An infinite time or amount is written as null, because JSON has no infinity.

Read this file in five parts: the header; writing lines; reading lines, by readers derived from the annotations of events
and actions; versions, how earlier ones are migrated and how much of later ones is read; and journals in files.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from math import inf
from operator import attrgetter
from pathlib import Path
from sys import float_info
from typing import IO, Any, TypeVar, get_args, get_origin, get_type_hints

from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.model import action as actions
from poise.scheduler.model import event as events
from poise.scheduler.model.action import JournalEntry, Waited
from poise.scheduler.model.cluster import MOST_GPUS, Cluster, Node, Slots, populated
from poise.scheduler.model.errors import JournalError, RequestError
from poise.scheduler.model.job import Job
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate, Rates
from poise.scheduler.model.workload import Filling

Read = TypeVar("Read")

VERSION = 2
"""Goes up whenever an event, an action, a job or the header gets other fields; `MIGRATIONS` then gets a step.

It does not for a new kind of event or action, nor for a new word of an enumeration: an earlier Poise refuses it by name. Nor
does it for a new field of a job with a default, such as `unit`: jobs without it are written as before, and an earlier Poise
refuses one that has it by the field's name.
"""
LIVE = "live"  # in the place of a trace: the journal of a live service, whose cluster may have no nodes yet
COMPLETE, INTERRUPTED = "complete", "interrupted"


@dataclass(frozen=True, slots=True)
class Header:
    """What the core was built from: enough to build it again for replay."""

    trace: str
    cluster: Cluster
    policy: str
    placement: str
    settings: Settings
    seed: int


# Writing

_EVENTS = {kind.__name__.lower(): kind for kind in events.Event.__args__}
_ACTIONS = {kind.__name__.lower(): kind for kind in actions.Action.__args__}
_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in (*_EVENTS.values(), *_ACTIONS.values())}
_NAMES = {kind: name for name, kind in (*_EVENTS.items(), *_ACTIONS.items())}
_JOB_DEFAULTS = {each.name: each.default for each in fields(Job)}
_job_fields = attrgetter(*_JOB_DEFAULTS)
_BY_TYPE = ("speeds", "prices")
"""Fields of a cluster that the header holds by GPU type, and leaves out where they are empty."""


def header_line(header: Header) -> str:
    """The first line of a journal."""
    return _line(
        {
            "journal": VERSION,
            "trace": header.trace,
            "policy": header.policy,
            "placement": header.placement,
            "seed": header.seed,
            "settings": asdict(header.settings),
            "nodes": [[node.name, node.gpu_type, node.gpus, node.rack] for node in header.cluster.nodes],
        }
        | {name: each for name in _BY_TYPE if (each := getattr(header.cluster, name))}
    )


def entry_line(entry: JournalEntry) -> str:
    """One entry as a line."""
    return _line([entry.now, [*map(_encoded, entry.events)], [*map(_encoded, entry.actions)]])


def job_line(job: Job) -> str:
    """A job as a line."""
    return _line(_plain(job))


def action_text(action: actions.Action) -> str:
    """An action as it stands in an entry."""
    return _line(_encoded(action))


def end_line(end: str) -> str:
    """The last line of a journal."""
    return _line({"end": end})


def _line(document: object) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _encoded(thing: events.Event | actions.Action) -> list[Any]:
    kind = type(thing)
    return [_NAMES[kind], *(_plain(getattr(thing, name)) for name in _FIELDS[kind])]


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field of an event or an action
    """A value as JSON knows it. Most have this form already: tuples are written as lists, enumerations as text."""
    match value:
        case Job():
            stated = zip(_JOB_DEFAULTS.items(), _job_fields(value), strict=True)
            return {name: each for (name, default), each in stated if each != default}
        case Estimate(rates, skew, others, None):  # what most estimates do not have is left out at the end
            return [rates, skew, *([others] if others else [])]
        case Estimate(rates, skew, others, Tasks(count, seconds, syncs, gang)):
            return [rates, skew, others, [count, seconds, [[*map(_plain, row)] for row in syncs], gang]]
        case float() if value == inf:
            return None
        case _:
            return value


# Reading. A journal may come from anywhere, so that every value is checked: a reader returns a value of its type, or raises
# one of the errors in `MALFORMED`.

MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, RequestError)
"""What the readers raise for a document that is not part of a journal."""
_MOST = float_info.max


def read_header(line: str) -> Header:
    """Read what `header_line` wrote; raises JournalError for anything else."""
    return _read("a header", lambda: _header(_parsed(line)))


def read_entry(line: str, last: float = -inf, but: frozenset[str] = frozenset()) -> JournalEntry:
    """Read what `entry_line` wrote; raises JournalError for anything else, and for an entry earlier than `last`.

    Events whose names are in `but` are left out, and not checked.
    """
    return _read("an entry", lambda: _entry(_parsed(line), last, but))


def read_job(line: str) -> Job:
    """Read what `job_line` wrote; raises JournalError for anything else."""
    return _read("a job", lambda: _job(_parsed(line)))


def _read(what: str, read: Callable[[], Read]) -> Read:
    try:
        return read()
    except (*MALFORMED, RecursionError) as error:
        raise JournalError(f"not {what} of a journal: {error}") from None


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


_parsed = json.JSONDecoder(parse_constant=_no_number).decode
"""The document in a line; raises ValueError or RecursionError if it is not JSON. NaN and Infinity are not."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.60}")
    return value


def _whole(value: Any) -> int:  # noqa: ANN401
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r:.60}")
    return value


def _index(value: Any) -> int:  # noqa: ANN401
    """A node, or slots as a mask. A negative number would silently count from the other end of a list."""
    index = _whole(value)
    if index < 0:
        raise ValueError(f"expected a whole number of at least 0, got {index}")
    return index


def _closed(value: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Slots of a node, ascending. Each becomes a bit of a mask, so that a huge number would fill the memory."""
    slots = tuple(map(_index, value))
    if any(slot >= MOST_GPUS for slot in slots) or list(slots) != sorted(set(slots)):
        raise ValueError(f"expected slots of a node, ascending, got {value!r:.60}")
    return slots


def _number(value: Any) -> float:  # noqa: ANN401
    # JSON's whole numbers may be larger than any float; such a one must not raise OverflowError later.
    if not isinstance(value, (float, int)) or isinstance(value, bool) or not -_MOST <= value <= _MOST:
        raise TypeError(f"expected a finite number, got {value!r:.60}")
    return value


def _or_inf(value: float | None) -> float:
    return inf if value is None else _number(value)


def _flag(value: Any) -> bool:  # noqa: ANN401
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {value!r:.60}")
    return value


_READERS: dict[Any, Callable[[Any], Any]] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _flag,
    Slots: lambda value: Slots(*map(_index, value)),
    Waited: lambda value: Waited(*map(_number, value)),
    Job: lambda value: _job(value),
    Estimate: lambda value: _estimate(*value),
}


def _reader(of: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - any annotation of a field
    """How a value of an annotated type is read: one above, an enumeration, or a union with None or a tuple of such."""
    if of in _READERS:
        return _READERS[of]
    parts = get_args(of)
    if not parts:
        return of if issubclass(of, StrEnum) else _READERS[of]
    first = _reader(parts[0])
    if get_origin(of) is not tuple:
        return lambda value: None if value is None else first(value)
    if parts[1] is ...:
        return lambda value: tuple(map(first, value))
    readers = tuple(map(_reader, parts))
    return lambda value: tuple([read(each) for read, each in zip(readers, value, strict=True)])


def _job(value: dict[str, Any]) -> Job:
    return Job(**{name: _JOB_READERS[name](each) for name, each in value.items()})


def _estimate(
    rates: list[Any], skew: float | None, others: list[Any] | None = None, tasks: list[Any] | None = None
) -> Estimate:
    divided = None
    if tasks is not None:
        count, seconds, syncs, gang = tasks
        waits = tuple((_or_inf(packed), _or_inf(rack), _or_inf(cluster)) for packed, rack, cluster in syncs)
        divided = Tasks(_whole(count), tuple(map(_number, seconds)), waits, _whole(gang))
    return Estimate(_rates(rates), None if skew is None else _number(skew), _other_rates(others or ()), divided)


_rates, _other_rates = _reader(Rates), _reader(tuple[tuple[int, Rates], ...])
_JOB_READERS = {name: _reader(of) for name, of in get_type_hints(Job).items()}
_SPECIAL_READERS: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (events.Submitted, "steps"): _or_inf,
    (events.Carried, "steps"): _or_inf,
    (events.NodeLost, "node"): _index,
    (events.NodeReturned, "node"): _index,
    (events.NodeRestricted, "node"): _index,
    (events.NodeRestricted, "closed"): _closed,
    (actions.WakeAt, "time"): _or_inf,
}
_FIELD_READERS = {
    kind: [_SPECIAL_READERS.get((kind, name)) or _reader(of) for name, of in get_type_hints(kind).items()]
    for kind in _FIELDS
}


def _decoded(kinds: dict[str, Any], document: list[Any]) -> Any:  # noqa: ANN401 - an Event or an Action
    name, *values = document
    kind = kinds[name]
    return kind(*(read(value) for read, value in zip(_FIELD_READERS[kind], values, strict=True)))


def _entry(document: Any, last: float, but: frozenset[str] = frozenset()) -> JournalEntry:  # noqa: ANN401
    """The entry in a document of this version, no earlier than `last`."""
    now, happened, asked = document
    if not last <= now < inf:
        raise ValueError(f"expected a time not before {last}, got {now}")
    return JournalEntry(
        float(now),
        tuple(_decoded(_EVENTS, event) for event in happened if event[0] not in but),
        tuple(_decoded(_ACTIONS, action) for action in asked),
    )


_CHOICES: dict[str, tuple[Callable[[str], StrEnum], str]] = {
    "cadence": (Cadence, ""),
    "retry": (RetryRule, RetryRule.COUNT),
    "filling": (Filling, Filling.BY_TYPE),
}
"""Settings that are enumerations: how they are read, and what journals mean that were written before there was a choice."""


def _header(document: dict[str, Any]) -> Header:
    settings = document["settings"]
    choices = {name: read(settings.get(name, before)) for name, (read, before) in _CHOICES.items()}
    nodes = []
    for name, gpu_type, gpus, rack in document["nodes"]:
        if not isinstance(gpus, int) or gpus > MOST_GPUS:
            raise ValueError(f"expected a number of GPUs, got {gpus!r}")
        nodes.append(Node(_text(name), _text(gpu_type), gpus, _text(rack)))
    by_type = [{_text(kind): float(each) for kind, each in document.get(name, {}).items()} for name in _BY_TYPE]
    trace, cluster = _text(document["trace"]), Cluster(tuple(nodes), *by_type)
    return Header(
        trace,
        cluster if trace == LIVE else populated(cluster),
        _text(document["policy"]),
        _text(document["placement"]),
        Settings(**{**settings, **choices}),
        document["seed"],
    )


# Versions.
#
# 1   jobs are `steadfast` or not; a `carried` event may lack its last fields
# 2   jobs say when they yield; a `carried` event says since when it is attached, and until when it backs off
#
# When anything that a journal holds gets other fields, `VERSION` goes up by one and `MIGRATIONS` gets a step from the
# version before. A step works on JSON documents, because classes only know the current version, and leaves alone what it
# does not know. Once released it is never changed. Headers have the same fields in all versions, so no step is about them.

Document = Any
"""What a line holds as JSON. Steps do not check it: the readers do, afterwards."""
_CARRIED = 13
"""Length of a `carried` event, its name included, in version 2."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A step from one version to the next, for an entry and for a job that is stored by itself."""

    entry: Callable[[Document], Document]
    job: Callable[[Document], Document]


def _job_to_2(job: Document) -> Document:
    """A steadfast job never yields; any other one does at any time."""
    if not isinstance(job, dict) or "steadfast" not in job:
        return job
    rest = {name: value for name, value in job.items() if name != "steadfast"}
    return rest | {"yields": "never"} if job["steadfast"] else rest


def _entry_to_2(entry: Document) -> Document:
    now, happened, asked = entry
    migrated = []
    for event in happened:
        if isinstance(event, list) and event[:1] in (["submitted"], ["carried"]):
            name, job, *rest = event
            missing = _CARRIED - len(event) if name == "carried" else 0
            migrated.append([name, _job_to_2(job), *rest, *[None] * missing])
        else:
            migrated.append(event)
    return [now, migrated, asked]


MIGRATIONS = {1: Migration(entry=_entry_to_2, job=_job_to_2)}
"""By the version that a step starts from."""


def migrate_entry(version: int, document: Document) -> Document:
    """The document of an entry of an earlier version, as it is written now."""
    for step in range(version, VERSION):
        document = MIGRATIONS[step].entry(document)
    return document


def migrate_job(version: int, document: Document) -> Document:
    """The document of a job of an earlier version, as it is written now."""
    for step in range(version, VERSION):
        document = MIGRATIONS[step].job(document)
    return document


def _known(document: Document, names: Container[str]) -> Document:
    """A job, or settings, of a later version without the fields that are not known here."""
    return {name: each for name, each in document.items() if name in names}


def _newer_entry(document: Document, last: float) -> tuple[JournalEntry, int]:
    """What is known here of an entry of a later version, and the number of events and actions that are not."""

    def known(kinds: dict[str, Any], documents: list[list[Any]]) -> list[list[Any]]:
        kept = [each[: 1 + len(_FIELDS[kinds[each[0]]])] for each in documents if each[0] in kinds]
        return [[_known(value, _JOB_DEFAULTS) if isinstance(value, dict) else value for value in each] for each in kept]

    now, happened, asked, *_ = document
    read = known(_EVENTS, happened), known(_ACTIONS, asked)
    return _entry((now, *read), last), len(happened) + len(asked) - sum(map(len, read))


# Files

NAME = "journal.jsonl"
"""Name of the journal in a directory that a run wrote."""
MOST_HEADER = 1 << 26
"""Longest first line in bytes: room for a million nodes, and a file of another kind does not fill the memory."""


class JournalWriter:
    """Writes a journal to a text stream while the run goes on."""

    def __init__(self, stream: IO[str], header: Header) -> None:
        self._stream = stream
        self._stream.write(header_line(header) + "\n")

    def record(self, entry: JournalEntry) -> None:
        """Write one entry."""
        self._stream.write(entry_line(entry) + "\n")

    def close(self, end: str) -> None:
        """Write the last line. The stream stays open."""
        self._stream.write(end_line(end) + "\n")


class JournalReader:
    """Reads a journal from a file, or from the directory that `--out` wrote: the header at once, the entries one by one.

    A file that is not a journal raises RequestError; a journal that is damaged, cut off or too new raises JournalError,
    after everything before the damage has been handed out.

    newer   for a journal of a later version, the message about that; None otherwise
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        self._path = file / NAME if file.is_dir() else file
        self._lines = self._numbered_lines()
        self._number, first = next(self._lines)
        document = self._document(first) if first.startswith("{") else None
        if not isinstance(document, dict) or "journal" not in document:
            raise RequestError(f"{self._path}: not a journal: its first line is no header")
        self._version = version = document["journal"]
        problem = f"{self._path}: written in journal version {version!r}; this Poise reads version {VERSION}"
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise JournalError(problem)
        self.newer = problem if version > VERSION else None
        self._skipped = 0
        try:
            if self.newer:
                settings = _known(document["settings"], [each.name for each in fields(Settings)])
                document |= {"settings": settings}
            self.header = _header(document)
        except MALFORMED as error:
            raise JournalError(self.newer or f"{self._path}:1: not a header of a journal: {error}") from None

    def entries(self) -> Iterator[JournalEntry]:
        """All entries in order. Raises JournalError where the journal is damaged or cut off, after what could be read.

        Events and actions of a later version that are not known here are left out; JournalError says so at the end.
        """
        last = -inf
        for number, line in self._lines:
            self._number = number
            document = self._document(line)
            if isinstance(document, dict) and document.get("end") in (COMPLETE, INTERRUPTED):
                if next(self._lines, None) is not None:
                    raise JournalError(f"{self._path}:{self._number + 1}: something follows the end of the journal")
                if self.newer:
                    left_out = f"{self._skipped:,} events and actions that it does not know are left out"
                    raise JournalError(f"{self.newer}; {left_out}")
                return
            try:
                if self.newer:
                    entry, skipped = _newer_entry(document, last)
                    self._skipped += skipped
                else:
                    entry = _entry(migrate_entry(self._version, document), last)
            except MALFORMED as error:
                raise JournalError(f"{self._path}:{self._number}: not an entry of a journal: {error}") from None
            last = entry.now
            yield entry
        raise JournalError(f"{self._path}:{self._number}: cut off here: the last line of a journal is missing")

    def feed(self, take: Callable[[JournalEntry], None]) -> JournalError | None:
        """Pass every entry that can be read to `take`; returns the error if those are not all."""
        try:
            for entry in self.entries():
                take(entry)
        except JournalError as problem:
            return problem
        except (KeyError, IndexError) as error:
            return JournalError(f"{self._path}:{self._number}: names a job or a node that is not there: {error}")
        return None

    def _document(self, line: str) -> Document:
        try:
            return _parsed(line)
        except (ValueError, RecursionError):
            raise JournalError(f"{self._path}:{self._number}: not JSON") from None

    def _numbered_lines(self) -> Iterator[tuple[int, str]]:
        """The lines with their numbers, from 1. Every way in which reading can fail becomes an error of ours."""
        number = 0
        try:
            packed = self._path.suffix == ".gz"
            with gzip.open(self._path, "rb") if packed else self._path.open("rb") as stream:
                number, first = 1, stream.readline(MOST_HEADER)
                yield 1, self._decode(1, first)
                for number, line in enumerate(stream, start=2):
                    yield number, self._decode(number, line)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise RequestError(f"{self._path}: cannot be read: {error.strerror}") from None
        except EOFError:
            raise JournalError(f"{self._path}: cut off: the end of its compressed data is missing") from None
        except (gzip.BadGzipFile, zlib.error):
            if not number:
                raise RequestError(f"{self._path}: not a journal: expected gzip-compressed data, as its name says") from None
            raise JournalError(f"{self._path}: damaged: its compressed data cannot be unpacked") from None
        except OSError as error:
            raise JournalError(f"{self._path}: cannot be read: {error.strerror or error}") from None

    def _decode(self, number: int, line: bytes) -> str:
        """A line as text. A file whose first line is not text is another kind of file, not a damaged journal."""
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError:
            if number == 1:
                raise RequestError(f"{self._path}: not a journal: its first line is no text") from None
            raise JournalError(f"{self._path}:{number}: damaged: not UTF-8 text") from None
