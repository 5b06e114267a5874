"""Conditions of a job's start, besides its owner's hold: the end of other jobs, a moment, and its turn in a capped array.

A job whose conditions are not met is *barred*. The core is told to hold it (`Held`) and later to release it (`Released`),
in the same way as for its owner's hold, so the policy does not see it meanwhile. `StartConditions.look` says which jobs are
to be held, released or cancelled; the engine puts that into the journal with what caused it.

Nothing of this is stored for itself. Which conditions a job has is in its request. Whether they are met follows from the
ends of other jobs, the time, and who of its array competes already; whether it was found so before is in the journal.
`recall` and `note_open` take that up after a start.

What it costs. A term of `after` is kept once, whoever names it (`Prerequisite`): a thousand jobs that wait for a thousand
others are a thousand steps when these end, and a thousand when they start. Moments to begin are in a heap; the engine wakes
up for the first of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from poise.scheduler.model.units import format_seconds
from poise.service.server.records import JobRecord
from poise.service.wire.after import AfterEnd, ids_of, term_of
from poise.service.wire.moments import format_moment
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState

MOST_NAMED = 3  # jobs that a sentence names


class StartCode(StrEnum):
    """Codes of reasons for which a job does not compete yet."""

    DEPENDENCY = "dependency"
    BEGIN = "begin-time"
    ARRAY = "array-cap"


@dataclass(slots=True)
class Prerequisite:
    """Jobs that others wait for, and how they have to end; `name`: the term that stands for it.

    left      those that have not ended, or whose processes are not all gone, in order
    other     one of them that did not succeed, and how it ended; None: all that have ended have succeeded
    waiters   jobs that wait for them
    """

    name: str
    jobs: tuple[str, ...]
    end: AfterEnd
    left: dict[str, None]
    other: tuple[str, JobState] | None = None
    waiters: dict[str, None] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """They have ended as they have to."""
        return not self.left and (self.end is AfterEnd.ENDED or (self.other is None) == (self.end is AfterEnd.SUCCEEDED))

    @property
    def is_hopeless(self) -> bool:
        """They will never have ended as they have to."""
        if self.end is AfterEnd.SUCCEEDED:
            return self.other is not None
        return self.end is AfterEnd.FAILED and not self.left and self.other is None

    def note_end(self, job: str, state: JobState) -> None:
        """One of them has ended. It counts as left until its processes are gone."""
        if state is not JobState.SUCCEEDED and self.other is None:
            self.other = job, state

    def text(self, records: Mapping[str, JobRecord]) -> str:
        """What it is that a job waits for, in words."""
        how = {AfterEnd.ENDED: "to end", AfterEnd.SUCCEEDED: "to succeed", AfterEnd.FAILED: "to fail"}[self.end]
        if len(self.jobs) == 1:
            return f"waits for job {_named(self.jobs, records)} {how}"
        if self.end is AfterEnd.FAILED:
            how = f"to end, {'one of which has not succeeded' if self.other else 'at least one of which has to fail'}"
        few = _named(islice(self.left, MOST_NAMED), records)
        others = ", …" if len(self.left) > MOST_NAMED else ""
        return f"waits for {len(self.left):,} of {len(self.jobs):,} jobs {how}: {few}{others}"

    def cause(self) -> str:
        """Why a job that waits for this can never start."""
        if self.other is not None:
            job, state = self.other
            became = "was cancelled" if state is JobState.CANCELLED else "failed"
            return f"was to start after the success of job {job}, which {became}"
        which = f"job {self.jobs[0]}, which" if len(self.jobs) == 1 else f"one of {len(self.jobs):,} jobs, which all"
        return f"was to start after the failure of {which} succeeded"


def _named(jobs: Iterable[str], records: Mapping[str, JobRecord]) -> str:
    """Jobs with their states."""
    found = ((job, records.get(job)) for job in jobs)
    return ", ".join(job if record is None else f"{job} ({record.state})" for job, record in found)


@dataclass(slots=True)
class CappedArray:
    """Jobs of which only some may hold GPUs at once.

    key     whose it is, and its name
    jobs    those that have not ended
    turns   those that compete for GPUs, hold some, or have processes that have not left theirs
    """

    key: tuple[str, str]
    jobs: dict[str, None] = field(default_factory=dict)
    turns: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class JobConditions:
    """What is left of one job's conditions.

    cap         how many jobs of its array may have their turn at once
    is_barred   the core was told to hold it for them
    was_let_in  it comes before those of its array that have never had a turn
    """

    after: tuple[Prerequisite, ...] = ()
    begin: float = -inf
    array: CappedArray | None = None
    cap: int = 0
    is_barred: bool = False
    was_let_in: bool = False

    def code(self, now: float) -> StartCode | None:
        """The first condition that is not met, its turn aside; None: only that can be missing."""
        if not all(each.is_met for each in self.after):
            return StartCode.DEPENDENCY
        return StartCode.BEGIN if now < self.begin else None


class Verdicts(NamedTuple):
    """What a look at conditions has found: jobs in order, with what is to be said of each.

    barred   jobs that compete and may not
    opened   jobs that may compete from now on
    lost     jobs that can never start
    """

    barred: dict[str, None]
    opened: dict[str, str]
    lost: dict[str, str]


_MET = {
    StartCode.DEPENDENCY: "the jobs that it waited for have ended",
    StartCode.BEGIN: "its time to begin has come",
    StartCode.ARRAY: "it has its turn in its array",
}


class StartConditions:
    """The conditions of all jobs that have not ended. Used by the engine's thread; readers hold its lock.

    codes   number of barred jobs by the condition that they wait for, those that their owners hold left out
    """

    def __init__(self) -> None:
        self.codes: Counter[StartCode] = Counter()
        self._jobs: dict[str, JobConditions] = {}
        self._code_of: dict[str, StartCode] = {}
        self._terms: dict[str, Prerequisite] = {}
        self._awaited: dict[str, list[Prerequisite]] = {}  # by job
        self._arrays: dict[tuple[str, str], CappedArray] = {}
        self._array_of: dict[str, CappedArray] = {}  # of jobs that have their turn
        self._begins: list[tuple[float, str]] = []  # a heap
        self._changed: dict[str, None] = {}  # jobs to be looked at
        self._stirred: dict[int, CappedArray] = {}  # arrays in which a turn may be free, or wanted, by identity

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    # What happens to jobs.

    def add(self, record: JobRecord, request: JobRequest, ends_of: "EndsOf") -> None:
        """Note the conditions of a job that was just submitted, if it has any."""
        job, array = record.job.id, request.array or record.job.app
        if not request.after and request.begin is None and request.array_cap is None:
            return
        found = JobConditions(begin=-inf if request.begin is None else request.begin)
        found.after = tuple(self._term(text, ends_of) for text in dict.fromkeys(request.after))
        for each in found.after:
            each.waiters[job] = None
        if request.begin is not None:
            heappush(self._begins, (request.begin, job))
        if request.array_cap is not None and array is not None:
            key = record.job.tenant, array
            found.array, found.cap = self._arrays.setdefault(key, CappedArray(key)), request.array_cap
            found.array.jobs[job] = None
        self._jobs[job] = found
        self._changed[job] = None

    def recall(self, record: JobRecord, request: JobRequest, ends_of: "EndsOf") -> None:
        """Note the conditions of a job that was submitted before this start. One that has run has met those that pass.

        It counts as barred unless it runs or its owner holds it, or `note_open` says otherwise. Of one that has ended, and
        whose processes have not, only the turn counts.
        """
        has_run = record.launches > 0
        self.add(record, request.model_copy(update={"after": (), "begin": None}) if has_run else request, ends_of)
        if (found := self._jobs.get(record.job.id)) is not None:
            found.was_let_in = has_run
            found.is_barred = not record.held and not record.open_runs()
            if record.open_runs():
                self._give_turn(record.job.id, found)
            if record.finished is not None:
                self.note_end(record.job.id, record.state)

    def note_open(self, job: str) -> None:
        """The journal has it that a job competes: its conditions were met."""
        if (found := self._jobs.get(job)) is not None:
            found.is_barred = False
            self._open(job, found)
            self._give_turn(job, found)

    def renew(self, job: str) -> None:
        """The core lets a job compete, because its owner does: whether it may is to be looked at."""
        if (found := self._jobs.get(job)) is not None:
            found.is_barred = False
            self._changed[job] = None

    def touch(self, job: str) -> None:
        """A job was held, or its run has ended: its turn may be another's."""
        found = self._jobs.get(job)
        array = self._array_of.get(job) or (None if found is None else found.array)
        if array is not None:
            self._stirred[id(array)] = array
        if found is not None:
            self._changed[job] = None

    def note_end(self, job: str, state: JobState) -> None:
        """A job has ended: it has no conditions any more. May be said twice.

        Its turn is its own until its processes are gone. So long, too, those wait that wait for it (`note_gone`), but for
        those that can never start now.
        """
        for each in self._awaited.get(job, ()):
            each.note_end(job, state)
            if each.is_hopeless:
                self._changed |= each.waiters
        found = self._jobs.pop(job, None)
        if found is None:
            return
        self._set_code(job, None)
        self._drop_terms(job, found)
        if found.array is not None:
            found.array.jobs.pop(job, None)
            self._stirred[id(found.array)] = found.array

    def note_gone(self, job: str) -> None:
        """A job has ended, and so have all its processes. May be said twice."""
        for each in self._awaited.pop(job, ()):
            each.left.pop(job, None)
            if each.is_met or each.is_hopeless:
                self._changed |= each.waiters

    # The look.

    def next_time(self) -> float:
        """When something is to be looked at, if nothing happens before."""
        return -inf if self._changed or self._stirred else self._begins[0][0] if self._begins else inf

    def look(self, now: float, is_held: Callable[[str], bool], keeps_turn: Callable[[str], bool]) -> Verdicts:
        """Look at all jobs whose conditions may have changed. Jobs that are lost count as cancelled from here on.

        is_held      whether the owner of a job wants it held
        keeps_turn   whether a job that has its turn goes on having it
        """
        found = Verdicts({}, {}, {})
        while self._begins and self._begins[0][0] <= now:
            self._changed[heappop(self._begins)[1]] = None
        while self._changed:
            job = next(iter(self._changed))
            del self._changed[job]
            if (each := self._jobs.get(job)) is not None:
                self._look_at(job, each, now, is_held, found)
        for array in self._stirred.values():
            self._pass_turns(array, now, is_held, keeps_turn, found)
        self._stirred.clear()
        return found

    def _look_at(self, job: str, each: JobConditions, now: float, is_held: Callable[[str], bool], found: Verdicts) -> None:
        hopeless = next((term for term in each.after if term.is_hopeless), None)
        if hopeless is not None:
            found.lost[job] = hopeless.cause()
            self.note_end(job, JobState.CANCELLED)
            self.note_gone(job)
        elif is_held(job):  # the core holds it for its owner from now on
            self._set_code(job, None)
            each.is_barred = False
        elif (code := each.code(now)) is not None:
            self._bar(job, each, code, found)
        elif each.array is not None:
            self._stirred[id(each.array)] = each.array
        else:
            self._let_in(job, each, found)

    def _pass_turns(
        self,
        array: CappedArray,
        now: float,
        is_held: Callable[[str], bool],
        keeps_turn: Callable[[str], bool],
        found: Verdicts,
    ) -> None:
        """Take turns back from those who have no use for them, and give what is free to the first who wait."""
        for job in [each for each in array.turns if not keeps_turn(each)]:
            del array.turns[job], self._array_of[job]
        if not array.jobs and not array.turns:
            self._arrays.pop(array.key, None)
        ready = [job for job in array.jobs if job not in array.turns and not is_held(job)]
        ready = [job for job in ready if self._jobs[job].code(now) is None]
        ready.sort(key=lambda job: (not self._jobs[job].was_let_in, int(job)))
        for job in ready:
            each = self._jobs[job]
            if len(array.turns) < each.cap:
                self._give_turn(job, each)
                self._let_in(job, each, found)
            else:
                self._bar(job, each, StartCode.ARRAY, found)

    def _bar(self, job: str, each: JobConditions, code: StartCode, found: Verdicts) -> None:
        self._set_code(job, code)
        if not each.is_barred:
            each.is_barred = True
            found.barred[job] = None

    def _let_in(self, job: str, each: JobConditions, found: Verdicts) -> None:
        if each.is_barred:
            each.is_barred = False
            code = self._code_of.get(job)
            found.opened[job] = "nothing is in its way any more" if code is None else _MET[code]
        self._set_code(job, None)
        self._open(job, each)

    def _open(self, job: str, each: JobConditions) -> None:
        """Forget conditions that were met for good."""
        self._drop_terms(job, each)
        each.begin, each.was_let_in = -inf, True
        if each.array is None:
            del self._jobs[job]

    def _give_turn(self, job: str, each: JobConditions) -> None:
        if each.array is not None:
            each.array.turns[job] = None
            self._array_of[job] = each.array

    def _set_code(self, job: str, code: StartCode | None) -> None:
        before = self._code_of.pop(job, None)
        if before is not None:
            self.codes[before] -= 1
        if code is not None:
            self._code_of[job] = code
            self.codes[code] += 1

    # Terms.

    def _term(self, text: str, ends_of: "EndsOf") -> Prerequisite:
        """The prerequisite that a term stands for, shared by all who wait for it."""
        if text not in self._terms:
            term = term_of(text)
            jobs = ids_of(term)
            found = Prerequisite(text, jobs, term.end, dict.fromkeys(jobs))
            for job, (state, is_gone) in ends_of(jobs).items():
                found.note_end(job, state)
                if is_gone:
                    del found.left[job]
            for job in found.left:
                self._awaited.setdefault(job, []).append(found)
            self._terms[text] = found
        return self._terms[text]

    def _drop_terms(self, job: str, each: JobConditions) -> None:
        for term in each.after:
            term.waiters.pop(job, None)
            if not term.waiters:
                self._terms.pop(term.name, None)
                for other in term.left:
                    self._awaited[other].remove(term)
                    if not self._awaited[other]:
                        del self._awaited[other]
        each.after = ()

    # Questions.

    def is_barred(self, job: str) -> bool:
        """Whether the core holds a job for its conditions, and not for its owner."""
        found = self._jobs.get(job)
        return found is not None and found.is_barred

    def code_of(self, job: str) -> StartCode | None:
        """What a job waits for that its owner does not hold; None: for none of its conditions."""
        return self._code_of.get(job)

    def first_awaited(self, job: str) -> str | None:
        """A job that another one waits for; None: none that has not ended."""
        each = self._jobs.get(job)
        return None if each is None else next((other for term in each.after for other in term.left), None)

    def texts(self, job: str, records: Mapping[str, JobRecord], now: float) -> list[str]:
        """All that a job waits for, what counts first; none if its conditions are met."""
        each = self._jobs.get(job)
        if each is None:
            return []
        found = [term.text(records) for term in each.after if not term.is_met]
        if now < each.begin:
            found.append(f"does not start before {format_moment(each.begin)}, in {format_seconds(each.begin - now)}")
        is_full = each.array is not None and job not in each.array.turns and len(each.array.turns) >= each.cap
        if each.array is not None and (is_full or self._code_of.get(job) is StartCode.ARRAY):
            few = _named(islice(each.array.turns, MOST_NAMED), records)
            others = ", …" if len(each.array.turns) > MOST_NAMED else ""
            have = "one has it" if len(each.array.turns) == 1 else f"{len(each.array.turns):,} have theirs"
            most = f"at most {each.cap:,} of its array may hold GPUs at once"
            found.append(f"waits for its turn: {most}, and {have}: {few}{others}")
        return found


EndsOf = Callable[[tuple[str, ...]], Mapping[str, tuple[JobState, bool]]]
"""Of some jobs, those that have ended, with their final states, and whether all their processes are gone."""
