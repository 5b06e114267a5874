"""Leader election: one leads at a time, whatever becomes of requests. Time is simulated by the event loop."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_kubernetes import LEASES, FakeKubernetes, FakeTransport
from tests.simulated_time import clock, simulate

from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import LeadershipLostError
from poise.service.backends.kubernetes.leadership import Leadership

SECONDS = 15.0


def a_candidate(
    fake: FakeKubernetes, name: str = "a", transport: httpx.AsyncBaseTransport | None = None, lock: str = ""
) -> Leadership:
    client = fake.client() if transport is None else KubeClient(fake.config(), transport=transport)
    return Leadership(client, "poise", "leader", name, lock=lock, seconds=SECONDS, clock=clock)


def ignore(_text: str) -> None:
    pass


def spec(fake: FakeKubernetes) -> dict[str, Any]:
    found: dict[str, Any] = fake.get(LEASES, "leader", "poise")["spec"]
    return found


def test_first_candidate_leads_at_once_and_writes_who_it_is() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one = a_candidate(fake)
        assert not one.is_leading()
        assert await one.acquire(ignore) == 1
        assert one.is_leading()
        assert spec(fake)["holderIdentity"] == one.identity
        assert spec(fake)["leaseDurationSeconds"] == 15
        assert spec(fake)["leaseTransitions"] == 1
        assert spec(fake)["acquireTime"].endswith("Z")

    simulate(work)


def test_two_processes_of_the_same_name_have_different_identities() -> None:
    fake = FakeKubernetes()
    assert a_candidate(fake, "same").identity != a_candidate(fake, "same").identity


def test_leader_stops_acting_after_two_thirds_of_the_duration_without_a_renewal() -> None:
    async def work() -> None:
        one = a_candidate(FakeKubernetes())
        await one.acquire(ignore)
        await asyncio.sleep(9.99)
        assert one.is_leading()
        await asyncio.sleep(0.02)
        assert not one.is_leading()

    simulate(work)


def test_leader_that_renews_leads_for_as_long_as_it_likes() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one, two = a_candidate(fake), a_candidate(fake, "b")
        await one.acquire(ignore)
        holding, waiting = asyncio.create_task(one.hold()), asyncio.create_task(two.acquire(ignore))
        await asyncio.sleep(1000.0)
        assert one.is_leading()
        assert not waiting.done()
        assert spec(fake)["leaseTransitions"] == 1
        for task in (holding, waiting):
            task.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        assert not one.is_leading(), "a leader whose renewals have ended does not act"

    simulate(work)


def test_lease_of_a_leader_that_died_is_taken_after_its_whole_duration() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one, two = a_candidate(fake), a_candidate(fake, "a")
        await one.acquire(ignore)
        said: list[str] = []
        assert await two.acquire(said.append) == 2
        assert SECONDS <= clock() < 1.5 * SECONDS
        assert len(said) == 1
        assert one.identity in said[0]

    simulate(work)


def test_who_has_the_lock_of_the_holder_takes_its_lease_at_once_as_that_one_is_dead() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one, two = a_candidate(fake, "host_with_a_name", lock="abc"), a_candidate(fake, "another", lock="abc")
        assert await one.acquire(ignore) == 1
        assert await two.acquire(ignore) == 2
        assert clock() == 0.0

    simulate(work)


@pytest.mark.parametrize(("first", "second"), [("abc", "bc"), ("bc", "abc"), ("abc", ""), ("", "abc"), ("", "")])
def test_who_has_another_lock_than_the_holder_or_none_waits(first: str, second: str) -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one, two = a_candidate(fake, "host_abc", lock=first), a_candidate(fake, "host_abc", lock=second)
        await one.acquire(ignore)
        assert await two.acquire(ignore) == 2
        assert clock() >= SECONDS

    simulate(work)


def test_lease_that_was_released_is_taken_at_the_next_look() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one, two = a_candidate(fake), a_candidate(fake, "b")
        await one.acquire(ignore)
        waiting = asyncio.create_task(two.acquire(ignore))
        await asyncio.sleep(1.0)
        await one.release()
        assert not one.is_leading()
        assert (spec(fake)["holderIdentity"], spec(fake)["leaseDurationSeconds"]) == ("", 1)
        assert await waiting == 2
        assert clock() <= 4.0

    simulate(work)


def test_release_leaves_the_lease_of_another_alone() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one, two = a_candidate(fake), a_candidate(fake, "b")
        await one.acquire(ignore)
        await two.acquire(ignore)
        await one.release()
        assert spec(fake)["holderIdentity"] == two.identity

    simulate(work)


def test_release_succeeds_after_a_renewal_whose_answer_was_lost() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one = a_candidate(fake)
        await one.acquire(ignore)
        fake.change(LEASES, "leader", {"metadata": {"annotations": {"note": "changed"}}}, "poise")
        await one.release()
        assert spec(fake)["holderIdentity"] == ""

    simulate(work)


def test_release_without_a_server_only_stops_acting() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one = a_candidate(fake)
        await one.acquire(ignore)
        fake.pause()
        await one.release()
        assert not one.is_leading()
        await a_candidate(fake).release()

    simulate(work)


@pytest.mark.parametrize("fault", [500, 429, 409, "drop", "drop-after", "refuse", "hang"])
def test_leadership_outlives_one_failure_of_a_renewal(fault: int | str) -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one = a_candidate(fake)
        await one.acquire(ignore)
        holding = asyncio.create_task(one.hold())
        fake.fail(fault, where=lambda verb, _path: verb == "update")
        await asyncio.sleep(100.0)
        assert one.is_leading()
        assert spec(fake)["leaseTransitions"] == 1
        holding.cancel()
        await asyncio.wait([holding])

    simulate(work)


def test_leadership_is_lost_before_the_lease_is_over_when_the_server_is_away() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one = a_candidate(fake)
        await one.acquire(ignore)
        fake.pause()
        with pytest.raises(LeadershipLostError, match="poise/leader could not be renewed in time: GET"):
            await one.hold()
        assert not one.is_leading()
        assert clock() == pytest.approx(10.0)

    simulate(work)


def test_leadership_is_lost_at_once_when_another_has_the_lease_or_it_is_gone() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one = a_candidate(fake)
        await one.acquire(ignore)
        fake.change(LEASES, "leader", {"spec": {"holderIdentity": "thief"}}, "poise")
        with pytest.raises(LeadershipLostError, match="is now that of thief"):
            await one.hold()
        fake.remove(LEASES, "leader", "poise")
        two = a_candidate(fake)
        await two.acquire(ignore)
        fake.remove(LEASES, "leader", "poise")
        with pytest.raises(LeadershipLostError, match="has been deleted"):
            await two.hold()

    simulate(work)


def test_deleted_lease_is_not_taken_while_its_holder_may_be_acting_and_terms_go_on() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        one, two = a_candidate(fake), a_candidate(fake, "b")
        assert await one.acquire(ignore) == 1
        waiting = asyncio.create_task(two.acquire(ignore))
        await asyncio.sleep(1.0)
        fake.remove(LEASES, "leader", "poise")
        while not waiting.done():
            assert not (one.is_leading() and two.is_leading())
            await asyncio.sleep(0.1)
        assert await waiting == 2

    simulate(work)


def test_acquisition_whose_answer_was_lost_is_completed() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        fake.fail("drop-after", where=lambda verb, _path: verb == "create")
        one = a_candidate(fake)
        said: list[str] = []
        assert await one.acquire(said.append) == 2
        assert one.is_leading()
        assert clock() < SECONDS, "it need not wait for its own lease to be over"
        assert "the connection broke" in said[0]

    simulate(work)


def test_candidate_waits_while_it_may_not_read_leases() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        fake.deny("get", "leases.coordination.k8s.io")
        one = a_candidate(fake)
        said: list[str] = []
        waiting = asyncio.create_task(one.acquire(said.append))
        await asyncio.sleep(60.0)
        assert len(said) == 1
        assert "403 Forbidden" in said[0]
        fake.denied.clear()
        assert await waiting == 1

    simulate(work)


def test_lease_without_a_duration_is_waited_for_as_long_as_ones_own() -> None:
    async def work() -> None:
        fake = FakeKubernetes()
        fake.add(LEASES, {"metadata": {"name": "leader", "namespace": "poise"}, "spec": {"holderIdentity": "other"}})
        await a_candidate(fake).acquire(ignore)
        assert clock() >= SECONDS

    simulate(work)


# Any fate of any request


Fate = tuple[float, float, str]
"""Seconds until a request arrives, seconds until its answer does, and what is lost."""


@dataclass
class LossyTransport(httpx.AsyncBaseTransport):
    """Delays and loses requests and answers. A request that is on its way arrives also if its sender has given up."""

    server: FakeTransport
    fates: Iterator[Fate]
    is_cut: bool = False
    arriving: set[asyncio.Task[httpx.Response]] = field(default_factory=set)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        before, after, fate = (0.0, 0.0, "request lost") if self.is_cut else next(self.fates)
        task = asyncio.create_task(self._arrive(request, before, fate))
        self.arriving.add(task)
        task.add_done_callback(self._arrived)
        response = await asyncio.shield(task)
        await asyncio.sleep(after)
        if fate == "answer lost":
            raise httpx.ReadError("lost", request=request)
        return response

    async def _arrive(self, request: httpx.Request, before: float, fate: str) -> httpx.Response:
        await asyncio.sleep(before)
        if fate == "request lost":
            raise httpx.ConnectError("lost", request=request)
        return await self.server.handle_async_request(request)

    def _arrived(self, task: asyncio.Task[httpx.Response]) -> None:
        self.arriving.discard(task)
        if not task.cancelled():
            task.exception()


@dataclass
class Story:
    """What some candidates did. Each is a sequence of processes, each of which has an identity of its own."""

    fake: FakeKubernetes
    processes: list[Leadership] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)
    holding: list[asyncio.Task[None]] = field(default_factory=list)

    async def live(self, plan: "Plan") -> None:
        """Lead whenever possible, until the lead is lost or for some time; then be cut off, or release it."""
        fates = cycle(plan.fates)
        loop = asyncio.get_running_loop()
        for lead, ending in cycle(plan.lives):
            transport = LossyTransport(FakeTransport(self.fake), fates)
            client = KubeClient(self.fake.config(), transport=transport)
            process = Leadership(client, "poise", "leader", "x", seconds=SECONDS, clock=lambda: plan.rate * loop.time())
            self.processes.append(process)
            self.terms.append(await process.acquire(ignore))
            self.check()  # now, when it has just begun to lead
            holding = asyncio.create_task(process.hold())
            self.holding.append(holding)
            await asyncio.wait([holding], timeout=None if ending == "hold" else lead)
            if ending == "cut off":
                transport.is_cut = True  # it goes on, and nothing but its clock tells it to stop
            elif ending == "release":
                holding.cancel()
                await asyncio.wait([holding])
                await process.release()

    def check(self) -> None:
        leading = [process for process in self.processes if process.is_leading()]
        assert len(leading) <= 1, [(process.identity, process.term) for process in leading]

    async def end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            assert not task.done(), task.exception()
        for task in (*tasks, *self.holding):
            task.cancel()
        results = await asyncio.gather(*tasks, *self.holding, return_exceptions=True)
        assert all(isinstance(each, LeadershipLostError | asyncio.CancelledError) for each in results)
        assert len(set(self.terms)) == len(self.terms), "a term is of one process"


class Plan(NamedTuple):
    """What is drawn for one candidate: the speed of its clock, the fates of its requests, and its lives."""

    rate: float
    fates: list[Fate]
    lives: list[tuple[float, str]]


DELAYS = st.sampled_from([0.0, 0.0, 0.0, 0.3, 2.0, 3.6, 9.0, 16.0, 40.0])
FATES = st.tuples(DELAYS, DELAYS, st.sampled_from(["", "", "", "answer lost", "request lost"]))
LIVES = st.tuples(st.sampled_from([0.0, 1.0, 5.0, 14.0, 33.0]), st.sampled_from(["hold", "cut off", "release"]))
PLANS = st.builds(
    Plan,
    st.sampled_from([1.0, 0.9, 1.1]),
    st.lists(FATES, min_size=1, max_size=12),
    st.lists(LIVES, min_size=1, max_size=4),
)


@pytest.mark.slow
@given(st.lists(PLANS, min_size=2, max_size=3))
@settings(max_examples=2 * settings().max_examples)
def test_two_processes_never_lead_at_once_whatever_becomes_of_requests(plans: list[Plan]) -> None:
    async def work() -> None:
        story = Story(FakeKubernetes())
        tasks = [asyncio.create_task(story.live(plan)) for plan in plans]
        while clock() < 200.0:
            story.check()
            await asyncio.sleep(0.5)
        await story.end(tasks)

    simulate(work)


@pytest.mark.parametrize("candidates", [1, 3])
def test_with_a_good_network_somebody_soon_leads_after_each_end(candidates: int) -> None:
    async def work() -> None:
        story = Story(FakeKubernetes())
        plan = Plan(1.0, [(0.1, 0.1, "")], [(40.0, "cut off"), (20.0, "release")])
        tasks = [asyncio.create_task(story.live(plan)) for _ in range(candidates)]
        await asyncio.sleep(300.0)
        await story.end(tasks)
        assert len(story.terms) >= 300 // 60
        assert story.terms == sorted(story.terms)

    simulate(work)
