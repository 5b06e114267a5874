"""A real Kubernetes API server on this machine, with etcd and without anything else: no kubelet, no controllers.

`tests/kube/build` (`make kubernetes`) gets the two programs; `find_assets` finds them. The server listens on loopback
addresses only, in a directory of its own, and ends with the test run, however that ends (`keeper.py`).

What is absent without the controller manager: garbage collection, deletion of namespaces, the life of nodes, default service
accounts, Jobs that make pods. `kubelet.py` and `controllers.py` pretend some of it.
"""

import http.client
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import httpx
from tests.kube.keeper import Keeper, Kept

VERSION = "v1.36.4"
GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"
AUDIENCE = "https://kubernetes.default.svc"
"""The audience of the API server itself; a token for another, such as `poise`, is reviewed and not let in."""
USERS = {
    "admin": "system:masters",
    "poise": "gpu-schedulers",
    "alice": "people",
    "bob": "people",
    "nobody": "",
}
"""Who may ask, and the group of each: RBAC gives all but the first nothing until a test binds a role to user or group."""
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts:poise-system"]}, {"level": "None"}],
}
"""What is written to the audit log: what the service account of an installed Poise does, and nothing of the others."""
START_SECONDS = 120.0
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
READY_TAINTS = {False: "node.kubernetes.io/not-ready", None: "node.kubernetes.io/unreachable"}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Assets:
    """The programs of a server."""

    etcd: Path
    apiserver: Path


def cache() -> Path:
    """Return where `tests/kube/build` puts what it has built."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "poise" / "kubernetes" / VERSION / "bin"


def find_assets() -> Assets | None:
    """Find the programs: in the directory that the variable KUBEBUILDER_ASSETS names, else where they were built."""
    if folder := os.environ.get("KUBEBUILDER_ASSETS"):
        given = Assets(Path(folder) / "etcd", Path(folder) / "kube-apiserver")
        if given.etcd.is_file() and given.apiserver.is_file():
            return given
    etcd, apiserver = shutil.which("etcd"), cache() / "kube-apiserver"
    return Assets(Path(etcd), apiserver) if etcd is not None and apiserver.is_file() else None


def find_kubectl() -> str | None:
    """Find kubectl: on the path, in the directory that KUBEBUILDER_ASSETS names, or where it was built."""
    folders = (os.environ.get("PATH", os.defpath), os.environ.get("KUBEBUILDER_ASSETS", ""), str(cache()))
    return shutil.which("kubectl", path=os.pathsep.join(filter(None, folders)))


class KubeError(Exception):
    """An answer of the API server that says no."""

    def __init__(self, method: str, path: str, code: int, status: Json) -> None:
        super().__init__(f"{method} {path}: {code} {status.get('reason', '')}: {status.get('message', '')}")
        self.code = code
        self.reason = str(status.get("reason", ""))
        self.status = status


def is_allowed(what: Callable[[], object]) -> bool:
    """Ask for something; say whether the asker has the right to."""
    try:
        what()
    except KubeError as error:
        if error.code != 403:
            raise
        return False
    return True


class _ClosingSocket(ssl.SSLSocket):
    """Closed when the connection was reset.

    Python (3.11.7 at least) leaves a socket open that is reset between connecting and the handshake, as when the server is
    killed, and warns of it later, in whatever test runs then.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except ConnectionError:
            self.close()
            raise


def closing_tls(ca: Path) -> ssl.SSLContext:
    """Return the TLS of a client of a server that may be killed at any time."""
    context = ssl.create_default_context(cafile=str(ca))
    context.sslsocket_class = _ClosingSocket
    return context


