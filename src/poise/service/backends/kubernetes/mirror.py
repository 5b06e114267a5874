"""Follows a collection of the Kubernetes API by list and watch, whatever becomes of the server meanwhile."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from enum import StrEnum
from random import uniform
from time import monotonic
from typing import NamedTuple

from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError, ExpiredError
from poise.service.backends.kubernetes.objects import Json, ObjectKey

NOT_LISTED = "not listed yet"  # what is wrong with a mirror that is new
LEAST_PAUSE, MOST_PAUSE = 0.5, 10.0  # seconds between tries of a mirror whose server is away
REFUSALS = (400, 403, 404)  # of a list: asking again changes nothing


class Change(StrEnum):
    """What happened to an object of a mirrored collection."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class _MirroredObject(NamedTuple):
    uid: str
    version: str


class Mirror:
    """Follows one collection by list and watch, and tells each change once; it keeps no objects, callers do.

    `on_change` is told of an object as ADDED when it was not known, as MODIFIED when it is another version, and as DELETED
    when it is gone or no longer selected. One that was deleted and made again under its name, which has another uid, is told
    as DELETED and then as ADDED. Of an object whose end was not seen, DELETED has only `metadata` with namespace, name, uid
    and resourceVersion. What it raises ends `run`.

    synced    whether a list has ever been complete
    problem   why the mirror is behind, for people; None: it is not
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        *,
        on_change: Callable[[Change, Json], None],
        labels: str = "",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.synced = asyncio.Event()
        self.problem: str | None = NOT_LISTED
        self._client, self._path = client, path
        self._on_change = on_change
        self._labels = labels
        self._clock = clock
        self._known: dict[ObjectKey, _MirroredObject] = {}
        self._version: str | None = None  # from which to watch; None: list first
        self._failures = 0  # in a row
        self._answered = asyncio.Event()  # whether the first list was complete or refused
        self._refusal: ApiError | None = None

    def __len__(self) -> int:
        return len(self._known)

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
            except ExpiredError as error:
                self._version = None
                await self._fall_behind(error, None)
            except (ApiError, ApiUnavailableError) as error:
                await self._fall_behind(error, error.retry_after)

    async def first_list(self) -> None:
        """Wait until a list was complete; raise ApiError if the server refused it before any was."""
        await self._answered.wait()
        if self._refusal is not None and not self.synced.is_set():
            raise self._refusal

    async def _list(self) -> None:
        seen: set[ObjectKey] = set()
        version = ""
        async with aclosing(self._client.pages(self._path, labels=self._labels)) as pages:
            async for page in pages:
                if page.is_first:
                    seen.clear()
                for thing in page.items:
                    seen.add(self._take(thing))
                version = page.resource_version
        for key in [key for key in self._known if key not in seen]:
            self._lose(key)
        self._version = version
        if self.problem == NOT_LISTED:
            self.problem = None  # the first list is as new as a watch; that it is not open yet is no trouble
        self.synced.set()
        self._answered.set()

    async def _watch(self) -> None:
        began, events = self._clock(), 0
        watch = self._client.watch(self._path, self._version or "", labels=self._labels, on_open=self._catch_up)
        async with aclosing(watch) as happenings:
            async for kind, thing in happenings:
                events += 1
                self._failures = 0
                self._happen(kind, thing)
        if not events and self._clock() - began < LEAST_PAUSE:  # a server that ends each watch at once is not to be flooded
            await self._back_off(None)

    def _happen(self, kind: str, thing: Json) -> None:
        self._version = thing["metadata"]["resourceVersion"]
        if kind == "DELETED":
            if self._known.pop(_key(thing), None) is not None:
                self._on_change(Change.DELETED, thing)
        elif kind in ("ADDED", "MODIFIED"):
            self._take(thing)

    def _take(self, thing: Json) -> ObjectKey:
        """Note an object that exists, and tell how it differs from what was known."""
        head, key = thing["metadata"], _key(thing)
        now, before = _MirroredObject(head["uid"], head["resourceVersion"]), self._known.get(key)
        if before is not None and before.uid != now.uid:
            self._lose(key)
            before = None
        if now != before:
            self._known[key] = now
            self._on_change(Change.ADDED if before is None else Change.MODIFIED, thing)
        return key

    def _lose(self, key: ObjectKey) -> None:
        """Tell that an object is gone, of which no more is known than who it was."""
        (namespace, name), known = key, self._known.pop(key)
        head = {"name": name, "uid": known.uid, "resourceVersion": known.version}
        self._on_change(Change.DELETED, {"metadata": {**({"namespace": namespace} if namespace else {}), **head}})

    def _catch_up(self) -> None:
        self.problem = None

    async def _fall_behind(self, error: Exception, retry_after: float | None) -> None:
        self.problem = str(error)
        if isinstance(error, ApiError) and error.status in REFUSALS and not self.synced.is_set():
            self._refusal = error
            self._answered.set()
        if isinstance(error, ExpiredError) and not self._failures:
            self._failures = 1  # list at once; after a second time in a row, pause
            return
        await self._back_off(retry_after)

    async def _back_off(self, retry_after: float | None) -> None:
        """Wait: longer each time, and less or more than others do, who lost the same server at the same moment."""
        longest = min(MOST_PAUSE, LEAST_PAUSE * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        await asyncio.sleep(max(uniform(0.5, 1.0) * longest, min(retry_after or 0.0, MOST_PAUSE)))


def _key(thing: Json) -> ObjectKey:
    head = thing["metadata"]
    return head.get("namespace", ""), head["name"]
