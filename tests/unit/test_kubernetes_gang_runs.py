"""Runs of pods that others have created: where and when they are bound, and how they leave."""

import asyncio

from tests.kube_gangs import LONG, TEAM, Cluster, scene, until

from poise.service.backends.api import RunEnding, RunNotice, RunOrder
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.gang_runs import GANG_START_SECONDS
from poise.service.backends.kubernetes.kube_run import SLOW_SECONDS, START_SECONDS
from poise.service.backends.kubernetes.objects import Json


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
        await asyncio.sleep(GANG_START_SECONDS / 2)
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


def evictable(cluster: Cluster, *pods: str, size: int) -> None:
    """Have pods that their owner makes again, so that they may be evicted."""
    notes = {names.GANG: "g", names.GANG_SIZE: str(size), names.PREEMPTION: "restart"}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "set", "uid": "9"}}
    for name in pods:
        cluster.pod(name, 1, annotations=notes, labels={"app": "train"}, owner=owner)


def a_budget(cluster: Cluster, name: str, allowed: int, selector: Json | None) -> None:
    budget = {"metadata": {"name": name, "namespace": TEAM}, "spec": {"selector": selector}}
    cluster.fake.add("poddisruptionbudgets", {**budget, "status": {"disruptionsAllowed": allowed}})


def leave(cluster: Cluster, order: RunOrder) -> None:
    cluster.runs.stop((order.job, order.epoch), RunNotice("outranked", "", 10.0))


def test_a_gang_is_evicted_whole_or_not_at_all_whatever_its_budgets_allow() -> None:
    async def work(cluster: Cluster) -> None:
        evictable(cluster, "p0", "p1", "p2", size=3)
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
        evictable(cluster, "p0", "p1", size=2)
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


def test_budgets_that_may_not_be_read_keep_a_gang_where_it_is_and_end_nothing() -> None:
    async def work(cluster: Cluster) -> None:
        evictable(cluster, "p0", "p1", size=2)
        order = await cluster.begun(("n0", 2))
        cluster.fake.fail(403, next=2, where=lambda _verb, path: path.endswith("poddisruptionbudgets"))
        leave(cluster, order)
        await until(lambda: not cluster.bound())
        assert len(cluster.troubles) == 1
        assert cluster.troubles[0].startswith("PodGroup g cannot be evicted now: ")

    scene(work)


def test_budgets_count_also_when_a_pod_of_the_gang_was_made_again() -> None:
    async def work(cluster: Cluster) -> None:
        evictable(cluster, "p0", "p1", "p2", size=3)
        a_budget(cluster, "one-by-one", 1, {"matchLabels": {"app": "train"}})
        order = await cluster.begun(("n0", 3))
        await cluster.delete("p0")
        cluster.fake.finish_deletions()
        evictable(cluster, "p9", size=3)
        await until(lambda: cluster.bound().keys() == {"p1", "p2", "p9"})
        cluster.fake.set_phase("p9", "Running", TEAM)
        await asyncio.sleep(5.0)  # for the watch
        leave(cluster, order)
        await asyncio.sleep(LONG)
        assert len(cluster.bound()) == 3
        assert "one-by-one allows 1 of its 3 pods to leave" in cluster.troubles[0]

    scene(work)


def test_a_device_plug_in_that_is_restarted_costs_a_gang_nothing() -> None:
    async def work(cluster: Cluster) -> None:
        owner = cluster.job()
        await cluster.begun(("n0", 2), ("n1", 2))
        (name,) = (pod for pod, node in cluster.bound().items() if node == "n0")
        offer(cluster, "n0", 0)
        await cluster.delete(name)
        cluster.fake.finish_deletions()
        cluster.pod("again", owner=owner)
        await asyncio.sleep(GANG_START_SECONDS / 2)
        assert "again" not in cluster.bound()
        assert not cluster.is_suspended()
        offer(cluster, "n0", 4)
        await until(lambda: cluster.bound().get("again") == "n0")
        assert not cluster.troubles

    scene(work)


def offer(cluster: Cluster, node: str, gpus: int) -> None:
    cluster.fake.change("nodes", node, {"status": {"allocatable": {names.GPU_RESOURCE: str(gpus)}}})


def test_a_gang_that_could_not_be_bound_for_long_says_what_was_in_its_way() -> None:
    async def work(cluster: Cluster) -> None:
        owner = cluster.job()
        await cluster.begun(("n0", 4))
        await cluster.delete("train-0")  # which takes long to end
        cluster.pod("train-0-again", owner=owner)
        await until(cluster.is_suspended)
        assert cluster.troubles == ["run 1 gave its GPUs back: pods on node n0 are still ending"]

    scene(work)


def test_a_gang_that_is_bound_and_does_not_start_is_told_of_and_gives_its_gpus_back_in_the_end() -> None:
    """As with a claim that is bound to no volume: Kubernetes does not say that this is in vain."""

    async def work(cluster: Cluster) -> None:
        cluster.job()
        await cluster.launched(("n0", 4))
        await until(cluster.bound)
        await asyncio.sleep(SLOW_SECONDS + 10)
        (said,) = cluster.troubles
        assert said.startswith("pod train-0, bound to node n0, has not started for 10 minutes; kubectl describe pod train-0")
        assert not cluster.is_suspended()
        await asyncio.sleep(START_SECONDS - SLOW_SECONDS)
        assert cluster.is_suspended()

    scene(work)


def test_a_gang_that_has_started_may_take_as_long_as_it_wants() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.job()
        await cluster.begun(("n0", 4))
        await asyncio.sleep(2 * START_SECONDS)
        assert not cluster.troubles
        assert not cluster.is_suspended()

    scene(work)
