"""One thread that does one thing after the other: what it was asked for, what happened to files it watches, what is due."""

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

Deed = Callable[[], None]


class EventLoop:
    """The thread. Only `ask`, `have` and `close` are for others; everything else is called by what it does.

    last_words   called, in the thread, with what it dies of
    """

    def __init__(self, name: str, last_words: Callable[[BaseException], None]) -> None:
        self._last_words = last_words
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._asked: deque[Deed] = deque()
        self._due: list[tuple[float, int, Deed]] = []
        self._numbers = count()
        self._problem: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, deed: Deed) -> None:
        """Have something done soon, in the order of asking."""
        if self._problem is not None:
            raise InvariantError(f"the local back end has stopped: {self._problem!r}") from self._problem
        self._asked.append(deed)
        os.eventfd_write(self._wake, 1)

    def have(self, deed: Deed) -> None:
        """Come back once that has been done."""
        done = threading.Event()

        def doing() -> None:
            try:
                deed()
            finally:
                done.set()

        self.ask(doing)
        while not done.wait(1.0) and self._thread.is_alive():
            pass

    def after(self, seconds: float, deed: Deed) -> None:
        """Have something done after so many seconds."""
        heapq.heappush(self._due, (monotonic() + seconds, next(self._numbers), deed))

    def watch(self, handle: int, deed: Deed) -> None:
        """Have something done whenever a file can be read."""
        self._selector.register(handle, selectors.EVENT_READ, deed)

    def unwatch(self, handle: int) -> None:
        """Watch it no more, and close it."""
        with suppress(KeyError):
            self._selector.unregister(handle)
        os.close(handle)

    def close(self) -> None:
        """Do what was asked for so far, and nothing after it."""
        if self._thread.is_alive():
            self._asked.append(self._stop)
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        if self._wake >= 0:
            self._selector.close()
            os.close(self._wake)
            self._wake = -1

    def _stop(self) -> None:
        self._is_closing = True

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except BaseException as error:
            self._problem = error
            self._last_words(error)
            raise

    def _turn(self) -> None:
        wait = None if not self._due else max(0.0, self._due[0][0] - monotonic())
        for key, _ in self._selector.select(wait):
            # What was done about another one may have closed this file, and its number may be a new one's by now.
            if self._selector.get_map().get(key.fileobj) is key:
                key.data()
        while self._asked and not self._is_closing:
            self._asked.popleft()()
        while self._due and self._due[0][0] <= monotonic() and not self._is_closing:
            heapq.heappop(self._due)[2]()
