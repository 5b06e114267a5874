"""What tenants and users may queue, keep and send. Counted from the records of jobs: a restart comes to the same figures.

A user is a token. Jobs count until they have ended, and so do the bytes of what was submitted. As the journal keeps those
for ever, whoever submits and cancels again and again is held by what a token may send in an hour.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, TypeVar

from poise.scheduler.model.units import counted
from poise.service.server.accounts import is_at_least
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.server.records import JobRecord
from poise.service.wire.views import Account, Role

SLOT = 60.0
SLOTS = 60
"""Slots of an hour; what was sent in one is forgotten as a whole, once all of it is an hour old."""
HOUR = SLOT * SLOTS
LATER = 60
"""Seconds until it is worth asking again, as the ends of jobs are unknown."""
MIB = 1 << 20

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Allowance:
    """What users may do; operators and admins are not held to it. 0: no bound.

    user_jobs, tenant_jobs     jobs that have not ended
    user_bytes, tenant_bytes   of what was submitted, of jobs that have not ended; of a user, also what is sent in an hour
    user_rate                  jobs that are submitted in an hour
    """

    user_jobs: int = 10_000
    tenant_jobs: int = 20_000
    user_rate: int = 20_000
    user_bytes: int = 256 * MIB
    tenant_bytes: int = 512 * MIB


@dataclass(slots=True)
class Load:
    """Jobs, and bytes of what was submitted."""

    jobs: int = 0
    size: int = 0


class Sent(NamedTuple):
    """What a user has sent in one slot, which is a number of minutes since 1970."""

    tenant: str
    by: str
    slot: int
    jobs: int
    size: int


class Hour:
    """What one user has sent lately, slot by slot."""

    __slots__ = ("_slots", "total")

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Load]] = deque()
        self.total = Load()

    def add(self, slot: int, jobs: int, size: int) -> None:
        """Something was sent, not before what is known already."""
        if not self._slots or self._slots[-1][0] < slot:
            self._slots.append((slot, Load()))
        for load in (self._slots[-1][1], self.total):
            load.jobs += jobs
            load.size += size

    def forget(self, now: float) -> None:
        """What is an hour old counts no more."""
        while self._slots and _ends(self._slots[0][0]) <= now:
            _, load = self._slots.popleft()
            self.total.jobs -= load.jobs
            self.total.size -= load.size

    def wait(self, jobs: int, size: int, now: float) -> float:
        """Seconds until so many jobs and bytes have been forgotten."""
        for slot, load in self._slots:
            jobs, size = jobs - load.jobs, size - load.size
            if jobs <= 0 and size <= 0:
                return _ends(slot) - now
        return HOUR


def _ends(slot: int) -> float:
    """When what was sent in a slot is forgotten."""
    return (slot + 1) * SLOT + HOUR


def slot_of(moment: float) -> int:
    """The slot that a moment is in."""
    return int(moment // SLOT)


def size_of(request: str) -> int:
    """Bytes of what was submitted, as it is kept."""
    return len(request) if request.isascii() else len(request.encode("utf-8", "surrogatepass"))


class Usage:
    """What each user and tenant has queued, and has sent in the last hour."""

    def __init__(self) -> None:
        self.tenants: dict[str, Load] = {}
        self.users: dict[tuple[str, str], Load] = {}
        self.hours: dict[tuple[str, str], Hour] = {}

    def enter(self, record: JobRecord) -> None:
        """A job has not ended."""
        self._count(record, 1)

    def leave(self, record: JobRecord) -> None:
        """It has."""
        self._count(record, -1)

    def submitted(self, record: JobRecord) -> None:
        """A job has just been submitted."""
        self.enter(record)
        if record.by is not None:
            self._hour(record.job.tenant, record.by).add(slot_of(record.job.submitted), 1, record.size)

    def recall(self, sent: Iterable[Sent]) -> None:
        """What was sent before the service was started, in any order."""
        for each in sorted(sent, key=lambda each: each.slot):
            self._hour(each.tenant, each.by).add(each.slot, each.jobs, each.size)

    def check(self, by: Account, jobs: int, size: int, now: float, allowance: Allowance) -> None:
        """Raise RefusedError if a user may not submit so much now."""
        if is_at_least(by, Role.OPERATOR):
            return
        user = (by.tenant, by.name)
        who, whose = f"token {by.name!r}", f"tenant {by.tenant}"
        mine, ours = self.users.get(user, Load()), self.tenants.get(by.tenant, Load())
        _check_jobs(who, mine.jobs, jobs, allowance.user_jobs, "user-jobs")
        _check_jobs(whose, ours.jobs, jobs, allowance.tenant_jobs, "tenant-jobs")
        _check_bytes(who, mine.size, size, allowance.user_bytes, "user-mib")
        _check_bytes(whose, ours.size, size, allowance.tenant_bytes, "tenant-mib")
        self._check_hour(user, Load(jobs, size), now, allowance)

    def changed(self, by: Account, now: float, allowance: Allowance) -> None:
        """A user holds or releases a job, which the journal keeps too; raise RefusedError if that was too often lately."""
        if not is_at_least(by, Role.OPERATOR):
            self._check_hour((by.tenant, by.name), Load(1, 0), now, allowance)
            self._hour(by.tenant, by.name).add(slot_of(now), 1, 0)

    def _check_hour(self, user: tuple[str, str], more: Load, now: float, allowance: Allowance) -> None:
        hour = self.hours.get(user) or Hour()
        hour.forget(now)
        sent = hour.total
        if not sent.jobs:
            self.hours.pop(user, None)
        jobs = sent.jobs + more.jobs - allowance.user_rate if allowance.user_rate else 0
        size = sent.size + more.size - allowance.user_bytes if allowance.user_bytes and more.size else 0
        if jobs <= 0 and size <= 0:
            return
        seconds = max(1, ceil(hour.wait(jobs, size, now)))
        if jobs > 0:
            did, what, most, bound = ", held or released", counted(sent.jobs, "job"), f"{allowance.user_rate:,}", "user-rate"
        else:
            did, what, most, bound = "", _mib(sent.size), _mib(allowance.user_bytes), "user-mib"
        text = f"token {user[1]!r} has submitted{did} {what} within an hour, of at most {most} (--{bound})"
        advice = f"try again in {seconds:,} s" if sent.jobs else "submit fewer at once"
        raise RequestRefusedError(RefusalCode.RATE, f"{text}; {advice}", retry=seconds, bound=bound)

    def _hour(self, tenant: str, by: str) -> Hour:
        hour = self.hours.get((tenant, by))
        if hour is None:
            hour = self.hours[tenant, by] = Hour()
        return hour

    def _count(self, record: JobRecord, sign: int) -> None:
        tenant, jobs, size = record.job.tenant, sign, sign * record.size
        _change(self.tenants, tenant, jobs, size)
        if record.by is not None:
            _change(self.users, (tenant, record.by), jobs, size)


def _change(loads: dict[Key, Load], key: Key, jobs: int, size: int) -> None:
    """What there is none of is not kept."""
    load = loads.get(key)
    if load is None:
        load = loads[key] = Load()
    load.jobs += jobs
    load.size += size
    if not load.jobs:
        del loads[key]


def _check_jobs(who: str, there: int, more: int, most: int, bound: str) -> None:
    if most and there + more > most:
        text = f"{who} has {counted(there, 'job')} that have not ended, and {more:,} more would be over {most:,} (--{bound})"
        raise RequestRefusedError(
            RefusalCode.QUOTA, f"{text}; cancel some, or wait for them to end", retry=LATER, bound=bound
        )


def _check_bytes(who: str, there: int, more: int, most: int, bound: str) -> None:
    if most and there + more > most:
        text = f"{who} has {_mib(there)} of jobs that have not ended, and {_mib(more)} more would be over {_mib(most)}"
        advice = "cancel some, or make commands and environments smaller"
        raise RequestRefusedError(RefusalCode.QUOTA, f"{text} (--{bound}); {advice}", retry=LATER, bound=bound)


def _mib(size: int) -> str:
    return f"{size / MIB:,.4g} MiB"
