"""The Kubernetes back end on a pretended API server: what users, operators and other services write there."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.backends import an_order, until
from tests.fake_kubernetes import a_node, a_pod
from tests.kube_stage import FakeKubeStage

from poise.service.backends.api import JobFound, NodeReport, RunEnded, RunEnding, RunPart
from poise.service.backends.kubernetes import names
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
