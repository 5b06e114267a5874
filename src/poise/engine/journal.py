"""The journal as text: one JSON document a line, compact, the same bytes for the same run.

First a header: the choices that the core was put together from. Then a line an instant, `[now, [events], [actions]]`, each
event and action a list that begins with its name. Last `{"end": "complete"}` or `{"end": "interrupted"}`; a journal
without it was cut off. A moment or an amount that is infinite is written as null.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from math import inf
from operator import attrgetter
from pathlib import Path
from sys import float_info
from typing import IO, Any, TypeVar, get_type_hints

from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.model import action as actions
from poise.scheduler.model import event as events
from poise.scheduler.model.action import JournalEntry, PreemptionCause, Waited
from poise.scheduler.model.cluster import MOST_GPUS, Cluster, Holding, Node, Slots
from poise.scheduler.model.errors import JournalError, RequestError
from poise.scheduler.model.job import Job, Yields
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate, Rates
from poise.scheduler.model.workload import Filling

Read = TypeVar("Read")

VERSION = 2
"""Goes up whenever an event, an action, a job or the header gets other fields; `journal_steps.py` then gets a step."""
COMPLETE, INTERRUPTED = "complete", "interrupted"
MOST = float_info.max
"""Of a number, either way: JSON knows none, and what is beyond is no float."""
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, RequestError)
"""What reading a document raises that is none of a journal."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the core was put together from: enough to re-drive it."""

    trace: str
    cluster: Cluster
    policy: str
    placement: str
    settings: Settings
    seed: int


_EVENTS = {kind.__name__.lower(): kind for kind in events.Event.__args__}
_ACTIONS = {kind.__name__.lower(): kind for kind in actions.Action.__args__}
_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in (*_EVENTS.values(), *_ACTIONS.values())}
_NAMES = {kind: name for name, kind in (*_EVENTS.items(), *_ACTIONS.items())}
_BY_TYPE = ("speeds", "prices")
_SETTINGS = {each.name for each in fields(Settings)}
_WAYS: dict[str, tuple[Callable[[str], StrEnum], str]] = {
    "cadence": (Cadence, ""),
    "retry": (RetryRule, RetryRule.COUNT),
    "filling": (Filling, Filling.BY_TYPE),
}
"""Settings that name a way of doing something: how they are read, and what was done before there was a choice."""
_JOB_DEFAULTS = {each.name: each.default for each in fields(Job)}
_stated = attrgetter(*_JOB_DEFAULTS)


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a fact or a wish carries
    """A value as JSON knows it."""
    match value:
        case Job():
            stated = zip(_JOB_DEFAULTS.items(), _stated(value), strict=True)
            return {name: each for (name, default), each in stated if each != default}
        case Estimate():
            return _plain_estimate(value)
        case float() if value == inf:
            return None
        case _:
            return value


def _plain_estimate(value: Estimate) -> list[Any]:
    """What most estimates do not have is left out; tasks come fourth, wherever they are."""
    if value.tasks is None:
        return [value.rates, value.skew, *([value.others] if value.others else [])]
    tasks = value.tasks
    sync = [[_plain(each) for each in row] for row in tasks.sync]
    return [value.rates, value.skew, value.others, [tasks.count, tasks.seconds, sync, tasks.gang]]


def _encoded(thing: events.Event | actions.Action) -> list[Any]:
    kind = type(thing)
    return [_NAMES[kind], *(_plain(getattr(thing, name)) for name in _FIELDS[kind])]


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
    """One instant as a line."""
    return _line([entry.now, [*map(_encoded, entry.events)], [*map(_encoded, entry.actions)]])


def job_line(job: Job) -> str:
    """A job as a line."""
    return _line(_plain(job))


def end_line(end: str) -> str:
    """The last line of a journal."""
    return _line({"end": end})


def _line(document: object) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.60}")
    return value


def _whole(value: Any) -> int:  # noqa: ANN401
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r:.60}")
    return value


def _place(value: Any) -> int:  # noqa: ANN401
    """A node, or slots as a mask: what is below 0 would count from the other end."""
    place = _whole(value)
    if place < 0:
        raise ValueError(f"expected a whole number of at least 0, got {place}")
    return place


def _number(value: Any) -> float:  # noqa: ANN401
    if not isinstance(value, (float, int)) or isinstance(value, bool) or not -MOST <= value <= MOST:
        raise TypeError(f"expected a finite number, got {value!r:.60}")
    return value


def _flag(value: Any) -> bool:  # noqa: ANN401
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {value!r:.60}")
    return value


