"""One file on its way in: where it is, what its jobs are called, and what was left out of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, TypeVar

from poise.model.errors import TraceError, Where
from poise.traces.documents import Record, objects
from poise.traces.fields import FieldError, shown
from poise.traces.lines import Line, lines
from poise.traces.schema import TraceJob

MOST_JOBS = 10_000_000

R = TypeVar("R")


@dataclass(slots=True)
class Intake:
    """What every reader is given.

    file     for messages
    stream   the unpacked bytes, not read yet
    prefix   goes before every job's id: `<file stem>/` where files are merged
    rows     records read before this one: the id of a job whose format has none
    tally    what was left out or assumed, and how often
    """

    file: str
    stream: BinaryIO
    prefix: str = ""
    rows: int = 0
    tally: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[Line]:
        """The lines that are not blank, each with its number."""
        return lines(self.stream, self.file)

    def objects(self) -> Iterator[tuple[int, Record]]:
        """The JSON objects, each with the line it starts on."""
        return objects(self.stream, self.file)

    def count(self, what: str) -> None:
        """Remember that this was left out or assumed once more."""
        self.tally[what] += 1

    def error(self, line: int, field: str | None, problem: str) -> TraceError:
        """An error in this file."""
        return TraceError(Where(self.file, line, field), problem)

    def jobs(self, records: Iterable[tuple[int, R]], parse: Callable[[R, "Intake"], TraceJob | None]) -> list[TraceJob]:
        """Every record's job, in order; `parse` answers None for what it left out. Ids are unique."""
        jobs: list[TraceJob] = []
        seen: dict[str, int] = {}
        for line, record in records:
            try:
                job = parse(record, self)
            except FieldError as refused:
                raise self.error(line, refused.field, refused.problem) from None
            self.rows += 1
            if job is None:
                continue
            name = job.job.id
            if name in seen:
                raise self.error(line, None, f"expected a new job id, got {shown(name)}, as on line {seen[name]}")
            seen[name] = line
            jobs.append(job)
            if len(jobs) > MOST_JOBS:
                raise self.error(line, None, f"expected at most {MOST_JOBS:,} jobs, got more")
        return jobs
