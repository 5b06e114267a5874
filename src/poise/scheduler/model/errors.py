"""Every error that Poise raises on purpose.

PoiseError
├── RequestError          the request is wrong: the command line ends with exit code 2
│   ├── UnknownNameError  a name that is not in a catalogue; carries the nearest known ones
│   ├── OptionError       a value that an option does not take, or options that contradict each other
│   ├── ClusterError      a cluster specification that does not describe a cluster
│   ├── ThroughputError   a throughput table that cannot be read, or lacks what a job needs
│   └── TraceError        a trace that cannot be read: which file, line, field, and what was expected
├── JournalError          a journal that is damaged, cut off, or written by a newer Poise
├── SolveError            a program was not solved; a policy may fall back
│   ├── InfeasibleError   nothing meets what was asked for
│   └── GaveUpError       the effort allowed is spent, or rounding stopped progress, before the answer was good enough
├── PolicyError           a policy from outside of Poise raised something, or answered what the core refuses
├── ReplayError           a journal was re-driven and an action came out differently
└── InvariantError        a bug in Poise: a decision that the ledger refuses, an impossible event

A message names the thing, the value and the remedy, on one line.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

_LONGEST_NAME = 100
"""Characters of an unknown name that a message repeats."""
_ENDLESS = re.compile(r"[^\s:]{500,}")


def plain(text: str) -> str:
    """Escape everything that cannot be seen (escape codes, line ends, changes of direction).

    Text of other people goes to terminals: no character of it may command the terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def concise(text: str) -> str:
    """Return a message as one line, with words without end cut short."""
    return " ".join(_ENDLESS.sub(lambda word: f"{word[0][:_LONGEST_NAME]}…", text).splitlines())


class PoiseError(Exception):
    """The root of all errors that Poise raises on purpose. Whatever a message repeats, it stays one line."""

    def __init__(self, message: object = "") -> None:
        super().__init__(concise(str(message)))


class RequestError(PoiseError):
    """The request is wrong; nothing was done."""


class UnknownNameError(RequestError):
    """A name that is not in a catalogue. The message lists the nearest known names, then `otherwise` if given."""

    def __init__(self, kind: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
        super().__init__(f"unknown {kind} {shown!r}; {hint}{otherwise and f' {otherwise}'}")
        self._made_of = (kind, name, tuple(names), otherwise)

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, tuple[str, ...], str]]:
        """Rebuild from the arguments, so that the error can be pickled by a worker process."""
        return type(self), self._made_of


class OptionError(RequestError):
    """A value that an option does not take, or options that contradict each other.

    names   the options as Python spells them, such as `restart_overhead`; `spelled` writes the message with other spellings
    """

    def __init__(self, names: str | tuple[str, ...], problem: str) -> None:
        self.names = (names,) if isinstance(names, str) else names
        self._problem = problem
        super().__init__(self.spelled(str))

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the message, the names of options written as `spell` has them."""
        names = " and ".join(map(spell, self.names))
        return f"{names}{':' if len(self.names) == 1 else ''} {self._problem}"

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[str, ...], str]]:
        """Rebuild from the arguments, so that the error can be pickled by a worker process."""
        return type(self), (self.names, self._problem)


class ClusterError(RequestError):
    """A cluster specification that does not describe a cluster."""


class ThroughputError(RequestError):
    """A throughput table that cannot be read, or that lacks what a job needs."""


@dataclass(frozen=True, slots=True)
class Where:
    """A place in an input file. `line` counts from 1; None where lines have no meaning."""

    file: str
    line: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        field = "" if self.field is None else f": {self.field}"
        return f"{self.file}{line}{field}"


class TraceError(RequestError):
    """A trace that cannot be read: the file, the line, the field, and what was expected there."""

    def __init__(self, where: Where, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self._problem = problem

    def __reduce__(self) -> tuple[type[Self], tuple[Where, str]]:
        """Rebuild from the arguments, so that the error can be pickled by a worker process."""
        return type(self), (self.where, self._problem)


class JournalError(PoiseError):
    """A journal that is damaged, cut off, or written by a newer Poise. What was read before the error may be used."""


class SolveError(PoiseError):
    """A program was not solved to the promised accuracy."""


class InfeasibleError(SolveError):
    """Nothing meets what was asked for."""


class GaveUpError(SolveError):
    """The effort allowed was spent before the answer was good enough.

    Effort is counted in iterations, never in seconds, so that the same events always give the same decision.
    """


class PolicyError(PoiseError):
    """A policy from outside of Poise raised something, or answered what the core refuses."""


class ReplayError(PoiseError):
    """A journal was re-driven through the core and an action came out differently."""


class InvariantError(PoiseError):
    """A bug in Poise: a decision that breaks a rule, or an event that cannot have happened."""
