"""Takes connections off the socket: as many as there is room and files for, and not faster than others can give way."""

import asyncio
import resource
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from poise.server.guests import Guests, Link, Room, neighbourhood
from poise.server.logs import Level, Logbook

ROOM = Room()
BACKLOG = 1_024
"""Connections that wait to be taken."""
SPARE_FILES = 256
"""Files that connections leave to the rest of the service: the store, logs, runs that are being started."""
FILES_A_RUN = 4
AT_ONCE = 64
"""Connections that are taken before anything else is done. Who gives way to them is gone by the next time."""
LOOK_SECONDS = 0.05
"""At most, before the next look whether there is room."""

Welcome = Callable[[Link], Coroutine[Any, Any, None]]


class Acceptor:
    """Takes connections until it is closed. `welcome` speaks with each, and ends once it is connected, or cannot be.

    The kernel gives out the lowest number that is free, so that of a connection says how many files are open. Without a
    bound a flood of connections, which needs no token, would keep runs from being started.
    """

    def __init__(self, bound: socket.socket, guests: Guests, welcome: Welcome, log: Logbook) -> None:
        self._bound = bound
        self._guests = guests
        self._welcome = welcome
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_short = False
        bound.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Take no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._bound)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._bound, self._come)

    def _rest(self, seconds: float) -> None:
        """Take none for a while; they wait in the kernel, in order."""
        self._loop.remove_reader(self._bound)
        self._pause = self._loop.call_later(seconds, self._listen)

    def _come(self) -> None:
        for _ in range(AT_ONCE):
            now = self._loop.time()
            dropped, wait = self._guests.trim(now, is_short=self._is_short)
            if dropped is not None:
                self._log.caused_by(dropped.address, Level.WARNING, "connection-displaced", {"address": dropped.address})
                self._is_short = False
            elif wait:
                self._rest(min(wait, LOOK_SECONDS))
                return
            try:
                accepted, address = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._log.caused_by("system", Level.WARNING, "no-connection", {"problem": error.strerror or str(error)})
                self._rest(LOOK_SECONDS)
                return
            self._take(accepted, str(address[0]), now)

    def _take(self, accepted: socket.socket, address: str, now: float) -> None:
        accepted.setblocking(False)
        self._is_short = accepted.fileno() >= most_files() - SPARE_FILES
        link = Link(accepted, neighbourhood(address), now, is_beyond=self._is_short)
        self._guests.enter(link)
        task = self._loop.create_task(self._met(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _met(self, link: Link) -> None:
        """Whoever does not get as far as HTTP leaves no trace."""
        try:
            await self._welcome(link)
        except OSError:  # no TLS, or not in time, or hung up on
            self._guests.leave(link)
        except BaseException:
            self._guests.leave(link)
            raise


def most_files() -> int:
    """Files that this process may have open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if most != resource.RLIM_INFINITY else 1 << 30


def ask_for_files(runs: int) -> None:
    """Raise the limit of open files to fit all connections and this number of runs, as far as this user may."""
    wanted = ROOM.all + SPARE_FILES + FILES_A_RUN * runs
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files() < wanted:
        granted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        with suppress(ValueError, OSError):  # some systems have a bound of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (granted, most))
