"""Reasons on pods and owners: one event that is counted up, one condition, at a bounded rate, and only by the leader."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.fake_kubernetes import FakeKubernetes, a_pod

from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.gangs import Gang, GangIndex
from poise.service.backends.kubernetes.objects import Json, read_pod
from poise.service.backends.kubernetes.owners import read_owner
from poise.service.backends.kubernetes.reasons import (
    CHANGE_SECONDS,
    FLICKER_SECONDS,
    LASTING_SECONDS,
    LONGEST,
    REPEAT_SECONDS,
    ReasonWriter,
    reason_word,
)


class Desk:
    """A writer on a pretended server, with a clock that the tests set."""

    def __init__(self, **more: Any) -> None:
        self.fake = FakeKubernetes()
        self.now, self.is_leading = 1000.0, True
        self.more = more

    def run(self, story: Callable[["Desk", ReasonWriter], Coroutine[Any, Any, None]]) -> None:
        async def tell() -> None:
            client = self.fake.client()
            writer = self.writer(client)
            try:
                await story(self, writer)
            finally:
                await client.aclose()

        asyncio.run(tell())

    def writer(self, client: Any, instance: str = "one") -> ReasonWriter:
        return ReasonWriter(
            client, instance, clock=lambda: self.now, wall=lambda: self.now, is_leading=lambda: self.is_leading, **self.more
        )

    def job(self, name: str = "train", pods: int = 2) -> None:
        """Make a Job and its pods."""
        template = a_pod("x")
        spec = {"parallelism": pods, "completions": pods, "template": {"metadata": {}, "spec": template["spec"]}}
        job = self.fake.add("jobs", {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
        for number in range(pods):
            self.fake.add("pods", a_pod(f"{name}-{number}", owner=job))

    def gangs(self) -> list[Gang]:
        """The gangs as the server has them now."""
        index = GangIndex()
        for job in self.fake.all("jobs"):
            index.put_owner(read_owner({"kind": "Job", **job}, names.GPU_RESOURCE))
        for pod in self.fake.all("pods"):
            index.put_pod(read_pod(pod, names.GPU_RESOURCE))
        return [*index]

    def events(self, name: str) -> list[Json]:
        return [each for each in self.fake.all("events") if each["involvedObject"]["name"] == name]

    def condition(self, name: str) -> Json | None:
        found = self.fake.get("pods", name).get("status", {}).get("conditions", [])
        return next((each for each in found if each["type"] == "PodScheduled"), None)


def test_a_reason_is_one_event_on_the_first_pod_and_on_the_owner_and_one_condition() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job(pods=3)
        writer.note(desk.gangs()[0], "7", "capacity", "waits: 2 GPUs are free")
        await writer.publish()
        for name, kind in (("train-0", "Pod"), ("train", "Job")):
            (event,) = desk.events(name)
            assert event["involvedObject"]["kind"] == kind
            assert (event["message"], event["count"]) == ("Poise's job 7 waits: 2 GPUs are free", 1)
            assert (event["type"], event["reason"]) == ("Normal", "WaitingForCapacity")
        condition = desk.condition("train-0")
        assert condition is not None
        assert (condition["status"], condition["message"]) == ("False", "Poise's job 7 waits: 2 GPUs are free")
        assert condition["reason"] != "Unschedulable", "an autoscaler is told once the reason has lasted"
        assert desk.condition("train-1") is None
        assert desk.events("train-1") == []
        assert writer.calls == 3

    Desk().run(story)


def test_the_same_reason_is_counted_up_and_not_repeated() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job()
        gang = desk.gangs()[0]
        for second in range(int(REPEAT_SECONDS) + 5):
            desk.now = 1000.0 + second
            writer.note(gang, "7", "tenant-share", "waits")
            await writer.publish()
        (event,) = desk.events("train-0")
        assert event["count"] == 2
        assert writer.calls == 3 + 2, "the condition says it already"

    Desk().run(story)


@pytest.mark.parametrize(
    ("code", "text", "pause"),
    [("capacity", "waits: 1 GPU is free", FLICKER_SECONDS), ("behind-others", "waits behind job 3", CHANGE_SECONDS)],
)
def test_what_changes_is_written_after_a_pause(code: str, text: str, pause: float) -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job()
        writer.note(desk.gangs()[0], "7", "capacity", "waits: 2 GPU is free")
        await writer.publish()
        writer.note(desk.gangs()[0], "7", code, text)
        desk.now += pause - 1
        await writer.publish()
        assert writer.calls == 3
        desk.now += 2
        await writer.publish()
        latest = max(desk.events("train-0"), key=lambda each: each["lastTimestamp"])  # the server lists them by name
        assert latest["message"].endswith(text)
        assert len(desk.events("train-0")) == (1 if code == "capacity" else 2)

    Desk().run(story)


def test_a_reason_that_lasts_and_that_nodes_would_mend_is_told_to_autoscalers_for_all_pods() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job(pods=3)
        for _ in range(3):
            writer.note(desk.gangs()[0], "7", "capacity", "waits")
            await writer.publish()
            desk.now += LASTING_SECONDS
        assert [(desk.condition(f"train-{n}") or {})["reason"] for n in range(3)] == ["Unschedulable"] * 3
        writer.note(desk.gangs()[0], "7", "tenant-share", "waits for its share")
        desk.now += CHANGE_SECONDS + 1
        await writer.publish()
        assert "Unschedulable" not in [(desk.condition(f"train-{n}") or {})["reason"] for n in range(3)]

    Desk().run(story)


def test_nothing_is_written_while_not_leading() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job()
        desk.is_leading = False
        writer.note(desk.gangs()[0], "7", "capacity", "waits")
        writer.tell_once(desk.gangs()[0].pods, "run-trouble", "x")
        await writer.publish()
        assert (writer.calls, desk.fake.all("events")) == (0, [])
        desk.is_leading = True
        await writer.publish()
        assert len(desk.events("train-0")) == 2

    Desk().run(story)


def test_a_server_that_is_away_loses_no_reason() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job()
        gang = desk.gangs()[0]
        writer.note(gang, "7", "capacity", "waits")
        writer.tell_once(gang.pods[:1], "run-trouble", "its image has no python3")
        desk.fake.pause()
        await writer.publish()
        calls = writer.calls
        await writer.publish()
        assert writer.calls == calls, "it is left alone for a while"
        desk.fake.resume()
        desk.now += 60
        await writer.publish()
        assert sorted(each["reason"] for each in desk.events("train-0")) == ["RunTrouble", "WaitingForCapacity"]
        assert len(desk.events("train")) == 1

    Desk().run(story)


def test_another_leader_goes_on_with_the_same_event() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job()
        writer.note(desk.gangs()[0], "7", "capacity", "waits")
        await writer.publish()
        client = desk.fake.client()
        other = desk.writer(client, "two")
        other.note(desk.gangs()[0], "7", "capacity", "waits still")
        await other.publish()
        (event,) = desk.events("train-0")
        assert (event["message"], event["reportingInstance"]) == ("Poise's job 7 waits still", "two")
        await client.aclose()

    Desk().run(story)


def test_a_pod_that_was_bound_meanwhile_is_not_told_that_it_waits() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job(pods=1)
        gang = desk.gangs()[0]
        desk.fake.change("pods", "train-0", {"metadata": {"labels": {"changed": "yes"}}})
        writer.note(gang, "7", "capacity", "waits")
        await writer.publish()
        assert desk.condition("train-0") is None
        assert writer.refused == {409: 1}

    Desk().run(story)


def test_what_runs_or_is_gone_is_spoken_of_no_more() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job("one")
        desk.job("two")
        one, two = sorted(desk.gangs(), key=lambda gang: gang.name)
        for gang in (one, two):
            writer.note(gang, None, "cannot-run", "wrong")
        writer.retain({two.key})
        await writer.publish()
        assert (desk.events("one"), len(desk.events("two"))) == ([], 1)
        assert desk.events("two")[0]["type"] == "Warning"

    Desk().run(story)


def test_twenty_thousand_waiting_pods_cost_no_more_calls_a_minute_than_the_rate_allows() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job(pods=1)
        gang = desk.gangs()[0]
        gangs = [Gang(**{each: getattr(gang, each) for each in Gang.__slots__} | {"key": f"k{n}"}) for n in range(2500)]
        for second in range(60):
            for each in gangs:
                writer.note(each, "7", "capacity", f"waits: {second} GPUs are free")
            await writer.publish()
            desk.now += 1
        assert writer.calls <= 100 + 60 * 20 + 3

    Desk().run(story)


def test_a_message_is_cut_to_what_the_server_takes_and_codes_become_words() -> None:
    async def story(desk: Desk, writer: ReasonWriter) -> None:
        desk.job()
        writer.note(desk.gangs()[0], None, "cannot-run", "ä" * 2000)
        await writer.publish()
        assert len(desk.events("train-0")[0]["message"].encode()) <= LONGEST

    Desk().run(story)
    assert [reason_word(code) for code in ("incomplete", "some-code", "")] == ["WaitingForPods", "SomeCode", "Waiting"]