class Admin:
    """A small client, which may be shared by threads. An answer that is no success is raised as `KubeError`."""

    def __init__(self, url: str, ca: Path, token: str) -> None:
        self.url = url
        self._token = token
        self._tls = closing_tls(ca)
        self._client = httpx.Client(
            base_url=url,
            verify=self._tls,
            headers={"Authorization": f"Bearer {token}"},
            timeout=30.0,
            trust_env=False,
            limits=httpx.Limits(max_connections=32, max_keepalive_connections=16, keepalive_expiry=20),
        )

    def get(self, path: str, **query: str | int | bool) -> Json:
        """Get one object, or any path."""
        return self._ask("GET", path, query)

    def find(self, path: str, **query: str | int | bool) -> Json | None:
        """Get one object; None if it does not exist."""
        try:
            return self.get(path, **query)
        except KubeError as error:
            if error.code == 404:
                return None
            raise

    def list(self, path: str, **query: str | int | bool) -> list[Json]:
        """Get all objects of a collection."""
        found: list[Json] = self.get(path, **query)["items"]
        return found

    def post(self, path: str, body: Mapping[str, Any], **query: str | int | bool) -> Json:
        """Create an object, or call a subresource."""
        return self._ask("POST", path, query, body)

    def put(self, path: str, body: Mapping[str, Any], **query: str | int | bool) -> Json:
        """Replace an object."""
        return self._ask("PUT", path, query, body)

    def patch(self, path: str, body: Mapping[str, Any] | Sequence[Any], kind: str = MERGE) -> Json:
        """Change an object, by default with a merge patch."""
        return self._ask("PATCH", path, {}, body, kind)

    def delete(self, path: str, *, grace: int | None = None, uid: str | None = None, **query: str | int | bool) -> Json:
        """Delete an object or a collection; it is fine if there is none."""
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            return self._ask("DELETE", path, query, options)
        except KubeError as error:
            if error.code == 404:
                return error.status
            raise

    def watch(self, path: str, version: str = "0", **query: str | int | bool) -> "Watch":
        """Watch a collection from a resource version on; by default, what there is comes first.

        Without any, this API server waits 3 s and refuses (`Too large resource version`): etcd 3.4, Debian's, cannot tell it
        how far its cache is. Clients list first, or watch from 0.
        """
        return Watch(self.url, self._tls, self._token, path, {**query, "watch": 1, "resourceVersion": version})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(
        self, method: str, path: str, query: Mapping[str, str | int | bool], body: Any = None, kind: str = "application/json"
    ) -> Json:
        content = None if body is None else json.dumps(body).encode()
        answer = self._client.request(method, path, params=dict(query), content=content, headers={"Content-Type": kind})
        try:
            said: Json = answer.json()
        except ValueError:
            said = {"message": answer.text}
        if answer.status_code >= 400:
            raise KubeError(method, path, answer.status_code, said)
        return said


class Watch:
    """The events of a watch, until the server ends it or it is closed, from another thread if need be."""

    def __init__(self, url: str, tls: ssl.SSLContext, token: str, path: str, query: Mapping[str, str | int | bool]) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        self._connection = http.client.HTTPSConnection(where.hostname, where.port, context=tls)
        self._closed = False
        self._lock = threading.Lock()
        refused: KubeError | None = None
        try:
            self._connection.request("GET", f"{path}?{urlencode(query)}", headers={"Authorization": f"Bearer {token}"})
            self._answer = self._connection.getresponse()
            self._socket = self._connection.sock
            if self._answer.status != 200:
                refused = KubeError("WATCH", path, self._answer.status, json.loads(self._answer.read()))
        except BaseException:
            self._connection.close()
            raise
        if refused is not None:
            self._connection.close()
            raise refused

    def __iter__(self) -> Iterator[Json]:
        try:
            while line := self._answer.readline():
                yield json.loads(line)
        except (OSError, ValueError, http.client.HTTPException):
            if not self._closed:
                raise
        finally:
            self._answer.close()
            with self._lock:
                self._closed = True
                self._connection.close()

    def close(self) -> None:
        """End it; who reads it in another thread comes to the end."""
        with self._lock, suppress(OSError):
            if not self._closed:
                self._closed = True
                self._socket.shutdown(2)