def _maybe(read: Callable[[Any], Read]) -> Callable[[Any], Read | None]:
    return lambda value: None if value is None else read(value)


def _all(read: Callable[[Any], Read]) -> Callable[[Any], tuple[Read, ...]]:
    return lambda value: tuple(map(read, value))


def _job(value: dict[str, Any]) -> Job:
    return Job(**{name: _JOB[name](each) for name, each in value.items()})


def _estimate(
    rates: list[Any], skew: float | None, others: list[Any] | None = None, tasks: list[Any] | None = None
) -> Estimate:
    resized = tuple((_whole(gpus), _rates(with_them)) for gpus, with_them in others or ())
    return Estimate(_rates(rates), _maybe(_number)(skew), resized, None if tasks is None else _tasks(*tasks))


def _tasks(count: int, seconds: list[float], sync: list[list[float | None]], gang: int) -> Tasks:
    waits = tuple((_or_inf(packed), _or_inf(rack), _or_inf(cluster)) for packed, rack, cluster in sync)
    return Tasks(_whole(count), _all(_number)(seconds), waits, _whole(gang))


def _rates(value: list[list[float]]) -> Rates:
    return tuple((_number(packed), _number(rack), _number(cluster)) for packed, rack, cluster in value)


def _holding(value: list[list[int]]) -> Holding:
    return tuple(Slots(_place(node), _place(mask)) for node, mask in value)


def _waited(value: list[float]) -> Waited:
    return Waited(*map(_number, value))


def _or_inf(value: float | None) -> float:
    return inf if value is None else _number(value)


_READERS: dict[Any, Callable[[Any], Any]] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _flag,
    str | None: _maybe(_text),
    int | None: _maybe(_whole),
    float | None: _maybe(_number),
    tuple[str, ...]: _all(_text),
    tuple[float, ...]: _all(_number),
    tuple[tuple[float, float], ...]: lambda value: tuple((_number(mine), _number(other)) for mine, other in value),
    Job: _job,
    Estimate: lambda value: _estimate(*value),
    Holding: _holding,
    Waited: _waited,
    PreemptionCause: PreemptionCause,
    Yields: Yields,
}
"""How a value of a type is read; raises TypeError or ValueError for what is none."""
_JOB = {name: _READERS[kind] for name, kind in get_type_hints(Job).items()}
_READERS_OF_THEIR_OWN: dict[Any, dict[str, Callable[[Any], Any]]] = {
    events.Submitted: {"steps": _or_inf},
    events.Carried: {"steps": _or_inf},
    events.NodeLost: {"node": _place},
    events.NodeReturned: {"node": _place},
    actions.WakeAt: {"time": _or_inf},
}
_FIELD_READERS = {
    kind: [_READERS_OF_THEIR_OWN.get(kind, {}).get(name) or _READERS[of] for name, of in get_type_hints(kind).items()]
    for kind in _FIELDS
}


def _decoded(kinds: dict[str, Any], document: list[Any]) -> Any:  # noqa: ANN401 - an Event or an Action
    name, *values = document
    kind = kinds[name]
    return kind(*(read(value) for read, value in zip(_FIELD_READERS[kind], values, strict=True)))


def _known(kinds: dict[str, Any], documents: list[list[Any]]) -> list[list[Any]]:
    """Of facts or wishes in a newer version of the journal: those that are known here, as far as they are."""
    kept = (each for each in documents if each[0] in kinds)
    return [[*map(_known_keys, each[: 1 + len(_FIELDS[kinds[each[0]]])])] for each in kept]


def _known_keys(value: Any) -> Any:  # noqa: ANN401
    """A job without what is not known of jobs here; anything else as it is."""
    return {name: each for name, each in value.items() if name in _JOB_DEFAULTS} if isinstance(value, dict) else value


def entry_of(document: Any, last: float, but: frozenset[str] = frozenset()) -> JournalEntry:  # noqa: ANN401
    """An instant, no earlier than `last`, from what its line holds; raises what `MALFORMED` lists for anything else."""
    now, facts, wishes = document
    if not last <= now < inf:
        raise ValueError(f"expected a moment not before {last}, got {now}")
    return JournalEntry(
        float(now),
        tuple(_decoded(_EVENTS, fact) for fact in facts if fact[0] not in but),
        tuple(_decoded(_ACTIONS, wish) for wish in wishes),
    )


