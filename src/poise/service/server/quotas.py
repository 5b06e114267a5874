"""Quotas: what users and tenants may queue, keep and send.

A user is a token. Jobs count until they have ended, and so do the bytes of their requests. The journal keeps requests for
ever, so a token that submits and cancels again and again is limited by what it may send within an hour. All of it is derived
from the records of jobs: a restart comes to the same figures, and there is nothing else to store.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, TypeVar

from poise.scheduler.model.units import counted
from poise.service.server.accounts import is_at_least
from poise.service.server.records import JobRecord
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.wire.views import Account, Role

SLOT = 60.0  # seconds of a slot; what was sent in one is forgotten as a whole, once all of it is an hour old
HOUR = 60 * SLOT
LATER = 60  # seconds after which a refused client is told to ask again, as it is unknown when jobs will end
MIB = 1 << 20

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What users may do; operators and admins are exempt. 0: no limit.

    user_jobs, tenant_jobs     jobs that have not ended
    user_bytes, tenant_bytes   bytes of the requests of those jobs; for a user, also of what is sent within an hour
    user_rate                  jobs that are submitted, held or released within an hour
    """

    user_jobs: int = 10_000
    tenant_jobs: int = 20_000
    user_rate: int = 20_000
    user_bytes: int = 256 * MIB
    tenant_bytes: int = 512 * MIB


@dataclass(slots=True)
class Load:
    """Number of jobs, and bytes of their requests."""

    jobs: int = 0
    size: int = 0

    def add(self, jobs: int, size: int) -> None:
        """Count more of them, or fewer."""
        self.jobs += jobs
        self.size += size


class Sent(NamedTuple):
    """What a user has sent in one slot, which is numbered from 1970."""

    tenant: str
    by: str
    slot: int
    jobs: int
    size: int


class Hour:
    """What one user has sent within the last hour, slot by slot."""

    __slots__ = ("_slots", "total")

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Load]] = deque()
        self.total = Load()

    def add(self, slot: int, jobs: int, size: int) -> None:
        """Count what was sent in a slot, which is not before the last one."""
        if not self._slots or self._slots[-1][0] < slot:
            self._slots.append((slot, Load()))
        self._slots[-1][1].add(jobs, size)
        self.total.add(jobs, size)

    def forget(self, now: float) -> None:
        """Drop what is more than an hour old."""
        while self._slots and _expiry(self._slots[0][0]) <= now:
            _, load = self._slots.popleft()
            self.total.add(-load.jobs, -load.size)

    def wait(self, jobs: int, size: int, now: float) -> float:
        """Seconds until this many jobs and bytes are forgotten."""
        for slot, load in self._slots:
            jobs, size = jobs - load.jobs, size - load.size
            if jobs <= 0 and size <= 0:
                return _expiry(slot) - now
        return HOUR


def _expiry(slot: int) -> float:
    """When what was sent in a slot is forgotten."""
    return (slot + 1) * SLOT + HOUR


def slot_of(time: float) -> int:
    """The slot that a time is in."""
    return int(time // SLOT)


def size_of(request: str) -> int:
    """Bytes of a request as it is stored."""
    return len(request) if request.isascii() else len(request.encode("utf-8", "surrogatepass"))


class Usage:
    """What each user, named by tenant and token, and each tenant has queued, and has sent within the last hour."""

    def __init__(self) -> None:
        self.tenants: dict[str, Load] = {}
        self.users: dict[tuple[str, str], Load] = {}
        self.hours: dict[tuple[str, str], Hour] = {}

    def enter(self, record: JobRecord, sign: int = 1) -> None:
        """Count a job that has not ended."""
        tenant = record.job.tenant
        _change(self.tenants, tenant, sign, sign * record.size)
        if record.by is not None:
            _change(self.users, (tenant, record.by), sign, sign * record.size)

    def leave(self, record: JobRecord) -> None:
        """Count a job no more, as it has ended."""
        self.enter(record, -1)

    def submitted(self, record: JobRecord) -> None:
        """Count a job that has just been submitted."""
        self.enter(record)
        if record.by is not None:
            self.recall([Sent(record.job.tenant, record.by, slot_of(record.job.submitted), 1, record.size)])

    def recall(self, sent: Iterable[Sent]) -> None:
        """Count what was sent, in any order but not before what is known already."""
        for each in sorted(sent, key=lambda each: each.slot):
            self.hours.setdefault((each.tenant, each.by), Hour()).add(each.slot, each.jobs, each.size)

    def check_submit(self, by: Account, jobs: int, size: int, now: float, allowance: Allowance) -> None:
        """Raise RequestRefusedError if a user may not submit this much now."""
        if is_at_least(by, Role.OPERATOR):
            return
        user = (by.tenant, by.name)
        mine = f"token {by.name!r}", self.users.get(user, Load()), "user"
        ours = f"tenant {by.tenant}", self.tenants.get(by.tenant, Load()), "tenant"
        for (who, there, what), most in ((mine, allowance.user_jobs), (ours, allowance.tenant_jobs)):
            if most and there.jobs + jobs > most:
                has = f"{who} has {counted(there.jobs, 'job')} that have not ended"
                text = f"{has}, and {jobs:,} more would be over {most:,} (--{what}-jobs)"
                advice, bound = "cancel some, or wait for them to end", f"{what}-jobs"
                raise RequestRefusedError(RefusalCode.QUOTA, f"{text}; {advice}", retry=LATER, bound=bound)
        for (who, there, what), most in ((mine, allowance.user_bytes), (ours, allowance.tenant_bytes)):
            if most and there.size + size > most:
                has = f"{who} has {_mib(there.size)} of jobs that have not ended"
                text = f"{has}, and {_mib(size)} more would be over {_mib(most)} (--{what}-mib)"
                advice, bound = "cancel some, or make commands and environments smaller", f"{what}-mib"
                raise RequestRefusedError(RefusalCode.QUOTA, f"{text}; {advice}", retry=LATER, bound=bound)
        self._check_hour(user, Load(jobs, size), now, allowance)

    def check_change(self, by: Account, now: float, allowance: Allowance) -> None:
        """Count that a user holds or releases a job, which the journal keeps too; raise RequestRefusedError if too often."""
        if not is_at_least(by, Role.OPERATOR):
            self._check_hour((by.tenant, by.name), Load(1, 0), now, allowance)
            self.recall([Sent(by.tenant, by.name, slot_of(now), 1, 0)])

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


def _change(loads: dict[Key, Load], key: Key, jobs: int, size: int) -> None:
    """Add to a load; one without jobs is dropped."""
    load = loads.setdefault(key, Load())
    load.add(jobs, size)
    if not load.jobs:
        del loads[key]


def _mib(size: int) -> str:
    return f"{size / MIB:,.4g} MiB"
