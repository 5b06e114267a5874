"""The pretended Kubernetes cluster of the tests, tested: a real API server, pretend kubelets and controllers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.kube.controllers import FINALIZER, JOBS, JOBSETS, TRAINJOBS, Controllers, install_crds
from tests.kube.keeper import ROOT
from tests.kube.kubelet import Image, Pretend, Processes, cannot_run
from tests.kube.running import MARK
from tests.kube.server import GPU, PRODUCT, Admin, Json, KubeError, KubeServer, find_assets, is_allowed

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

LONG = 60.0
BUILD = ROOT / "tests" / "kube" / "build"


def until(what: Callable[[], Any], seconds: float = LONG) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        if found := what():
            return found
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.03)


class Place:
    """A namespace, with a node."""

    def __init__(self, server: KubeServer) -> None:
        self.server = server
        self.admin = server.admin
        self.namespace = server.namespace("harness")
        self.node = f"node-{self.namespace}"
        server.add_node(self.node, gpus=4)

    def path(self, kind: str = "pods", base: str = "/api/v1") -> str:
        return f"{base}/namespaces/{self.namespace}/{kind}"

    def pod(self, name: str, *containers: Json, gpus: int = 0, notes: Json | None = None, **spec: Any) -> Json:
        """Create a pod on the node."""
        if gpus:
            containers[0]["resources"] = {"limits": {GPU: str(gpus)}}
        whole = {"nodeName": self.node, "restartPolicy": "Never", "serviceAccountName": "default", **spec}
        meta = {"name": name, "annotations": notes or {}, "labels": {"app": "harness"}}
        return self.admin.post(self.path(), {"metadata": meta, "spec": {**whole, "containers": list(containers)}})

    def get(self, name: str) -> Json:
        return self.admin.get(f"{self.path()}/{name}")

    def in_phase(self, name: str, *phases: str) -> Json:
        """Wait for a phase of a pod."""
        found: Json = until(lambda: (pod := self.get(name))["status"]["phase"] in phases and pod)
        return found

    def gone(self, name: str) -> None:
        until(lambda: self.admin.find(f"{self.path()}/{name}") is None)


def sh(name: str, script: str, **more: Any) -> Json:
    return {"name": name, "image": "any", "command": ["sh", "-c", script], **more}


def ended(pod: Json, name: str = "main") -> Json:
    """How a container has ended."""
    both = [*pod["status"].get("containerStatuses", []), *pod["status"].get("initContainerStatuses", [])]
    found: Json = next(each for each in both if each["name"] == name)["state"]["terminated"]
    return found


@pytest.fixture
def place(fresh_kube: KubeServer) -> Place:
    return Place(fresh_kube)


@pytest.fixture
def kubelet(place: Place) -> Iterator[Processes]:
    if problem := cannot_run():
        pytest.skip(problem)
    with Processes(place.server) as made:
        yield made
        assert made.problems == []


@pytest.fixture
def pretend(place: Place) -> Iterator[Pretend]:
    with Pretend(place.server) as made:
        yield made
        assert made.problems == []


@pytest.fixture
def controllers(place: Place) -> Iterator[Controllers]:
    install_crds(place.server)
    with Controllers(place.server) as made:
        yield made
        assert made.problems == []


# The server -----------------------------------------------------------------------------------------------------------


def test_a_node_has_gpus_and_is_ready(place: Place) -> None:
    node = place.admin.get(f"/api/v1/nodes/{place.node}")
    assert node["status"]["allocatable"][GPU] == "4"
    assert node["metadata"]["labels"][PRODUCT] == "Tesla-V100-SXM2-16GB"
    assert "taints" not in node["spec"]
    place.server.set_ready(place.node, None)
    place.server.cordon(place.node)
    node = place.admin.get(f"/api/v1/nodes/{place.node}")
    assert [each["status"] for each in node["status"]["conditions"] if each["type"] == "Ready"] == ["Unknown"]
    keys = {(each["key"], each["effect"]) for each in node["spec"]["taints"]}
    assert {("node.kubernetes.io/unreachable", "NoExecute"), ("node.kubernetes.io/unreachable", "NoSchedule")} <= keys
    assert node["spec"]["unschedulable"]
    place.server.set_ready(place.node)
    place.server.cordon(place.node, False)
    assert "unschedulable" not in place.admin.get(f"/api/v1/nodes/{place.node}")["spec"]


def test_users_have_the_rights_that_they_are_given(place: Place) -> None:
    for user in ("nobody", "alice"):
        with pytest.raises(KubeError, match="Forbidden"):
            place.server.client(user).list(place.path())
    place.server.allow("alice", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}], place.namespace)
    assert until(lambda: is_allowed(lambda: place.server.client("alice").list(place.path())))
    assert not is_allowed(lambda: place.server.client("alice").list("/api/v1/pods"))
    config = json.loads(place.server.kubeconfig("poise").read_text())
    cluster = config["clusters"][0]["cluster"]
    client = Admin(cluster["server"], Path(cluster["certificate-authority"]), config["users"][0]["user"]["token"])
    review = {"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1"}
    answer = client.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    client.close()
    assert answer["status"]["userInfo"]["username"] == "poise"
    assert "gpu-schedulers" in answer["status"]["userInfo"]["groups"]


def test_a_binding_has_labels_and_annotations(place: Place) -> None:
    made = place.pod("bound", sh("main", "true"), nodeName="")
    meta = {"name": "bound", "uid": made["metadata"]["uid"], "labels": {"rank": "1"}, "annotations": {"epoch": "2"}}
    binding = {"metadata": meta, "target": {"kind": "Node", "name": place.node}}
    place.admin.post(f"{place.path()}/bound/binding", binding)
    bound = place.get("bound")
    assert bound["spec"]["nodeName"] == place.node
    assert bound["metadata"]["labels"]["rank"] == "1"
    assert bound["metadata"]["annotations"]["epoch"] == "2"
    with pytest.raises(KubeError, match="Conflict"):
        place.admin.post(f"{place.path()}/bound/binding", binding)


def test_a_server_that_was_away_knows_what_it_knew(place: Place, pretend: Pretend) -> None:
    place.pod("stays", sh("main", "true"))
    place.pod("ends", sh("main", "true"), notes={"test/seconds": "1.5"})
    for name in ("stays", "ends"):
        place.in_phase(name, "Running")
    with place.server.down(), pytest.raises(httpx.HTTPError):
        place.get("stays")
    assert place.get("stays")["status"]["phase"] == "Running"
    place.in_phase("ends", "Succeeded")
    with place.server.frozen(), pytest.raises(httpx.TimeoutException):
        httpx.get(f"{place.server.url}/readyz", verify=False, timeout=0.5)
    place.pod("later", sh("main", "true"))
    place.in_phase("later", "Running")


def test_a_watch_from_before_a_compaction_expires(place: Place, pretend: Pretend) -> None:
    old = place.pod("old", sh("main", "true"))["metadata"]["resourceVersion"]
    place.in_phase("old", "Running")
    watch = place.admin.watch("/api/v1/pods", old)
    assert next(iter(watch))["type"] == "MODIFIED"
    watch.close()
    place.server.compact()
    event = next(iter(place.admin.watch("/api/v1/pods", old)))
    assert (event["type"], event["object"]["reason"]) == ("ERROR", "Expired")
    place.pod("new", sh("main", "true"))
    place.in_phase("new", "Running")  # the kubelet has listed again


# Containers as processes ----------------------------------------------------------------------------------------------

MOUNTS: Json = {
    "volumes": [
        {"name": "shared", "emptyDir": {}},
        {
            "name": "identity",
            "projected": {
                "sources": [
                    {"serviceAccountToken": {"path": "token", "audience": "poise", "expirationSeconds": 600}},
                    {"downwardAPI": {"items": [{"path": "notes", "fieldRef": {"fieldPath": "metadata.annotations"}}]}},
                ]
            },
        },
    ]
}
AT = [
    {"name": "shared", "mountPath": "/poise"},
    {"name": "identity", "mountPath": "/var/run/secrets/poise", "readOnly": True},
]


def test_a_container_is_a_process_with_volumes_and_an_identity(place: Place, kubelet: Processes) -> None:
    script = """
        cat /var/run/secrets/poise/token > /poise/token
        echo "$NAME $ADDRESS $GREETING $JOINED ${KUBERNETES_SERVICE_HOST-none}" > /poise/words
        touch /var/run/secrets/poise/x || echo read-only >> /poise/words
        hostname >> /poise/words; id -u >> /poise/words; pwd >> /poise/words
        until grep -q 'step="2"' /var/run/secrets/poise/notes; do sleep 0.05; done
        printf done > /dev/termination-log; exit 3
    """
    fields = (("NAME", "metadata.name"), ("ADDRESS", "status.podIP"))
    env = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields]
    env += [{"name": "GREETING", "value": "hello"}, {"name": "JOINED", "value": "$(GREETING)-$$"}]
    limits = {"securityContext": {"runAsUser": 12345}, "workingDir": "/usr"}
    made = place.pod("real", sh("main", script, env=env, volumeMounts=AT, **limits), gpus=2, notes={"step": "1"}, **MOUNTS)
    pod = place.in_phase("real", "Running")
    assert kubelet.held(place.node) == 2
    assert pod["status"]["podIP"].startswith("127.")
    shared = kubelet.folder(place.namespace, "real") / "volumes" / "shared"
    token = until(lambda: (shared / "token").exists() and (shared / "token").read_text())
    status = _review(place, token)
    assert status["authenticated"]
    assert status["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [made["metadata"]["uid"]]
    assert not _review(place, token, "another")["authenticated"]
    kubelet.rotate_tokens(place.namespace, "real")
    identity = kubelet.folder(place.namespace, "real") / "volumes" / "identity"
    until(lambda: (identity / "token").read_text() != token)
    place.admin.patch(f"{place.path()}/real", {"metadata": {"annotations": {"step": "2"}}})
    pod = place.in_phase("real", "Failed")
    end = ended(pod)
    assert (end["exitCode"], end["reason"], end["message"]) == (3, "Error", "done")
    words = (shared / "words").read_text().splitlines()
    assert words == [f"real {pod['status']['podIP']} hello hello-$ none", "read-only", "real", "12345", "/usr"]
    assert kubelet.held(place.node) == 0
    place.admin.delete(f"{place.path()}/real", grace=0)
    until(lambda: not _review(place, token)["authenticated"])  # it dies with the pod
    assert not Path("/poise").exists()
    assert not Path("/run/secrets/poise").exists()


def _review(place: Place, token: str, audience: str = "poise") -> Json:
    spec = {"token": token, "audiences": [audience]}
    found: Json = place.admin.post("/apis/authentication.k8s.io/v1/tokenreviews", {"spec": spec})["status"]
    return {"authenticated": False, **found}


def test_sidecars_start_first_are_kept_and_end_last(place: Place, kubelet: Processes) -> None:
    note = "echo {0} >> /poise/order"
    trap = "trap 'echo {0}-term >> /poise/order; exit 0' TERM; while :; do sleep 0.05; done"
    inits = [
        sh("first", note.format("first"), volumeMounts=AT),
        sh("a", f"{note.format('a')}; {trap.format('a')}", volumeMounts=AT, restartPolicy="Always"),
        sh("second", f"sleep 0.3; {note.format('second')}", volumeMounts=AT),
        sh("b", f"{note.format('b')}; {trap.format('b')}", volumeMounts=AT, restartPolicy="Always"),
    ]
    probe = {"exec": {"command": ["sh", "-c", "test -e /poise/probed || { touch /poise/probed; false; }"]}}
    inits[3]["startupProbe"] = {**probe, "periodSeconds": 1}
    main = sh("main", f"{note.format('main')}; until test -e /poise/go; do sleep 0.05; done", volumeMounts=AT)
    place.pod("order", main, initContainers=inits, **MOUNTS)
    place.in_phase("order", "Running")
    order = kubelet.folder(place.namespace, "order") / "volumes" / "shared" / "order"
    assert until(lambda: "main" in order.read_text() and order.read_text().split()) == ["first", "a", "second", "b", "main"]
    os.kill(kubelet.processes(place.namespace, "order", "a")[0], signal.SIGKILL)
    until(lambda: order.read_text().split()[5:] == ["a"])
    again = until(lambda: (each := place.get("order")["status"]["initContainerStatuses"][1])["restartCount"] and each)
    assert again["lastState"]["terminated"]["exitCode"] == 137
    (order.parent / "go").touch()
    pod = place.in_phase("order", "Succeeded")
    assert order.read_text().split()[6:] == ["b-term", "a-term"]
    assert ended(pod)["reason"] == "Completed"
    assert kubelet.processes(place.namespace, "order") == []


def test_a_node_never_has_more_pods_than_gpus(place: Place, kubelet: Processes) -> None:
    place.pod("three", sh("main", "sleep 60"), gpus=3)
    place.in_phase("three", "Running")
    place.pod("two", sh("main", "sleep 60"), gpus=2)
    refused = place.in_phase("two", "Failed")
    assert refused["status"]["reason"] == f"OutOf{GPU}"
    assert "containerStatuses" not in refused["status"]
    place.pod("one", sh("main", "echo $NVIDIA_VISIBLE_DEVICES"), gpus=1)
    place.in_phase("one", "Succeeded")
    assert kubelet.log(place.namespace, "one", "main") == f"GPU-{place.node}-3\n"
    kubelet.refuse_next(place.node)
    place.pod("unlucky", sh("main", "true"))
    assert place.in_phase("unlucky", "Failed")["status"]["reason"] == "UnexpectedAdmissionError"
    for name in ("three", "two", "unlucky"):
        place.admin.delete(f"{place.path()}/{name}", grace=1)
    place.gone("three")
    place.pod("four", sh("main", "true"), gpus=4)
    place.in_phase("four", "Succeeded")


def test_a_pod_that_is_deleted_has_its_grace(place: Place, kubelet: Processes) -> None:
    polite = "trap 'sleep 0.5; echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    stubborn = "trap '' TERM; echo up; setsid sleep 77 & while :; do sleep 0.05; done"
    events = []
    watch = place.admin.watch(place.path())
    place.pod("polite", sh("main", polite))
    place.pod("stubborn", sh("main", stubborn))
    for name in ("polite", "stubborn"):
        place.in_phase(name, "Running")
        until(partial(_is_up, kubelet, place.namespace, name))
        place.admin.delete(f"{place.path()}/{name}", grace=2)
    begun = time.monotonic()
    for event in watch:
        events.append(event)
        if len([each for each in events if each["type"] == "DELETED"]) == 2:
            break
    watch.close()
    assert 1.0 < time.monotonic() - begun < 20.0
    last = {each["object"]["metadata"]["name"]: each["object"] for each in events if each["type"] == "DELETED"}
    assert ended(last["polite"])["exitCode"] == 0
    assert ended(last["stubborn"])["exitCode"] == 137
    assert last["stubborn"]["status"]["phase"] == "Failed"
    assert "saved" in kubelet.log(place.namespace, "polite", "main")
    assert kubelet.processes(place.namespace, "stubborn") == []


def _is_up(kubelet: Processes, namespace: str, name: str) -> bool:
    return "up" in kubelet.log(namespace, name, "main")


def test_a_pod_that_is_removed_by_force_ends(place: Place, kubelet: Processes) -> None:
    place.pod("forced", sh("main", "trap '' TERM; while :; do sleep 0.05; done"), gpus=4)
    place.in_phase("forced", "Running")
    place.admin.delete(f"{place.path()}/forced", grace=0)
    place.gone("forced")
    until(lambda: kubelet.held(place.node) == 0)
    assert kubelet.processes(place.namespace, "forced") == []


def test_what_cannot_be_started_is_said_as_kubelets_say_it(place: Place, kubelet: Processes, tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    kubelet.images = {"small": Image(entrypoint=["sh", "-c"], command=["exit 4"], path=str(tmp_path))}
    place.pod("no-program", {"name": "main", "image": "small", "command": ["python3", "-c", "pass"]})
    place.pod("entry", {"name": "main", "image": "small"})
    place.pod("no-image", {"name": "main", "image": "large", "command": ["true"]})
    end = ended(place.in_phase("no-program", "Failed"))
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert 'exec: "python3": executable file not found in $PATH' in end["message"]
    assert ended(place.in_phase("entry", "Failed"))["exitCode"] == 4

    def waiting() -> str:
        statuses = place.get("no-image")["status"].get("containerStatuses", [{}])
        return str(statuses[0].get("state", {}).get("waiting", {}).get("reason"))

    until(lambda: waiting() == "ImagePullBackOff")
    assert place.get("no-image")["status"]["phase"] == "Pending"
    place.admin.delete(f"{place.path()}/no-image")
    place.gone("no-image")


def test_pods_of_a_headless_service_find_each_other(place: Place, kubelet: Processes) -> None:
    spec = {"clusterIP": "None", "selector": {"app": "harness"}, "publishNotReadyAddresses": True}
    place.admin.post(place.path("services"), {"metadata": {"name": "gang"}, "spec": spec})
    name = f"rank-1.gang.{place.namespace}.svc"
    place.pod("zero", sh("main", f"until getent hosts {name}; do sleep 0.1; done"), hostname="rank-0", subdomain="gang")
    place.pod("one", sh("main", "sleep 60"), hostname="rank-1", subdomain="gang")
    place.in_phase("zero", "Succeeded")
    assert place.get("one")["status"]["podIP"] in kubelet.log(place.namespace, "zero", "main")


def test_nodes_hang_and_die(place: Place, kubelet: Processes) -> None:
    place.pod("counts", sh("main", "while :; do echo; sleep 0.05; done"), gpus=1)
    place.in_phase("counts", "Running")
    kubelet.stop_node(place.node)
    time.sleep(0.2)
    log = kubelet.folder(place.namespace, "counts") / "logs" / "main.log"
    size = log.stat().st_size
    time.sleep(0.4)
    assert log.stat().st_size == size
    place.pod("waits", sh("main", "true"))
    time.sleep(0.4)
    assert place.get("waits")["status"]["phase"] == "Pending"
    kubelet.start_node(place.node)
    until(lambda: log.stat().st_size > size)
    place.in_phase("waits", "Succeeded")
    kubelet.kill_node(place.node)
    assert until(lambda: kubelet.processes(place.namespace, "counts") == [])
    time.sleep(0.4)
    assert place.get("counts")["status"]["phase"] == "Running"
    kubelet.start_node(place.node)
    assert ended(place.in_phase("counts", "Failed"))["exitCode"] == 137


def test_containers_go_on_while_the_server_is_away(place: Place, kubelet: Processes) -> None:
    place.pod("away", sh("main", "until test -e /poise/go; do sleep 0.05; done; exit 5", volumeMounts=AT), **MOUNTS)
    place.in_phase("away", "Running")
    with place.server.down():
        (kubelet.folder(place.namespace, "away") / "volumes" / "shared" / "go").touch()
        until(lambda: kubelet.processes(place.namespace, "away") == [])
    assert ended(place.in_phase("away", "Failed"))["exitCode"] == 5


def test_nothing_is_left_behind(place: Place) -> None:
    if problem := cannot_run():
        pytest.skip(problem)
    with Processes(place.server) as kubelet:
        place.pod("leaves", sh("main", "setsid sleep 3600 & env -i setsid sleep 3600 & sleep 3600"))
        place.in_phase("leaves", "Running")
        until(lambda: len(kubelet.keeper.processes()) == 4)
        left = kubelet.keeper.processes()
        root = kubelet.root
    assert [pid for pid in left if _lives(pid)] == []
    assert not root.exists()
    assert not [each for each in Path("/proc").glob("[0-9]*") if root.name in _environment(each)]


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _environment(process: Path) -> str:
    try:
        return next((each for each in (process / "environ").read_text().split("\0") if each.startswith(MARK)), "")
    except OSError:
        return ""


# Pretended pods and controllers ---------------------------------------------------------------------------------------


def test_pretended_pods_begin_and_end(place: Place, pretend: Pretend) -> None:
    place.pod("well", sh("main", "true"), gpus=1, notes={"test/seconds": "0.2"})
    place.pod("ill", sh("main", "true"), gpus=1, notes={"test/seconds": "0", "test/exit": "7"})
    place.pod("long", sh("main", "true"), gpus=2, notes={"test/stop-seconds": "0.5"})
    place.in_phase("well", "Succeeded")
    assert ended(place.in_phase("ill", "Failed"))["exitCode"] == 7
    assert place.in_phase("long", "Running")["status"]["containerStatuses"][0]["ready"]
    place.pod("much", sh("main", "true"), gpus=3)
    assert place.in_phase("much", "Failed")["status"]["reason"] == f"OutOf{GPU}"
    place.admin.delete(f"{place.path()}/long")
    assert "deletionTimestamp" in place.get("long")["metadata"]
    place.gone("long")
    assert pretend.held(place.node) == 0
    place.pod("asked", sh("main", "true"), gpus=4)
    place.in_phase("asked", "Running")
    pretend.finish(place.namespace, "asked", 9)
    assert ended(place.in_phase("asked", "Failed"))["exitCode"] == 9
    place.pod("lost", sh("main", "true"), gpus=4)
    place.in_phase("lost", "Running")
    pretend.kill_node(place.node)
    pretend.start_node(place.node)
    place.in_phase("lost", "Failed")


def a_job(place: Place, seconds: str | None = None, code: str = "0", **spec: Any) -> Json:
    notes = {"test/exit": code} | ({} if seconds is None else {"test/seconds": seconds})
    pod = {"nodeName": place.node, "restartPolicy": "Never", "containers": [sh("main", "true")]}
    return {**spec, "template": {"metadata": {"annotations": notes}, "spec": pod}}


def conditions(each: Json) -> dict[str, str]:
    return {one["type"]: one["status"] for one in each.get("status", {}).get("conditions", [])}


def test_a_job_makes_pods_and_can_be_suspended(place: Place, pretend: Pretend, controllers: Controllers) -> None:
    jobs = place.path("jobs", JOBS)
    spec = a_job(place, parallelism=2, completions=2, completionMode="Indexed", backoffLimit=0)
    place.admin.post(jobs, {"metadata": {"name": "train"}, "spec": spec})

    def pods() -> list[Json]:
        found = place.admin.list(place.path(), labelSelector="batch.kubernetes.io/job-name=train")
        return [
            each for each in found if each["status"]["phase"] == "Running" and "deletionTimestamp" not in each["metadata"]
        ]

    first = until(lambda: len(pods()) == 2 and pods())
    indices = {each["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] for each in first}
    assert indices == {"0", "1"}
    assert all(FINALIZER in each["metadata"]["finalizers"] for each in first)
    assert {each["spec"]["hostname"] for each in first} == {"train-0", "train-1"}
    assert {each["metadata"]["ownerReferences"][0]["kind"] for each in first} == {"Job"}
    place.admin.patch(f"{jobs}/train", {"spec": {"suspend": True}})
    until(lambda: not place.admin.list(place.path()))
    job = until(lambda: conditions(found := place.admin.get(f"{jobs}/train")).get("Suspended") == "True" and found)
    assert job["status"].get("failed", 0) == 0
    place.admin.patch(f"{jobs}/train", {"spec": {"suspend": False}})
    second = until(lambda: len(pods()) == 2 and pods())
    assert not {each["metadata"]["uid"] for each in first} & {each["metadata"]["uid"] for each in second}
    for each in second:
        pretend.finish(place.namespace, each["metadata"]["name"])
    job = until(lambda: conditions(found := place.admin.get(f"{jobs}/train")).get("Complete") == "True" and found)
    assert job["status"]["succeeded"] == 2
    assert conditions(job)["Suspended"] == "False"


def test_failures_of_jobs_count_unless_a_policy_says_otherwise(
    place: Place, pretend: Pretend, controllers: Controllers
) -> None:
    jobs = place.path("jobs", JOBS)
    place.admin.post(jobs, {"metadata": {"name": "bad"}, "spec": a_job(place, "0", "1", backoffLimit=1)})
    job = until(lambda: conditions(found := place.admin.get(f"{jobs}/bad")).get("Failed") == "True" and found)
    assert job["status"]["failed"] == 2
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
    ]
    spec = a_job(place, backoffLimit=0, podFailurePolicy={"rules": rules})
    place.admin.post(jobs, {"metadata": {"name": "mild"}, "spec": spec})

    def runs(not_in: set[str]) -> Json | None:
        found = place.admin.list(place.path(), labelSelector="job-name=mild", fieldSelector="status.phase=Running")
        return next((each for each in found if each["metadata"]["name"] not in not_in), None)

    seen: set[str] = set()
    for what in ("evict", "75", "42"):
        name = until(lambda: runs(seen))["metadata"]["name"]
        seen.add(name)
        if what == "evict":
            meta = {"name": name, "namespace": place.namespace}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
            place.admin.post(f"{place.path()}/{name}/eviction", body)
        else:
            pretend.finish(place.namespace, name, int(what))
    job = until(lambda: conditions(found := place.admin.get(f"{jobs}/mild")).get("Failed") == "True" and found)
    assert job["status"]["failed"] == 1
    assert "PodFailurePolicy" in [each["reason"] for each in job["status"]["conditions"]]


def test_a_trainjob_makes_a_jobset_which_makes_jobs(place: Place, pretend: Pretend, controllers: Controllers) -> None:
    replicated = {"name": "node", "replicas": 1, "template": {"spec": a_job(place)}}
    controllers._runtimes["torch"] = {"replicatedJobs": [replicated]}
    trainer = {"numNodes": 2, "image": "train", "command": ["true"], "resourcesPerNode": {"limits": {GPU: "2"}}}
    trains = place.path("trainjobs", TRAINJOBS)
    train = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "fit"}}
    place.admin.post(trains, {**train, "spec": {"runtimeRef": {"name": "torch"}, "trainer": trainer, "suspend": True}})
    until(lambda: place.admin.find(f"{place.path('jobs', JOBS)}/fit-node-0"))
    until(lambda: conditions(place.admin.get(f"{trains}/fit")).get("Suspended") == "True")
    assert place.admin.list(place.path()) == []
    place.admin.patch(f"{trains}/fit", {"spec": {"suspend": False}})
    selector = {"labelSelector": "jobset.sigs.k8s.io/jobset-name=fit", "fieldSelector": "status.phase=Running"}
    pods = until(lambda: len(found := place.admin.list(place.path(), **selector)) == 2 and found)
    assert {each["spec"]["subdomain"] for each in pods} == {"fit"}
    assert pretend.held(place.node) == 4
    place.admin.patch(f"{trains}/fit", {"spec": {"suspend": True}})
    until(lambda: not place.admin.list(place.path()))
    place.admin.patch(f"{trains}/fit", {"spec": {"suspend": False}})
    pods = until(lambda: len(found := place.admin.list(place.path(), **selector)) == 2 and found)
    for each in pods:
        pretend.finish(place.namespace, each["metadata"]["name"])
    until(lambda: conditions(place.admin.get(f"{trains}/fit")).get("Complete") == "True")
    jobset = place.admin.get(f"{place.path('jobsets', JOBSETS)}/fit")
    assert jobset["status"]["terminalState"] == "Completed"
    place.admin.delete(f"{trains}/fit")
    until(lambda: not place.admin.list(place.path()) and not place.admin.list(place.path("jobs", JOBS)))


# Programs -------------------------------------------------------------------------------------------------------------


def test_processes_end_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tests.kube.keeper import Keeper
keeper = Keeper()
argv = ["sh", "-c", "setsid sleep 3600 & sleep 3600"]
print(keeper.start(argv, {"PATH": "/bin:/usr/bin"}, Path(sys.argv[1])).pid, flush=True)
sys.stdin.read()
"""
    argv = [sys.executable, "-c", script, str(tmp_path / "log")]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert _lives(pid)
        run.kill()
    until(lambda: not _lives(pid))


def test_programs_are_got_once(tmp_path: Path) -> None:
    assets = find_assets()
    if assets is None:
        pytest.skip("there is no etcd or no kube-apiserver here; `make kubernetes` gets them")
    for name, program in (("etcd", assets.etcd), ("kube-apiserver", assets.apiserver)):
        (tmp_path / name).symlink_to(program)
    plain = {"PATH": f"{tmp_path}:{os.defpath}", "HOME": str(tmp_path)}
    done = _build({**plain, "KUBEBUILDER_ASSETS": str(tmp_path)})
    assert (done.returncode, done.stdout) == (
        0,
        f"etcd and kube-apiserver are in KUBEBUILDER_ASSETS ({tmp_path}): nothing to do\n",
    )
    done = _build({**plain, "XDG_CACHE_HOME": str(tmp_path / "empty")})
    assert done.returncode == 1
    assert "there is no Go to build kube-apiserver with" in done.stderr


def _build(environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([BUILD], env=environment, capture_output=True, text=True, check=False, timeout=LONG)
