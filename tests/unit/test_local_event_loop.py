"""The event loop: a file that is not watched any more gets no callback, even if both happen at once."""

import os
from threading import Event

from tests.backends import PATIENCE

from poise.service.backends.local.event_loop import EventLoop


def test_reused_handle_is_not_called_back_for_its_predecessor() -> None:
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
