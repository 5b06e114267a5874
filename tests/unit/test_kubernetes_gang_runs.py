"""Runs of pods that others have created: where and when they are bound, and how they leave. In simulated time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from tests.fake_kubernetes import FakeKubernetes, a_node, a_pod
from tests.simulated_time import clock, simulate

from poise.service.backends.api import (
    BackendEvent,
    JobFound,
    RunBegan,
    RunEnded,
    RunEnding,
    RunNotice,
    RunOrder,
    RunPart,
)
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.actions import Actions
from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.gang_runs import PATIENCE, GangRuns, Questions
from poise.service.backends.kubernetes.gangs import GangIndex
from poise.service.backends.kubernetes.kube_run import KubeRuns
from poise.service.backends.kubernetes.leadership import Leadership
from poise.service.backends.kubernetes.mirror import Mirror
from poise.service.backends.kubernetes.objects import Json, PodInfo
from poise.service.backends.kubernetes.owners import read_owner
from poise.service.backends.kubernetes.view import ClusterView

GPU = names.GPU_RESOURCE
TEAM = "team"
LONG = 4 * PATIENCE  # in which whatever is going to happen has happened


class Cluster:
    """Two nodes of four GPUs, and the gangs of a back end, without the rest of it."""

    def __init__(self, client: KubeClient, fake: FakeKubernetes, leadership: Leadership) -> None:
        self._client = client
        self.fake, self.events, self.troubles = fake, list[BackendEvent](), list[str]()
        self.faults: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()
        actions = Actions(client, leadership)
        self._view = ClusterView("poise", GPU, lambda _node: None, self._pod_changed)
        self._index = GangIndex()
        questions = Questions(
            lambda namespace: namespace,
            lambda _gang: ((), None),
            lambda _node: False,
            lambda job: any(self.runs.table.of(job)),
        )
        self._gangs = GangRuns(self._index, self._view, actions, self.events.append, questions, self.start)
        self.runs = KubeRuns(
            lambda _run, end: self.events.append(end),
            lambda _run: self._gangs.live,
            self.faults.append,
            lambda run: self.troubles.append(run.failure[1] if run.failure else ""),
        )
        for path, on_change in (
            ("/api/v1/nodes", self._view.node_event),
            ("/apis/batch/v1/jobs", self._job_changed),
            ("/api/v1/pods", self._view.pod_event),
        ):
            self.start(Mirror(client, path, on_change=on_change, clock=clock).run())

    def start(self, life: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pod_changed(self, before: PodInfo | None, after: PodInfo | None) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            self._index.remove_pod(before.key)
        if after is not None and after.scheduler == "poise":
            self._index.put_pod(after)
        self._look()

    def _job_changed(self, kind: str, found: Json) -> None:
        if kind == "DELETED":
            self._index.remove_owner(found["metadata"]["uid"])
        else:
            self._index.put_owner(read_owner({"kind": "Job", **found}, GPU))
        self._look()

    def _look(self) -> None:
        self._gangs.look_at([each if isinstance(each, str) else each.key for each in self._index.changed()])

    async def close(self) -> None:
        await self.runs.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self.faults == []

    # What users and controllers do

    def job(self, pods: int = 2, gpus: int = 2) -> Json:
        spec = {"parallelism": pods, "completions": pods, "template": {"spec": a_pod("x", gpus)["spec"]}}
        made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train", "namespace": TEAM}, "spec": spec}
        owner = self.fake.add("jobs", made)
        for number in range(pods):
            self.pod(f"train-{number}", gpus, owner=owner)
        return owner

    def pod(self, name: str, gpus: int = 2, **more: Any) -> None:
        self.fake.add("pods", a_pod(name, gpus, namespace=TEAM, **more))

    async def delete(self, name: str) -> None:
        """Have a pod deleted, which takes until `finish_deletions`."""
        await self._client.delete(f"/api/v1/namespaces/{TEAM}/pods/{name}")

    def stranger(self, node: str, gpus: int) -> None:
        self.fake.add("pods", a_pod("stranger", gpus, "other", node=node, phase="Running"))

    def cordon(self, node: str) -> None:
        self.fake.change("nodes", node, {"spec": {"unschedulable": True}})

    def is_suspended(self) -> bool:
        return bool(self.fake.get("jobs", "train", TEAM)["spec"].get("suspend"))

    def bound(self) -> dict[str, str]:
        """Nodes of the pods that are not being deleted."""
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"]
            for pod in self.fake.all("pods")
            if pod["metadata"]["namespace"] == TEAM
            and pod["spec"].get("nodeName")
            and "deletionTimestamp" not in pod["metadata"]
        }

    # What the service does

    async def launched(self, *parts: tuple[str, int]) -> RunOrder:
        await until(lambda: any(isinstance(each, JobFound) for each in self.events))
        found = next(each for each in self.events if isinstance(each, JobFound))
        self._gangs.accepted(found.key, "1", is_over=False)
        gpus = tuple(RunPart(node, "v100", tuple(range(count))) for node, count in parts)
        order = RunOrder("1", 1, gpus, found.request)
        self.runs.launch(order)
        return order

    async def begun(self, *parts: tuple[str, int]) -> RunOrder:
        order = await self.launched(*parts)
        await until(lambda: self.bound())
        for name in self.bound():
            self.fake.set_phase(name, "Running", TEAM)
        await until(lambda: any(isinstance(each, RunBegan) for each in self.events))
        return order

    @property
    def end(self) -> RunEnded | None:
        return next((each for each in self.events if isinstance(each, RunEnded)), None)


async def until(condition: Callable[[], Any]) -> None:
    began = clock()
    while not condition():
        assert clock() - began < LONG, "it never comes"
        await asyncio.sleep(0.1)


def scene(work: Callable[[Cluster], Awaitable[None]]) -> None:
    async def run() -> None:
        fake = FakeKubernetes()
        for name in ("n0", "n1"):
            fake.add("nodes", a_node(name, 4))
        leadership = Leadership(fake.client(), "poise", "leader", "a", clock=clock)
        await leadership.acquire(lambda _text: None)
        holding = asyncio.create_task(leadership.hold())
        client = fake.client(may_write=leadership.is_leading)
        cluster = Cluster(client, fake, leadership)
        try:
            await work(cluster)
        finally:
            await cluster.close()
            holding.cancel()
            with suppress(asyncio.CancelledError):
                await holding
            await client.aclose()

    simulate(run)


def test_a_gang_is_bound_whole_and_finishes_with_its_owner() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.job()
        await cluster.begun(("n0", 2), ("n1", 2))
        assert sorted(cluster.bound().values()) == ["n0", "n1"]
        for name in cluster.bound():
            cluster.fake.set_phase(name, "Succeeded", TEAM, code=0)
        done = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        cluster.fake.change("jobs", "train", done, TEAM)
        await until(lambda: cluster.end)
        assert cluster.end is not None
        assert cluster.end.how is RunEnding.FINISHED

    scene(work)


def test_a_pod_that_is_made_again_is_not_bound_before_the_one_that_it_replaces_has_ended() -> None:
    async def work(cluster: Cluster) -> None:
        owner = cluster.job()
        await cluster.begun(("n0", 4))
        await cluster.delete("train-0")
        cluster.pod("train-0-again", owner=owner)
        await asyncio.sleep(PATIENCE / 2)
        assert cluster.bound() == {"train-1": "n0"}
        assert not cluster.troubles
        cluster.fake.finish_deletions()
        await until(lambda: cluster.bound() == {"train-1": "n0", "train-0-again": "n0"})

    scene(work)


def test_a_gang_whose_place_others_have_taken_gives_it_back_and_binds_nothing() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.job()
        cluster.stranger("n1", 3)
        await cluster.launched(("n0", 2), ("n1", 2))
        await until(lambda: cluster.end)
        assert cluster.end is not None
        assert (cluster.end.how, cluster.bound()) == (RunEnding.YIELDED, {})
        assert cluster.troubles == ["run 1 gave its GPUs back: other pods hold 3 of the 4 GPUs of node n1"]

    scene(work)


def test_nothing_is_bound_to_a_node_that_was_cordoned_and_the_gang_goes_elsewhere() -> None:
    async def work(cluster: Cluster) -> None:
        owner = cluster.job()
        await cluster.begun(("n0", 4))
        cluster.cordon("n0")
        await cluster.delete("train-0")
        cluster.fake.finish_deletions()
        cluster.pod("train-0-again", owner=owner)
        await until(cluster.is_suspended)
        assert "train-0-again" not in cluster.bound()
        for name in ("train-1", "train-0-again"):
            await cluster.delete(name)
        cluster.fake.finish_deletions()
        await until(lambda: cluster.end)
        assert cluster.end is not None
        assert cluster.end.how is RunEnding.YIELDED

    scene(work)


def test_nothing_is_bound_to_a_node_that_is_gone() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.job()
        cluster.fake.remove("nodes", "n0")
        await cluster.launched(("n0", 4))
        await until(lambda: cluster.end)
        assert cluster.end is not None
        assert (cluster.end.how, cluster.bound()) == (RunEnding.YIELDED, {})

    scene(work)


def evictable(cluster: Cluster, count: int) -> None:
    """Have pods that their owner makes again, so that they may be evicted."""
    notes = {names.GANG: "g", names.GANG_SIZE: str(count), names.PREEMPTION: "restart"}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "set", "uid": "9"}}
    for number in range(count):
        cluster.pod(f"p{number}", 1, annotations=notes, labels={"app": "train"}, owner=owner)


def a_budget(cluster: Cluster, name: str, allowed: int, selector: Json | None) -> None:
    budget = {"metadata": {"name": name, "namespace": TEAM}, "spec": {"selector": selector}}
    cluster.fake.add("poddisruptionbudgets", {**budget, "status": {"disruptionsAllowed": allowed}})


def leave(cluster: Cluster, order: RunOrder) -> None:
    cluster.runs.stop((order.job, order.epoch), RunNotice("outranked", "", 10.0))


def test_a_gang_is_evicted_whole_or_not_at_all_whatever_its_budgets_allow() -> None:
    async def work(cluster: Cluster) -> None:
        evictable(cluster, 3)
        selector = {"matchExpressions": [{"key": "app", "operator": "In", "values": ["train"]}]}
        a_budget(cluster, "one-by-one", 1, selector)
        a_budget(cluster, "of-others", 0, {"matchLabels": {"app": "other"}})
        order = await cluster.begun(("n0", 3))
        leave(cluster, order)
        await asyncio.sleep(LONG)
        assert len(cluster.bound()) == 3
        assert cluster.troubles == [
            "PodGroup g cannot be evicted now: disruption budget one-by-one allows 1 of its 3 pods to leave"
        ]
        cluster.fake.change("poddisruptionbudgets", "one-by-one", {"status": {"disruptionsAllowed": 3}}, TEAM)
        await until(lambda: not cluster.bound())
        cluster.fake.finish_deletions()
        await until(lambda: cluster.end)
        assert cluster.end is not None
        assert cluster.end.how is RunEnding.YIELDED

    scene(work)


def test_pods_under_two_budgets_are_not_evicted_at_all() -> None:
    async def work(cluster: Cluster) -> None:
        evictable(cluster, 2)
        a_budget(cluster, "all", 9, {})
        a_budget(cluster, "again", 9, {"matchLabels": {"app": "train"}})
        a_budget(cluster, "none", 0, None)
        order = await cluster.begun(("n0", 2))
        leave(cluster, order)
        await asyncio.sleep(LONG)
        assert len(cluster.bound()) == 2
        assert len(cluster.troubles) == 1
        assert "several disruption budgets select its pods" in cluster.troubles[0]

    scene(work)


def test_a_job_that_cannot_be_preempted_is_evicted_when_it_was_cancelled() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.pod("alone")
        order = await cluster.begun(("n0", 2))
        leave(cluster, order)
        await asyncio.sleep(LONG)
        assert cluster.bound() == {"alone": "n0"}
        cluster.runs.kill((order.job, order.epoch), "cancelled", 10.0)
        await until(lambda: not cluster.bound())
        cluster.fake.finish_deletions()
        await until(lambda: cluster.end)
        assert ("delete", f"/api/v1/namespaces/{TEAM}/pods/alone") not in cluster.fake.requests

    scene(work)
