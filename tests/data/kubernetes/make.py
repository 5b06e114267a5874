"""Makes `objects.json` beside this script: what a real API server has of Jobs and their pods, as `kubectl get` prints it.

    python -m tests.data.kubernetes.make

The API server is real (`make kubernetes`); that Jobs make pods, that pods are bound and that they run for some seconds is
pretended, by tests/kube and by the loop below, which binds pods first come, first served. It takes half a minute.
"""

import json
import time
from pathlib import Path

from tests.kube.controllers import Controllers
from tests.kube.kubelet import Pretend, gpus_of
from tests.kube.server import GPU, Json, KubeServer

OUTPUT = Path(__file__).with_name("objects.json")
NODES = {"n1": 4, "n2": 4}
JOBS = (
    # namespace, name, pods, GPUs of each, seconds, exit code
    ("vision", "resnet", 1, 4, 5, 0),
    ("vision", "gang", 2, 4, 6, 0),
    ("speech", "asr", 2, 1, 4, 0),
    ("speech", "broken", 1, 2, 3, 1),
    ("speech", "prepare", 1, 0, 2, 0),
    ("vision", "short", 1, 1, 2, 0),
)


def main() -> None:
    """Run the jobs, one submitted each second, and write all of them and their pods."""
    with KubeServer() as server, Controllers(server), Pretend(server):
        for name, gpus in NODES.items():
            server.add_node(name, gpus, "NVIDIA-A100-SXM4-80GB")
        for namespace in {job[0] for job in JOBS}:
            server.admin.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
            server.service_account(namespace)
        for job in JOBS:
            server.admin.post(f"/apis/batch/v1/namespaces/{job[0]}/jobs", _job(*job))
            _bind_for(server, 1.0)
        while any(
            "completionTime" not in each["status"] and not _failed(each) for each in server.admin.list("/apis/batch/v1/jobs")
        ):
            _bind_for(server, 0.5)
        items: list[Json] = []
        for path, version, kind in (("/apis/batch/v1/jobs", "batch/v1", "Job"), ("/api/v1/pods", "v1", "Pod")):
            for each in server.admin.list(path):
                each["metadata"].pop("managedFields", None)  # which kubectl hides, too
                items.append({"apiVersion": version, "kind": kind, **each})
        lines = ",\n".join(map(json.dumps, items))
        OUTPUT.write_text(f'{{"apiVersion": "v1", "items": [\n{lines}\n], "kind": "List"}}\n', encoding="utf-8")


def _job(_namespace: str, name: str, pods: int, gpus: int, seconds: int, code: int) -> Json:
    container = {"name": "main", "image": "train", "resources": {"limits": {GPU: str(gpus)}} if gpus else {}}
    spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
    }
    template = {"metadata": {"annotations": {"test/seconds": str(seconds), "test/exit": str(code)}}, "spec": spec}
    job = {"parallelism": pods, "completions": pods, "backoffLimit": 1, "template": template}
    return {"metadata": {"name": name}, "spec": job}


def _failed(job: Json) -> bool:
    return any(each["type"] == "Failed" and each["status"] == "True" for each in job["status"].get("conditions", []))


def _bind_for(server: KubeServer, seconds: float) -> None:
    """Bind pods to the first node that has room, in the order of their creation, for this long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pods = server.admin.list("/api/v1/pods")
        free = dict(NODES)
        for each in pods:
            if each["spec"].get("nodeName") and each["status"]["phase"] in ("Pending", "Running"):
                free[each["spec"]["nodeName"]] -= gpus_of(each)
        for each in sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"])):
            if each["spec"].get("nodeName") or each["status"]["phase"] != "Pending":
                continue
            node = next((name for name, gpus in free.items() if gpus >= gpus_of(each)), None)
            if node is None:
                break
            free[node] -= gpus_of(each)
            meta = each["metadata"]
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding"
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            server.admin.post(path, {"metadata": {"name": meta["name"]}, "target": target})
        time.sleep(0.1)


if __name__ == "__main__":
    main()