class KubeServer:
    """An API server with etcd. As a context manager it is started and closed."""

    def __init__(self, assets: Assets | None = None) -> None:
        found = assets or find_assets()
        if found is None:
            raise FileNotFoundError("there is no etcd or no kube-apiserver; `make kubernetes` gets them")
        self.assets = found
        self.root = Path(tempfile.mkdtemp(prefix="poise-kube-"))
        self.ca = self.root / "certs" / "apiserver.crt"
        self.audit = self.root / "audit.log"
        """Every request of service accounts of Poise, one JSON document a line."""
        self.url = ""
        self.admin: Admin
        self._tokens = {user: secrets.token_hex(20) for user in USERS}
        self._keeper = Keeper()
        self._ports = free_ports(3)
        self._etcd: Kept | None = None
        self._server: Kept | None = None
        self._names = itertools.count(1)
        self._clients: dict[str, Admin] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The server ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start etcd and the API server, and wait until it answers."""
        (self.root / "certs").mkdir(exist_ok=True)
        key = self.root / "certs" / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60)
        lines = (f'{token},{user},{user},"{USERS[user]}"\n' for user, token in self._tokens.items())
        (self.root / "tokens.csv").write_text("".join(lines))
        (self.root / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports[:2])
        self._etcd = self._run(
            self.assets.etcd, f"--data-dir={self.root}/etcd", f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}", "--unsafe-no-fsync", "--logger=zap", "--log-level=warn",
        )  # fmt: skip
        self.url = f"https://127.0.0.1:{self._ports[2]}"
        self._start_server()

    def stop(self, number: int = signal.SIGKILL) -> None:
        """Kill the API server; etcd goes on. `restart` brings it back."""
        assert self._server is not None
        self._server.signal(number)
        self._server.wait()

    def restart(self) -> None:
        """Start the API server again, at the same address and with what it knew; stop it first if it runs."""
        assert self._server is not None
        if self._server.code is None:
            self.stop()
        self._start_server()

    @contextmanager
    def down(self) -> Iterator[None]:
        """Have no API server for a while: connections are refused."""
        self.stop()
        try:
            yield
        finally:
            self.restart()

    def freeze(self) -> None:
        """Stop the API server in its tracks: connections are accepted, and nothing answers."""
        assert self._server is not None
        self._server.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._server is not None
        self._server.signal(signal.SIGCONT)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Have an API server that does not answer for a while."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def compact(self, *, restart: bool = True) -> str:
        """Forget history, so that watches and lists from older resource versions are refused as `Expired`.

        etcd forgets; the API server has the last events of each kind in memory, and would serve them: so it is restarted,
        unless `restart` is false. Return the resource version as of which history goes on.
        """
        with httpx.Client(base_url=f"http://127.0.0.1:{self._ports[0]}", timeout=30.0, trust_env=False) as etcd:
            mark = {"key": "cG9pc2U=", "value": ""}  # a revision of our own: no revision can be compacted twice
            revision = etcd.post("/v3/kv/put", json=mark).raise_for_status().json()["header"]["revision"]
            etcd.post("/v3/kv/compaction", json={"revision": revision, "physical": True}).raise_for_status()
        if restart:
            self.restart()
        return str(revision)

    def close(self) -> None:
        """End everything, and remove the directory."""
        for client in self._clients.values():
            client.close()
        self._keeper.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # Who asks -----------------------------------------------------------------------------------------------------------

    def token(self, user: str) -> str:
        """Return the token of one of `USERS`."""
        return self._tokens[user]

    def client(self, user: str = "admin") -> Admin:
        """Return the client of one of `USERS`, which is closed with the server."""
        if user not in self._clients:
            self._clients[user] = Admin(self.url, self.ca, self.token(user))
        return self._clients[user]

    def kubeconfig(self, user: str = "poise", namespace: str = "default") -> Path:
        """Write a kubeconfig of one of `USERS`."""
        path = self.root / f"kubeconfig-{user}-{namespace}.yaml"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": user, "user": {"token": self.token(user)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(content, indent=2))  # JSON is YAML
        path.chmod(0o600)
        return path

    def allow(self, user: str, rules: Sequence[Mapping[str, Sequence[str]]], namespace: str | None = None) -> None:
        """Let a user do what the rules of RBAC say, everywhere or in one namespace."""
        kind, path = ("ClusterRole", "") if namespace is None else ("Role", f"/namespaces/{namespace}")
        name, group = f"test-{user}-{next(self._names)}", "rbac.authorization.k8s.io"
        where = f"/apis/{group}/v1{path}/"
        self.admin.post(where + kind.lower() + "s", {"metadata": {"name": name}, "rules": list(rules)})
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": kind, "name": name},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        }
        self.admin.post(where + kind.lower() + "bindings", binding)

    # What there is ------------------------------------------------------------------------------------------------------

    def namespace(self, prefix: str = "test") -> str:
        """Make a namespace that no test had before, with the service account that pods have by default."""
        name = f"{prefix}-{next(self._names)}-{secrets.token_hex(2)}"
        self.admin.post("/api/v1/namespaces", {"metadata": {"name": name}})
        self.service_account(name)
        return name

    def service_account(self, namespace: str, name: str = "default") -> None:
        """Make a service account."""
        self.admin.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})

    def add_node(
        self,
        name: str,
        gpus: int = 4,
        product: str = "Tesla-V100-SXM2-16GB",
        labels: Mapping[str, str] | None = None,
        cpu: str = "64",
        memory: str = "512Gi",
    ) -> None:
        """Make a node that is ready, with GPUs of one kind as their device plug-in and feature discovery tell of them."""
        known = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        if gpus:
            known |= {PRODUCT: product, "nvidia.com/gpu.count": str(gpus), "nvidia.com/gpu.present": "true"}
        self.admin.post("/api/v1/nodes", {"metadata": {"name": name, "labels": {**known, **(labels or {})}}})
        amounts = {"cpu": cpu, "memory": memory, "pods": "110", "ephemeral-storage": "1Ti"} | (
            {GPU: str(gpus)} if gpus else {}
        )
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
        }
        self.admin.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        self.set_ready(name)

    def set_gpus(self, name: str, gpus: int, capacity: int | None = None) -> None:
        """Change how many GPUs of a node can be had, as where one has broken."""
        amounts = {"allocatable": {GPU: str(gpus)}} | ({} if capacity is None else {"capacity": {GPU: str(capacity)}})
        self.admin.patch(f"/api/v1/nodes/{name}/status", {"status": amounts})

    def set_ready(self, name: str, ready: bool | None = True, message: str = "") -> None:
        """Say whether a node is ready, with the taints that the node controller adds.

        ready   False: its kubelet says that it is not; None: nothing was heard of its kubelet
        """
        reason, said = {
            True: ("KubeletReady", "kubelet is posting ready status"),
            False: ("KubeletNotReady", "container runtime is down"),
            None: ("NodeStatusUnknown", "Kubelet stopped posting node status."),
        }[ready]
        condition = {
            "type": "Ready",
            "status": "Unknown" if ready is None else str(ready),
            "reason": reason,
            "message": message or said,
            "lastHeartbeatTime": now(),
            "lastTransitionTime": now(),
        }
        path = f"/api/v1/nodes/{name}"
        self.admin.patch(f"{path}/status", {"status": {"conditions": [condition]}}, STRATEGIC)
        taints = [
            each
            for each in self.admin.get(path)["spec"].get("taints", [])
            if each["key"] not in READY_TAINTS.values()  # admission adds one to a node that is new
        ]
        if not ready:
            taints += [{"key": READY_TAINTS[ready], "effect": effect} for effect in ("NoSchedule", "NoExecute")]
        self.admin.patch(path, {"spec": {"taints": taints or None}})

    def cordon(self, name: str, cordoned: bool = True) -> None:
        """Say whether new pods may come to a node."""
        self.admin.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": cordoned or None}})

    def remove_node(self, name: str) -> None:
        """Remove a node; its pods stay, as nothing collects garbage."""
        self.admin.delete(f"/api/v1/nodes/{name}")

    def wipe(self) -> None:
        """Remove nodes, what tests make in namespaces, and what `allow` has allowed; start the server if it is down.

        Namespaces stay, as nothing could delete them; so do definitions of resources.
        """
        assert self._server is not None
        self.thaw()
        if self._server.code is not None:
            self.restart()
        self._disallow()
        for path in self._kinds():
            try:
                left = self.admin.list(path)
            except KubeError as error:
                if error.code in (404, 405):
                    continue
                raise
            for each in left:
                meta = each["metadata"]
                if meta.get("namespace", "").startswith("kube-") or meta["name"] == "kubernetes":
                    continue  # what the server makes for itself
                base, _, plural = path.rpartition("/")
                where = f"{base}/namespaces/{meta['namespace']}/{plural}" if "namespace" in meta else path
                if meta.get("finalizers"):
                    with suppress(KubeError):
                        self.admin.patch(f"{where}/{meta['name']}", {"metadata": {"finalizers": None}})
                self.admin.delete(f"{where}/{meta['name']}", grace=0)

    def _disallow(self) -> None:
        for kind in ("clusterrolebindings", "clusterroles"):
            for each in self.admin.list(f"/apis/rbac.authorization.k8s.io/v1/{kind}"):
                if each["metadata"]["name"].startswith("test-"):
                    self.admin.delete(f"/apis/rbac.authorization.k8s.io/v1/{kind}/{each['metadata']['name']}")

    def _kinds(self) -> list[str]:
        core = ("pods", "services", "configmaps", "secrets", "persistentvolumeclaims", "nodes")
        owners = [
            f"/apis/{each['spec']['group']}/{each['spec']['versions'][0]['name']}/{each['spec']['names']['plural']}"
            for each in self.admin.list("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
        ]
        groups = ("batch/v1/jobs", "policy/v1/poddisruptionbudgets", "coordination.k8s.io/v1/leases")
        return [*owners, *(f"/apis/{each}" for each in groups), *(f"/api/v1/{each}" for each in core)]

    def _start_server(self) -> None:
        certs = self.root / "certs"
        self._server = self._run(
            self.assets.apiserver, f"--etcd-servers=http://127.0.0.1:{self._ports[0]}", "--bind-address=127.0.0.1",
            f"--secure-port={self._ports[2]}", f"--cert-dir={certs}", "--advertise-address=127.0.0.1",
            "--service-cluster-ip-range=10.0.0.0/24", f"--service-account-issuer={AUDIENCE}", f"--api-audiences={AUDIENCE}",
            f"--service-account-signing-key-file={certs}/sa.key", f"--service-account-key-file={certs}/sa.key",
            f"--token-auth-file={self.root}/tokens.csv", "--authorization-mode=RBAC", "--anonymous-auth=false",
            "--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none", "--allow-privileged=true",
            f"--audit-policy-file={self.root}/audit-policy.json", f"--audit-log-path={self.audit}", "--profiling=false",
            "--v=1",
        )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self.ca.exists():
                with suppress(httpx.HTTPError, KubeError, ssl.SSLError):
                    self.admin = self.client()
                    self.admin.get("/readyz")
                    return
            if self._server.code is not None or time.monotonic() > deadline:
                log = (self.root / "kube-apiserver.log").read_text(errors="replace")[-4000:]
                raise RuntimeError(f"the API server did not start: {log}")
            time.sleep(0.1)

    def _run(self, program: Path, *options: str) -> Kept:
        environment = {"PATH": os.defpath, "HOME": str(self.root)}
        return self._keeper.start([str(program), *options], environment, self.root / f"{program.name}.log")


def free_ports(count: int) -> list[int]:
    """Find ports that nothing listens on, below those that clients get: a server that was away gets its own back."""
    found: list[int] = []
    while len(found) < count:
        port = 21000 + secrets.randbelow(11000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return list(found) if len(set(found)) == count else free_ports(count)


def now() -> str:
    """Return the time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
