"""The queue, a page at a time: jobs that hold GPUs, then those that wait, as they stand in line, then those held back."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import filterfalse, islice
from typing import NamedTuple

from poise.server.records import Record
from poise.server.situation import Situation
from poise.wire.views import State

IN_LINE = 2_000
"""Waiting jobs whose place in line is looked at; those behind them come in order of submission, whoever asks for so many.

To find the place of any one of 50,000 takes 10 to 20 ms under an order, during which nothing is decided.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which jobs: in one of these states (none: in any), a tenant's, an app's, called so."""

    states: frozenset[State]
    tenant: str | None
    app: str | None
    name: str | None = None

    @property
    def is_everything(self) -> bool:
        """All of them."""
        return not self.states and self.tenant is None and self.app is None and self.name is None

    def among(self, situation: Situation) -> list[str]:
        """Those jobs, in order of submission."""
        records = situation.records
        names = records if self.tenant is None else situation.tally.jobs.get(self.tenant, ())
        return [name for name in names if self._has(records[name])]

    def _has(self, record: Record) -> bool:
        is_called_so = self.name in (None, record.name)
        return is_called_so and (not self.states or record.state in self.states) and self.app in (None, record.job.app)


class Page(NamedTuple):
    """Some jobs, the places in line of those that are among the first, and how many there are on all pages, by state."""

    names: list[str]
    places: dict[str, int]
    counts: Counter[str]


def page_of(situation: Situation, wanted: Wanted, *, limit: int, offset: int) -> Page:
    """Jobs that have not ended, or whose processes are not all gone."""
    most = min(limit + offset, IN_LINE) if wanted.is_everything else IN_LINE
    places = places_of(situation, most)
    if wanted.is_everything:
        names, counts = _everybody(situation, places), situation.tally.states.copy()
    else:
        match = wanted.among(situation)
        names, counts = _sorted(situation, match, places), situation.tally.among(match)
    return Page(list(islice(names, offset, offset + limit)), places, counts)


def places_of(situation: Situation, most: int = IN_LINE) -> dict[str, int]:
    """The first jobs in line: each with its place, from 1. While the core thinks it knows more than the records do."""
    waiting = (name for name in situation.scheduler.in_line(most) if name in situation.records)
    return {name: place for place, name in enumerate(filterfalse(situation.running.__contains__, waiting), 1)}


def _everybody(situation: Situation, places: dict[str, int]) -> Iterator[str]:
    yield from situation.running
    yield from places
    yield from (name for name in situation.records if name not in places and name not in situation.running)


def _sorted(situation: Situation, match: list[str], places: dict[str, int]) -> Iterator[str]:
    """A few are put in order by themselves; many are found on the way through all."""
    if len(match) > IN_LINE:
        return filter(set(match).__contains__, _everybody(situation, places))
    running = filter(set(match).__contains__, situation.running)
    waiting = situation.scheduler.lined_up(match)
    return iter(dict.fromkeys((*running, *waiting, *match)))
