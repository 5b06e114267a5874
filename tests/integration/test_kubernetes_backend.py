"""The Kubernetes back end on a pretended API server: what users, operators and other services write there."""

import asyncio
import errno
import json
import secrets
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from tests.backends import WAITS, a_request, an_order, until
from tests.fake_kubernetes import a_node, a_pod
from tests.kube_stage import FakeKubeStage

from poise.service.backends.api import JobFound, NodeReport, NodeState, RunBegan, RunEnded, RunEnding, RunPart
from poise.service.backends.kubernetes import authority, names, pod_runs
from poise.service.backends.kubernetes.pod_runs import PodRuns
from poise.service.wire.request import JobRequest

Json = dict[str, Any]
AMD = "amd.com/gpu"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., FakeKubeStage]]:
    stages: list[FakeKubeStage] = []

    def open_stage(**options: Any) -> FakeKubeStage:
        stages.append(FakeKubeStage(tmp_path, options=options))
        return stages[-1]

    yield open_stage
    for stage in stages:
        stage.close()


def last_report(stage: FakeKubeStage, node: str) -> NodeReport:
    return next(each for each in reversed([*stage.reports]) if each.node.name == node)


@pytest.mark.parametrize("epoch", ["²", "1" * 500, "", "1"])
def test_what_users_write_on_pods_never_ends_the_back_end(opened: Callable[..., FakeKubeStage], epoch: str) -> None:
    stage = opened()
    stage.joined("v100-0")
    for number, scheduler in enumerate(("other", "poise")):
        notes = {names.JOB: "1", names.EPOCH: epoch}
        stage.fake.add("pods", a_pod(f"p{number}", 1, scheduler, node="v100-0", annotations=notes))
    until(lambda: len(last_report(stage, "v100-0").withheld) == 2)


def amd(thing: Json) -> Json:
    """The same on a cluster that calls its GPUs otherwise."""
    found: Json = json.loads(json.dumps(thing).replace('"nvidia.com/gpu"', f'"{AMD}"'))
    return found


def test_owners_pods_nodes_and_taints_are_read_by_the_name_that_the_cluster_has_for_gpus(
    opened: Callable[..., FakeKubeStage],
) -> None:
    stage = opened(resource=AMD)
    taint = {"key": AMD, "value": "present", "effect": "NoSchedule"}
    stage.fake.add("nodes", amd(a_node("mi-0", 4, None, labels={"poise.run/gpu-type": "mi300"}, taints=[taint])))
    stage.joined("mi-0")
    pod = amd(a_pod("train-0", 2, namespace="team"))
    spec = {"parallelism": 1, "completions": 1, "template": {"spec": pod["spec"]}}
    job = stage.fake.add(
        "jobs", {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train", "namespace": "team"}, "spec": spec}
    )
    stage.fake.add("pods", amd(a_pod("train-0", 2, namespace="team", owner=job)))
    until(lambda: [each for each in stage.findings if isinstance(each, JobFound)])
    (found,) = (each for each in stage.findings if isinstance(each, JobFound))
    assert (found.request.gpus, found.request.pods is not None and found.request.pods.name) == (2, "train")
    assert last_report(stage, "mi-0").withheld == ()


def test_a_tainted_node_is_seen_and_not_given_out_until_the_operator_says_so(opened: Callable[..., FakeKubeStage]) -> None:
    stage = opened(tolerate=("ours",))
    for name in ("dedicated", "ours"):
        taint = {"key": name, "value": "x", "effect": "NoSchedule"}
        stage.fake.add("nodes", a_node(name, 4, taints=[taint]))
    stage.joined("dedicated", "ours")
    assert last_report(stage, "dedicated").withheld == (0, 1, 2, 3)
    assert "its taint dedicated=x:NoSchedule" in last_report(stage, "dedicated").evidence
    assert last_report(stage, "ours").withheld == ()
    stage.fake.change("nodes", "dedicated", {"spec": {"taints": []}})
    until(lambda: last_report(stage, "dedicated").withheld == ())


@pytest.mark.parametrize("kind", ["pods", "services"])
def test_a_pod_or_service_of_somebody_else_is_not_taken_for_the_run_s_own(
    opened: Callable[..., FakeKubeStage], kind: str
) -> None:
    stage = opened()
    stage.joined("v100-0", "v100-1")
    name = names.pod_name("7", 1, 0) if kind == "pods" else names.service_name("7", 1)
    thing = a_pod(name, 0, "other", namespace=stage.namespace)
    stage.fake.add(kind, thing if kind == "pods" else {"metadata": thing["metadata"], "spec": {"clusterIP": "None"}})
    request = JobRequest(command=("true",), image="job", gpus=2)
    parts = tuple(RunPart(node, "v100", (0,)) for node in ("v100-0", "v100-1"))
    stage.backend.launch(an_order("7", request, parts=parts))
    ended = stage.wait(RunEnded, "7")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "node-exhausted"), "the next run has another name"
    assert any("none of this service" in str(values.get("text")) for _, values in stage.log.lines)
    assert stage.fake.exists(kind, name, stage.namespace), "it is left alone"


