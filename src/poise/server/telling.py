"""What happened, read off the journal in parts: forward from a number, or the latest."""

from bisect import bisect_right

from poise.engine.journal import read_entry, read_header
from poise.model.cluster import Cluster
from poise.model.errors import JournalError
from poise.server.happenings import happenings, jobs_named
from poise.server.store import Named, Reader, Written
from poise.wire.views import Actor, Events, Happening

PART = 200
"""Entries of the journal that are read at once."""
MOST_ENTRIES = 5_000
"""Entries of the journal that one question looks at."""
SILENT = frozenset({"carried"})
"""Facts that nobody is told of, and that there may be very many of."""


class Telling:
    """Answers one question about jobs that are named."""

    def __init__(self, reader: Reader, named: Named) -> None:
        self._reader = reader
        self._named = named
        self._chapters = reader.chapters()
        self._clusters: dict[int, Cluster] = {}

    def after(self, number: int, limit: int) -> Events:
        """What happened after that number. All of an instant is told or none of it, so it may be more than `limit`.

        `next` is beyond all that was looked at, told or not: whoever asks again from there misses nothing.
        """
        last = self._reader.last()  # what is committed from now on is not to be passed over
        found: list[Happening] = []
        for _ in range(MOST_ENTRIES // PART):
            entries = self._reader.entries(self._named, after=number, limit=PART)
            for each in entries:
                number = each.number
                found += self._told(each)
                if len(found) >= limit:
                    return Events(events=tuple(found), next=number)
            if len(entries) < PART:
                return Events(events=tuple(found), next=max(number, last))
        return Events(events=tuple(found), next=number)

    def latest(self, most: int) -> Events:
        """The last so many things that happened, as far as that is not too long ago."""
        last = before = self._reader.last()
        found: list[Happening] = []
        for _ in range(MOST_ENTRIES // PART):
            entries = self._reader.entries_back(self._named, until=before, limit=PART)
            for each in entries:
                found = [*self._told(each), *found]
                if len(found) >= most:
                    return Events(events=tuple(found[-most:]), next=last)
            if len(entries) < PART:
                break
            before = entries[-1].number - 1
        return Events(events=tuple(found), next=last)

    def _told(self, written: Written) -> list[Happening]:
        try:
            entry = read_entry(written.document, but=SILENT)
        except JournalError:
            return [] if self._named != (None, None) else [_unreadable(written)]
        tenants = self._reader.tenants_of(jobs_named(entry, written.notes))
        told = happenings(written.number, entry, written.notes, self._cluster(written.number), tenants)
        job, tenant = self._named
        return [each for each in told if job in (None, each.job) and tenant in (None, each.tenant)]

    def _cluster(self, number: int) -> Cluster:
        """The cluster of the chapter that an entry belongs to."""
        first = self._chapters[bisect_right(self._chapters, number) - 1]
        if first not in self._clusters:
            self._clusters[first] = read_header(self._reader.header_at(first)).cluster
        return self._clusters[first]


def _unreadable(written: Written) -> Happening:
    """What can be said of an entry that was damaged: that it is there."""
    text = f"entry {written.number:,} of the journal is damaged: what happened then cannot be told"
    return Happening(number=written.number, time=0.0, actor=Actor.SERVICE, kind="damaged", job=None, tenant=None, text=text)
