"""Work spread over the processor cores, as processes that end when this one is interrupted or dies."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import connection, get_start_method, parent_process
from threading import Thread
from typing import Any, TypeVar

from poise.cli.output import Watch
from poise.engine.outside import CarriedPolicy, carried, take_over
from poise.scheduler.model.errors import PoiseError

Task = TypeVar("Task")
Result = TypeVar("Result")

POLL = 0.1
"""Seconds between two checks for Ctrl-C while other processes work."""
AHEAD = 3
"""Tasks handed out per process: enough that none waits, few enough that thousands of tasks cost nothing extra."""


def workers_for(tasks: int) -> int:
    """Number of processes for this many tasks."""
    return max(1, min(tasks, os.cpu_count() or 1))


def spread(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    watch: Watch,
    *,
    initialize: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[tuple[int, Result]]:
    """The index of each task and its result, as they finish; `initialize(*arguments)` is called once in every process.

    Ends early if the watch is interrupted; no process is left then. Enter the watch first: it must catch Ctrl-C while
    processes are being started, too. Raises PoiseError if a process is killed.
    """
    workers = workers_for(len(tasks))
    policies = () if get_start_method() == "fork" else carried()
    with ProcessPoolExecutor(workers, initializer=_initialize, initargs=(initialize, arguments, policies)) as pool:
        finished = False
        try:
            waiting = iter(enumerate(tasks))
            places: dict[Future[Result], int] = {}
            done = 0
            while not watch.interrupted and done < len(tasks):
                for place, task in islice(waiting, AHEAD * workers - len(places)):
                    places[pool.submit(work, task)] = place
                ended, _ = wait(places, timeout=POLL, return_when=FIRST_COMPLETED)
                for future in ended:
                    done += 1
                    yield places.pop(future), future.result()
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


def _initialize(
    initialize: Callable[..., None] | None, arguments: tuple[Any, ...], policies: tuple[CarriedPolicy, ...]
) -> None:
    """Leave Ctrl-C to the process that was started by hand, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    take_over(policies)
    if initialize is not None:
        initialize(*arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
