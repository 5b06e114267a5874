"""Structured logs: one line per event on a stream, as text or as JSON. Whatever looks like a token is masked.

`Logbook` is all that the rest of the service uses. `LineLimiter` bounds the lines that clients can cause at will.
"""

import json
import logging
import re
import sys
import traceback
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from threading import Lock
from time import monotonic, time  # noqa: TID251 - the server stands at the edge, where the clock is
from typing import TextIO

TOKEN = re.compile(r"poise_[A-Za-z0-9_-]{20,}")  # form of the tokens that `accounts.py` makes
MASK = "poise_***"
LONGEST = 4_000  # characters of a value that are kept
LINES = 10  # lines that one source may cause per SPAN
SPAN = 60.0  # seconds
MOST_SOURCES = 100  # addresses and tokens that are told apart per SPAN; all further ones share one limit
OTHERS = "others"


class LogFormat(StrEnum):
    """For people, or for programs."""

    TEXT = "text"
    JSON = "json"


class Level(IntEnum):
    """Severity, with the numbers of the standard library."""

    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


class Logbook:
    """The log of a service, for any thread. A stream that cannot be written (a full disk) does not stop the service."""

    def __init__(self, stream: TextIO | None = None, *, form: LogFormat = LogFormat.TEXT, least: Level = Level.INFO) -> None:
        self._stream = stream  # None: stderr as it is when a line is written
        self._form = form
        self._least = least
        self._lock = Lock()  # lines of two threads must not mix
        self._limiter = LineLimiter()

    def info(self, event: str, **values: object) -> None:
        """Write an event of normal operation."""
        self.write(Level.INFO, event, values)

    def warning(self, event: str, **values: object) -> None:
        """Write an event that an operator may want to look at."""
        self.write(Level.WARNING, event, values)

    def error(self, event: str, *, error: BaseException | None = None, **values: object) -> None:
        """Write an event that an operator has to look at; with the traceback of `error`, if there is one."""
        self.write(Level.ERROR, event, values if error is None else values | traceback_of(error))

    def write(self, level: Level, event: str, values: dict[str, object]) -> None:
        """Write one line, if events of this level are kept."""
        if level < self._least:
            return
        now = datetime.fromtimestamp(time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        kept = {key: _bounded(value) for key, value in values.items()}
        if self._form is LogFormat.JSON:
            line = json.dumps({"time": now, "level": level.name.lower(), "event": event} | kept, allow_nan=False)
        else:
            words = (f"{key}={_word(value)}" for key, value in kept.items())
            line = " ".join((now, f"{level.name.lower():7}", event, *words))
        with suppress(OSError, ValueError), self._lock:  # the stream is full, or closed
            stream = self._stream or sys.stderr
            stream.write(TOKEN.sub(MASK, line) + "\n")
            stream.flush()

    def write_limited(self, source: str, level: Level, event: str, values: dict[str, object]) -> None:
        """Write a line that a client can cause at will: LINES per SPAN and source, then how many more there were."""
        if level < self._least:
            return
        now = monotonic()
        self.report_suppressed(now)
        if self._limiter.passes(source, now):
            self.write(level, event, values)

    def report_suppressed(self, now: float | None = None) -> None:
        """Write how many lines were left out, if a span is over. Called now and then, so that the report is not late."""
        for source, lines in self._limiter.suppressed(monotonic() if now is None else now).items():
            self.write(Level.WARNING, "lines-left-out", {"caused_by": source, "lines": lines, "seconds": SPAN})


class LineLimiter:
    """Decides which lines are written, and counts the others. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lines: Counter[str] = Counter()  # by source, in the current span; empty: no span has begun
        self._ends = 0.0

    def passes(self, source: str, now: float) -> bool:
        """Whether a line that `source` causes is written."""
        with self._lock:
            if not self._lines:
                self._ends = now + SPAN
            if source not in self._lines and len(self._lines) >= MOST_SOURCES:
                source = OTHERS
            self._lines[source] += 1
            return self._lines[source] <= LINES

    def suppressed(self, now: float) -> dict[str, int]:
        """Lines left out by source, once a span is over; they are reported once, and the next line begins another span."""
        if not self._lines or now < self._ends:
            return {}
        with self._lock:
            lines, self._lines = self._lines, Counter()
        return {source: count - LINES for source, count in sorted(lines.items()) if count > LINES}


def traceback_of(error: BaseException) -> dict[str, object]:
    """The values by which a line describes an unexpected error."""
    return {"error": repr(error), "traceback": "".join(traceback.format_exception(error))}


def _bounded(value: object) -> object:
    """A value that JSON can represent, as it is; any other as text. Both of bounded length."""
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            if len(_json(value)) <= LONGEST:
                return value
    text = str(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _word(value: object) -> str:
    """A value as text, quoted if it would not be one word on one line."""
    text = value if isinstance(value, str) else _json(value)
    quoting = ' "=' if isinstance(value, str) else " "
    return text if text and all(char.isprintable() and char not in quoting for char in text) else json.dumps(text)


class LogForwarder(logging.Handler):
    """Writes what a library logs to our log."""

    def __init__(self, log: Logbook) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
        level = max((each for each in Level if each <= record.levelno), default=Level.DEBUG)
        values: dict[str, object] = {"logger": record.name, "text": record.getMessage().strip()}
        if record.exc_info:
            values["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        if record.name.startswith("poise."):
            self._log.write(level, "library", values)
        else:  # a client may be the cause
            self._log.write_limited(record.name, level, "library", values)


def forward(logger: str, log: Logbook, least: Level) -> None:
    """Send a library's log to ours, from this level on, and nowhere else."""
    library = logging.getLogger(logger)
    library.handlers = [LogForwarder(log)]
    library.propagate = False
    library.setLevel(least)
