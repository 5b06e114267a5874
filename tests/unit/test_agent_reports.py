"""What an agent reports when: news at once, progress and logs when they are due, and what somebody looks at soon."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from poise.service.agent import report_times
from poise.service.agent.agent import NewsQueue
from poise.service.agent.log_shipping import FIRST_BYTES, LogShipping
from poise.service.agent.report_times import ReportTimes
from poise.service.backends.local.logs import LogFile, read_log
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.remote.shipped_logs import ShippedLogs
from poise.service.wire.agent_messages import LogPiece, PartBegan, PartEnded, PartProgressed


def progress(steps: float, job: str = "1", **more: Any) -> PartProgressed:
    given = {"checkpoint": None, "throughput": None, **more}
    return PartProgressed(job=job, epoch=1, at=0.0, steps=steps, total=None, loss=None, **given)


def ended(job: str) -> PartEnded:
    return PartEnded(job=job, epoch=1, at=0.0, how="finished", steps=None, cause=None, codes=())


def test_progress_waits_and_only_the_latest_is_sent() -> None:
    queue = NewsQueue()
    for steps in range(5):
        queue.put(progress(steps))
    assert queue.pending() == (1, ())
    queue.release(None)
    assert queue.pending() == (1, (progress(4),))


def test_first_progress_that_says_that_a_run_can_leave_does_not_wait() -> None:
    queue = NewsQueue()
    queue.put(progress(1, checkpoint=0.0))
    assert queue.pending()[1] == ()
    queue.put(progress(2, checkpoint=0.0, throughput=1.0))
    queue.put(progress(3, checkpoint=0.0, throughput=1.0))
    assert [news.steps for news in queue.pending()[1] if isinstance(news, PartProgressed)] == [2]


def test_other_news_do_not_wait_and_an_end_comes_after_the_last_progress() -> None:
    queue = NewsQueue()
    began = PartBegan(job="1", epoch=1, at=0.0, port=0)
    queue.put(began)
    queue.put(progress(7))
    queue.put(progress(8, job="2"))
    queue.put(ended("1"))
    assert queue.pending() == (1, (began, progress(7), ended("1")))
    queue.confirm(3)
    assert not queue.arrived.is_set()
    queue.release({("2", 1)})
    assert queue.pending() == (4, (progress(8, job="2"),))


def in_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_watched_runs_are_reported_between_two_reports_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [0.0]
    monkeypatch.setattr(report_times, "monotonic", lambda: moments[0])

    async def sleep(seconds: float) -> None:
        moments[0] += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def work() -> None:
        times = ReportTimes()
        times.every = 10.0
        times.watch(("1", 1))
        found = []
        async for keys in times.reports():
            found.append((moments[0], keys))
            if moments[0] >= 100:
                break
        assert [at for at, keys in found if keys is None] == [10.0 * each for each in range(1, 11)]
        watched = [at for at, keys in found if keys == {("1", 1)}]
        assert min(watched) <= 1.0
        assert max(watched) < report_times.WATCH_SECONDS + 1.0

    in_loop(work)


class Nodes:
    """A node's logs and the server's, and what was sent from one to the other."""

    def __init__(self, folder: Path) -> None:
        (folder / "node").mkdir()
        (folder / "server").mkdir()
        self.here, self.server = StateDir(folder / "node"), StateDir(folder / "server")
        self.shipped = ShippedLogs(self.server)
        self.has_room = True
        self.sent: list[Sequence[LogPiece]] = []

    async def send(self, pieces: Sequence[LogPiece], text: bytes) -> tuple[int | None, ...]:
        self.sent.append(pieces)
        return await self.shipped.append("a" * 32, pieces, text) if self.has_room else (None,) * len(pieces)

    def write(self, job: str, text: bytes) -> None:
        log = LogFile(self.here.open_logs(job), 0, 1 << 20, 5)
        log.write(text)
        log.close()

    def received(self, job: str) -> bytes:
        return read_log(self.server.handle, job, 0, 0, 1 << 30)[0]


def test_logs_of_many_runs_go_in_one_request_and_nothing_twice(tmp_path: Path) -> None:
    async def work() -> None:
        nodes = Nodes(tmp_path)
        shipping = LogShipping(nodes.here, nodes.send)
        keys = [(str(number), 1) for number in range(20)]
        for job, epoch in keys:
            shipping.enter((job, epoch), [0])
            nodes.write(job, b"first " + job.encode())
        await shipping.ship(keys)
        assert len(nodes.sent) == 1
        await shipping.ship(keys)
        assert len(nodes.sent) == 1  # nothing is new, so nothing is sent
        nodes.write("3", b", more")
        await shipping.ship(keys)
        assert [piece.job for piece in nodes.sent[1]] == ["3"]
        assert nodes.received("3") == b"first 3, more"
        assert nodes.received("4") == b"first 4"
        await nodes.shipped.close()

    in_loop(work)


def test_new_agent_sends_a_long_log_on_from_where_the_server_has_it(tmp_path: Path) -> None:
    async def work() -> None:
        nodes = Nodes(tmp_path)
        text = bytes(range(32, 127)) * (3 * FIRST_BYTES // 95)
        nodes.write("1", text)
        for expected in (text, text + b"the end"):
            again = LogShipping(nodes.here, nodes.send)
            again.enter(("1", 1), [0])
            await again.finish(("1", 1))
            assert nodes.received("1") == expected
            nodes.write("1", b"the end")
        assert [len(pieces) for pieces in nodes.sent] == [1] * len(nodes.sent)
        await nodes.shipped.close()

    in_loop(work)


def test_log_that_the_server_has_no_room_for_is_sent_again(tmp_path: Path) -> None:
    async def work() -> None:
        nodes = Nodes(tmp_path)
        shipping = LogShipping(nodes.here, nodes.send)
        shipping.enter(("1", 1), [0])
        nodes.write("1", b"text")
        nodes.has_room = False
        await shipping.ship([("1", 1)])
        assert nodes.received("1") == b""
        nodes.has_room = True
        await shipping.ship([("1", 1)])
        assert nodes.received("1") == b"text"
        await nodes.shipped.close()

    in_loop(work)


def test_logs_that_cannot_be_sent_are_sent_with_the_next_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_times, "SOONEST", 0.01)

    async def work() -> None:
        nodes, failures = Nodes(tmp_path), [httpx.ReadTimeout("slow"), httpx.ConnectError("away")]

        async def send(pieces: Sequence[LogPiece], text: bytes) -> tuple[int | None, ...]:
            if failures:
                raise failures.pop()
            return await nodes.send(pieces, text)

        shipping = LogShipping(nodes.here, send)
        shipping.enter(("1", 1), [0])
        nodes.write("1", b"text")
        times = ReportTimes()
        times.every = 0.01
        running = asyncio.create_task(shipping.run(times))
        async with asyncio.timeout(20):
            while nodes.received("1") != b"text":
                await asyncio.sleep(0.01)
        assert not running.done()
        running.cancel()
        await nodes.shipped.close()

    in_loop(work)
