"""Work spread over the processor cores, as processes that end when this one is interrupted or dies.

Processes are forked: they inherit the work and its tasks, so that neither has to be importable or picklable (a notebook's
function or lambda will do), and no script needs a guard around its main part. Only results travel. Children compute and
write files; they use none of the locks that other threads of this process may hold.
"""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar

from poise.scheduler.model.errors import PoiseError

Task = TypeVar("Task")
Result = TypeVar("Result")

POLL = 0.1
"""Seconds between two checks for Ctrl-C while other processes work."""
AHEAD = 3
"""Tasks handed out per process: enough that none waits, few enough that thousands of tasks cost nothing extra."""


class WorkWatch(Protocol):
    """Who watches the work: is shown how much is done, and may ask to stop by `interrupted`."""

    interrupted: bool

    def show(self, done: int) -> None:
        """Take note of how much is done."""


def workers_for(tasks: int, most: int | None = None) -> int:
    """Return the number of processes for this many tasks: the number of cores, or at most `most`."""
    return max(1, min(tasks, (os.cpu_count() or 1) if most is None else most))


def spread(
    work: Callable[[Task], Result], tasks: Sequence[Task], watch: WorkWatch, *, processes: int | None = None
) -> Iterator[tuple[int, Result]]:
    """Yield the index of each task and its result, as they finish.

    Ends early if the watch is interrupted; no process is left then, nor after an exception, KeyboardInterrupt included.
    Enter the watch first: it must catch Ctrl-C while processes are being started, too. Raises PoiseError if a process is
    killed.
    """
    workers = workers_for(len(tasks), processes)
    with ProcessPoolExecutor(
        workers, mp_context=get_context("fork"), initializer=_initialize, initargs=(work, tasks)
    ) as pool:
        finished = False
        try:
            waiting = iter(range(len(tasks)))
            places: dict[Future[Any], int] = {}
            done = 0
            while not watch.interrupted and done < len(tasks):
                with _forking():
                    for place in islice(waiting, AHEAD * workers - len(places)):
                        places[pool.submit(_perform, place)] = place
                ended, _ = wait(places, timeout=POLL, return_when=FIRST_COMPLETED)
                for future in ended:
                    done += 1
                    yield places.pop(future), _result_of(future)
                watch.show(done)
            finished = not watch.interrupted
        except BrokenExecutor:
            if watch.interrupted:  # whoever asked this process to end asked its whole group
                return
            raise PoiseError("a process that simulated a policy was killed, perhaps for want of memory") from None
        finally:
            if not finished:
                for process in list((pool._processes or {}).values()):
                    process.kill()


def _result_of(future: "Future[Result]") -> Result:
    """The result of a task, or the error that it ended with, without the traceback of the other process."""
    try:
        return future.result()
    except PoiseError as error:
        raise error.with_traceback(None) from None


_TURN = Lock()


@contextmanager
def _forking() -> Iterator[None]:
    """Let processes begin with Ctrl-C held back, which is theirs to ignore before it can reach them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Threads that compare at once take turns: filters of warnings are those of the whole process.
        with _TURN, warnings.catch_warnings():
            # From 3.12 on Python warns of forks beside other threads. The executor has one, and a notebook has several.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_work: Callable[[Any], Any]
_tasks: Sequence[Any]
"""What a process of the pool does; set in it alone."""


def _initialize(work: Callable[[Any], Any], tasks: Sequence[Any]) -> None:
    """Leave Ctrl-C to the process that was started by hand, and end with it."""
    global _work, _tasks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    _work, _tasks = work, tasks


def _perform(place: int) -> object:
    return _work(_tasks[place])


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
