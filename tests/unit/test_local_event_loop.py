"""The thread of the local back end: what is watched no more is not told, also if both happened at once."""

import os
from threading import Event

from tests.backends import PATIENCE

from poise.service.backends.local.event_loop import EventLoop


def test_a_handle_that_is_used_again_does_not_hear_of_its_predecessor() -> None:
    """Two files can be read at once: what is done about one closes both, and watches a third under the number of one."""
    problems: list[BaseException] = []
    loop = EventLoop("test", problems.append)
    pipes = [os.pipe() for _ in range(2)]
    heard: list[str] = []
    successors: list[tuple[int, int]] = []
    done = Event()

    def first_to_hear() -> None:
        for reading, _ in pipes:
            loop.unwatch(reading)
        successors.append(os.pipe())
        loop.watch(successors[0][0], lambda: heard.append("successor"))
        loop.post(done.set)

    def hear() -> None:
        heard.append("predecessor")
        if len(heard) == 1:
            first_to_hear()

    def both() -> None:
        for reading, writing in pipes:
            loop.watch(reading, hear)
            os.close(writing)

    loop.call(both)
    assert done.wait(PATIENCE)
    loop.close()
    assert heard == ["predecessor"]
    assert not problems
    for handle in successors[0]:
        os.close(handle)
