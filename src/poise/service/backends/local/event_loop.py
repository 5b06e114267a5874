"""An event loop: one thread that calls back for posted work, readable files and timers, one callback at a time."""

import heapq
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from time import monotonic

from poise.scheduler.model.errors import InvariantError

Callback = Callable[[], None]


class EventLoop:
    """The thread. `post`, `call` and `close` are for other threads; the rest is called from within callbacks.

    on_death   called, in the thread, with the exception that ends it
    """

    def __init__(self, name: str, on_death: Callable[[BaseException], None]) -> None:
        self._on_death = on_death
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._clear_wake)
        self._posted: deque[Callback] = deque()  # appended by other threads; deques need no lock for that
        self._timers: list[tuple[float, int, Callback]] = []
        self._numbers = count()  # timers of the same time go off in the order in which they were set
        self._problem: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, callback: Callback) -> None:
        """Call back soon, in the order of posting."""
        if self._problem is not None:
            raise InvariantError(f"the local back end has stopped: {self._problem!r}") from self._problem
        self._posted.append(callback)
        os.eventfd_write(self._wake, 1)

    def call(self, callback: Callback) -> None:
        """Call back in the thread, and return once that is done or the thread has died."""
        done = threading.Event()

        def calling() -> None:
            try:
                callback()
            finally:
                done.set()

        self.post(calling)
        while not done.wait(1.0) and self._thread.is_alive():
            pass

    def after(self, seconds: float, callback: Callback) -> None:
        """Call back after this many seconds."""
        heapq.heappush(self._timers, (monotonic() + seconds, next(self._numbers), callback))

    def watch(self, handle: int, callback: Callback) -> None:
        """Call back whenever a file can be read."""
        self._selector.register(handle, selectors.EVENT_READ, callback)

    def unwatch(self, handle: int) -> None:
        """Stop watching a file, and close it."""
        with suppress(KeyError):
            self._selector.unregister(handle)
        os.close(handle)

    def close(self) -> None:
        """Call back for what was posted so far, then end the thread."""
        if self._thread.is_alive():
            self._posted.append(self._stop)
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        if self._wake >= 0:
            self._selector.close()
            os.close(self._wake)
            self._wake = -1

    def _stop(self) -> None:
        self._is_closing = True

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                wait = None if not self._timers else max(0.0, self._timers[0][0] - monotonic())
                for key, _ in self._selector.select(wait):
                    # An earlier callback may have closed this file, and its number may be that of a new one by now.
                    if self._selector.get_map().get(key.fileobj) is key:
                        key.data()
                while self._posted and not self._is_closing:
                    self._posted.popleft()()
                while self._timers and self._timers[0][0] <= monotonic() and not self._is_closing:
                    heapq.heappop(self._timers)[2]()
        except BaseException as error:
            self._problem = error
            self._on_death(error)
            raise
