"""Poise as its manifests install it: applied by kubectl to a real API server, and run from its StatefulSet's pod template.

The server of Poise is a process of this machine, in the pod `poise-0` that `Processes` runs: with the arguments, variables,
volumes and user of the manifest, and with the token of its service account. What a cluster has besides is played here, as
far as it is needed: the controllers of StatefulSets and of namespaces, the admission plug-in that mounts the token, and
readiness probes. All pods share the network of this machine, so the ports are others than the manifest's.
"""

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from tests.backends import PATIENCE, until
from tests.kube import kubectl as played
from tests.kube.kubelet import Processes
from tests.kube.pods import Image
from tests.kube.server import Json, KubeError, KubeServer, find_kubectl, free_ports
from tests.kube_manifests import BASE, KUBERNETES

SYSTEM, JOBS = "poise-system", "poise-jobs"
HERE = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
NODE = "control-0"  # for the server; it has no GPUs
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
PYTHON = "python-of-this-machine"  # claim and volume
USER = 10001
_IN_NAMESPACES = (
    "/api/v1:pods", "/api/v1:services", "/api/v1:serviceaccounts", "/api/v1:configmaps", "/api/v1:persistentvolumeclaims",
    "/apis/coordination.k8s.io/v1:leases", "/apis/apps/v1:statefulsets", "/apis/networking.k8s.io/v1:networkpolicies",
    "/apis/rbac.authorization.k8s.io/v1:roles", "/apis/rbac.authorization.k8s.io/v1:rolebindings",
)  # fmt: skip


