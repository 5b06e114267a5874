"""Laws of runs of others' pods: whatever happens in the cluster, no GPU is given out twice, and gangs are whole."""

import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tests.kube_gangs import LONG, TEAM, Cluster, scene, until
from tests.simulated_time import clock

from poise.service.backends.api import RunEnded, RunNotice, RunOrder
from poise.service.backends.kubernetes.objects import Json

NODES, GPUS = ("n0", "n1"), 4
DEEDS = ("delete", "finish", "cordon", "uncordon", "stop", "stranger", "fault", "wait")

FAULTS: tuple[int | str, ...] = (409, 429, 500, "drop", "drop-after")


def is_change(verb: str, path: str) -> bool:
    """Whether a request is one of Poise that changes something, besides its lease."""
    return verb in ("create", "patch") and "leases" not in path


class World:
    """A Job of two pods of two GPUs, its controller, and one run of it after the other."""

    def __init__(self, cluster: Cluster, draw: Random) -> None:
        self.cluster, self.fake, self.draw = cluster, cluster.fake, draw
        self.owner = cluster.job()
        self.made = 2
        self.order: RunOrder | None = None
        self.epochs = 0

    def pods(self, namespace: str = TEAM) -> list[Json]:
        return [pod for pod in self.fake.all("pods") if pod["metadata"]["namespace"] == namespace]

    def is_open(self) -> bool:
        return self.order is not None and self.cluster.runs.table.get((self.order.job, self.order.epoch)) is not None

    def held(self, node: str) -> int:
        """GPUs of a node that pods hold, also those that are on their way out."""
        sizes = {True: 2, False: GPUS}  # of the gang, and of strangers
        return sum(
            sizes[pod["metadata"]["namespace"] == TEAM]
            for pod in self.fake.all("pods")
            if pod["spec"].get("nodeName") == node
        )

    async def control(self) -> None:
        """Do what the controller of Jobs does: make pods again once they are being deleted; if suspended, delete all."""
        alive = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
        if self.cluster.is_suspended():
            for pod in alive:
                await self.cluster.delete(pod["metadata"]["name"])
        for _ in range(0 if self.cluster.is_suspended() else 2 - len(alive)):
            self.cluster.pod(f"train-{self.made}", owner=self.owner)
            self.made += 1
        for pod in alive:
            if pod["spec"].get("nodeName") and pod.get("status", {}).get("phase") != "Running":
                self.fake.set_phase(pod["metadata"]["name"], "Running", TEAM)

    async def launch(self) -> None:
        """Have the core order a run where there is room, as far as can be known."""
        free = {node: GPUS - self.held(node) for node in NODES}
        whole = [node for node in NODES if free[node] == GPUS]
        if whole:
            parts = [(self.draw.choice(whole), GPUS)]
        elif min(free.values()) >= 2:
            parts = [(node, 2) for node in NODES]
        else:
            return
        self.epochs += 1
        self.order = await self.cluster.launched(*parts, epoch=self.epochs)

    async def do(self, deed: str) -> None:  # noqa: C901 - a table
        draw, node = self.draw, self.draw.choice(NODES)
        match deed:
            case "delete" if self.pods():
                await self.cluster.delete(draw.choice(self.pods())["metadata"]["name"])
            case "finish":
                self.fake.finish_deletions()
            case "cordon" | "uncordon":
                self.fake.change("nodes", node, {"spec": {"unschedulable": deed == "cordon"}})
            case "stop" if self.order is not None:
                self.cluster.runs.stop((self.order.job, self.order.epoch), RunNotice("outranked", "", 10.0))
            case "stranger" if self.fake.exists("pods", "stranger"):
                self.fake.remove("pods", "stranger")
            case "stranger" if not self.is_open() and not self.held(node):
                self.cluster.stranger(node, GPUS)
            case "fault":
                self.fake.fail(draw.choice(FAULTS), next=draw.randint(1, 3), where=is_change)
        for _ in range(draw.randint(1, 40)):
            await asyncio.sleep(0.5)
            await self.control()
            if not self.is_open() and draw.random() < 0.1:
                await self.launch()
            for each in NODES:
                assert self.held(each) <= GPUS, f"{each} has {GPUS} GPUs"


@given(st.lists(st.sampled_from(DEEDS), max_size=12), st.integers(0, 2**32))
def test_no_gpu_is_held_twice_and_a_gang_is_whole_in_the_end(deeds: list[str], seed: int) -> None:
    async def work(cluster: Cluster) -> None:
        world = World(cluster, Random(seed))
        await world.launch()
        for deed in deeds:
            await world.do(deed)
        cluster.fake._faults.clear()
        if cluster.fake.exists("pods", "stranger"):
            cluster.fake.remove("pods", "stranger")
        for node in NODES:
            cluster.fake.change("nodes", node, {"spec": {"unschedulable": False}})

        async def settle() -> bool:
            cluster.fake.finish_deletions()
            await world.control()
            if not world.is_open():
                await world.launch()
            return world.is_open() and len(cluster.bound()) == 2

        began = clock()
        while not await settle():
            assert clock() - began < LONG, "it never settles"
            await asyncio.sleep(0.5)
        await until(lambda: sorted(pod["metadata"]["name"] for pod in world.pods()) == sorted(cluster.bound()))
        assert world.order is not None
        places = [part.node for part in world.order.gpus for _ in range(len(part.slots) // 2)]
        assert sorted(cluster.bound().values()) == sorted(places)
        ends = [each.epoch for each in cluster.events if isinstance(each, RunEnded)]
        assert ends == sorted(set(ends)), "every run ends once"
        assert set(range(1, world.epochs)) <= set(ends)

    scene(work)
