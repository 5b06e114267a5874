"""Journals of earlier versions: how what one of them holds becomes what the next one would hold.

A version ends when anything that a journal holds gets other fields. Then `VERSION` in `journal.py` goes up by one, and the
table below gets a step from the version before. Each step does one thing to each kind of document, and leaves alone what it
does not know. What a step was is never changed again.

    1   jobs are `steadfast` or not; what is `carried` may lack its last fields
    2   jobs say when they `yield`; what is `carried` says since when it is attached, and until when it backs off
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