class Installation:
    """The manifests of a folder on a server, and what is needed to run them; a context manager that removes all of it.

    images   of jobs, besides Poise's own, and `bare`, which has no programs
    """

    def __init__(self, server: KubeServer, folder: Path, images: tuple[str, ...] = ("job",)) -> None:
        found = find_kubectl()
        assert found is not None, "tests that use it are skipped without kubectl"
        self.server, self.folder, self._kubectl = server, folder, found
        self.api, self.agents = free_ports(2)
        self._ports = {":8642": f":{self.api}", ":8643": f":{self.agents}"}
        state = folder / "volume"
        state.mkdir()
        os.chown(state, 0, USER)  # as `fsGroup` has it
        state.chmod(0o2775)
        host, _, port = server.url.removeprefix("https://").partition(":")
        known = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        self.kubelet = Processes(
            server,
            images={
                "poise:0.1.0": Image(entrypoint=["poise"], path=HERE, environment=known),
                **{name: Image(path=HERE) for name in images},
                "bare": Image(path="/nowhere"),
            },
            claims={"state-poise-0": state, PYTHON: Path(sys.base_prefix)},
            resolve=self.resolved,
        )
        self._closing = threading.Event()
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._control, daemon=True, name="control plane")

    def __enter__(self) -> Self:
        self.server.add_node(NODE, gpus=0)
        self.kubelet.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.kubectl("delete", "-k", str(KUBERNETES / BASE), "--ignore-not-found", "--timeout=60s", check=False)
        finally:
            self._closing.set()
            self._thread.join(60)
            self.kubelet.close()

    def resolved(self, text: str) -> str:
        """Return a text with the ports that there are here."""
        for port, ours in self._ports.items():
            text = text.replace(port, ours)
        return text

    def environment(self) -> dict[str, str]:
        """Return what kubectl and its plug-ins need to know, with a kubectl that can `exec` and `port-forward` here."""
        programs = self.folder / "bin"
        if not programs.exists():
            programs.mkdir()
            (programs / "kubectl").write_text(f'#!/bin/sh\nexec {sys.executable} {Path(played.__file__)} "$@"\n')
            (programs / "kubectl").chmod(0o755)
        return {
            "PATH": f"{programs}:{HERE}",
            "HOME": str(self.folder),
            "KUBECONFIG": str(self.server.kubeconfig("admin")),
            played.REAL: self._kubectl,
            played.ROOT: self.kubelet.root.name,
            played.PORTS: f"8642={self.api},8643={self.agents}",
        }

    def kubectl(self, *words: str, check: bool = True) -> str:
        """Run kubectl, and return what it prints."""
        environment = self.environment()
        command = [str(self.folder / "bin" / "kubectl"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
        assert not check or done.returncode == 0, f"{words}: {done.stderr or done.stdout}"
        return done.stdout

    def apply(self, folder: str | Path = BASE) -> None:
        """Apply the manifests, and wait until the server is ready."""
        self.kubectl("apply", "-k", str(KUBERNETES / folder))
        self.wait()

    def wait(self) -> None:
        """Wait until the server is ready; say what it has logged if it never is."""
        try:
            until(lambda: (self._set() or {}).get("status", {}).get("readyReplicas") == 1)
        except AssertionError:
            raise AssertionError(f"{self.problems} {self.kubelet.problems} {self.log()}") from None

    def log(self) -> str:
        """Return what the server has logged."""
        with suppress(KeyError, OSError):
            return "".join(self.kubelet.log(SYSTEM, "poise-0", each) for each in ("certificate", "poise"))
        return ""

    def certificate(self) -> Path:
        """Return the file of the server's certificate."""
        return self.folder / "volume" / "tls" / "tls.crt"

    def poise(self, *words: str) -> str:
        """Run a command of Poise as an admin on this machine, and return what it prints."""
        environment = {**self.environment(), **self.client_environment()}
        command = [str(Path(sys.executable).with_name("poise")), *words]
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr or done.stdout}"
        return done.stdout

    def client_environment(self) -> Mapping[str, str]:
        """Return how an admin on this machine reaches the server."""
        token = (self.folder / "volume" / "state" / "admin.token").read_text().strip()
        return {
            "POISE_URL": f"https://localhost:{self.api}", "POISE_TOKEN": token, "POISE_CA": str(self.certificate()),
        }  # fmt: skip

    # What a cluster does ----------------------------------------------------------------------------------------------

    def _set(self) -> Json | None:
        return self.server.admin.find(f"/apis/apps/v1/namespaces/{SYSTEM}/statefulsets/poise")

    def _control(self) -> None:
        while not self._closing.wait(0.2):
            try:
                self._end_namespaces()
                self._run_set()
            except KubeError as error:
                if error.code not in (404, 409):
                    self.problems.append(str(error))
            except httpx.HTTPError:
                continue

    def _run_set(self) -> None:
        """Have the pod that the StatefulSet asks for, one of the newest template, and say how it is."""
        found = self._set()
        path = f"/api/v1/namespaces/{SYSTEM}/pods"
        pod = self.server.admin.find(f"{path}/poise-0")
        generation = None if found is None else str(found["metadata"]["generation"])
        wanted = found is not None and "deletionTimestamp" not in found["metadata"] and found["spec"]["replicas"] > 0
        if pod is not None and (not wanted or pod["metadata"]["labels"]["controller-revision-hash"] != generation):
            if "deletionTimestamp" not in pod["metadata"]:
                self.server.admin.delete(f"{path}/poise-0", uid=pod["metadata"]["uid"])
        elif pod is None and wanted:
            assert found is not None
            self.server.admin.post(path, self._pod(found))
        if found is not None:
            ready = int(pod is not None and wanted and self._is_ready(found, pod))
            count = int(pod is not None)
            status = {
                "observedGeneration": found["metadata"]["generation"], "replicas": count, "currentReplicas": count,
                "updatedReplicas": count, "readyReplicas": ready, "availableReplicas": ready,
                "currentRevision": f"poise-{generation}", "updateRevision": f"poise-{generation}",
            }  # fmt: skip
            if found.get("status") != {**found.get("status", {}), **status}:
                self.server.admin.patch(f"/apis/apps/v1/namespaces/{SYSTEM}/statefulsets/poise/status", {"status": status})

    def _is_ready(self, found: Json, pod: Json) -> bool:
        """Ask the readiness probe of the manifest."""
        process = played.first_process(self.kubelet.root.name, "poise-0", "poise")
        if process is None or "deletionTimestamp" in pod["metadata"]:
            return False
        (container,) = found["spec"]["template"]["spec"]["containers"]
        probe = [self.resolved(word) for word in container["readinessProbe"]["exec"]["command"]]
        with suppress(OSError, KeyError, subprocess.TimeoutExpired):
            return (
                subprocess.run(played.inside(process, probe), capture_output=True, timeout=10, check=False).returncode == 0
            )
        return False

    def _pod(self, found: Json) -> Json:
        """Make the pod as the controller, the scheduler and the admission plug-in of service accounts would."""
        template = copy.deepcopy(found["spec"]["template"])
        spec = template["spec"]
        spec |= {"nodeName": NODE, "hostname": "poise-0", "subdomain": found["spec"]["serviceName"]}
        claim = {"name": "state", "persistentVolumeClaim": {"claimName": "state-poise-0"}}
        token = {
            "name": "kube-api-access",
            "projected": {
                "defaultMode": 0o644,
                "sources": [
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                    {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
                ],
            },
        }
        authorities = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": self.server.ca.read_text()}}
        path = f"/api/v1/namespaces/{SYSTEM}/configmaps"
        if self.server.admin.find(f"{path}/kube-root-ca.crt") is None:
            self.server.admin.post(path, authorities)
        spec["volumes"] = [*spec.get("volumes", []), claim, token]
        mounts = [{"name": "kube-api-access", "mountPath": ACCOUNT, "readOnly": True}]
        if (hidden := _hidden_folder(Path(sys.base_prefix))) is not None:
            # Python is in a folder that only root may enter: cover that folder by one with nothing but this Python in it.
            spec["volumes"] += [
                {"name": "cover", "emptyDir": {}},
                {"name": PYTHON, "persistentVolumeClaim": {"claimName": PYTHON, "readOnly": True}},
            ]
            mounts += [
                {"name": "cover", "mountPath": str(hidden)},
                {"name": PYTHON, "mountPath": sys.base_prefix, "readOnly": True},
            ]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            container["volumeMounts"] = [*container.get("volumeMounts", []), *mounts]
        labels = {**template["metadata"]["labels"], "controller-revision-hash": str(found["metadata"]["generation"])}
        meta = {**template["metadata"], "name": "poise-0", "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}

    def _end_namespaces(self) -> None:
        """Empty namespaces that are to be deleted, and let them go."""
        for each in self.server.admin.list("/api/v1/namespaces"):
            name = each["metadata"]["name"]
            if name not in (SYSTEM, JOBS) or "deletionTimestamp" not in each["metadata"]:
                continue
            for kind in _IN_NAMESPACES:
                base, _, plural = kind.partition(":")
                for left in self.server.admin.list(f"{base}/namespaces/{name}/{plural}"):
                    if "deletionTimestamp" not in left["metadata"]:
                        self.server.admin.delete(f"{base}/namespaces/{name}/{plural}/{left['metadata']['name']}")
            if not self.server.admin.list(f"/api/v1/namespaces/{name}/pods"):
                self.server.admin.put(f"/api/v1/namespaces/{name}/finalize", {**each, "spec": {"finalizers": []}})


def _hidden_folder(path: Path) -> Path | None:
    """Return the topmost folder above a path that only its owner may enter; None: everybody gets there."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
