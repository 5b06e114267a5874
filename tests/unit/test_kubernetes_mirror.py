"""Mirrors of collections of the Kubernetes API: whatever goes wrong, each change is told once, in simulated time."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_kubernetes import PODS, FakeKubernetes, FakeTransport, a_pod
from tests.simulated_time import clock, simulate

from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.mirror import LEAST_PAUSE, Change, Mirror

Json = dict[str, Any]
ALL_PODS, POD_PATH = "/api/v1/pods", "/api/v1/namespaces/default/pods"


class SmallPages(KubeClient):
    """A client whose lists have pages of two.

    lists   how many were asked for
    """

    lists = 0

    def pages(self, path: str, *, labels: str = "", fields: str = "", limit: int = 2) -> Any:
        self.lists += 1
        return super().pages(path, labels=labels, fields=fields, limit=limit)


@dataclass
class Follower:
    """A mirror of pods, and what it has told: each change is checked against those before it."""

    fake: FakeKubernetes
    labels: str = ""
    known: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    told: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = SmallPages(self.fake.config(), transport=FakeTransport(self.fake))
        self.mirror = Mirror(self.client, ALL_PODS, on_change=self._change, labels=self.labels, clock=clock)

    def _change(self, kind: Change, thing: Json) -> None:
        head = thing["metadata"]
        key, uid, version = (head["namespace"], head["name"]), head["uid"], int(head["resourceVersion"])
        before = self.known.get(key)
        self.told.append((kind, head["name"]))
        match kind:
            case Change.ADDED:
                assert before is None
                self.known[key] = uid, version
            case Change.MODIFIED:
                assert before is not None
                assert (before[0], before[1] < version) == (uid, True)
                self.known[key] = uid, version
            case Change.DELETED:
                assert before is not None
                assert before[0] == uid
                del self.known[key]

    def truth(self) -> dict[tuple[str, str], tuple[str, int]]:
        """What the server has."""
        heads = [pod["metadata"] for pod in self.fake.all(PODS, self.labels)]
        return {(head["namespace"], head["name"]): (head["uid"], int(head["resourceVersion"])) for head in heads}


def following(work: Callable[[FakeKubernetes, Follower], Any], labels: str = "") -> None:
    """Do something while a mirror follows."""

    async def run() -> None:
        fake = FakeKubernetes()
        follower = Follower(fake, labels)
        running = asyncio.create_task(follower.mirror.run())
        try:
            await work(fake, follower)
            assert not running.done(), "a mirror goes on for ever"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await follower.client.aclose()

    simulate(run)


def requests(fake: FakeKubernetes, verb: str) -> int:
    return sum(each == verb for each, _ in fake.requests)


def test_a_mirror_goes_on_where_a_watch_ended_or_broke() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        fake.add(PODS, a_pod("a"))
        await follower.mirror.synced.wait()
        for number, interrupt in enumerate((fake.end_watches, fake.break_watches, fake.end_watches)):
            await asyncio.sleep(5.0)
            interrupt()
            fake.add(PODS, a_pod(f"b{number}"))
            await asyncio.sleep(5.0)
            assert follower.known == follower.truth()
        assert (follower.client.lists, requests(fake, "watch")) == (1, 4)
        assert follower.mirror.problem is None

    following(work)


def test_a_mirror_whose_watch_has_expired_lists_again_and_tells_only_what_differs() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        for name in "abcd":
            fake.add(PODS, a_pod(name))
        await asyncio.sleep(1.0)
        follower.told.clear()
        fake.pause()
        fake.remove(PODS, "a")
        fake.remove(PODS, "b")
        fake.add(PODS, a_pod("b"))
        fake.change(PODS, "c", {"metadata": {"labels": {"x": "y"}}})
        fake.compact()
        fake.resume()
        await asyncio.sleep(30.0)
        assert sorted(follower.told) == [("ADDED", "b"), ("DELETED", "a"), ("DELETED", "b"), ("MODIFIED", "c")]
        assert follower.told.index(("DELETED", "b")) < follower.told.index(("ADDED", "b"))
        assert (follower.client.lists, follower.known) == (2, follower.truth())

    following(work)


def test_a_mirror_says_why_it_is_behind() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        mirror = follower.mirror
        assert mirror.problem == "not listed yet"
        await asyncio.sleep(100.0)
        assert mirror.problem is None
        fake.pause()
        await asyncio.sleep(60.0)
        assert mirror.problem == f"watch {ALL_PODS}: the connection broke: All connection attempts failed"
        assert requests(fake, "watch") < 5, "an absent server is not flooded when it comes back"
        fake.resume()
        await asyncio.sleep(15.0)
        assert mirror.problem is None

    following(work)


def test_bookmarks_keep_a_mirror_of_a_quiet_collection_from_expiring() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        await asyncio.sleep(10.0)
        for _ in range(10):
            fake.add("configmaps", {"metadata": {"name": f"other-{fake.version}"}})
        fake.bookmark()
        await asyncio.sleep(0.1)
        fake.compact()
        fake.end_watches()
        await asyncio.sleep(10.0)
        assert (follower.client.lists, follower.told) == (1, [])

    following(work)


def test_a_mirror_heeds_how_long_the_server_wants_to_be_left_alone() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        fake.fail(429, where=lambda verb, _path: verb == "list", retry_after=8)
        await follower.mirror.synced.wait()
        assert 8.0 <= clock() < 9.0

    following(work)


def test_a_server_that_ends_each_watch_at_once_is_not_flooded() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        await follower.mirror.synced.wait()
        for _ in range(600):
            fake.end_watches()
            await asyncio.sleep(0.1)
        assert requests(fake, "watch") < 60.0 / LEAST_PAUSE
        fake.add(PODS, a_pod("a"))
        await asyncio.sleep(15.0)
        assert follower.known == follower.truth()

    following(work)


def test_rights_that_are_taken_away_and_given_back_are_waited_for() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        fake.deny("list", PODS)
        fake.add(PODS, a_pod("a"))
        await asyncio.sleep(60.0)
        assert follower.mirror.problem is not None
        assert "403 Forbidden" in follower.mirror.problem
        fake.denied.clear()
        await asyncio.sleep(15.0)
        assert follower.known == follower.truth()

    following(work)


STEPS = st.one_of(
    st.tuples(st.sampled_from(["add", "add", "change", "move", "remove", "replace"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["end", "break", "compact", "bookmark", "pause", "resume", "silent", "loud"]), st.just(0)),
    st.tuples(st.sampled_from([409, 410, 429, 500, 503, "drop", "drop-after", "refuse", "hang"]), st.integers(1, 4)),
    st.tuples(st.just("turns"), st.integers(1, 12)),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, 7.0, 40.0, 400.0])),
)


def strike(fake: FakeKubernetes, what: str | int, how: int) -> None:
    """Spoil something, or change something on the server."""
    spoil: dict[str | int, Callable[[], None]] = {
        "end": fake.end_watches,
        "break": fake.break_watches,
        "compact": fake.compact,
        "bookmark": fake.bookmark,
        "pause": fake.pause,
        "resume": fake.resume,
        "silent": lambda: setattr(fake, "silent", True),
        "loud": lambda: setattr(fake, "silent", False),
    }
    if what in ("add", "change", "move", "remove", "replace"):
        alter(fake, str(what), f"p{how}")
    elif what in spoil:
        spoil[what]()
    else:
        fake.fail(what, next=how, retry_after=5 if what == 429 else None)


def alter(fake: FakeKubernetes, what: str, name: str) -> None:
    """Change a pod, as far as it is there."""
    is_there = fake.exists(PODS, name)
    if is_there and what in ("remove", "replace"):
        fake.remove(PODS, name)
    if what == "replace" or (what == "add" and not is_there):
        fake.add(PODS, a_pod(name, labels={"team": "a"}))
    if is_there and what == "change":
        fake.change(PODS, name, {"metadata": {"annotations": {"version": str(fake.version)}}})
    if is_there and what == "move":
        fake.change(PODS, name, {"metadata": {"labels": {"team": "ab"[fake.version % 2]}}})


@settings(max_examples=3 * settings().max_examples)
@given(steps=st.lists(STEPS, max_size=60), labels=st.sampled_from(["", "team=a"]))
def test_whatever_goes_wrong_a_mirror_tells_consistent_changes_and_ends_as_the_server(
    steps: list[tuple[str | int, Any]], labels: str
) -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        for what, how in steps:
            if what == "wait":
                await asyncio.sleep(how)
            elif what == "turns":
                for _ in range(how):
                    await asyncio.sleep(0)
            else:
                strike(fake, what, how)
        fake._faults.clear()
        fake.resume()
        fake.silent = False
        await asyncio.sleep(500.0)  # a watch that has died without a word is given up after six minutes
        assert follower.known == follower.truth()
        assert len(follower.mirror) == len(follower.known)
        assert follower.mirror.problem is None
        assert follower.mirror.synced.is_set()

    following(work, labels)
