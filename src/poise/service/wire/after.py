"""What a job waits for, as text: `17`, `prep:succeeded`, `17,20-29:failed`.

A term names jobs and says how they have to end. People write ids, names of jobs and names of apps; the client puts ids in
their place, ranges of them where they follow each other, so that a thousand jobs are a few characters.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

MOST_AWAITED = 10_000
"""Jobs that one job may wait for."""
_IDS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


class AfterEnd(StrEnum):
    """How jobs have to end before a job that waits for them may start.

    ENDED       they have ended, in whatever way
    SUCCEEDED   all of them have succeeded
    FAILED      all of them have ended, and at least one of them failed or was cancelled
    """

    ENDED = "ended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Term(NamedTuple):
    """A term in parts: ids, ranges of ids and names as they were written, and how these jobs have to end."""

    words: tuple[str, ...]
    end: AfterEnd

    def __str__(self) -> str:
        return f"{','.join(self.words)}{'' if self.end is AfterEnd.ENDED else f':{self.end}'}"


def term_of(text: str) -> Term:
    """A term of a checked request in its parts."""
    words, _, end = text.partition(":")
    return Term(tuple(words.split(",")), AfterEnd(end or AfterEnd.ENDED))


def ids_of(term: Term) -> tuple[str, ...]:
    """The ids that a term stands for, in order and each once; ValueError for a name, or for too many of them."""
    found: dict[str, None] = {}
    for word in term.words:
        match = _IDS.fullmatch(word)
        if match is None:
            raise ValueError(f"expected ids of jobs, such as 17 or 20-29, got {word!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"expected the lower id first, got {word!r}")
        if last - first + len(found) >= MOST_AWAITED:
            raise ValueError(f"a job waits for at most {MOST_AWAITED:,} others")
        found.update((str(each), None) for each in range(first, last + 1))
    return tuple(sorted(found, key=int))


def is_ids(word: str) -> bool:
    """Whether a word can be an id or a range of ids; a job may have such a name all the same."""
    return _IDS.fullmatch(word) is not None


def ranges_of(jobs: Iterable[str]) -> tuple[str, ...]:
    """Ids as ranges, as few as there are. Ids that are no numbers, as no server of this version gives, come after these."""
    given = set(jobs)
    found: list[list[int]] = []
    for each in sorted(int(job) for job in given if job.isdecimal()):
        if found and found[-1][1] == each - 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    others = sorted(job for job in given if not job.isdecimal())
    return *(str(first) if first == last else f"{first}-{last}" for first, last in found), *others
