"""What agents tell each other of a run over their nodes: nothing counts as told before all have it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from tests.backends import a_request
from tests.remote import hang_up

from poise.service.agent.gang import Gangs, serve_peers
from poise.service.backends.api import GangPart, RunEnding, RunOrder, RunPart
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.run_table import Key
from poise.service.wire.agent_messages import NodeSpec, PartOrder
from poise.worker.protocol import STOP, acknowledged

KEY = ("1", 1)
REQUEST = a_request("", gpus=2, replicas="gpu")
PARTS = (RunPart("n0", "v100", (0,)), RunPart("n1", "v100", (0,)))


class GangNode:
    """One node of a run of two."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.files = name, StateDir(folder / name)
        self.files.make_run(*KEY)
        self.ended: list[tuple[Key, RunEnding]] = []
        self.gangs = Gangs(name, self.files, lambda key, how: self.ended.append((key, how)))

    async def listen(self) -> str:
        """Take what others send; return where."""
        self.server = await serve_peers(self.gangs.app(), NodeSpec(name=self.name, gpu_type="v100", gpus=1))
        return f"http://127.0.0.1:{self.server.port}"

    def part(self, **peers: str) -> PartOrder:
        """Make the order for this node, which says where the other one is, as far as the server knows."""
        return PartOrder(
            job="1", epoch=1, gpus=tuple((each.node, each.gpu_type, each.slots) for each in PARTS), request=REQUEST,
            tenant="t", ran=0.0, beside=None, speeds={}, reason=None, master="127.0.0.1", port=1, peers=peers, key="k",
        )  # fmt: skip

    def enter(self, **peers: str) -> None:
        """Hear of the run."""
        order = RunOrder("1", 1, PARTS, REQUEST, part=GangPart(self.name, "127.0.0.1", 1))
        self.gangs.enter(self.part(**peers), order)


async def comes(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait for a condition; say whether it came."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)
            return True
    return False


def run(folder: Path, story: Callable[[GangNode, GangNode], Awaitable[None]]) -> None:
    """Tell a story of two nodes."""

    async def telling() -> None:
        first, second = GangNode(folder, "n0"), GangNode(folder, "n1")
        try:
            await story(first, second)
        finally:
            for each in (first, second):
                await each.gangs.close()
                each.files.close()
            await hang_up()

    asyncio.run(telling())


def test_stop_is_acknowledged_once_a_node_has_it_whose_place_was_not_known(tmp_path: Path) -> None:
    async def story(first: GangNode, second: GangNode) -> None:
        url = await second.listen()
        second.enter()
        first.enter()  # the server was just started, and does not know yet where the other node is
        first.files.put(*KEY, STOP, {"step": 7})
        await asyncio.sleep(0.5)
        assert first.files.get(*KEY, acknowledged(STOP)) is None
        first.enter(n1=url)
        assert await comes(lambda: first.files.get(*KEY, acknowledged(STOP)))
        assert (second.files.get(*KEY, STOP) or {})["step"] == 7
        await second.server.close()

    run(tmp_path, story)


def test_stop_reaches_a_node_whose_agent_moves_while_it_is_sent(tmp_path: Path) -> None:
    async def story(first: GangNode, second: GangNode) -> None:
        url = await second.listen()
        await second.server.close()  # its agent was killed
        first.enter(n1=url)
        first.files.put(*KEY, STOP, {"step": 7})
        await asyncio.sleep(0.3)
        url = await second.listen()
        second.enter()
        first.enter(n1=url)
        first.enter()  # another server, which has not heard of it yet: what is known stays known
        assert await comes(lambda: first.files.get(*KEY, acknowledged(STOP)))
        assert (second.files.get(*KEY, STOP) or {})["step"] == 7
        await second.server.close()

    run(tmp_path, story)


def test_run_that_is_not_open_any_more_is_forgotten(tmp_path: Path) -> None:
    async def story(first: GangNode, second: GangNode) -> None:
        first.enter(n1=await second.listen())
        first.gangs.keep(())
        first.files.put(*KEY, STOP, {"step": 7})
        await asyncio.sleep(0.3)
        assert first.gangs.deadline(KEY) is None
        assert second.files.get(*KEY, STOP) is None
        await second.server.close()

    run(tmp_path, story)


def test_end_of_a_part_reaches_one_that_is_being_prepared(tmp_path: Path) -> None:
    async def story(first: GangNode, second: GangNode) -> None:
        url = await second.listen()
        second.gangs.keep(())
        second.gangs.expect(second.part())
        first.enter(n1=url)
        first.gangs.ended(KEY, RunEnding.FAILED)
        assert await comes(lambda: second.ended == [(KEY, RunEnding.FAILED)])
        await second.server.close()

    run(tmp_path, story)


def test_end_of_a_part_reaches_an_agent_that_has_to_find_out_first_what_runs_there(tmp_path: Path) -> None:
    async def story(first: GangNode, second: GangNode) -> None:
        first.enter(n1=await second.listen())
        first.gangs.ended(KEY, RunEnding.FAILED)
        await asyncio.sleep(0.5)
        second.enter()
        assert await comes(lambda: second.ended == [(KEY, RunEnding.FAILED)])
        await second.server.close()

    run(tmp_path, story)


def test_end_of_a_part_is_not_told_for_ever_to_a_node_that_does_not_have_the_run(tmp_path: Path) -> None:
    async def story(first: GangNode, second: GangNode) -> None:
        first.enter(n1=await second.listen())
        second.gangs.keep(())
        first.gangs.ended(KEY, RunEnding.FAILED)
        assert await comes(lambda: not first.gangs._telling)
        await second.server.close()

    run(tmp_path, story)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other side hangs up soon."""
    with suppress(TimeoutError):
        async with asyncio.timeout(3.0):
            with suppress(ConnectionError):
                await reader.read()
            return True
    return False


def test_stranger_who_is_answered_keeps_no_connection(tmp_path: Path) -> None:
    async def story(first: GangNode, _second: GangNode) -> None:
        await first.listen()
        for method in ("PUT", "GET"):
            reader, writer = await asyncio.open_connection("127.0.0.1", first.server.port)
            writer.write(f"{method} /runs/1/1/stop.json HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"y")
            assert await is_closed(reader), method
            writer.close()
        await first.server.close()

    run(tmp_path, story)
