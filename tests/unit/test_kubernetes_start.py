"""How the Kubernetes back end starts: what is in its way is said in one sentence, and what may be a mistake as a warning."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.fake_kubernetes import FakeKubernetes, FakeTransport, a_node
from tests.kube_stage import SilentLog
from tests.remote import listening

from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.api import NodeReport
from poise.service.backends.kubernetes.backend import SYNC_SECONDS, KubernetesBackend, KubernetesOptions, ServiceQueries
from poise.service.backends.remote.backend import AgentAccess

Begin = Callable[..., SilentLog]


@pytest.fixture
def fake() -> FakeKubernetes:
    """A cluster with one node of four GPUs."""
    found = FakeKubernetes()
    found.add("nodes", a_node("v100-0", 4, labels={"pool": "training"}))
    return found


@pytest.fixture
def told() -> list[object]:
    """What the engine was told."""
    return []


@pytest.fixture
def begin(fake: FakeKubernetes, tmp_path: Path, told: list[object]) -> Begin:
    """Start a back end with some options and close it again; return what the operator would read."""

    def start(**options: Any) -> SilentLog:
        given = {"namespace": "poise", "transport": FakeTransport(fake), "config": fake.config(), **options}
        log = SilentLog()
        with closing(listening()) as bound:
            access = AgentAccess(bound, "http://127.0.0.1:1")
            backend = KubernetesBackend(
                (), tmp_path, told.append, access, KubernetesOptions(**given), log, ServiceQueries(), lease=60.0
            )
            backend.adopt([])
            backend.close()
        return log

    return start


def warnings(log: SilentLog, event: str) -> list[object]:
    return [values["text"] for each, values in log.lines if each == event]


def test_a_selector_that_kubernetes_does_not_understand_ends_the_start_at_once(begin: Begin) -> None:
    began = monotonic()
    with pytest.raises(RequestError) as caught:
        begin(nodes="a ~ b")
    text = "--nodes 'a ~ b': Kubernetes does not understand this selector: unable to parse requirement: 'a ~ b'"
    assert str(caught.value) == text
    assert monotonic() - began < SYNC_SECONDS / 2


@pytest.mark.parametrize("status", [403, 404])
def test_a_first_list_that_is_refused_ends_the_start_at_once(begin: Begin, fake: FakeKubernetes, status: int) -> None:
    fake.fail(status, where=lambda verb, path: (verb, path) == ("list", "/api/v1/pods"), next=100)
    with pytest.raises(RequestError, match=r"^http://kubernetes\.test: GET /api/v1/pods: "):
        begin()


def test_a_selector_that_selects_no_node_with_gpus_is_warned_of_once(begin: Begin, fake: FakeKubernetes) -> None:
    fake.add("nodes", a_node("other", 0, labels={"pool": "other"}))
    for selector in ("pool=other", "pool=none"):
        assert warnings(begin(nodes=selector), "no-nodes") == [
            f"no node has nvidia.com/gpu and the labels {selector}; jobs wait until one has: see"
            f" `kubectl get nodes -l '{selector}'`, and choose others with --nodes"
        ]
    assert warnings(begin(nodes="pool=training"), "no-nodes") == []
    assert warnings(begin(), "no-nodes") == []


def test_a_cluster_without_gpus_is_warned_of_once(begin: Begin) -> None:
    assert warnings(begin(resource="amd.com/gpu"), "no-nodes") == [
        "no node has amd.com/gpu; jobs wait until one has: install the device plug-in of the GPUs, or name what it calls"
        " them with --gpu-resource"
    ]


@pytest.mark.parametrize(
    ("denied", "what", "purpose"),
    [
        (("list", "nodes"), "list nodes", ""),
        (("get", "leases.coordination.k8s.io"), "get leases poise in namespace poise", ""),
        (("create", "pods/binding"), "create pods/binding", " with --gangs"),
        (("list", "jobsets.jobset.x-k8s.io"), "list jobsets", " to schedule JobSets"),
    ],
)
def test_a_right_that_is_missing_is_said_with_what_it_is_for(
    begin: Begin, fake: FakeKubernetes, denied: tuple[str, str], what: str, purpose: str
) -> None:
    fake.deny(*denied)
    with pytest.raises(RequestError) as caught:
        begin()
    assert str(caught.value) == (
        f"the account that Poise uses may not {what}; Poise needs this right{purpose}: apply deploy/kubernetes,"
        " or name another account with --kubeconfig and --context"
    )


def test_a_cluster_that_does_not_answer_is_named_with_where_its_address_came_from(
    begin: Begin, fake: FakeKubernetes
) -> None:
    fake.pause()
    config = replace(fake.config(), source="/home/u/.kube/config, context 'dev'")
    with pytest.raises(PoiseError) as caught:
        begin(config=config)
    text = "no Kubernetes cluster at http://kubernetes.test (/home/u/.kube/config, context 'dev'): no connection: "
    assert str(caught.value).startswith(text)


def test_a_label_that_the_operator_names_says_the_gpu_type_before_those_that_are_usual(
    begin: Begin, fake: FakeKubernetes, told: list[object]
) -> None:
    gke = "cloud.google.com/gke-accelerator"
    fake.add("nodes", a_node("t4-0", 1, product=None, labels={gke: "nvidia-tesla-t4"}))
    fake.add("nodes", a_node("l4-0", 1, labels={gke: "nvidia-l4"}))
    fake.add("nodes", a_node("bare-0", 1, product=None))
    log = begin(type_labels=(gke,))
    types = {each.node.name: each.node.gpu_type for each in told if isinstance(each, NodeReport)}
    assert types == {"t4-0": "t4", "l4-0": "l4", "v100-0": "a100", "bare-0": "unknown"}
    said = "run GPU feature discovery, or: kubectl label node bare-0 poise.run/gpu-type=v100"
    assert [said in str(each) for each in warnings(log, "node-odd")] == [True]
