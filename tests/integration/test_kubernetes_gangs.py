"""Jobs that others create, on a real API server: found, bound whole or not at all, and made to leave as their owner allows.

The back end runs alone: the tests decide, as the core would, where a gang goes and when it leaves. Pods only pretend to run.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from tests.backends import notice, until
from tests.kube.controllers import JOBS, JOBSETS, TRAINJOBS, Controllers, install_crds
from tests.kube.kubelet import Pretend
from tests.kube.server import GPU, Json, KubeServer
from tests.kube_stage import KubeStage

from poise.service.backends.api import (
    DesiredState,
    JobFound,
    JobGone,
    JobHeld,
    RunBegan,
    RunEnded,
    RunEnding,
    RunOrder,
    RunPart,
    TenantWeighed,
)
from poise.service.backends.kubernetes import gang_runs, names
from poise.service.backends.kubernetes.backend import KubernetesOptions
from poise.service.wire.request import PreemptionMode

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

GROUP = "scheduling.x-k8s.io/pod-group"
IGNORES = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]}
PRODUCT = "nvidia.com/gpu.product"


class Gangs(KubeStage):
    """A back end on a real server with two nodes of four GPUs, controllers of Jobs, and kubelets that pretend."""

    def __init__(self, server: KubeServer, folder: Path) -> None:
        self.server, self.admin = server, server.admin
        self.namespace = server.namespace("gangs")
        for name in ("v100-0", "v100-1"):
            server.add_node(name, 4)
        self.kubelet = Pretend(server)
        self.kubelet.start()
        self.controllers = Controllers(server)
        self.controllers.__enter__()
        self._numbers = iter(range(1, 1000))
        self.jobs: dict[str, str] = {}  # ids by key, as a journal would have them
        options = KubernetesOptions(kubeconfig=server.kubeconfig("admin"), namespace=self.namespace, lease_seconds=5.0)
        super().__init__(folder, options)

    def path(self, kind: str = "pods", base: str = "/api/v1") -> str:
        return f"{base}/namespaces/{self.namespace}/{kind}"

    def pod(self, name: str, gpus: int = 1, *, notes: Json | None = None, labels: Json | None = None, **spec: Any) -> Json:
        meta = {"name": name, "annotations": notes or {}, "labels": labels or {}}
        return self.admin.post(self.path(), {"metadata": meta, "spec": pod_spec(gpus, **spec)})

    def job(self, name: str, pods: int = 2, gpus: int = 1, *, notes: Json | None = None, **spec: Any) -> Json:
        body = {"metadata": {"name": name}, "spec": job_spec(pods, gpus, notes, **spec)}
        return self.admin.post(self.path("jobs", JOBS), body)

    def pods(self, **labels: str) -> list[Json]:
        """Those that are not over and not being deleted."""
        found = self.admin.list(self.path(), labelSelector=",".join(f"{key}={text}" for key, text in labels.items()))
        return [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") in ("Pending", "Running")
        ]

    def found(self, name: str) -> JobFound:
        """Wait until the service is told of a gang; accept it as the next job, or as the one that it was."""
        until(lambda: self.reported(name))
        found = self.reported(name)[-1]
        job = self.jobs.setdefault(found.key, str(next(self._numbers)))
        self.backend.accepted(found.key, job, is_over=False)
        return found

    def reported(self, name: str) -> list[JobFound]:
        found = [each for each in [*self.findings] if isinstance(each, JobFound)]
        return [each for each in found if each.request.pods is not None and each.request.pods.name == name]

    def launch(self, found: JobFound, *parts: tuple[str, int], epoch: int = 1) -> RunOrder:
        """Order a run on so many GPUs of nodes."""
        gpus = tuple(RunPart(node, "v100", tuple(range(count))) for node, count in parts)
        order = RunOrder(self.jobs[found.key], epoch, gpus, found.request)
        self.backend.launch(order)
        return order

    def begun(self, found: JobFound, *parts: tuple[str, int], epoch: int = 1) -> RunOrder:
        order = self.launch(found, *parts, epoch=epoch)
        self.wait(RunBegan, order.job, epoch)
        return order

    def leave(self, order: RunOrder) -> RunEnded:
        self.backend.stop(order.job, order.epoch, notice())
        return self.wait(RunEnded, order.job, order.epoch)

    def events(self, name: str) -> list[Json]:
        """Events about an object."""
        return [each for each in self.admin.list(self.path("events")) if each["involvedObject"]["name"] == name]

    def says(self, name: str, text: str) -> Json:
        """Wait for an event on an object that says something."""
        until(lambda: any(text in each["message"] for each in self.events(name)))
        return next(each for each in self.events(name) if text in each["message"])

    def close(self) -> None:
        super().close()
        self.controllers.close()
        self.kubelet.close()
        assert self.controllers.problems == []
        assert self.kubelet.problems == []


def pod_spec(gpus: int = 1, **more: Any) -> Json:
    container: Json = {"name": "main", "image": "any"}
    if gpus:
        container["resources"] = {"limits": {GPU: str(gpus)}}
    return {"schedulerName": "poise", "restartPolicy": "Never", "containers": [container], **more}


def job_spec(pods: int = 2, gpus: int = 1, notes: Json | None = None, **more: Any) -> Json:
    pod = {"metadata": {"annotations": notes or {}}, "spec": pod_spec(gpus, **more.pop("pod", {}))}
    return {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "template": pod, **more}


def a_jobset(name: str) -> Json:
    replicated = {"name": "workers", "replicas": 2, "template": {"spec": job_spec(2)}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": [replicated]},
    }


@pytest.fixture
def stage(fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gangs]:
    monkeypatch.setattr(gang_runs, "INCOMPLETE_SECONDS", 1.0)
    install_crds(fresh_kube)
    made = Gangs(fresh_kube, tmp_path)
    made.joined("v100-0", "v100-1")
    yield made
    made.close()


def uids(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def nodes(pods: list[Json]) -> list[str]:
    return sorted(pod["spec"].get("nodeName", "") for pod in pods)


# Whole or not at all


def test_a_job_is_bound_whole_where_it_was_said_and_finishes(stage: Gangs) -> None:
    stage.job("train", 4, notes={"test/seconds": "1"})
    found = stage.found("train")
    assert (found.tenant, found.request.gpus, found.request.preemption) == (stage.namespace, 4, PreemptionMode.RESTART)
    sleep(0.5)
    assert nodes(stage.pods()) == [""] * 4, "nothing is bound before the core has said where"
    order = stage.begun(found, ("v100-0", 1), ("v100-1", 3))
    until(lambda: stage.of(RunEnded, order.job))
    pods = stage.admin.list(stage.path())
    assert nodes(pods) == ["v100-0"] + ["v100-1"] * 3
    assert stage.wait(RunEnded, order.job).how is RunEnding.FINISHED
    assert stage.wait(RunEnded, order.job).codes == (0, 0, 0, 0)
    for pod in pods:
        notes = pod["metadata"]["annotations"]
        assert (notes[names.JOB], notes[names.EPOCH]) == (order.job, "1")
        assert notes[names.TERM] == pods[0]["metadata"]["annotations"][names.TERM]


def test_no_moment_shows_a_gang_that_stays_partly_bound(stage: Gangs) -> None:
    """Many gangs come and leave; a watch records how many pods of each are bound at any time."""
    stop, record = threading.Event(), dict[str, set[str]]()
    watch = stage.admin.watch(stage.path())

    def follow() -> None:
        for event in watch:
            pod = event["object"]
            record.setdefault(pod["metadata"]["labels"].get("job-name", ""), set())
            if pod["spec"].get("nodeName"):
                record[pod["metadata"]["labels"]["job-name"]].add(pod["metadata"]["uid"])
            if stop.is_set():
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        for name in ("one", "two", "large"):
            stage.job(name, 4)
        one, two, large = (stage.found(name) for name in ("one", "two", "large"))
        stage.begun(one, ("v100-0", 4))
        second = stage.begun(two, ("v100-1", 4))
        # The third has to wait for the GPUs of the second, which is still there: not a single pod of it is bound.
        waits = stage.launch(large, ("v100-1", 4))
        sleep(1.0)
        assert nodes(stage.pods(**{"job-name": "large"})) == [""] * 4
        assert not record["large"]
        assert stage.leave(second).how is RunEnding.YIELDED
        stage.wait(RunBegan, waits.job)
        until(lambda: len(record["large"]) == 4)
        assert {name: len(uids) for name, uids in record.items()} == {"one": 4, "two": 4, "large": 4}
    finally:
        stop.set()
        watch.close()
        thread.join(10)


def test_a_gang_is_found_once_all_its_pods_exist(stage: Gangs) -> None:
    group: dict[str, Any] = {"labels": {GROUP: "pair"}, "notes": {names.GANG_SIZE: "2"}}
    stage.pod("a", **group)
    event = stage.says("a", "1 of its 2 pods exist")
    assert (event["reason"], event["type"]) == ("WaitingForPods", "Normal")
    assert stage.reported("pair") == []
    stage.pod("b", **group)
    found = stage.found("pair")
    assert found.request.preemption is PreemptionMode.NEVER, "nobody would make these pods again"
    order = stage.begun(found, ("v100-1", 2))
    assert nodes(stage.pods()) == ["v100-1"] * 2
    for name in ("a", "b"):
        stage.kubelet.finish(stage.namespace, name)
    assert stage.wait(RunEnded, order.job).how is RunEnding.FINISHED


def test_gangs_by_annotation_and_bare_pods(stage: Gangs) -> None:
    stage.pod("alone", 2, notes={"test/seconds": "0"})
    for name in ("x", "y"):
        stage.pod(name, notes={names.GANG: "both", names.GANG_SIZE: "2"})
    alone, both = stage.found("alone"), stage.found("both")
    assert (alone.request.gpus, both.request.gpus) == (2, 2)
    first = stage.launch(alone, ("v100-0", 2))
    assert stage.wait(RunEnded, first.job).how is RunEnding.FINISHED, "even if it was over before anybody looked"
    assert stage.of(RunBegan, first.job)
    order = stage.begun(both, ("v100-0", 2))
    stage.backend.stop(order.job, order.epoch, notice())
    sleep(1.5)
    assert nodes(stage.pods()) == ["v100-0"] * 2, "what cannot be preempted politely is not preempted"
    stage.backend.kill(order.job, order.epoch, "cancelled")
    assert stage.wait(RunEnded, order.job).how is RunEnding.YIELDED
    until(lambda: not stage.pods())


# Leaving


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_an_owner_is_suspended_and_resumed(stage: Gangs, kind: str) -> None:
    match kind:
        case "Job":
            path = f"{stage.path('jobs', JOBS)}/train"
            stage.job("train", 4, backoffLimit=0)
        case "JobSet":
            path = f"{stage.path('jobsets', JOBSETS)}/train"
            stage.admin.post(stage.path("jobsets", JOBSETS), a_jobset("train"))
        case _:
            path = f"{stage.path('trainjobs', TRAINJOBS)}/train"
            stage.controllers._runtimes["torch"] = a_jobset("x")["spec"]
            body = {"metadata": {"name": "train"}, "spec": {"runtimeRef": {"name": "torch"}}}
            stage.admin.post(
                stage.path("trainjobs", TRAINJOBS),
                {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", **body},
            )
    found = stage.found("train")
    assert found.request.pods is not None
    assert (found.request.pods.kind, found.request.gpus) == (kind, 4)
    order = stage.begun(found, ("v100-0", 2), ("v100-1", 2))
    assert stage.leave(order).how is RunEnding.YIELDED
    owner = stage.admin.get(path)
    assert owner["spec"]["suspend"] is True
    assert owner["metadata"]["annotations"][names.SUSPENDED_BY] == "1"
    assert not stage.pods()
    assert not [each for each in stage.findings if isinstance(each, JobHeld | JobGone)]
    order = stage.begun(found, ("v100-1", 4), epoch=2)
    owner = stage.admin.get(path)
    assert not owner["spec"].get("suspend")
    assert names.SUSPENDED_BY not in owner["metadata"].get("annotations", {})
    assert nodes(stage.pods()) == ["v100-1"] * 4
    for pod in stage.pods():
        stage.kubelet.finish(stage.namespace, pod["metadata"]["name"])
    assert stage.wait(RunEnded, order.job, 2).how is RunEnding.FINISHED
    jobs = stage.admin.list(stage.path("jobs", JOBS))
    assert sum(job["status"].get("failed", 0) for job in jobs) == 0


def test_pods_are_evicted_where_their_job_does_not_count_it(stage: Gangs) -> None:
    """Pods of a group whose Job ignores disruptions: the group is the gang, so its Job is not suspended."""
    labelled: Json = {"metadata": {"labels": {GROUP: "evicted"}, "annotations": {names.GANG_SIZE: "2"}}, "spec": pod_spec()}
    spec = job_spec(2, backoffLimit=0, podFailurePolicy=IGNORES)
    stage.admin.post(stage.path("jobs", JOBS), {"metadata": {"name": "work"}, "spec": {**spec, "template": labelled}})
    found = stage.found("evicted")
    assert found.request.preemption is PreemptionMode.RESTART
    order = stage.begun(found, ("v100-0", 2))
    before = uids(stage.pods())
    assert stage.leave(order).how is RunEnding.YIELDED
    until(lambda: len(stage.pods()) == 2 and not before & uids(stage.pods()))
    job = stage.admin.get(f"{stage.path('jobs', JOBS)}/work")
    assert not job["spec"].get("suspend")
    assert job["status"].get("failed", 0) == 0
    assert not {"Failed"} & {each["type"] for each in job["status"].get("conditions", [])}


def test_pods_whose_job_would_count_an_eviction_are_not_preempted(stage: Gangs) -> None:
    labelled: Json = {"metadata": {"labels": {GROUP: "strict"}, "annotations": {names.GANG_SIZE: "2"}}, "spec": pod_spec()}
    stage.admin.post(
        stage.path("jobs", JOBS), {"metadata": {"name": "strict-job"}, "spec": {**job_spec(2), "template": labelled}}
    )
    found = stage.found("strict")
    assert found.request.preemption is PreemptionMode.NEVER
    order = stage.begun(found, ("v100-0", 2))
    before = uids(stage.pods())
    stage.backend.stop(order.job, 1, notice())
    sleep(1.5)
    assert uids(stage.pods()) == before


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_whose_pods_were_done_when_it_was_to_leave_has_finished(stage: Gangs, restarts: bool) -> None:
    path = f"{stage.path('jobs', JOBS)}/quick"
    stage.job("quick", 2)
    order = stage.begun(stage.found("quick"), ("v100-0", 2))
    stage.controllers.close()  # the Job does not say yet that it is complete
    for pod in stage.pods():
        stage.kubelet.finish(stage.namespace, pod["metadata"]["name"])
    until(lambda: not stage.pods())
    if restarts:
        stage.reopen((order, DesiredState.LEAVE))
    else:
        until(lambda: all(pod.is_over for pod in stage.backend._view.pods.values()))  # else the Job is suspended
        stage.backend.stop(order.job, order.epoch, notice())
    sleep(1.0)
    assert not stage.of(RunEnded, order.job)
    stage.controllers = Controllers(stage.server)
    stage.controllers.__enter__()
    assert stage.wait(RunEnded, order.job).how is RunEnding.FINISHED
    assert not stage.admin.get(path)["spec"].get("suspend")


# What users do meanwhile


def test_a_job_that_its_user_suspends_is_held_and_not_resumed(stage: Gangs) -> None:
    stage.job("mine")
    found = stage.found("mine")
    order = stage.begun(found, ("v100-0", 2))
    path = f"{stage.path('jobs', JOBS)}/mine"
    stage.admin.patch(path, {"spec": {"suspend": True}})
    until(lambda: JobHeld(order.job, True) in stage.findings)
    assert stage.leave(order).how is RunEnding.YIELDED
    again = stage.launch(found, ("v100-0", 2), epoch=2)
    sleep(1.5)
    assert stage.admin.get(path)["spec"]["suspend"] is True
    assert not stage.of(RunBegan, order.job, 2)
    stage.admin.patch(path, {"spec": {"suspend": False}})
    until(lambda: JobHeld(order.job, False) in stage.findings)
    stage.wait(RunBegan, again.job, 2)


def test_a_suspension_by_the_user_counts_although_poise_had_suspended_before(stage: Gangs) -> None:
    stage.job("both")
    found = stage.found("both")
    order = stage.begun(found, ("v100-0", 2))
    assert stage.leave(order).how is RunEnding.YIELDED
    path = f"{stage.path('jobs', JOBS)}/both"
    stage.admin.patch(path, {"spec": {"suspend": False}})
    until(lambda: names.SUSPENDED_BY not in stage.admin.get(path)["metadata"].get("annotations", {}))
    stage.admin.patch(path, {"spec": {"suspend": True}})
    until(lambda: JobHeld(order.job, True) in stage.findings)
    stage.launch(found, ("v100-0", 2), epoch=2)
    sleep(1.5)
    assert stage.admin.get(path)["spec"]["suspend"] is True


def test_a_job_that_is_deleted_in_the_middle_is_gone(stage: Gangs) -> None:
    stage.job("short")
    found = stage.found("short")
    order = stage.begun(found, ("v100-0", 2))
    stage.admin.delete(f"{stage.path('jobs', JOBS)}/short", propagationPolicy="Background")
    assert stage.wait(RunEnded, order.job).how is RunEnding.YIELDED
    until(lambda: JobGone(order.job) in stage.findings)
    until(lambda: not stage.pods())


def test_a_job_whose_pods_finish_partly_runs_on_and_a_failed_pod_comes_back(stage: Gangs) -> None:
    stage.job("mixed", 3, backoffLimit=3)
    order = stage.begun(stage.found("mixed"), ("v100-0", 3))
    index = "batch.kubernetes.io/job-completion-index"
    first, second, third = sorted(stage.pods(), key=lambda pod: str(pod["metadata"]["labels"][index]))
    stage.kubelet.finish(stage.namespace, first["metadata"]["name"])
    stage.kubelet.finish(stage.namespace, second["metadata"]["name"], 1)
    until(lambda: second["metadata"]["uid"] not in uids(stage.pods()))
    until(lambda: len(stage.pods()) == 2 and nodes(stage.pods()) == ["v100-0"] * 2)
    assert third["metadata"]["uid"] in uids(stage.pods())
    assert not stage.of(RunEnded, order.job)
    until(lambda: all(pod["status"]["phase"] == "Running" for pod in stage.pods()))
    for pod in stage.pods():
        stage.kubelet.finish(stage.namespace, pod["metadata"]["name"])
    assert stage.wait(RunEnded, order.job).how is RunEnding.FINISHED


def test_a_job_that_has_failed_for_good_has_failed(stage: Gangs) -> None:
    stage.job("bad", 1, backoffLimit=0, notes={"test/seconds": "0", "test/exit": "3"})
    order = stage.launch(stage.found("bad"), ("v100-0", 1))
    end = stage.wait(RunEnded, order.job)
    assert (end.how, end.codes) == (RunEnding.FAILED, (3,))


# Whose it is


def test_tenant_and_weight_are_said_by_the_namespace(stage: Gangs) -> None:
    space = f"/api/v1/namespaces/{stage.namespace}"
    change = {"labels": {names.TENANT: "vision"}, "annotations": {names.WEIGHT: "2.5"}}
    stage.admin.patch(space, {"metadata": change})
    until(lambda: TenantWeighed("vision", 2.5) in stage.findings)
    stage.pod("p", notes={names.WEIGHT: "900"}, labels={names.TENANT: "other"})
    assert stage.found("p").tenant == "vision"
    assert not [each for each in stage.findings if isinstance(each, TenantWeighed) and each.weight == 900]
    stage.admin.patch(space, {"metadata": {"annotations": {names.WEIGHT: "much"}}})
    until(lambda: warnings(stage))
    stage.admin.patch(space, {"metadata": {"labels": {"other": "label"}}})
    stage.admin.patch(space, {"metadata": {"annotations": {names.WEIGHT: "3"}}})
    until(lambda: TenantWeighed("vision", 3.0) in stage.findings)
    assert len(warnings(stage)) == 1, "it was told once, although the namespace has changed twice"


def warnings(stage: Gangs) -> list[dict[str, object]]:
    return [values for event, values in stage.log.lines if event == "namespace-weight"]


# Bad input


def test_a_pod_that_asks_for_more_than_any_node_has_is_told_so_with_its_owner(stage: Gangs) -> None:
    stage.job("huge", 1, 16)
    until(stage.pods)
    (pod,) = stage.pods()
    for name in ("huge", pod["metadata"]["name"]):
        event = stage.says(name, "a pod asks for 16 GPUs, the largest node (v100-0) has 4")
        assert (event["type"], event["reason"]) == ("Warning", "Rejected")
    until(lambda: any(each["type"] == "PodScheduled" for each in stage.pods()[0]["status"].get("conditions", [])))
    assert stage.reported("huge") == []


def test_a_type_that_no_node_has_is_named(stage: Gangs) -> None:
    stage.server.add_node("bare", 2)
    stage.admin.patch("/api/v1/nodes/bare", {"metadata": {"labels": {PRODUCT: None}}})
    until(lambda: any("bare" in str(values.get("text")) for event, values in stage.log.lines if event == "node-odd"))
    stage.pod("picky", nodeSelector={PRODUCT: "H100"})
    stage.says("picky", f"no node with GPUs matches what its pods demand ({PRODUCT}=H100)")
    stage.says("picky", "bare has GPUs and no such label")


def test_a_gang_that_stays_incomplete_names_how_many_there_are(stage: Gangs) -> None:
    for name in ("a", "b"):
        stage.pod(name, notes={names.GANG: "trio", names.GANG_SIZE: "3"})
    event = stage.says("a", "PodGroup trio: 2 of its 3 pods exist; a gang is placed when all of them do")
    assert event["count"] == 1
    assert stage.events("b") == [], "the first pod speaks for all"