def known_entry_of(document: Any, last: float) -> tuple[JournalEntry, int]:  # noqa: ANN401
    """As `entry_of`, of a newer journal: what is known here of it, and how many facts and wishes are not."""
    now, facts, wishes, *_ = document
    known = _known(_EVENTS, facts), _known(_ACTIONS, wishes)
    return entry_of((now, *known), last), len(facts) + len(wishes) - sum(map(len, known))


def known_header_of(document: dict[str, Any]) -> Header:
    """As `header_of`, of a newer journal: settings that are not known here are left out."""
    settings = document["settings"].items()
    return header_of(document | {"settings": {name: value for name, value in settings if name in _SETTINGS}})


def header_of(document: dict[str, Any]) -> Header:
    """The header from what its line holds; raises what `MALFORMED` lists for anything else."""
    settings = document["settings"]
    return Header(
        _text(document["trace"]),
        Cluster(tuple(_node(*node) for node in document["nodes"]), *(_by_type(document.get(each, {})) for each in _BY_TYPE)),
        _text(document["policy"]),
        _text(document["placement"]),
        Settings(**{**settings, **{name: read(settings.get(name, before)) for name, (read, before) in _WAYS.items()}}),
        document["seed"],
    )


def _node(name: object, gpu_type: object, gpus: object, rack: object) -> Node:
    if not isinstance(gpus, int) or gpus > MOST_GPUS:
        raise ValueError(f"expected a number of GPUs, got {gpus!r}")
    return Node(_text(name), _text(gpu_type), gpus, _text(rack))


def _by_type(value: dict[str, Any]) -> dict[str, float]:
    return {_text(gpu_type): float(each) for gpu_type, each in value.items()}


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


parsed = json.JSONDecoder(parse_constant=_refused).decode
"""What a line holds; raises ValueError or RecursionError for what is not JSON."""


def read_header(line: str) -> Header:
    """What `header_line` wrote; raises JournalError for anything else."""
    return _read("a header", lambda: header_of(parsed(line)))


def read_entry(line: str, last: float = -inf, but: frozenset[str] = frozenset()) -> JournalEntry:
    """What `entry_line` wrote, no earlier than `last`, `but` for facts of these names; JournalError for anything else."""
    return _read("an instant", lambda: entry_of(parsed(line), last, but))


def read_job(line: str) -> Job:
    """What `job_line` wrote; raises JournalError for anything else."""
    return _read("a job", lambda: _job(parsed(line)))


def _read(what: str, read: Callable[[], Read]) -> Read:
    try:
        return read()
    except (*MALFORMED, RecursionError) as error:
        raise JournalError(f"not {what} of a journal: {error}") from None


# Journals of earlier versions: how what one of them holds becomes what the next one would hold.
#
# A version ends when anything that a journal holds gets other fields. Then `VERSION` in `journal.py` goes up by one, and the
# table below gets a step from the version before. Each step does one thing to each kind of document, and leaves alone
# what it
# does not know. What a step was is never changed again.
#
# 1   jobs are `steadfast` or not; what is `carried` may lack its last fields
# 2   jobs say when they `yield`; what is `carried` says since when it is attached, and until when it backs off

Document = Any
"""What JSON holds: whoever reads it further checks it."""
_CARRIED = 13
"""Name and fields of a fact `carried`, in version 2."""


@dataclass(frozen=True, slots=True)
class Step:
    """From one version to the next: an instant, and a job by itself; headers have had the same fields ever since."""

    entry: Callable[[Document], Document]
    job: Callable[[Document], Document]


def _yielding(job: Document) -> Document:
    """A steadfast job never yields; any other one does at any time."""
    if not isinstance(job, dict) or "steadfast" not in job:
        return job
    rest = {name: value for name, value in job.items() if name != "steadfast"}
    return rest | {"yields": "never"} if job["steadfast"] else rest


def _fact_with_all(fact: Document) -> Document:
    if not isinstance(fact, list) or fact[:1] not in (["submitted"], ["carried"]):
        return fact
    name, job, *rest = fact
    missing = _CARRIED - len(fact) if name == "carried" else 0
    return [name, _yielding(job), *rest, *[None] * missing]


def _entry_with_all(entry: Document) -> Document:
    now, facts, wishes = entry
    return [now, [_fact_with_all(fact) for fact in facts], wishes]


STEPS = {1: Step(entry=_entry_with_all, job=_yielding)}
"""By the version that they lead on from."""


def entry_from(version: int, document: Document) -> Document:
    """An instant of an earlier version, as it is written now."""
    for step in range(version, max(STEPS) + 1):
        document = STEPS[step].entry(document)
    return document


