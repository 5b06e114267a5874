"""Which of several servers acts on a cluster: the holder of a Lease. Two never act at the same time.

The holder writes the Lease again and again. It acts until two thirds of the lease's duration after it *sent* the last write
that succeeded. Another takes the Lease when it has *seen* it unchanged for the whole duration, and it cannot see a write
before that was sent. So the holder has stopped a third of the duration earlier, which is more than clocks differ in speed.
The times in the Lease are compared with no clock: they are of another machine, and for people. Each write carries the
resource version of what it replaces, so one that was overtaken by another changes nothing, however late it arrives.

One case needs no waiting: the holder is known to be dead. A server holds a lock on its state directory for as long as it
lives, and the Lease says which lock that is. A server that has the same lock, and so the same journal, takes the Lease at
once. What the dead one had sent may still arrive then, as it may after any wait: the API server takes its time. It was
ordered by the same journal, and doing it twice is the same as once (`actions.py`).

Whoever deletes the Lease takes the guarantee away, until the holder notices at its next renewal.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, inf
from random import uniform
from time import time  # noqa: TID251 - a Lease carries, for people, the time at which it was written
from typing import NamedTuple
from uuid import uuid4

from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError, LeadershipLostError
from poise.service.backends.kubernetes.objects import Json
from poise.service.backends.local.runner.fence import since_boot

ACTING_PART = 2 / 3  # of the duration, for which the holder acts after it sent a renewal
RENEWING_PART = 1 / 5  # of the duration, after which the holder renews, and another looks again
ANSWER_PART = 1 / 4  # of the duration, for which an answer is awaited: there is time for a second try
AGAIN_PART = 1 / 30  # of the duration, between a try to renew that failed and the next


class _Mark(NamedTuple):
    """What changes when a holder renews its lease."""

    holder: str
    renewed: str
    term: int
    version: str


@dataclass(frozen=True, slots=True)
class _Record:
    """A Lease as it was read."""

    body: Json
    mark: _Mark
    seconds: int | None

    @classmethod
    def of(cls, body: Json) -> "_Record":
        spec, version = body.get("spec") or {}, body["metadata"]["resourceVersion"]
        transitions = int(spec.get("leaseTransitions") or 0)
        mark = _Mark(spec.get("holderIdentity") or "", spec.get("renewTime") or "", transitions, version)
        return cls(body, mark, spec.get("leaseDurationSeconds"))


class Leadership:
    """One candidate for a Lease, for the life of one process. Give it a client of its own, so that renewals never wait.

    identity   this candidate's name in the Lease: the given name, the name of the lock and something random. A new process
               never takes itself for an earlier one, which may still be acting
    lock       names a lock that this process has for as long as it lives: a holder that had the same one is dead.
               Letters and digits; empty: there is none
    term       the number of this leadership: larger than those of all before it, never of two processes; 0: never led
    seconds    the duration of the lease, rounded up for others
    """

    def __init__(  # noqa: PLR0913 - of which two are for tests
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        lock: str = "",
        seconds: float = 15.0,
        clock: Callable[[], float] = since_boot,  # goes on while the machine sleeps, which others do not wait for
        wall: Callable[[], float] = time,
    ) -> None:
        self._lock = lock
        self.identity = f"{identity}_{lock}_{uuid4().hex[:12]}"
        self.term = 0
        self.seconds = seconds
        self._client, self._namespace, self._name = client, namespace, name
        self._clock, self._wall = clock, wall
        self._record: _Record | None = None  # as it was last read or written
        self._unchanged_since = 0.0  # when that was first seen
        self._acting_until = -inf

    def is_leading(self) -> bool:
        """Whether this process may act now. Ask before each write: time passes."""
        return self._clock() < self._acting_until

    async def acquire(self, on_waiting: Callable[[str], None]) -> int:
        """Wait until this process leads, and return the term.

        `on_waiting` is told what it waits for, each time when that is something else. What the API server refuses is waited
        for, too: permissions can be given.
        """
        said = ""
        while True:
            try:
                waiting = await self._try_to_lead()
            except (ApiError, ApiUnavailableError) as error:
                waiting = f"lease {self._namespace}/{self._name}: {error}"
            if waiting is None:
                return self.term
            if waiting != said:
                on_waiting(waiting)
                said = waiting
            await asyncio.sleep(uniform(0.8, 1.0) * RENEWING_PART * self.seconds)

    async def hold(self) -> None:
        """Renew the lease until it is lost, and raise `LeadershipLostError`. This process does not act any more by then."""
        try:
            while True:
                await asyncio.sleep(min(RENEWING_PART * self.seconds, self._left()))
                await self._renew()
        finally:
            self._acting_until = -inf

    async def release(self) -> None:
        """Stop acting, and let another lead at once. Without an answer the others wait until the lease is over."""
        self._acting_until = -inf
        for _ in range(2):  # an earlier write whose answer was lost makes the first one fail
            record = self._record
            if record is None or record.mark.holder != self.identity:
                return
            try:
                await self._write(record, "", record.mark.term, 1)
            except (ApiError, ApiUnavailableError):
                try:
                    await self._read()
                except (ApiError, ApiUnavailableError):
                    return

    async def _try_to_lead(self) -> str | None:
        """Take the lease if it is free; None: it is ours now. Otherwise say why not."""
        record = await self._read()
        known = self._record  # if the Lease has been deleted, its holder may still be acting
        if known is None:
            return await self._lead(None, 1)
        mark = known.mark
        duration = max(1.0, self.seconds if known.seconds is None else float(known.seconds))
        is_over = self._clock() - self._unchanged_since >= duration
        if not mark.holder or mark.holder == self.identity or is_over or self._is_dead(mark.holder):
            return await self._lead(record, mark.term + 1)
        return f"{mark.holder} leads; its lease {self._namespace}/{self._name} is over when not renewed for {duration:g} s"

    def _is_dead(self, holder: str) -> bool:
        """Whether a holder is known to be dead: it had the lock that this process has."""
        return bool(self._lock) and holder.split("_")[-2:-1] == [self._lock]

    async def _lead(self, record: _Record | None, term: int) -> str | None:
        sent = self._clock()
        try:
            await self._write(record, self.identity, term, ceil(self.seconds))
        except ApiError as error:
            if error.status != 409:
                raise
            return f"another has just taken lease {self._namespace}/{self._name}"
        self.term, self._acting_until = term, sent + ACTING_PART * self.seconds
        return None if self.is_leading() else "the answer came too late"

    async def _renew(self) -> None:
        """Write the lease again, as often as it takes and until this process must not act any more."""
        trouble = "there was no time"
        while self._left() > 0:
            sent = self._clock()
            try:
                if self._record is None or self._record.mark.holder != self.identity:
                    self._check(await self._read())
                    sent = self._clock()
                await self._write(self._record, self.identity, self.term, ceil(self.seconds))
            except (ApiError, ApiUnavailableError) as error:
                trouble = str(error)
                self._record = None  # it may be another one by now: read it before the next try
                await asyncio.sleep(max(0.0, min(AGAIN_PART * self.seconds, self._left())))
            else:
                if self._left() > 0:
                    self._acting_until = sent + ACTING_PART * self.seconds
                    return
        raise LeadershipLostError(f"lease {self._namespace}/{self._name} could not be renewed in time: {trouble}")

    def _check(self, record: _Record | None) -> None:
        """Give up if the lease is no longer that of this leadership."""
        what = f"lease {self._namespace}/{self._name}"
        if record is None:
            raise LeadershipLostError(f"{what} has been deleted")
        if (record.mark.holder, record.mark.term) != (self.identity, self.term):
            raise LeadershipLostError(f"{what} is now that of {record.mark.holder or 'no instance'}")

    def _left(self) -> float:
        return self._acting_until - self._clock()

    # Requests

    async def _read(self) -> _Record | None:
        """Read the Lease, and note since when it has been as it is; None: there is none."""
        try:
            body = await self._in_time(self._client.get(self._path))
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        record = _Record.of(body)
        if self._record is None or record.mark != self._record.mark:
            # The moment after the answer: what is in it may have been written just before.
            self._record, self._unchanged_since = record, self._clock()
        return record

    async def _write(self, record: _Record | None, holder: str, term: int, seconds: int) -> None:
        """Write the Lease in place of the one that was read, or as a new one."""
        now = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        before = {} if record is None else record.body.get("spec") or {}
        is_renewal = record is not None and (record.mark.holder, record.mark.term) == (holder, term)
        spec = {
            **before,
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "leaseTransitions": term,
            "acquireTime": before.get("acquireTime", now) if is_renewal else now,
            "renewTime": now,
        }
        head = {"namespace": self._namespace, "name": self._name}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": head, "spec": spec}
        if record is None:
            body = await self._in_time(self._client.post(self._path.rpartition("/")[0], lease))
        else:
            body = await self._in_time(self._client.put(self._path, {**lease, "metadata": record.body["metadata"]}))
        self._record, self._unchanged_since = _Record.of(body), self._clock()

    async def _in_time(self, asking: Coroutine[object, object, Json]) -> Json:
        """Await an answer for a part of the duration, so that a request that hangs does not cost the leadership."""
        seconds = ANSWER_PART * self.seconds
        try:
            async with asyncio.timeout(seconds):
                return await asking
        except TimeoutError as error:
            raise ApiUnavailableError(f"no answer within {seconds:g} s") from error

    @property
    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{self._name}"
