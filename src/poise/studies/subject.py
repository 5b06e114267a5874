"""What a study is about."""

from dataclasses import dataclass
from enum import StrEnum

from poise.analysis.records import Records


class Source(StrEnum):
    """Where records come from."""

    TRACE = "trace"
    JOURNAL = "journal"


@dataclass(frozen=True, eq=False)
class Subject:
    """Records and their source.

    about     what else is known of the source, by name
    notes     what was left out or assumed
    problem   why it could not be read to its end, on one line; None if it could
    """

    source: Source
    name: str
    records: Records
    about: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None
