"""Logs that agents ship to the server, so that they can be read while a node is away.

A replica's log is one file here, as on one machine (`backends/local/logs.py`), made of what the nodes have written in turn.
Which byte of a node's own log comes next is not counted: it follows from the length of the file. `<rank>.source.json` says
from which node, and from which byte of its log, the file has been extended since it had which length, so that neither a
crash between writing and noting nor a request that is sent twice repeats or loses a line.

Logs are written in a thread of their own: a disk that is slow for a while must not keep the server from answering agents,
whose leases depend on that. Nothing is forced to the disk; after a power failure a line may be missing or there twice.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from poise.service.backends.local.lease_files import Fields, get, put
from poise.service.backends.local.logs import LogFile, end_of
from poise.service.backends.local.orders import LocalSettings
from poise.service.backends.local.state_dir import StateDir
from poise.service.wire.agent_messages import LogPiece

LOG = logging.getLogger("poise.remote")
MOST_REMEMBERED = 20_000  # logs
MOST_SOURCES = 1_000  # nodes of one log, the latest ones: each pod of a job is another
_LIMITS = LocalSettings()


class LogSource(NamedTuple):
    """The file has had `length` bytes when the node's log from byte `offset` on was appended to it."""

    node: str
    offset: int
    length: int


class ShippedLogs:
    """All logs."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._thread = ThreadPoolExecutor(1, "shipped-logs")
        self._sources: dict[tuple[str, int], tuple[LogSource, int]] = {}  # with the length of the log, as noted here last

    async def close(self) -> None:
        """Write what is being written, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown)

    async def append(self, node: str, pieces: Sequence[LogPiece], text: bytes) -> tuple[int | None, ...]:
        """Append what a node has sent: pieces of logs, and the text of all of them in a row (`LogsAnswer`)."""

        def appended() -> Iterator[int | None]:
            begin = 0
            for piece in pieces:
                end = begin + piece.length
                try:
                    yield self._append(piece.job, piece.rank, node, piece.offset, text[begin:end])
                except OSError as error:
                    LOG.warning("job %s: a log cannot be kept at the moment: %s", piece.job, error)
                    yield None
                begin = end

        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: tuple(appended()))

    def _append(self, job: str, rank: int, node: str, offset: int, text: bytes) -> int:
        """Append what node `node` has in its log from byte `offset` on; return which byte of its log comes next.

        What was appended before is skipped. Text after a gap is appended too: the node has deleted what was there.
        """
        folder = self._state.open_logs(job, lasting=False)
        try:
            known = self._sources.pop((job, rank), None)
            source: LogSource | None
            before: dict[str, int] = {}  # of other nodes: read only where it may have to be written
            if known is not None and known[0].node == node and offset <= known[0].offset + known[1] - known[0].length:
                source, length = known
            else:
                length, (source, before) = end_of(folder, rank), _read(folder, rank)
            if source is not None and source.node == node:
                received = source.offset + length - source.length
            else:
                received = before.get(node, 0)
            if source is None or source.node != node or offset > received:
                if source is not None:
                    before.pop(source.node, None)
                    before[source.node] = source.offset + length - source.length
                    before = dict([*before.items()][-MOST_SOURCES:])
                received = max(received, offset)
                source = LogSource(node, received, length)
                put(folder, _name(rank), {"source": list(source), "before": before}, forced=False)
            fresh = text[max(0, received - offset) :]
            if fresh:
                log = LogFile(folder, rank, _LIMITS.log_bytes, _LIMITS.log_files)
                try:
                    log.append_all(fresh)
                finally:
                    log.close()
            # What is remembered saves a look at the files. If something fails above, there is nothing to remember.
            if len(self._sources) >= MOST_REMEMBERED:
                self._sources.clear()
            self._sources[job, rank] = source, length + len(fresh)
            return received + len(fresh)
        finally:
            os.close(folder)


def _name(rank: int) -> str:
    return f"{rank}.source.json"


def _read(folder: int, rank: int) -> tuple[LogSource | None, dict[str, int]]:
    fields: Fields = get(folder, _name(rank)) or {}
    with suppress(KeyError, TypeError, ValueError):
        node, offset, length = fields["source"]
        return LogSource(str(node), int(offset), int(length)), {str(k): int(v) for k, v in fields["before"].items()}
    return None, {}
