"""The transport of requests to the API server, against a server that answers byte by byte as it is told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from poise.service.backends.kubernetes import connections
from poise.service.backends.kubernetes.connections import KeepAliveTransport

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request with the next of its answers; None: it hangs up instead.

    asked   the heads and bodies of requests, with the number of the connection that each came over
    """

    def __init__(self, *answers: bytes | None, then_closes: bool = False) -> None:
        self.asked: list[tuple[int, bytes]] = []
        self.connections = 0
        self.sent = 0
        self._answers, self._then_closes = list(answers), then_closes
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.connections += 1
        number = self.connections
        self._writers.append(writer)
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:")), 0
                )
                self.asked.append((number, head + await reader.readexactly(length)))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                for start in range(0, len(answer), 1 << 16):
                    writer.write(answer[start : start + (1 << 16)])
                    await writer.drain()
                    self.sent += len(answer[start : start + (1 << 16)])
                if self._then_closes:
                    break
            else:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def hang_up(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def talking(server: Server, most: int = 4) -> AsyncIterator[httpx.AsyncClient]:
    """Run a server, and a client of it."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    transport = KeepAliveTransport(verify=True, most=most)
    try:
        async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
            yield client
    finally:
        server.hang_up()
        listening.close()
        await listening.wait_closed()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Do it in a loop of its own, within a minute."""

    async def limited() -> None:
        async with asyncio.timeout(60.0):
            await work()

    asyncio.run(limited())


def test_requests_in_a_row_use_one_connection_and_arrive_as_they_are() -> None:
    async def work() -> None:
        server = Server(OK, OK)
        async with talking(server) as client:
            assert (await client.get("/a?b=c%20d")).text == "ok"
            assert (await client.post("/e", content=b"body", headers={"X-Any": "thing"})).text == "ok"
        assert [number for number, _ in server.asked] == [1, 1]
        assert server.asked[0][1].startswith(b"GET /a?b=c%20d HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nX-Any: thing\r\n" in server.asked[1][1]
        assert server.asked[1][1].endswith(b"\r\n\r\nbody")

    run(work)


def test_requests_at_a_time_have_connections_of_their_own_and_few_are_kept() -> None:
    async def work() -> None:
        server = Server(*[OK] * 6)
        async with talking(server, most=1) as client:
            await asyncio.gather(*(client.get("/") for _ in range(3)))
            assert server.connections == 3
            for _ in range(3):
                await client.get("/")
        assert server.connections == 3

    run(work)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK,
    ],
)
def test_each_form_of_an_answer_is_read_and_leaves_the_connection_usable(answer: bytes) -> None:
    async def work() -> None:
        server = Server(answer, OK)
        async with talking(server) as client:
            found = await client.get("/")
            assert (found.status_code, found.text, "Link" in found.headers) == (200, "ok", False)
            assert (await client.get("/")).text == "ok"
        assert server.connections == 1

    run(work)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\n\r\nok", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"],
)
def test_a_connection_that_the_server_ends_with_the_answer_is_not_used_again(answer: bytes) -> None:
    async def work() -> None:
        server = Server(answer, answer, then_closes=True)
        async with talking(server) as client:
            assert [(await client.get("/")).text for _ in range(2)] == ["ok", "ok"]
        assert server.connections == 2

    run(work)


def test_a_connection_that_has_ended_while_it_was_free_is_not_used() -> None:
    async def work() -> None:
        server = Server(OK, OK)
        async with talking(server) as client:
            await client.get("/")
            server.hang_up()
            await asyncio.sleep(0.2)
            assert (await client.post("/")).text == "ok"  # which a client must not repeat
        assert server.connections == 2

    run(work)


def test_a_connection_that_was_free_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.0)

    async def work() -> None:
        server = Server(OK, OK)
        async with talking(server) as client:
            await client.get("/")
            await client.get("/")
        assert server.connections == 2

    run(work)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "hung up without an answer"),
        (b"HTTP/1.1 200", "hung up without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", "in the middle of an answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", "in the middle of an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP"),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_its_connection_is_left(answer: bytes, text: str) -> None:
    async def work() -> None:
        server = Server(answer, OK, then_closes=True)
        async with talking(server) as client:
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError), match=text):
                await client.get("/")
            assert (await client.get("/")).text == "ok"
        assert server.connections == 2

    run(work)


def test_who_waits_for_too_long_is_told_and_the_late_answer_is_nobodys() -> None:
    async def work() -> None:
        server = Server(b"", OK)
        async with talking(server) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/", timeout=0.2)
            assert (await client.get("/")).text == "ok"
        assert [number for number, _ in server.asked] == [1, 2]

    run(work)


def test_a_request_that_was_given_up_leaves_no_answer_for_the_next_one() -> None:
    async def work() -> None:
        server = Server(b"", OK)
        async with talking(server) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.get("/")
            assert (await client.get("/")).text == "ok"
        assert [number for number, _ in server.asked] == [1, 2]

    run(work)


def test_no_server_is_an_error_of_the_connection() -> None:
    async def work() -> None:
        async with httpx.AsyncClient(transport=KeepAliveTransport(verify=True, most=1)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:1/")

    run(work)


def test_a_server_has_to_wait_for_who_reads_slowly_and_nothing_is_lost() -> None:
    size = 64 << 20
    body = bytes(range(256)) * (size >> 8)

    async def work() -> None:
        server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + body)
        async with talking(server) as client, client.stream("GET", "/") as answer:
            await asyncio.sleep(1.0)
            assert server.sent < size // 2  # what the kernel buffers, and a little more
            assert b"".join([piece async for piece in answer.aiter_raw()]) == body

    run(work)


def test_a_stream_that_is_closed_early_ends_its_connection() -> None:
    async def work() -> None:
        server = Server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", OK)
        async with talking(server) as client:
            async with client.stream("GET", "/") as answer:
                assert [await anext(answer.aiter_raw())] == [b"o"]
            assert (await client.get("/")).text == "ok"
        assert server.connections == 2

    run(work)
