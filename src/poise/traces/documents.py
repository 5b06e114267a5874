"""JSON objects from a stream of bytes, one at a time: a list of them, or one after another.

The list is never held as one document. What is held is a window on the text, of at most about two objects' size.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from poise.model.errors import TraceError, Where
from poise.traces.fields import shown
from poise.traces.lines import MOST_BYTES, not_text

_CHUNK = 1 << 16
_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()

Record = dict[str, Any]


def objects(stream: BinaryIO, file: str) -> Iterator[tuple[int, Record]]:
    """Every object with the line on which it starts. A list must be complete and nothing may follow it."""
    window = _Window(stream, file)
    if window.peek() != "[":
        while window.peek():
            yield window.take_object()
        return
    window.skip()
    if window.peek() != "]":
        yield window.take_object()
    while window.peek() == ",":
        window.skip()
        yield window.take_object()
    window.expect("]", "a comma or the end of the list")
    window.expect("", "nothing after the end of the list")


def parse_object(text: str) -> Record:
    """The one object that this text is; ValueError says what it is instead."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"{shown(text)} ({problem.msg} at column {problem.colno})") from None
    except ValueError:
        raise ValueError(f"{shown(text)} with a number of too many digits") from None
    if not isinstance(value, dict):
        raise ValueError(shown(text))  # noqa: TRY004  a wrong value of the input, not a wrong type of ours
    return value


class _Window:
    """The unread text that is in memory, and the number of the line on which it starts."""

    def __init__(self, stream: BinaryIO, file: str) -> None:
        self._stream = stream
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._line = 1

    def peek(self) -> str:
        """The next character that is not blank, not taken; empty at the end."""
        skipped = 0
        while True:
            match = _BLANK.match(self._text, self._at)
            end = self._at if match is None else match.end()
            skipped += end - self._at
            self._advance(end)
            if end < len(self._text):
                return self._text[end]
            if skipped > MOST_BYTES:
                raise self._error(f"expected jobs, got more than {MOST_BYTES:,} blank characters")
            if not self._more():
                return ""

    def skip(self) -> None:
        """Take the character that `peek` showed."""
        self._advance(self._at + 1)

    def expect(self, character: str, what: str) -> None:
        """Take this character, or stand at the end if it is empty."""
        got = self.peek()
        if got != character:
            raise self._error(f"expected {what}, got {shown(got) if got else 'the end of the file'}")
        self.skip()

    def take_object(self) -> tuple[int, Record]:
        """The object that starts here, read as far as it goes and no further than one may be long."""
        if self.peek() != "{":
            raise self._error(f"expected a JSON object, got {shown(self._text[self._at : self._at + 80])}")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as problem:
                self._grow(problem)
                continue
            except (RecursionError, ValueError):
                raise self._error("expected a JSON object, got one nested too deeply or a number too long") from None
            if end - self._at > MOST_BYTES:
                raise self._too_long()
            line = self._line
            self._advance(end)
            return line, value

    def _grow(self, problem: json.JSONDecodeError) -> None:
        """Text that does not parse may only be cut off: read on, unless it is too long or the file ends."""
        if len(self._text) - self._at > MOST_BYTES:
            raise self._too_long()
        if not self._more():
            line = self._line + self._text.count("\n", self._at, problem.pos)
            raise TraceError(Where(self._file, line), f"expected a whole JSON object, got a broken one ({problem.msg})")

    def _more(self) -> bool:
        """Read a chunk, as long as what is there already, so that an object is parsed few times; False at the end."""
        rest = self._text[self._at :]
        chunk = self._stream.read(max(_CHUNK, len(rest)))
        try:
            text = self._decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as problem:
            line = self._line + rest.count("\n") + problem.object.count(b"\n", 0, problem.start)
            raise not_text(self._file, line, problem) from None
        self._text, self._at = rest + text, 0
        return bool(chunk)

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _too_long(self) -> TraceError:
        return self._error(f"expected JSON objects of at most {MOST_BYTES:,} bytes, got a longer or a broken one")

    def _error(self, problem: str) -> TraceError:
        return TraceError(Where(self._file, self._line), problem)
