"""The rights of the manifests, on a real API server: all that Poise does works with them, and it uses every one.

Poise runs as the manifests say, with the token of its service account. The audit log of the API server has each request,
and which role allowed it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.backends import until
from tests.kube.controllers import Controllers, install_crds
from tests.kube.kubelet import cannot_run
from tests.kube.server import GPU, Admin, Json, KubeError, KubeServer, find_kubectl, is_allowed
from tests.kube_install import JOBS, SYSTEM, Installation
from tests.kube_manifests import BASE, ONLY_POISE_JOBS, rendered
from tests.kube_stage import SilentLog
from tests.remote import listening

from poise.scheduler.model.errors import RequestError
from poise.service.backends.kubernetes.backend import (
    KubernetesBackend,
    KubernetesOptions,
    ServiceQueries,
)
from poise.service.backends.kubernetes.rights import GANG_RIGHTS, RIGHTS
from poise.service.backends.remote.backend import AgentAccess

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.slow,
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(find_kubectl() is None, reason="kubectl, which applies the manifests, is not installed"),
    pytest.mark.skipif(bool(cannot_run()), reason=cannot_run()),
]

ACCOUNT = f"system:serviceaccount:{SYSTEM}:poise"
EVERYWHERE = "*"
FOR_ALL = "system:"  # roles that every account has: discovery, and questions about its own rights

Right = tuple[str, str, str, str]  # verb, group, resource with subresource or name, namespace


@pytest.fixture
def installed(fresh_kube: KubeServer, tmp_path: Path) -> Iterator[Installation]:
    """A cluster with one node of four GPUs; nothing is applied yet."""
    install_crds(fresh_kube)
    fresh_kube.add_node("v100-0", 4)
    node = {
        "name": "node",
        "template": {"spec": {"template": {"spec": {"restartPolicy": "Never", "schedulerName": "poise"}}}},
    }
    controllers = Controllers(fresh_kube, runtimes={"torch": {"replicatedJobs": [node]}})
    with Installation(fresh_kube, tmp_path) as installation, controllers:
        yield installation


def granted(folder: str) -> set[Right]:
    """Every right in the manifests."""
    found = set()
    for role in rendered(folder):
        if role["kind"] in ("ClusterRole", "Role"):
            space = role["metadata"].get("namespace", EVERYWHERE)
            for rule in role["rules"]:
                for resource in rule["resources"]:
                    objects = [f"{resource} {name}" for name in rule.get("resourceNames", ())] or [resource]
                    found |= {(verb, rule["apiGroups"][0], each, space) for verb in rule["verbs"] for each in objects}
    return found


def requests(server: KubeServer) -> list[Json]:
    """What the account of Poise has asked for, from the audit log."""
    lines = [json.loads(line) for line in server.audit.read_text().splitlines()]
    return [each for each in lines if each["user"]["username"] == ACCOUNT and "objectRef" in each]


def used(server: KubeServer, rights: set[Right]) -> set[Right]:
    """Which rights requests have needed. A request that needed none of them is an error."""
    found = set()
    for each in requests(server):
        about = each["objectRef"]
        resource = "/".join(filter(None, (about.get("resource", ""), about.get("subresource"))))
        verb, group = each["verb"], about.get("apiGroup", "")
        resource = f"{resource}" if verb == "create" or resource != "leases" else f"leases {about.get('name')}"
        fits = {
            right
            for right in rights
            if right[:3] == (verb, group, resource) and right[3] in (EVERYWHERE, about.get("namespace"))
        }
        by = each["annotations"]["authorization.k8s.io/reason"]
        assert fits or f'ClusterRole "{FOR_ALL}' in by, each
        found |= fits
    return found


def denied(server: KubeServer) -> list[str]:
    """Requests that were refused for want of a right."""
    return [
        f"{each['verb']} {each['requestURI']}"
        for each in requests(server)
        if each["annotations"]["authorization.k8s.io/decision"] != "allow"
    ]


def forget_requests(server: KubeServer) -> None:
    """Begin a new audit log."""
    server.audit.write_text("")


def pod_template(gpus: int = 1) -> Json:
    script = "trap 'exit 0' TERM; while :; do sleep 0.1; done"
    limits = {"limits": {GPU: str(gpus)}}
    container = {"name": "main", "image": "job", "command": ["sh", "-c", script], "resources": limits}
    return {"spec": {"schedulerName": "poise", "restartPolicy": "Never", "containers": [container]}}


def job_spec(gpus: int = 1) -> Json:
    return {"parallelism": 1, "completions": 1, "completionMode": "Indexed", "template": pod_template(gpus)}


def run_jobs_of_poise(installation: Installation) -> None:
    """One in a pod, and one that needs two pods, which find each other through a service."""
    words = ("submit", "--json", "--image", "job", "--no-venv")
    installation.poise(*words, "-n", "one", "--", "echo", "said by one")
    installation.poise("wait", "one")
    assert "said by one" in installation.poise("logs", "one")
    script = 'echo "rank $RANK of $WORLD_SIZE"; getent hosts "$MASTER_ADDR"'
    installation.poise(*words, "-n", "two", "-g", "6", "--replicas", "gpu", "--", "sh", "-c", script)
    installation.poise("wait", "two")
    assert "rank 0 of 6" in installation.poise("logs", "two")
    run_into_trouble(installation, words)


def run_into_trouble(installation: Installation, words: tuple[str, ...]) -> None:
    """A job whose image has no Python, which its pod says; and two whose names others have taken."""
    admin = installation.server.admin
    installation.poise(*words[:-3], "--image", "bare", "--no-venv", "--retries", "0", "-n", "bare", "--", "true")
    until(lambda: any("has no python3" in each["message"] for each in events(installation.server, JOBS)))
    number = 1 + max(int(each["id"]) for each in json.loads(installation.poise("queue", "--state", "all", "--json"))["jobs"])
    spec = {"containers": [{"name": "main", "image": "job"}]}
    admin.post(f"/api/v1/namespaces/{JOBS}/pods", {"metadata": {"name": f"poise-{number}-1-0"}, "spec": spec})
    service = {"metadata": {"name": f"poise-{number + 1}-1"}, "spec": {"clusterIP": "None"}}
    admin.post(f"/api/v1/namespaces/{JOBS}/services", service)
    for name, gpus in (("taken", "1"), ("taken-service", "6")):
        installation.poise(*words, "-n", name, "-g", gpus, "--replicas", "gpu", "--", "true")
        # The next run has other names, and comes by itself in a while.
        until(lambda name=name: first_cause(installation, name) == "node-exhausted")
        installation.poise("cancel", name)


def first_cause(installation: Installation, job: str) -> str | None:
    """Why the first run of a job has failed."""
    runs = json.loads(installation.poise("show", job, "--json"))["runs"]
    return runs[0]["cause"] if runs else None


def test_all_that_poise_does_works_with_its_rights_and_needs_each_of_them(installed: Installation) -> None:
    server = installed.server
    server.add_node("v100-1", 4)
    forget_requests(server)
    installed.apply(BASE)
    run_jobs_of_poise(installed)
    installed.poise("drain", "v100-1")
    space = server.namespace("vision")
    admin, batch = server.admin, f"/apis/batch/v1/namespaces/{space}/jobs"
    admin.post(batch, {"metadata": {"name": "train"}, "spec": job_spec()})
    replicated = [{"name": "workers", "replicas": 1, "template": {"spec": job_spec()}}]
    jobsets = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{space}/jobsets"
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    admin.post(jobsets, {**kind, "metadata": {"name": "set"}, "spec": {"replicatedJobs": replicated}})
    trainjobs = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{space}/trainjobs"
    trainer = {
        "numNodes": 1,
        "image": "job",
        "command": ["sh", "-c", "sleep 60"],
        "resourcesPerNode": {"limits": {GPU: "1"}},
    }
    kind = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    body = {"runtimeRef": {"name": "torch"}, "trainer": trainer}
    admin.post(trainjobs, {**kind, "metadata": {"name": "trained"}, "spec": body})
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "set", "uid": "0", "controller": True}
    notes = {"poise.run/preemption": "restart"}
    plain = {"metadata": {"name": "made-again", "annotations": notes, "ownerReferences": [owner]}, **pod_template()}
    admin.post(f"/api/v1/namespaces/{space}/pods", plain)
    pods = f"/api/v1/namespaces/{space}/pods"
    until(lambda: [bool(each["spec"].get("nodeName")) for each in admin.list(pods)] == [True] * 4)
    # It does not fit beside the others, and says so.
    admin.post(batch, {"metadata": {"name": "large"}, "spec": job_spec(4)})
    until(lambda: [each for each in events(server, space) if each["involvedObject"]["name"] == "large"])
    (large,) = (each for each in admin.list(pods) if each["metadata"]["name"].startswith("large"))
    until(lambda: "PodScheduled" in conditions(server, space, large["metadata"]["name"]))
    # A new leader finds what the one before has said, and writes it again.
    leader = lease(server)["spec"]["holderIdentity"]
    installed.kubectl("-n", SYSTEM, "delete", "pod", "poise-0")
    installed.wait()
    until(lambda: lease(server)["spec"]["holderIdentity"] not in (leader, ""))
    until(lambda: any(each["verb"] == "patch" and each["objectRef"]["resource"] == "events" for each in requests(server)))
    installed.poise("drain", "v100-0")
    for path in (f"{batch}/train", f"{jobsets}/set", f"{trainjobs}/trained"):
        until(lambda path=path: admin.get(path)["spec"].get("suspend") is True)
    until(lambda: admin.find(f"{pods}/made-again") is None)
    rights = granted(BASE)
    assert denied(server) == []
    assert used(server, rights) == rights


def test_jobs_of_poise_alone_need_fewer_rights(installed: Installation) -> None:
    server = installed.server
    server.add_node("v100-1", 4)
    forget_requests(server)
    installed.apply(ONLY_POISE_JOBS)
    run_jobs_of_poise(installed)
    rights = granted(ONLY_POISE_JOBS)
    assert rights < granted(BASE)
    assert denied(server) == []
    assert used(server, rights) == rights


def events(server: KubeServer, namespace: str) -> list[Json]:
    return server.admin.list(f"/api/v1/namespaces/{namespace}/events")


def conditions(server: KubeServer, namespace: str, pod: str) -> dict[str, str]:
    found = server.admin.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")["status"].get("conditions", [])
    return {each["type"]: each.get("message", "") for each in found}


def lease(server: KubeServer) -> Json:
    return server.admin.get(f"/apis/coordination.k8s.io/v1/namespaces/{JOBS}/leases/poise")


def test_what_it_must_not_do_is_refused(installed: Installation) -> None:
    server = installed.server
    installed.kubectl("apply", "-k", "deploy/kubernetes/base")
    other = server.namespace("other")
    path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/poise/token"
    account = Admin(server.url, server.ca, server.admin.post(path, {"spec": {}})["status"]["token"])
    until(lambda: is_allowed(lambda: account.list("/api/v1/pods")))
    pods, rbac = "/api/v1/namespaces/{}/pods", "/apis/rbac.authorization.k8s.io/v1"
    for verb, where in [
        ("get", f"/api/v1/namespaces/{SYSTEM}/secrets"),
        ("get", f"/api/v1/namespaces/{JOBS}/secrets"),
        ("get", "/api/v1/secrets"),
        ("get", "/api/v1/configmaps"),
        ("get", pods.format(SYSTEM) + "/poise-0/log"),
        ("get", pods.format(other) + "/a"),
        ("post", pods.format(SYSTEM) + "/poise-0/exec"),
        ("post", pods.format(JOBS) + "/a/exec"),
        ("post", pods.format(other)),
        ("post", pods.format(SYSTEM)),
        ("patch", pods.format(other) + "/a"),
        ("put", pods.format(other) + "/a/status"),
        ("delete", pods.format("kube-system") + "/a"),
        ("delete", pods.format(other) + "/a"),
        ("delete", f"/api/v1/namespaces/{other}"),
        ("patch", f"/api/v1/namespaces/{other}"),
        ("patch", "/api/v1/nodes/v100-0"),
        ("patch", "/api/v1/nodes/v100-0/status"),
        ("delete", "/api/v1/nodes/v100-0"),
        ("get", "/api/v1/nodes/v100-0/proxy/"),
        ("post", f"/api/v1/namespaces/{other}/services"),
        ("get", f"/api/v1/namespaces/{JOBS}/services"),
        ("post", f"/api/v1/namespaces/{JOBS}/serviceaccounts/poise-job/token"),
        ("post", f"/apis/batch/v1/namespaces/{other}/jobs"),
        ("delete", f"/apis/batch/v1/namespaces/{other}/jobs/a"),
        ("get", f"/apis/coordination.k8s.io/v1/namespaces/{JOBS}/leases/another"),
        ("put", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/poise"),
        ("delete", f"/apis/coordination.k8s.io/v1/namespaces/{JOBS}/leases/poise"),
        ("post", f"{rbac}/clusterroles"),
        ("patch", f"{rbac}/clusterroles/poise-observe"),
        ("post", f"{rbac}/clusterrolebindings"),
    ]:
        with pytest.raises(KubeError) as refused:
            {
                "get": lambda where=where: account.get(where),
                "post": lambda where=where: account.post(where, {}),
                "put": lambda where=where: account.put(where, {}),
                "patch": lambda where=where: account.patch(where, {}),
                "delete": lambda where=where: account.delete(where),
            }[verb]()
        assert (refused.value.code, refused.value.reason) == (403, "Forbidden"), (verb, where)
    account.close()


def test_what_jobs_run_as_may_do_nothing(installed: Installation) -> None:
    server = installed.server
    installed.kubectl("apply", "-k", "deploy/kubernetes/base")
    path = f"/api/v1/namespaces/{JOBS}/serviceaccounts/poise-job/token"
    account = Admin(server.url, server.ca, server.admin.post(path, {"spec": {}})["status"]["token"])
    review = {"spec": {"namespace": JOBS}}
    found = account.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)["status"]["resourceRules"]
    account.close()
    # What everybody may: ask who they are, and what they may do.
    assert {resource for rule in found for resource in rule["resources"]} == {
        "selfsubjectreviews",
        "selfsubjectaccessreviews",
        "selfsubjectrulesreviews",
    }


def test_a_missing_right_is_named_in_one_sentence(fresh_kube: KubeServer, tmp_path: Path) -> None:
    """For each right that is asked for at the start: all the others are granted."""
    server, space = fresh_kube, fresh_kube.namespace("jobs")
    config, review = server.kubeconfig("alice"), "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    twice = {each[:3] for each in RIGHTS}  # those that it needs everywhere to schedule pods of others
    everything = [*RIGHTS, *(each for each in GANG_RIGHTS if each[:3] not in twice)]
    for number, (verb, group, resource, scope) in enumerate(everything):
        for role in ("clusterroles", "clusterrolebindings"):
            for each in server.admin.list(f"/apis/rbac.authorization.k8s.io/v1/{role}"):
                if each["metadata"]["name"].startswith("test-alice"):
                    server.admin.delete(f"/apis/rbac.authorization.k8s.io/v1/{role}/{each['metadata']['name']}")
        others = [each for each in everything if each != (verb, group, resource, scope)]
        server.allow(
            "alice",
            [
                {
                    "apiGroups": [each[1]],
                    "resources": [each[2].partition(" ")[0]],
                    "verbs": [each[0]],
                    **({"resourceNames": [each[2].partition(" ")[2]]} if " " in each[2] else {}),
                }
                for each in others
            ],
        )
        kind, _, name = resource.partition(" ")
        plural, _, sub = kind.partition("/")
        last = others[-1]
        asked = {"verb": verb, "group": group, "resource": plural, "subresource": sub, "name": name, "namespace": space}
        there = {"verb": last[0], "group": last[1], "resource": last[2]}
        until(
            lambda asked=asked, there=there: (
                [
                    server.client("alice").post(review, {"spec": {"resourceAttributes": each}})["status"]["allowed"]
                    for each in (asked, there)
                ]
                == [False, True]
            )
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        with listening() as bound, pytest.raises(RequestError) as refused:
            KubernetesBackend(
                (), folder, lambda _event: None, AgentAccess(bound, "http://127.0.0.1:1"),
                KubernetesOptions(kubeconfig=config, namespace=space), SilentLog(), ServiceQueries(), lease=60.0,
            )  # fmt: skip
        where = "" if scope is None else f" in namespace {space}"
        said = str(refused.value)
        assert said.startswith(f"the account that Poise uses may not {verb} {resource}{where}; Poise needs this right"), said
        assert "\n" not in said
