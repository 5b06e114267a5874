"""The client of the Kubernetes API: errors, changes that are made until they are done, lists, watches.

Requests go to a pretended server; what takes minutes happens in simulated time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from tests.fake_kubernetes import PODS, FakeKubernetes, a_pod
from tests.simulated_time import clock, simulate

from poise.service.backends.kubernetes.access import KubeConfig
from poise.service.backends.kubernetes.actions import Actions
from poise.service.backends.kubernetes.client import KubeClient, Page
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError, ExpiredError, LeadershipLostError
from poise.service.backends.kubernetes.leadership import Leadership

Json = dict[str, Any]
ALL_PODS, POD_PATH = "/api/v1/pods", "/api/v1/namespaces/default/pods"


# Requests that fail


def asking(work: Callable[[FakeKubernetes, KubeClient], Any]) -> None:
    """Do something with a client of a new server, in simulated time."""

    async def run() -> None:
        fake = FakeKubernetes()
        client = fake.client()
        try:
            await work(fake, client)
        finally:
            await client.aclose()

    simulate(run)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_error_that_may_pass_is_told_apart_and_says_for_how_long(status: int) -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.fail(status, retry_after=7)
        with pytest.raises(ApiUnavailableError) as caught:
            await client.post(POD_PATH, a_pod("p"))
        assert (caught.value.status, caught.value.retry_after) == (status, 7.0)
        assert caught.value.text.startswith(f"POST {POD_PATH}: {status} ")
        assert not fake.all(PODS)
        assert client.calls == {"create": 1}, "whether to try again is the caller's decision"

    asking(work)


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (404, "NotFound"), (409, "Conflict"), (422, "Invalid")])
def test_a_refusal_is_an_answer(status: int, reason: str) -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("p"))
        fake.deny("get", "services")
        asked = {
            403: client.get("/api/v1/namespaces/default/services/s"),
            404: client.get(f"{POD_PATH}/none"),
            409: client.patch(f"{POD_PATH}/p", {"metadata": {"uid": "another"}}),
            422: client.post(POD_PATH, a_pod("Not a name")),
        }
        with pytest.raises(ApiError) as caught:
            await asked.pop(status)
        for each in asked.values():
            each.close()
        assert (caught.value.status, caught.value.reason) == (status, reason)

    asking(work)


def test_an_eviction_that_a_budget_forbids_is_an_answer_and_an_overloaded_server_is_none() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("p", node="n", phase="Running"))
        fake.budget(0)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
        with pytest.raises(ApiError, match=r"429 TooManyRequests: .*disruption budget"):
            await client.post(f"{POD_PATH}/p/eviction", eviction)
        fake.fail(429)
        with pytest.raises(ApiUnavailableError):
            await client.post(f"{POD_PATH}/p/eviction", eviction)

    asking(work)


def test_a_read_is_sent_again_over_a_new_connection_and_a_write_is_not() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("p"))
        for how in ("drop", "drop-after"):
            fake.fail(how)
            assert (await client.get(f"{POD_PATH}/p"))["metadata"]["name"] == "p"
        fake.fail("drop", next=2)
        with pytest.raises(ApiUnavailableError, match="the connection broke"):
            await client.get(f"{POD_PATH}/p")
        for how, is_done in (("drop", False), ("drop-after", True)):
            fake.fail(how)
            with pytest.raises(ApiUnavailableError, match="the connection broke") as caught:
                await client.post(POD_PATH, a_pod(how))
            assert caught.value.status is None
            assert fake.exists(PODS, how) is is_done, "nobody but the server can say which"

    asking(work)


def test_a_server_that_is_away_or_does_not_answer_is_unavailable() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.pause()
        with pytest.raises(ApiUnavailableError, match=r"GET /version: no connection: "):
            await client.get("/version")
        fake.resume()
        fake.fail("hang")
        before = clock()
        with pytest.raises(ApiUnavailableError, match="no answer within 30 s"):
            await client.get("/version")
        assert clock() - before == pytest.approx(30.0)

    asking(work)


@pytest.mark.parametrize("content", [b"<html>a proxy</html>", b"[]"])
def test_something_else_at_the_address_is_no_kubernetes(content: bytes) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=content))

    async def work() -> None:
        with pytest.raises(ApiUnavailableError, match="is there a Kubernetes API at this address"):
            await KubeClient(KubeConfig("http://elsewhere.test"), transport=transport).get("/version")

    simulate(work)


def test_an_error_of_a_proxy_is_told_in_its_words() -> None:
    transport = httpx.MockTransport(
        lambda _request: httpx.Response(502, text="<h1>Bad\n Gateway</h1>", headers={"Retry-After": "x"})
    )

    async def work() -> None:
        with pytest.raises(ApiUnavailableError) as caught:
            await KubeClient(KubeConfig("http://elsewhere.test"), transport=transport).get("/version")
        assert caught.value.text == "GET /version: 502 BadGateway: <h1>Bad Gateway</h1>"
        assert caught.value.retry_after is None

    simulate(work)


def test_no_more_requests_are_under_way_than_there_are_connections() -> None:
    under_way = most = 0

    async def slow(_request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(1.0)
        under_way -= 1
        return httpx.Response(200, json={})

    async def work() -> None:
        client = KubeClient(KubeConfig("http://k8s.test"), transport=httpx.MockTransport(slow), connections=3)
        await asyncio.gather(*(client.get("/version") for _ in range(10)))
        assert most == 3
        assert clock() == pytest.approx(4.0)

    simulate(work)


# Changes that are made until they are done


def acting(work: Callable[[FakeKubernetes, Actions, Leadership], Any]) -> None:
    async def run(fake: FakeKubernetes, _client: KubeClient) -> None:
        leadership = Leadership(fake.client(), "poise", "leader", "a", clock=clock)
        await leadership.acquire(lambda _text: None)
        holding = asyncio.create_task(leadership.hold())
        try:
            writer = fake.client(may_write=leadership.is_leading)
            await work(fake, Actions(writer, leadership), leadership)
            await writer.aclose()
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    asking(run)


def is_creation(verb: str, path: str) -> bool:
    return verb == "create" and path.endswith("/pods")


@pytest.mark.parametrize("fault", [429, 500, 503, "drop", "refuse", "hang"])
def test_a_change_is_tried_again_until_it_is_done(fault: int | str) -> None:
    async def work(fake: FakeKubernetes, actions: Actions, _: Leadership) -> None:
        fake.fail(fault, next=3, where=is_creation)
        await actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p")))
        assert [pod["metadata"]["name"] for pod in fake.all(PODS)] == ["p"]

    acting(work)


def test_a_server_that_asks_to_be_left_alone_is_left_alone() -> None:
    async def work(fake: FakeKubernetes, actions: Actions, _: Leadership) -> None:
        fake.fail(429, where=is_creation, retry_after=4)
        began = clock()
        await actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p")))
        assert 4.0 <= clock() - began < 5.0

    acting(work)


def test_a_change_that_is_refused_or_not_wanted_any_more_is_not_tried_again() -> None:
    async def work(fake: FakeKubernetes, actions: Actions, _: Leadership) -> None:
        with pytest.raises(ApiError, match="404"):
            await actions.persist(lambda: actions.client.delete(f"{POD_PATH}/none"))
        fake.fail(503, next=100, where=is_creation)
        wanted = iter([True, True, False])
        assert await actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p")), lambda: next(wanted)) is None
        assert fake.requests.count(("create", POD_PATH)) == 2

    acting(work)


def test_a_deletion_that_met_a_conflict_is_asked_for_again_unless_another_has_the_name() -> None:
    async def work(fake: FakeKubernetes, actions: Actions, _: Leadership) -> None:
        for name in ("a", "b"):
            fake.add(PODS, a_pod(name))
        fake.fail(409, next=3, where=lambda verb, _path: verb == "delete")
        await actions.delete(f"{POD_PATH}/a", fake.get(PODS, "a")["metadata"]["uid"])
        await actions.delete(f"{POD_PATH}/b", "the uid of one before it")
        await actions.delete(f"{POD_PATH}/c", "gone")
        fake.finish_deletions()
        assert [pod["metadata"]["name"] for pod in fake.all(PODS)] == ["b"]

    acting(work)


def test_who_does_not_lead_any_more_changes_nothing() -> None:
    async def work(fake: FakeKubernetes, actions: Actions, leadership: Leadership) -> None:
        fake.fail(503, next=100, where=is_creation)
        trying = asyncio.create_task(actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p"))))
        await asyncio.sleep(3.0)
        await leadership.release()
        with pytest.raises(LeadershipLostError):
            await trying
        fake._faults.clear()
        with pytest.raises(LeadershipLostError):
            await actions.client.post(POD_PATH, a_pod("p"))
        assert not fake.all(PODS)
        assert await actions.client.get("/api/v1/pods"), "it may look on"

    acting(work)


def test_what_has_waited_for_its_turn_is_not_sent_by_who_has_lost_the_lead_meanwhile() -> None:
    sent: list[float] = []

    async def slow(_request: httpx.Request) -> httpx.Response:
        sent.append(clock())
        await asyncio.sleep(1.0)
        return httpx.Response(200, json={})

    async def work() -> None:
        config = KubeConfig("http://k8s.test")
        client = KubeClient(config, transport=httpx.MockTransport(slow), connections=2, may_write=lambda: clock() < 2.5)
        done = await asyncio.gather(*(client.post(POD_PATH, {}) for _ in range(10)), return_exceptions=True)
        assert sent == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert [isinstance(each, LeadershipLostError) for each in done] == [False] * 6 + [True] * 4
        await client.aclose()

    simulate(work)


# Lists


async def names_in(client: KubeClient, **options: Any) -> list[str]:
    """Names of the pods that a whole list has."""
    return [pod["metadata"]["name"] async for page in client.pages(ALL_PODS, **options) for pod in page.items]


def test_a_list_comes_in_pages_of_one_moment() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        for name in "abcde":
            fake.add(PODS, a_pod(name))
        pages: list[Page] = []
        async for page in client.pages(ALL_PODS, limit=2):
            pages.append(page)
            if len(pages) == 1:
                fake.remove(PODS, "e")
        assert [[pod["metadata"]["name"] for pod in page.items] for page in pages] == [["a", "b"], ["c", "d"], ["e"]]
        assert [page.is_first for page in pages] == [True, False, False]
        assert len({page.resource_version for page in pages}) == 1

    asking(work)


def test_a_list_that_expires_between_two_pages_is_begun_anew_with_larger_ones() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        for number in range(20):
            fake.add(PODS, a_pod(f"p{number:02}"))
        sizes: list[tuple[int, bool]] = []
        async for page in client.pages(ALL_PODS, limit=2):
            sizes.append((len(page.items), page.is_first))
            if len(sizes) == 2:
                fake.remove(PODS, "p00")
                fake.compact()
        assert sizes == [(2, True), (2, False), (16, True), (3, False)]
        fake.fail(410, next=1)
        with pytest.raises(ExpiredError):
            await names_in(client)
        assert await names_in(client, limit=3) == [f"p{number:02}" for number in range(1, 20)]

    asking(work)


def test_a_list_is_of_what_was_selected() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("here", node="n"))
        fake.add(PODS, a_pod("there", labels={"a": "b"}))
        for labels, fields, name in (("a in (b,c)", "", "there"), ("", "spec.nodeName=n", "here")):
            assert await names_in(client, labels=labels, fields=fields) == [name]

    asking(work)


# Watches


def test_a_watch_tells_what_happens_and_ends_with_the_server_s_patience() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        opened: list[float] = []
        version = str(fake.version)
        fake.add(PODS, a_pod("a"))
        fake.add(PODS, a_pod("b"))
        fake.change(PODS, "a", {"metadata": {"labels": {"text": "x"}, "annotations": {"t": "1\u2028\u0085 2\r\n3"}}})
        fake.remove(PODS, "a")
        told = [
            (kind, thing["metadata"]["name"], (thing["metadata"].get("annotations") or {}).get("t"))
            async for kind, thing in client.watch(ALL_PODS, version, seconds=10.0, on_open=lambda: opened.append(clock()))
        ]
        text = "1\u2028\u0085 2\r\n3"
        assert told == [("ADDED", "a", None), ("ADDED", "b", None), ("MODIFIED", "a", text), ("DELETED", "a", text)]
        assert opened == [0.0]
        assert 9.0 <= clock() <= 11.0

    asking(work)


def test_a_watch_from_too_long_ago_has_expired() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        version = str(fake.version)
        fake.add(PODS, a_pod("a"))
        fake.compact()
        with pytest.raises(ExpiredError, match="410 Expired: watch /api/v1/pods: too old resource version"):
            [event async for event in client.watch(ALL_PODS, version)]
        fake.fail(410)
        with pytest.raises(ExpiredError):
            [event async for event in client.watch(ALL_PODS, str(fake.version))]

    asking(work)


@pytest.mark.parametrize(
    ("lines", "error", "said"),
    [
        (
            b'{"type":"ERROR","object":{"code":500,"reason":"InternalError","message":"etcd"}}\n',
            ApiUnavailableError,
            "500 Inter",
        ),
        (b'{"type":"ERROR","object":{"code":410,"reason":"Expired"}}\n', ExpiredError, "410 Expired"),
        (b'{"type":"ERROR","object":{"message":"odd"}}\n', ApiUnavailableError, "500 InternalServerError: .*odd"),
        (b'{"type":"ERROR","object":{"code":403,"reason":"Forbidden"}}\n', ApiError, "403 Forbidden"),
        (b"<html>\n", ApiUnavailableError, "a line of the answer is no event"),
        (b'{"type":"ADDED"}\n', ApiUnavailableError, "a line of the answer is no event"),
        (b'{"type":"ERROR","object":"odd"}\n', ApiUnavailableError, "a line of the answer is no event"),
        (b'{"type":"ADDED","object":{"kind":"Status"}}\n', ApiUnavailableError, "a line of the answer is no event"),
    ],
)
def test_an_error_in_the_stream_of_a_watch_is_raised(lines: bytes, error: type[Exception], said: str) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=lines))

    async def work() -> None:
        client = KubeClient(KubeConfig("http://k8s.test"), transport=transport)
        with pytest.raises(error, match=said):
            [event async for event in client.watch(ALL_PODS, "1")]

    simulate(work)


def test_a_watch_that_is_cut_in_the_middle_of_a_line_tells_nothing_of_it() -> None:
    whole = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "a", "uid": "1", "resourceVersion": "2"}}}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield whole[:10]
        yield whole[10:] + b"\n" + whole[:20]
        raise httpx.ReadError("reset")

    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=pieces()))

    async def work() -> None:
        watch = KubeClient(KubeConfig("http://k8s.test"), transport=transport).watch(ALL_PODS, "1")
        kind, thing = await anext(watch)
        assert (kind, thing["metadata"]["name"]) == ("ADDED", "a")
        with pytest.raises(ApiUnavailableError, match="watch /api/v1/pods: the connection broke: reset"):
            await anext(watch)

    simulate(work)


def test_a_watch_in_which_even_the_end_does_not_come_is_taken_to_be_dead() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.silent = True
        with pytest.raises(ApiUnavailableError, match="watch /api/v1/pods: silent for too long"):
            [event async for event in client.watch(ALL_PODS, str(fake.version))]
        assert 300.0 <= clock() <= 360.0

    asking(work)