def test_an_owner_that_cannot_be_read_is_left_alone_and_told_of_once(opened: Callable[..., FakeKubeStage]) -> None:
    stage = opened()
    template = {"spec": {"parallelism": "many", "template": {"spec": a_pod("x")["spec"]}}}
    odd = {
        "metadata": {"name": "odd", "namespace": "team"},
        "spec": {"replicatedJobs": [{"name": "a", "template": template}]},
    }
    stage.fake.add("jobsets", {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", **odd})
    until(lambda: any(name == "owner-odd" for name, _ in stage.log.lines))
    stage.fake.change("jobsets", "odd", {"metadata": {"labels": {"a": "b"}}}, "team")
    stage.fake.add("pods", a_pod("alone", 1, namespace="team"))
    until(lambda: [each for each in stage.findings if isinstance(each, JobFound)])
    (said,) = (values["text"] for name, values in stage.log.lines if name == "owner-odd")
    assert str(said).startswith("JobSet team/odd cannot be read: ")


def test_nodes_that_were_deleted_are_forgotten_once_they_are_lost(tmp_path: Path) -> None:
    stage = FakeKubeStage(tmp_path, lease=0.5)
    try:
        for number in range(20):
            stage.fake.add("nodes", a_node(f"spot-{number}", 1))
        stage.joined(*(f"spot-{number}" for number in range(20)))
        for number in range(20):
            stage.fake.remove("nodes", f"spot-{number}")
        until(lambda: all(stage.node_state(f"spot-{number}") is NodeState.LOST for number in range(20)))
        until(lambda: not any(name.startswith("spot") for name in stage.backend._known_nodes))
        stage.fake.add("nodes", a_node("spot-0", 1))
        stage.joined("spot-0")
    finally:
        stage.close()


def test_a_full_disk_keeps_the_end_of_a_run_waiting_and_nothing_else(
    opened: Callable[..., FakeKubeStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = opened()
    stage.joined("v100-0")
    monkeypatch.setattr(pod_runs, "KEEP_AGAIN_SECONDS", 0.05)
    left, write = [3], PodRuns._keep_end

    def full(runs: PodRuns, end: RunEnded) -> None:
        if left[0]:
            left[0] -= 1
            assert stage.fake.exists("pods", names.pod_name("1", 1, 0), stage.namespace), "it says how the run has ended"
            raise OSError(errno.ENOSPC, "No space left on device")
        write(runs, end)

    monkeypatch.setattr(PodRuns, "_keep_end", full)
    stage.backend.launch(an_order("1", a_request("", image="job")))
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert left == [0]
    assert [values["cause"] for name, values in stage.log.lines if name == "run-trouble"] == ["storage-full"]


def test_tokens_that_are_reviewed_slowly_do_not_cost_the_lead(opened: Callable[..., FakeKubeStage]) -> None:
    stage = opened()
    stage.joined("v100-0")
    stage.fake.fail("hang", next=1000, where=lambda _verb, path: path.endswith("/tokenreviews"))
    backend = stage.backend
    asked = [
        asyncio.run_coroutine_threadsafe(backend._authority.node_of(secrets.token_hex(8)), backend._loop) for _ in range(50)
    ]
    renewals = ("update", f"/apis/coordination.k8s.io/v1/namespaces/{stage.namespace}/leases/poise")
    before = stage.fake.requests.count(renewals)
    until(lambda: stage.fake.requests.count(renewals) >= before + 10)  # twice the lease: the stage refuses a lost lead
    for each in asked:
        each.cancel()


def test_a_run_outlives_reviews_that_are_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "KNOWN_SECONDS", 0.5)
    lease = 8.0
    stage = FakeKubeStage(tmp_path, lease=lease)
    try:
        stage.joined("v100-0")
        stage.backend.launch(an_order("1", a_request(WAITS, image="job")))
        stage.wait(RunBegan, "1")
        asked: list[str] = []

        def hangs(_verb: str, path: str) -> bool:
            is_review = path.endswith("/tokenreviews")
            asked.extend([path] * is_review)
            return is_review

        stage.fake.fail("hang", next=10**6, where=hangs)
        sleep(2 * lease)
        assert not stage.of(RunEnded, "1")
        assert len(asked) == 1, "of one token, one review is under way at a time"
    finally:
        stage.close()


@pytest.mark.parametrize(
    ("status", "cause"), [(401, "node-exhausted"), (422, "incorrect-inputs")], ids=["credential", "pod"]
)
def test_only_what_is_wrong_with_a_job_makes_it_fail_for_good(
    opened: Callable[..., FakeKubeStage], status: int, cause: str
) -> None:
    stage = opened()
    stage.joined("v100-0")
    # The client asks once more after 401, with a credential that was read again.
    stage.fake.fail(status, next=2, where=lambda verb, path: verb == "create" and path.endswith("/pods"))
    stage.backend.launch(an_order("1", a_request("", image="job")))
    assert stage.wait(RunEnded, "1").cause == cause


def test_without_the_right_to_create_pods_jobs_do_not_fail_for_good(opened: Callable[..., FakeKubeStage]) -> None:
    stage = opened()
    stage.joined("v100-0")
    stage.fake.deny("create", "pods")
    stage.backend.launch(an_order("1", a_request("", image="job")))
    assert stage.wait(RunEnded, "1").cause == "node-exhausted"
    assert any("cannot create resource" in str(values.get("text")) for _, values in stage.log.lines)


def test_a_pod_of_which_a_watch_tells_after_its_run_is_over_is_deleted(opened: Callable[..., FakeKubeStage]) -> None:
    stage = opened()
    stage.joined("v100-0", "v100-1")
    (mirror,) = (each for each in stage.backend._mirrors if each._path == "/api/v1/pods")
    told, late = mirror._on_change, list[tuple[Any, Json]]()
    mirror._on_change = lambda change, found: late.append((change, found))
    created = count(1)
    stage.fake.fail(422, where=lambda verb, path: verb == "create" and path.endswith("/pods") and next(created) == 2)
    parts = tuple(RunPart(node, "v100", (0,)) for node in ("v100-0", "v100-1"))
    stage.backend.launch(an_order("1", a_request("", image="job", gpus=2), parts=parts))
    assert stage.wait(RunEnded, "1").cause == "incorrect-inputs"
    (pod,) = stage.fake.all("pods")

    def go_on() -> None:
        mirror._on_change = told
        for change, found in late:
            told(change, found)

    stage.backend._call(go_on)
    until(lambda: not stage.fake.exists("pods", pod["metadata"]["name"], stage.namespace))