def job_from(version: int, document: Document) -> Document:
    """A job of an earlier version, as it is written now."""
    for step in range(version, max(STEPS) + 1):
        document = STEPS[step].job(document)
    return document


# Journals in files: written as a run goes on, read one instant after the other.

NAME = "journal.jsonl"
"""What a journal is called in a directory that a run wrote."""
MOST_HEADER = 1 << 26
"""Characters of a first line: a million nodes have room in it, and a file of another kind does not fill the memory."""


class JournalWriter:
    """Writes a journal to a text stream as it happens."""

    def __init__(self, stream: IO[str], header: Header) -> None:
        self._stream = stream
        self._stream.write(header_line(header) + "\n")

    def record(self, entry: JournalEntry) -> None:
        """One instant."""
        self._stream.write(entry_line(entry) + "\n")

    def close(self, end: str) -> None:
        """The last line."""
        self._stream.write(end_line(end) + "\n")


class JournalReader:
    """Reads a journal from a file or from the directory that `--out` wrote: its header at once, its entries one by one.

    newer   of a journal in a version that is not known yet: what to say of that; None in all others
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        self._path = file / NAME if file.is_dir() else file
        self._lines = self._numbered()
        self._number, first = next(self._lines)
        document = self._parsed(first) if first.startswith("{") else None
        if not isinstance(document, dict) or "journal" not in document:
            raise RequestError(f"{self._path}: not a journal: its first line is no header")
        self._version = document["journal"]
        self.newer = self._is_newer()
        self._skipped = 0
        try:
            self.header = known_header_of(document) if self.newer else header_of(document)
        except MALFORMED as error:
            raise JournalError(self.newer or f"{self._path}:1: not a header of a journal: {error}") from None

    def _is_newer(self) -> str | None:
        version = self._version
        problem = f"{self._path}: written in journal version {version!r}; this Poise reads version {VERSION}"
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise JournalError(problem)
        return problem if version > VERSION else None

    def entries(self) -> Iterator[JournalEntry]:
        """All instants; raises JournalError where the journal is damaged or cut off, after what could be read.

        Of a newer journal, facts and wishes that are not known here are left out; in the end it raises for that.
        """
        last = -inf
        for number, line in self._lines:
            self._number = number
            document = self._parsed(line)
            if isinstance(document, dict) and document.get("end") in (COMPLETE, INTERRUPTED):
                if next(self._lines, None) is not None:
                    raise JournalError(f"{self._path}:{self._number + 1}: something follows the end of the journal")
                if self.newer:
                    raise JournalError(
                        f"{self.newer}; {self._skipped:,} facts and wishes that it does not know are left out"
                    )
                return
            try:
                entry = self._read(document, last)
            except MALFORMED as error:
                raise JournalError(f"{self._path}:{self._number}: not an instant of a journal: {error}") from None
            last = entry.now
            yield entry
        raise JournalError(f"{self._path}:{self._number}: cut off here: the last line of a journal is missing")

    def feed(self, take: Callable[[JournalEntry], None]) -> JournalError | None:
        """Hand over every instant that can be read, one by one; what there is to say if those are not all of them."""
        try:
            for entry in self.entries():
                take(entry)
        except JournalError as problem:
            return problem
        except (KeyError, IndexError) as error:
            return JournalError(f"{self._path}:{self._number}: names a job or a node that is not there: {error}")
        return None

    def _read(self, document: Any, last: float) -> JournalEntry:  # noqa: ANN401
        if self.newer is None:
            return entry_of(document if self._version == VERSION else entry_from(self._version, document), last)
        entry, skipped = known_entry_of(document, last)
        self._skipped += skipped
        return entry

    def _parsed(self, line: str) -> Any:  # noqa: ANN401
        try:
            return parsed(line)
        except (ValueError, RecursionError):
            raise JournalError(f"{self._path}:{self._number}: not JSON") from None

    def _numbered(self) -> Iterator[tuple[int, str]]:
        number = 0
        try:
            packed = self._path.suffix == ".gz"
            with gzip.open(self._path, "rb") if packed else self._path.open("rb") as stream:
                number, first = 1, stream.readline(MOST_HEADER)
                yield 1, self._text(1, first)
                for number, line in enumerate(stream, start=2):
                    yield number, self._text(number, line)
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

    def _text(self, number: int, line: bytes) -> str:
        """A line as text. What is no text from its first line on is another kind of file, not a damaged journal."""
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError:
            if number == 1:
                raise RequestError(f"{self._path}: not a journal: its first line is no text") from None
            raise JournalError(f"{self._path}:{number}: damaged: not UTF-8 text") from None
