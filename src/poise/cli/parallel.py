"""Work spread over the cores there are."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import connection, parent_process
from threading import Thread
from typing import Any, TypeVar

from poise.cli.output import Watch
from poise.scheduler.model.errors import PoiseError

Task = TypeVar("Task")
Result = TypeVar("Result")

PULSE = 0.1
"""Seconds between two looks at whether Ctrl-C was pressed while other processes work."""

AHEAD = 3
"""Tasks handed out for each process: enough that none waits, few enough that thousands of tasks cost nothing extra."""


def workers_for(tasks: int) -> int:
    """How many processes so many tasks are worth."""
    return max(1, min(tasks, os.cpu_count() or 1))


def _nothing() -> None:
    """What a process does first that needs nothing."""


def spread(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    watch: Watch,
    *,
    begin: Callable[..., None] = _nothing,
    given: tuple[Any, ...] = (),
) -> Iterator[tuple[int, Result]]:
    """The place of each task and its result, as they come; `begin(*given)` is called once in every process.

    Ends early if the watch is interrupted; no process is left then. Enter the watch first: Ctrl-C must find it while
    processes are being started, too. Raises PoiseError if a process is killed.
    """
    with ProcessPoolExecutor(workers_for(len(tasks)), initializer=_begin, initargs=(begin, given)) as pool:
        finished = False
        try:
            yield from _results(pool, work, tasks, watch)
            finished = not watch.interrupted
        except BrokenExecutor:
            if watch.interrupted:  # whoever asked this process to end asked all of its group
                return
            raise PoiseError("a process that simulated a policy was killed, perhaps for want of memory") from None
        finally:
            if not finished:
                for process in list((pool._processes or {}).values()):
                    process.kill()


def _results(
    pool: ProcessPoolExecutor, work: Callable[[Task], Result], tasks: Sequence[Task], watch: Watch
) -> Iterator[tuple[int, Result]]:
    waiting = iter(enumerate(tasks))
    places: dict[Future[Result], int] = {}
    done = 0
    while not watch.interrupted and done < len(tasks):
        for place, task in islice(waiting, AHEAD * workers_for(len(tasks)) - len(places)):
            places[pool.submit(work, task)] = place
        ended, _ = wait(places, timeout=PULSE, return_when=FIRST_COMPLETED)
        for future in ended:
            done += 1
            yield places.pop(future), future.result()
        watch.show(done)


def _begin(begin: Callable[..., None], given: tuple[Any, ...]) -> None:
    """Ctrl-C is for the process that was started by hand; where that one dies, no other is left behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=_follow, daemon=True).start()
    begin(*given)


def _follow() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
