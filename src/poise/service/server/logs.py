"""Structured logs: one line an event on a stream, as text or as JSON. Whatever looks like a token is blotted out."""

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

# Bounds on lines that others can cause at will: so many a minute for each who does, then one that says how many more.

LINES = 10
"""Of one peer or token, in each span."""
SPAN = 60.0
"""Seconds."""
MOST = 100
"""Peers and tokens that are told apart in each span; all further ones count as one."""
OTHERS = "others"


class Damper:
    """Says which lines are written, and what has to be said of the others. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._said: Counter[str] = Counter()
        self._ends = 0.0

    def passes(self, who: str, now: float) -> bool:
        """A line that `who` causes is written. Those that are not are counted."""
        with self._lock:
            if not self._said:
                self._ends = now + SPAN
            if who not in self._said and len(self._said) >= MOST:
                who = OTHERS
            self._said[who] += 1
            return self._said[who] <= LINES

    def over(self, now: float) -> dict[str, int]:
        """How many lines were left out of whom, once a span is over; it is told once, and another span begins."""
        if not self._said or now < self._ends:
            return {}
        with self._lock:
            said, self._said = self._said, Counter()
        return {who: count - LINES for who, count in sorted(said.items()) if count > LINES}


TOKEN = re.compile(r"poise_[A-Za-z0-9_-]{20,}")
"""What a token looks like; accounts make them so."""
BLOT = "poise_***"
LONGEST = 4_000
"""Characters of a value that are kept."""


class LogFormat(StrEnum):
    """For people, or for programs."""

    TEXT = "text"
    JSON = "json"


class Level(IntEnum):
    """How much somebody should care; numbers as those of the standard library."""

    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


class Logbook:
    """Takes events from any thread. A stream that cannot be written (a full disk) is no reason for a service to stop."""

    def __init__(self, stream: TextIO | None = None, *, form: LogFormat = LogFormat.TEXT, least: Level = Level.INFO) -> None:
        self._stream = stream
        self._form = form
        self._least = least
        self._lock = Lock()
        self._damper = Damper()

    def debug(self, event: str, **values: object) -> None:
        """For those who look for an error."""
        self.say(Level.DEBUG, event, values)

    def info(self, event: str, **values: object) -> None:
        """As it should be."""
        self.say(Level.INFO, event, values)

    def warning(self, event: str, **values: object) -> None:
        """Somebody may want to look at it."""
        self.say(Level.WARNING, event, values)

    def error(self, event: str, *, error: BaseException | None = None, **values: object) -> None:
        """Somebody has to look at it; with the traceback of `error`, if there is one."""
        if error is not None:
            values = values | trace_of(error)
        self.say(Level.ERROR, event, values)

    def caused_by(self, who: str, level: Level, event: str, values: dict[str, object]) -> None:
        """Write one line that a peer, or whoever has a token, can cause at will: so many a minute, then how many more."""
        if level < self._least:
            return
        now = monotonic()
        self.catch_up(now)
        if self._damper.passes(who, now):
            self.say(level, event, values)

    def catch_up(self, now: float | None = None) -> None:
        """Say which lines were left out, once it is time for that."""
        for who, lines in self._damper.over(monotonic() if now is None else now).items():
            self.say(Level.WARNING, "lines-left-out", {"caused_by": who, "lines": lines, "seconds": SPAN})

    def say(self, level: Level, event: str, values: dict[str, object]) -> None:
        """Write one line, if events of this level are kept."""
        if level < self._least:
            return
        moment = datetime.fromtimestamp(time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = TOKEN.sub(BLOT, _LINES[self._form](moment, level.name.lower(), event, values))
        try:
            with self._lock:
                stream = self._stream or sys.stderr
                stream.write(line + "\n")
                stream.flush()
        except (OSError, ValueError):  # full, or closed
            pass


def trace_of(error: BaseException) -> dict[str, object]:
    """What a line says of an error that should not be."""
    return {"error": repr(error), "traceback": "".join(traceback.format_exception(error))}


def _as_json(moment: str, level: str, event: str, values: dict[str, object]) -> str:
    document = {"time": moment, "level": level, "event": event} | {key: _kept(value) for key, value in values.items()}
    return json.dumps(document, allow_nan=False)


def _as_text(moment: str, level: str, event: str, values: dict[str, object]) -> str:
    words = (f"{key}={_word(_kept(value))}" for key, value in values.items())
    return " ".join((moment, f"{level:7}", event, *words))


_LINES = {LogFormat.JSON: _as_json, LogFormat.TEXT: _as_text}


def _kept(value: object) -> object:
    """What JSON can say, as it is; anything else as text. Of reasonable length."""
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            if len(_json(value)) <= LONGEST:
                return value
    text = str(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _word(value: object) -> str:
    """Quoted where it would not be one word on one line."""
    text = value if isinstance(value, str) else _json(value)
    quoting = ' "=' if isinstance(value, str) else " "
    return text if text and all(char.isprintable() and char not in quoting for char in text) else json.dumps(text)


class Forwarding(logging.Handler):
    """Hands what a library logs on to our log."""

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
            self._log.say(level, "library", values)
        else:  # of what others say, peers may be the cause
            self._log.caused_by(record.name, level, "library", values)


def forward(logger: str, log: Logbook, least: Level) -> None:
    """From now on our log is where that library's log goes, from this level on."""
    library = logging.getLogger(logger)
    library.handlers = [Forwarding(log)]
    library.propagate = False
    library.setLevel(least)
