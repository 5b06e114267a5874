"""Gangs of others in simulated time: a pretended API server, its users and controllers, and the runs of a back end."""

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
    RunOrder,
    RunPart,
)
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.actions import Actions
from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.gang_runs import GANG_START_SECONDS, GangQueries, GangRuns
from poise.service.backends.kubernetes.gangs import GangIndex
from poise.service.backends.kubernetes.kube_run import KubeRuns
from poise.service.backends.kubernetes.leadership import Leadership
from poise.service.backends.kubernetes.mirror import Mirror
from poise.service.backends.kubernetes.objects import Json, PodInfo
from poise.service.backends.kubernetes.owners import read_owner
from poise.service.backends.kubernetes.view import ClusterView

GPU = names.GPU_RESOURCE
TEAM = "team"
LONG = 4 * GANG_START_SECONDS  # in which whatever is going to happen has happened


class Cluster:
    """Two nodes of four GPUs, and the gangs of a back end, without the rest of it."""

    def __init__(self, client: KubeClient, fake: FakeKubernetes, leadership: Leadership) -> None:
        self._client = client
        self.fake, self.events, self.troubles = fake, list[BackendEvent](), list[str]()
        self.faults: list[BaseException] = []
        self._found: JobFound | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        actions = Actions(client, leadership)
        self._view = ClusterView("poise", GPU, lambda _node: None, self._pod_changed)
        self._index = GangIndex()
        questions = GangQueries(
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
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.faults.append(error)

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

    async def launched(self, *parts: tuple[str, int], epoch: int = 1) -> RunOrder:
        if self._found is None:
            await until(lambda: any(isinstance(each, JobFound) for each in self.events))
            self._found = next(each for each in self.events if isinstance(each, JobFound))
            self._gangs.accepted(self._found.key, "1", is_over=False)
        gpus = tuple(RunPart(node, "v100", tuple(range(count))) for node, count in parts)
        order = RunOrder("1", epoch, gpus, self._found.request)
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
