"""Ships the logs of runs to the server while they run, and a last time at their end.

What is new of all logs goes into one request. The server says which byte of each it wants next, so nothing is remembered
here that a crash could lose: of a log of which that is not known, the beginning is sent, and the server drops what it has.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from contextlib import suppress

import httpx

from poise.service.agent.report_times import ReportTimes
from poise.service.backends.local.logs import read_log
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.run_table import Key
from poise.service.wire.agent_messages import MOST_PIECES, LogPiece

MOST_BYTES = 1 << 20  # of one request
FIRST_BYTES = 1 << 16  # of a log of which it is not known what the server has

Log = tuple[str, int]  # job, replica
Status = tuple[int, int]  # of the file that is being written: inode and length
SendLogs = Callable[[Sequence[LogPiece], bytes], Awaitable[tuple[int | None, ...]]]
"""Takes pieces, and the text of all of them; returns which byte of each log the server wants next, None: no room."""


class LogShipping:
    """The logs of all runs on this node. One request is under way at a time."""

    def __init__(self, state: StateDir, send: SendLogs) -> None:
        self._state, self._send = state, send
        self._ranks: dict[Key, list[int]] = {}
        self._next: dict[Log, int] = {}  # what the server wants next
        self._shipped: dict[Log, Status] = {}  # what the file was when all of it had been shipped
        self._lock = asyncio.Lock()  # its waiters take turns, so a run that writes without end does not keep others waiting

    def enter(self, key: Key, ranks: list[int]) -> None:
        """Ship the logs of these replicas from now on."""
        self._ranks[key] = ranks

    def keep(self, keys: Container[Key]) -> None:
        """Forget all runs but these: the others have ended while there was no server to tell."""
        self._ranks = {key: ranks for key, ranks in self._ranks.items() if key in keys}

    async def run(self, times: ReportTimes) -> None:
        """Ship in one session, until cancelled. What fails is sent with the next report: logs do not end a session."""
        self._next.clear()  # the server may have lost something
        self._shipped.clear()
        async for keys in times.reports():
            with suppress(httpx.HTTPError):
                await self.ship([*self._ranks] if keys is None else keys)

    async def finish(self, key: Key) -> None:
        """Ship what is left of a run that is over, and forget it."""
        await self.ship([key])
        for rank in self._ranks.pop(key, ()):
            self._next.pop((key[0], rank), None)
            self._shipped.pop((key[0], rank), None)

    async def ship(self, keys: Iterable[Key]) -> None:
        """Ship what is new of the logs of these runs."""
        left = [(key[0], rank) for key in keys for rank in self._ranks.get(key, ())]
        while left:
            async with self._lock:
                left = await self._ship_some(left)

    async def _ship_some(self, logs: list[Log]) -> list[Log]:
        """Send one request; return the logs of which there may be more.

        What cannot be read here or kept there, as on a full disk, is tried again at the next report. What a run has written
        last may then be missing on the server, and its end is reported nevertheless.
        """
        found, unread = await asyncio.to_thread(self._read, logs)
        if not found:
            return unread
        received = await self._send([piece for piece, _ in found], b"".join(text for _, text in found))
        for (piece, _), wanted in zip(found, received, strict=True):
            if wanted is not None:
                self._next[piece.job, piece.rank] = wanted
                unread.append((piece.job, piece.rank))
        return unread

    def _read(self, logs: list[Log]) -> tuple[list[tuple[LogPiece, bytes]], list[Log]]:
        """Read what is new of these logs, as much as fits into a request; and return the logs that did not fit."""
        found: list[tuple[LogPiece, bytes]] = []
        room = MOST_BYTES
        for place, (job, rank) in enumerate(logs):
            if room <= 0 or len(found) == MOST_PIECES:
                return found, logs[place:]
            with suppress(OSError):
                status = self._status(job, rank)
                if status is not None and status == self._shipped.get((job, rank)):
                    continue
                offset = self._next.get((job, rank))
                most = FIRST_BYTES if offset is None else room
                text, begin, _ = read_log(self._state.handle, job, rank, offset or 0, most)
                if text:
                    found.append((LogPiece(job=job, rank=rank, offset=begin, length=len(text)), text))
                    room -= len(text)
                elif status is not None:
                    self._shipped[job, rank] = status
        return found, []

    def _status(self, job: str, rank: int) -> Status | None:
        """Return what changes whenever a log does; None: there is none. Cheap, as most logs have nothing new."""
        try:
            stat = os.stat(self._state.job_path(job) / "log" / f"{rank}.log", follow_symlinks=False)
        except OSError:
            return None
        return stat.st_ino, stat.st_size
