"""What is read of Kubernetes' nodes and pods, and the pods that Poise makes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poise.scheduler.model.cluster import Node, parse_cluster
from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import NodeState, RunOrder, RunPart
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.discovery import Discovery, observed
from poise.service.backends.kubernetes.manifests import PodTerms, checkpoint_problem, links_of, run_pods
from poise.service.backends.kubernetes.objects import MOST, Json, NodeInfo, PodInfo, quantity, read_node, read_pod, requested
from poise.service.backends.kubernetes.pod_runs import cause_of, start_problem
from poise.service.server.startup import check_pods
from poise.service.wire.request import Checkpoint, JobRequest, PodOptions

GPU = names.GPU_RESOURCE
TERMS = PodTerms("jobs", "5" * 32, "https://poise:8643", "poise:0.1", "-----PEM-----")


def a_node(**more: Any) -> NodeInfo:
    labels = {"nvidia.com/gpu.product": "Tesla-V100-SXM2-16GB", "topology.kubernetes.io/zone": "eu-1a"}
    given = {"name": "n1", "uid": "u", "labels": labels, "gpus": 4, "cpu": 64.0, "memory": 2.0**39}
    return NodeInfo(**{**given, "is_ready": True, "message": "", "is_cordoned": False, **more})


def pod_json(gpus: int = 1, **status: Any) -> Json:
    return {
        "metadata": {"name": "p", "namespace": "team", "uid": "1", "creationTimestamp": "2026-11-18T10:00:00Z"},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "resources": {"limits": {GPU: str(gpus)}}}]},
        "status": {"phase": "Running", **status},
    }


def a_pod(gpus: int = 1, **status: Any) -> PodInfo:
    return read_pod(pod_json(gpus, **status), GPU)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5),
        ("16Gi", 2.0**34),
        ("4", 4.0),
        (8, 8.0),
        ("1e3", 1000.0),
        ("128974848", 128974848.0),
        ("nonsense", 0.0),
        ("1e400", MOST),
        ("nan", 0.0),
        ("-4", 0.0),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str, value: float) -> None:
    assert quantity(text) == value


def test_a_pod_asks_for_its_containers_and_sidecars_together_or_for_its_largest_init_container() -> None:
    def asks(gpus: int, **more: str) -> Json:
        return {"name": "c", "resources": {"limits": {GPU: gpus}}, **more}

    assert requested({"containers": [asks(1), asks(2)]}, GPU) == 3
    assert requested({"containers": [asks(1)], "initContainers": [asks(4)]}, GPU) == 4
    assert requested({"containers": [asks(1)], "initContainers": [asks(1, restartPolicy="Always"), asks(2)]}, GPU) == 3


def test_a_node_is_named_by_its_labels_and_its_type_is_the_usual_one() -> None:
    assert Discovery().node_of(a_node()) == Node("n1", "v100", 4, "eu-1a")
    own = a_node(
        labels={"poise.run/gpu-type": "h100", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "poise.run/rack": "r7"}
    )
    assert Discovery().node_of(own) == Node("n1", "h100", 4, "r7")


def test_a_type_that_an_administrator_names_is_taken_as_it_is_and_before_all_other_labels() -> None:
    gke = "cloud.google.com/gke-accelerator"
    labels = {names.OWN_TYPE_LABEL: "A100-80", gke: "nvidia-tesla-t4", names.PRODUCT_LABEL: "NVIDIA-A100-SXM4-80GB"}
    discovery = Discovery((names.OWN_TYPE_LABEL, gke, names.PRODUCT_LABEL))
    found = [discovery.node_of(a_node(labels=dict([*labels.items()][first:]))) for first in range(3)]
    assert [node and node.gpu_type for node in found] == ["a100-80", "t4", "a100"]


@given(
    st.sampled_from([names.OWN_TYPE_LABEL, names.PRODUCT_LABEL]),
    st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,50}[A-Za-z0-9])?(-MIG-1g\.10gb|-SHARED)?", fullmatch=True),
)
@example(names.OWN_TYPE_LABEL, "4090")
def test_the_type_of_a_node_can_be_given_to_the_agents_of_its_pods(label: str, said: str) -> None:
    node = Discovery().node_of(a_node(labels={label: said}))
    if node is not None:  # MIG-INVALID
        assert parse_cluster(f"{node.gpu_type}:4").gpu_types == (node.gpu_type,)


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "a100-mig-1g.10gb"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb.me", "a100-mig-1g.10gb.me"),
        ("Tesla-T4-SHARED", "t4-shared"),
    ],
)
def test_parts_of_gpus_are_types_of_their_own(product: str, kind: str) -> None:
    node = Discovery().node_of(a_node(labels={names.PRODUCT_LABEL: product}))
    assert node is not None
    assert node.gpu_type == kind


def test_nodes_without_gpus_or_of_no_one_type_are_none_of_poise() -> None:
    assert Discovery().node_of(a_node(gpus=0)) is None
    mixed = a_node(labels={"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-INVALID"})
    assert Discovery().node_of(mixed) is None
    assert "no one type" in (Discovery().problem_of(mixed) or "")


def test_a_missing_label_is_said_with_the_command_that_helps() -> None:
    problem = Discovery().problem_of(a_node(labels={}))
    assert problem is not None
    assert "kubectl label node n1 poise.run/gpu-type=v100" in problem
    assert Discovery().problem_of(a_node()) is None
    assert Discovery().node_of(a_node(labels={})) == Node("n1", "unknown", 4, "rack-0")


NODE = Node("n1", "v100", 4, "r")


def test_gpus_that_pods_of_others_use_are_withheld_from_the_end_and_never_ours() -> None:
    now = observed(NODE, a_node(), [a_pod(2)], ours={3}, lost=None, closed=None)
    assert (now.state, now.withheld) == (NodeState.UP, (1, 2))
    assert now.evidence == "others use 2 of its GPUs: team/p"


def test_a_node_that_is_cordoned_gives_out_nothing_and_keeps_its_runs() -> None:
    cordoned = a_node(is_cordoned=True)
    now = observed(NODE, cordoned, [], ours={0}, lost=None, closed=Discovery().why_closed(cordoned))
    assert (now.state, now.withheld) == (NodeState.UP, (0, 1, 2, 3))


def test_a_node_whose_gpus_are_not_offered_any_more_gives_out_nothing() -> None:
    """Its device plug-in is being restarted, for example."""
    for found in (a_node(gpus=0), a_node(labels={"nvidia.com/gpu.product": "A100-MIG-INVALID"})):
        now = observed(NODE, found, [], ours={0}, lost=None, closed=Discovery().why_closed(found))
        assert (now.state, now.withheld) == (NodeState.UP, (0, 1, 2, 3))
        assert now.evidence == "it offers no nvidia.com/gpu of one type any more"


def test_a_node_that_is_not_ready_or_deleted_is_unreachable_until_nothing_can_run_there() -> None:
    silent = a_node(is_ready=False, message="Kubelet stopped posting node status.")
    assert observed(NODE, silent, [], (), None, None).state is NodeState.UNREACHABLE
    assert "Kubelet stopped" in observed(NODE, silent, [], (), None, None).evidence
    assert observed(NODE, silent, [], (), "its lease has ended", None).state is NodeState.LOST
    assert observed(NODE, None, [], (), None, None).state is NodeState.UNREACHABLE
    assert observed(NODE, None, [], (), "gone", None).state is NodeState.LOST


@given(st.integers(0, 8), st.lists(st.integers(1, 8), max_size=4), st.sets(st.integers(0, 7)))
def test_as_many_are_withheld_as_others_use_as_far_as_there_are_any(gpus: int, others: list[int], ours: set[int]) -> None:
    node = Node("n1", "v100", gpus, "r")
    ours = {slot for slot in ours if slot < gpus}
    pods = [replace(a_pod(each), name=f"p{number}") for number, each in enumerate(others)]
    withheld = observed(node, a_node(gpus=gpus), pods, ours, None, None).withheld
    assert not ours & set(withheld)
    assert len(withheld) == min(sum(others), gpus - len(ours))
    assert list(withheld) == sorted(withheld)


def test_a_node_that_has_never_reported_is_not_ready() -> None:
    assert not read_node({"metadata": {"name": "n", "uid": "1"}}, GPU).is_ready


@pytest.mark.parametrize(
    ("taint", "barrier"),
    [
        (("dedicated", "inference", "NoSchedule"), "dedicated=inference:NoSchedule"),
        (("dedicated", "", "NoExecute"), "dedicated:NoExecute"),
        (("dedicated", "inference", "PreferNoSchedule"), None),
        ((GPU, "present", "NoSchedule"), None),
        (("node.kubernetes.io/unschedulable", "", "NoSchedule"), None),
        (("ours", "x", "NoSchedule"), None),
    ],
)
def test_a_taint_keeps_jobs_away_unless_the_operator_tolerates_it(taint: tuple[str, str, str], barrier: str | None) -> None:
    found = a_node(taints=(taint,))
    discovery = Discovery(tolerated=("ours",))
    assert discovery.barrier_of(found) == barrier
    now = observed(NODE, found, [], ours={0}, lost=None, closed=discovery.why_closed(found))
    assert now.state is NodeState.UP
    assert now.withheld == ((0, 1, 2, 3) if barrier else ())
    assert barrier is None or "--tolerate dedicated" in now.evidence


@pytest.mark.parametrize(
    ("key", "is_open"),
    [("disk-pressure", False), ("network-unavailable", False), ("unreachable", True), ("not-ready", True)],
)
def test_a_node_under_pressure_takes_no_new_jobs_until_that_has_passed(key: str, is_open: bool) -> None:
    """Its kubelet would refuse or evict them. Whether gangs can be of its type does not depend on it."""
    found = a_node(taints=((f"node.kubernetes.io/{key}", "", "NoSchedule"),))
    closed = Discovery().why_closed(found)
    assert closed == (
        None if is_open else f"its taint node.kubernetes.io/{key}:NoSchedule keeps new jobs away until it passes"
    )
    assert Discovery().barrier_of(found) is None


def test_the_taint_of_the_gpus_is_named_like_the_resource() -> None:
    found = a_node(taints=(("amd.com/gpu", "", "NoSchedule"),))
    assert Discovery().barrier_of(found) is not None
    assert Discovery(resource="amd.com/gpu").barrier_of(found) is None


# Names


@pytest.mark.parametrize("text", ["²", "٣", "1" * 5000, "-1", "1.0", " 1", ""])
def test_what_is_no_number_of_ours_is_none(text: str) -> None:
    assert names.number(text) is None
    assert names.run_key({names.JOB: "1", names.EPOCH: text}) is None


@given(st.dictionaries(st.sampled_from([names.JOB, names.EPOCH]), st.text()))
def test_what_users_write_about_runs_is_read_without_an_error(texts: dict[str, str]) -> None:
    key = names.run_key(texts)
    assert key is None or (key[1] >= 0 and key[0] == texts.get(names.JOB, ""))


@given(st.text(alphabet="abcXYZ019._-", min_size=1, max_size=200), st.integers(1, 10**9), st.integers(0, 999))
def test_names_of_pods_are_names_of_hosts(job: str, epoch: int, part: int) -> None:
    name = names.pod_name(job, epoch, part)
    assert len(name) <= 63
    assert name.replace("-", "a").isalnum()
    assert name == name.lower()
    assert names.label_value(job)[:1].isalnum()


@given(st.lists(st.text(alphabet="aA-._", min_size=1, max_size=5), min_size=2, max_size=2, unique=True))
def test_different_jobs_have_pods_of_different_names(jobs: list[str]) -> None:
    one, other = jobs
    assert names.service_name(one, 1) != names.service_name(other, 1)


# Pods


def an_order(nodes: int = 1, **more: Any) -> RunOrder:
    request = JobRequest(command=("python", "train.py"), image="pytorch", gpus=2 * nodes, env={"SECRET": "x"}, **more)
    return RunOrder("17", 2, tuple(RunPart(f"n{number}", "v100", (2, 3)) for number in range(nodes)), request, "team")


def test_a_pod_is_pinned_to_its_node_and_asks_for_its_gpus() -> None:
    service, [pod] = run_pods(an_order(), TERMS, 5)
    assert service is None
    assert pod["spec"]["nodeName"] == "n0"
    [container] = pod["spec"]["containers"]
    assert container["resources"] == {"requests": {GPU: "2"}, "limits": {GPU: "2"}}
    assert pod["metadata"]["annotations"] == {names.TERM: "5", names.SLOTS: "2,3", names.CERTIFICATE: "-----PEM-----"}
    assert pod["metadata"]["labels"][names.SERVICE] == TERMS.service
    assert "SECRET" not in str(pod)  # the environment comes with the order, not with the pod


def test_pods_of_a_run_over_nodes_find_each_other_and_rank_0_is_created_last() -> None:
    order = an_order(3)
    service, pods = run_pods(order, TERMS, 1)
    assert [pod["metadata"]["name"] for pod in pods] == [*reversed(links_of(order))]
    assert service is not None
    assert service["spec"]["clusterIP"] == "None"
    for pod in pods:
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["subdomain"] == service["metadata"]["name"]
        agent = pod["spec"]["initContainers"][1]["command"]
        assert f"{pod['metadata']['name']}.{service['metadata']['name']}.jobs.svc" in agent


def test_a_pod_has_no_rights_and_mounts_what_its_job_asks_for() -> None:
    volumes = [{"name": "data", "path": "/data", "read_only": True}, {"name": "wandb", "path": "/s", "kind": "secret"}]
    given = {"cpu": 4.5, "memory": 1 << 30, "user": 1000, "volumes": volumes, "pull_secrets": ["hub"]}
    _, [pod] = run_pods(an_order(pod=given), TERMS, 1)
    spec = pod["spec"]
    assert (spec["automountServiceAccountToken"], spec["serviceAccountName"]) == (False, "poise-job")
    [container] = spec["containers"]
    assert container["resources"]["requests"] == {"cpu": "4500m", "memory": str(1 << 30), GPU: "2"}
    assert "cpu" not in container["resources"]["limits"]
    assert {"name": "volume-0", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}} in spec["volumes"]
    assert {"name": "volume-1", "secret": {"secretName": "wandb"}} in spec["volumes"]
    assert spec["imagePullSecrets"] == [{"name": "hub"}]


CLAIMS = [
    {"name": "data", "path": "/data", "read_only": True},
    {"name": "shared", "path": "/mnt/shared/"},
    {"name": "deep", "path": "/mnt/shared/team"},
    {"name": "keys", "path": "/keys", "kind": "secret"},
]


@pytest.mark.parametrize(
    ("place", "mounted"),
    [
        ("relay", None),
        ("s3://bucket/here", None),
        ("/mnt/shared/ckpt", "/mnt/shared/"),
        ("/mnt/shared", "/mnt/shared/"),
        ("/mnt//shared/./team/ckpt", "/mnt/shared/team"),
        ("file:///mnt/shared/ckpt", "/mnt/shared/"),
    ],
)
def test_the_agent_sees_the_claim_that_has_the_checkpoints_and_no_other_volume(place: str, mounted: str | None) -> None:
    order = an_order(2, pod={"volumes": CLAIMS})
    for pod in run_pods(order, TERMS, 1, f"{place}/5/17" if mounted else place).pods:
        agent, [job] = pod["spec"]["initContainers"][1], pod["spec"]["containers"]
        own = [each for each in agent["volumeMounts"] if not each["name"].startswith("poise")]
        assert [each["mountPath"] for each in own] == ([mounted] if mounted else [])
        assert all(each in job["volumeMounts"] for each in own), "both see it at the same path"
    assert checkpoint_problem(order.request.pod, place) is None


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/ckpt", "checkpoints are kept at /ckpt, which is on no claim that the job can write; mount one"),
        ("/mnt/sharedness", "which is on no claim"),
        ("/data/ckpt", "which is on no claim that the job can write"),
        ("/keys/ckpt", "which is on no claim"),
        ("local:///ckpt", "which is on no claim"),
        ("/usr/ckpt", "the claim at /usr has the checkpoints, and would hide /usr/bin from Poise's sidecar"),
    ],
)
def test_checkpoints_that_would_go_with_the_pod_are_refused(place: str, said: str) -> None:
    options = PodOptions.model_validate({"volumes": [*CLAIMS, {"name": "usr", "path": "/usr"}]})
    problem = checkpoint_problem(options, place)
    assert problem is not None
    assert said in problem
    request = JobRequest(command=("true",), image="job", pod=options, checkpoint=Checkpoint(url=place))
    with pytest.raises(RequestError, match=r"^checkpoint\.url: "):
        check_pods("relay", request)
    with pytest.raises(RequestError):
        check_pods(place, request.model_copy(update={"checkpoint": Checkpoint()}))


def test_pods_have_the_runtime_class_that_the_operator_names() -> None:
    _, [pod] = run_pods(an_order(), TERMS, 1)
    assert "runtimeClassName" not in pod["spec"]
    _, [pod] = run_pods(an_order(), replace(TERMS, runtime_class="nvidia"), 1)
    assert pod["spec"]["runtimeClassName"] == "nvidia"


def containers_of(spec: Json) -> list[Json]:
    return [*spec["initContainers"], *spec["containers"]]


def test_with_a_user_a_pod_is_all_that_the_level_restricted_wants() -> None:
    _, [pod] = run_pods(an_order(pod={"user": 1000}), TERMS, 1)
    assert pod["spec"]["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    for container in containers_of(pod["spec"]):
        assert container["securityContext"] == {
            "runAsUser": 1000,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    allowed = {"emptyDir", "projected", "persistentVolumeClaim", "secret", "configMap"}
    assert all(each.keys() - {"name"} <= allowed for each in pod["spec"]["volumes"])


@pytest.mark.parametrize("given", [{}, {"user": 0}])
def test_without_a_user_agent_and_job_are_root_whatever_the_image_says(given: Json) -> None:
    """Both have to read the same files; the image of the job may have a user of its own."""
    _, [pod] = run_pods(an_order(pod=given), TERMS, 1)
    assert {each["securityContext"]["runAsUser"] for each in containers_of(pod["spec"])} == {0}
    assert not any("runAsNonRoot" in each["securityContext"] for each in containers_of(pod["spec"]))


def test_volumes_are_told_apart_however_alike_their_names_are_and_mounted_where_they_are_wanted() -> None:
    claims = [("a.b", "/1"), ("a-b", "/2"), (f"{'x' * 70}1", "/3"), (f"{'x' * 70}2", "/4"), ("a.b", "/5")]
    volumes = [{"name": name, "path": path} for name, path in claims]
    _, [pod] = run_pods(an_order(pod={"volumes": volumes}), TERMS, 1)
    made = {
        each["name"]: each["persistentVolumeClaim"] for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each
    }
    assert len(made) == 4
    [container] = pod["spec"]["containers"]
    mounted = {
        each["mountPath"]: made[each["name"]]["claimName"] for each in container["volumeMounts"] if each["name"] in made
    }
    assert mounted == {path: name for name, path in claims}


def test_pods_tolerate_and_fetch_with_what_the_operator_says_and_sidecars_ask_for_little() -> None:
    terms = replace(TERMS, tolerated=("dedicated",), pull_secrets=("ours", "hub"))
    _, [pod] = run_pods(an_order(pod={"pull_secrets": ["hub"]}), terms, 1)
    assert pod["spec"]["imagePullSecrets"] == [{"name": "hub"}, {"name": "ours"}]
    assert [each["key"] for each in pod["spec"]["tolerations"]] == [GPU, "dedicated"]
    for each in pod["spec"]["initContainers"]:
        assert each["resources"]["requests"].keys() == {"cpu", "memory"}
        assert each["resources"]["limits"].keys() == {"memory"}


# What pods end of


def _container(name: str = "job", **state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": name, "state": state}]}


def test_an_image_without_python_is_said_in_one_sentence() -> None:
    message = 'failed to create containerd task: exec: "python3": executable file not found in $PATH'
    pod = a_pod(**_container(terminated={"reason": "StartError", "message": message, "exitCode": 128}))
    problem = start_problem(pod)
    assert problem is not None
    cause, text, is_final = problem
    assert (cause, is_final) == ("program-missing", True)
    assert text.startswith("the job's image has no python3")


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}, "node-exhausted"),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, "node-exhausted"),
        ({"phase": "Failed", "reason": "Evicted"}, "node-lost"),
        ({"phase": "Failed", **_container(terminated={"reason": "OOMKilled", "exitCode": 137})}, "cpu-out-of-memory"),
        ({"phase": "Failed", **_container(terminated={"reason": "Error", "exitCode": 137})}, "killed"),
        (
            {"phase": "Pending", **_container(waiting={"reason": "ImagePullBackOff", "message": "not found"})},
            "image-missing",
        ),
    ],
)
def test_what_a_pod_has_ended_of_is_told_without_its_agent(status: dict[str, Any], cause: str) -> None:
    assert cause_of(a_pod(**status)) == cause
