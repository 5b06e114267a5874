"""`make bench`: how fast Poise places pods on a real Kubernetes API server, and what a large cluster costs it.

Bars (issue "Poise on Kubernetes"): with gangs of 8 pods, binds a second at least those of kube-scheduler on the same server
and the same pods, its client limits raised out of the way; with 5,000 nodes and 20,000 pending pods, a decision in under
2 s, under 1 GiB of memory, and at most two requests to the API server a pod.

Poise is a real `poise serve --backend kubernetes`. Nodes are only said to exist, and pods never run: what is measured ends
with the bind. In each turn the pods are made first and one of the two schedulers is started then; turns of the two
alternate, and the medians are compared. A rate counts from the start of the process to the last bind, so that neither gains
by deciding everything before its first bind; beside it stands the rate from the first bind to the last.

Binds are seen by a watch on bound pods, which is the same for both, and requests are counted by the server.
"""

import argparse
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from tests.bench.live import Service, counter, decisions, together
from tests.bench.speed import say
from tests.kube.server import GPU, PRODUCT, KubeServer, Watch, cache, closing_tls, find_assets, now

GANG = 8
SENDERS = 8
"""Connections that make nodes and pods."""
PRODUCTS = ("Tesla-V100-SXM2-16GB", "Tesla-P100-PCIE-16GB", "Tesla-K80")
TURNS, PODS = 3, 4_000
"""Of fewer pods, the start of a process is a large part of the time, and Poise takes one or two seconds longer for it."""
NODES, PENDING, GPUS_EACH = 5_000, 20_000, 4
"""GPUs of a pod are such that half of the pending pods find room, and the others wait."""
PATIENCE = 600.0
MOST_DECISION, MOST_MEMORY, MOST_CALLS = 2.0, 1 << 30, 2.0
LEAST_RATIO = 1.0


def send(server: KubeServer, requests: Iterable[tuple[str, str, Any]], senders: int = SENDERS) -> None:
    """Send many requests over several connections that are kept open; anything but 2xx ends the measurement."""
    where, left = urlsplit(server.url), iter(list(requests))
    headers = {"Authorization": f"Bearer {server.token('admin')}"}

    def work(_number: int) -> None:
        connection = http.client.HTTPSConnection(where.hostname or "", where.port, context=closing_tls(server.ca))
        for method, path, body in left:  # a list's iterator may be shared by threads
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            connection.request(method, path, json.dumps(body), headers | {"Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")
        connection.close()

    together(work, senders)


def add_nodes(server: KubeServer, count: int, gpus: int = 8, *, untainted: bool = False) -> None:
    """Make nodes that are ready, of a few types. Admission gives a new node a taint that kube-scheduler heeds."""
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(gpus)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastHeartbeatTime": now()}
    names = [f"node-{number:05d}" for number in range(count)]

    def node(number: int, name: str) -> dict[str, Any]:
        labels = {"kubernetes.io/hostname": name, PRODUCT: PRODUCTS[number % len(PRODUCTS)]}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [{**ready, "lastTransitionTime": now()}]}
        return {"metadata": {"name": name, "labels": labels}, "status": status}

    send(server, [("POST", "/api/v1/nodes", node(number, name)) for number, name in enumerate(names)])
    if untainted:
        send(server, [("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}) for name in names])


def add_pods(server: KubeServer, namespaces: Sequence[str], count: int, scheduler: str, gpus: int = 1) -> None:
    """Make gangs of pods that nobody owns."""

    def pod(namespace: str, number: int) -> tuple[str, str, Any]:
        gang = f"gang-{number // GANG:05d}"
        notes = {"poise.run/gang": gang, "poise.run/gang-size": str(GANG)}
        container = {"name": "main", "image": "any", "resources": {"limits": {GPU: str(gpus)}}}
        spec = {"schedulerName": scheduler, "restartPolicy": "Never", "containers": [container]}
        meta = {"name": f"{gang}-{number % GANG}", "annotations": notes}
        return "POST", f"/api/v1/namespaces/{namespace}/pods", {"metadata": meta, "spec": spec}

    send(server, [pod(namespaces[(number // GANG) % len(namespaces)], number) for number in range(count)])


def remove_pods(server: KubeServer, namespaces: Sequence[str]) -> None:
    """Delete all pods, also those that are bound, and wait until they are gone."""
    body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
    while any(server.admin.list(f"/api/v1/namespaces/{each}/pods", limit=1) for each in namespaces):
        send(server, [("DELETE", f"/api/v1/namespaces/{each}/pods", body) for each in namespaces], len(namespaces))


@dataclass
class Binds:
    """The moments at which pods were seen to be bound. `problem`: why no more are seen."""

    moments: list[float]
    problem: Exception | None = None

    def wait(self, count: int, is_alive: Callable[[], bool]) -> None:
        """Wait until so many are bound."""
        deadline = monotonic() + PATIENCE
        while len(self.moments) < count:
            if self.problem is not None:
                raise self.problem
            if monotonic() > deadline or not is_alive():
                raise RuntimeError(f"only {len(self.moments):,} of {count:,} pods are bound")
            sleep(0.02)


@contextmanager
def watching(server: KubeServer) -> Iterator[Binds]:
    """Count pods that are bound: a pod is ADDED to this watch when it is."""
    bound, seen, closing = "spec.nodeName!=", Binds([]), Event()
    version: str = server.admin.get("/api/v1/pods", fieldSelector=bound)["metadata"]["resourceVersion"]
    streams: list[Watch] = []

    def work() -> None:
        nonlocal version
        try:
            while not closing.is_set():  # a watch may end at any time; the next one goes on where it ended
                streams.append(server.admin.watch("/api/v1/pods", version, fieldSelector=bound))
                for event in streams[-1]:
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"the watch on pods has ended: {event['object']}")  # noqa: TRY301
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] == "ADDED":
                        seen.moments.append(monotonic())
        except Exception as error:
            seen.problem = error

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        closing.set()
        while thread.is_alive():
            if streams:
                streams[-1].close()
            thread.join(0.1)


def requests_of(server: KubeServer) -> Counter[str]:
    """Return how many requests the API server has answered so far, by verb and resource; watches that go on do not count."""
    text: str = server.admin.get("/metrics")["message"]  # which is no JSON
    found: Counter[str] = Counter()
    for labels, value in re.findall(r"^apiserver_request_total{(.*)} (\S+)$", text, re.MULTILINE):
        said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        what = "/".join(filter(None, (said["resource"], said["subresource"])))
        found[f"{said['verb']} {what}"] += int(float(value))
    return found


@contextmanager
def poise(server: KubeServer) -> Iterator[Service]:
    """Run `poise serve` on the cluster, with a state directory of its own."""
    folder = Path(tempfile.mkdtemp(prefix="poise-bench-"))
    kubeconfig = str(server.kubeconfig("admin"))
    options = ("--backend", "kubernetes", "--kubeconfig", kubeconfig, "--agents", "127.0.0.1:0", "--policy", "max-min")
    service = Service(folder / "state", options)
    try:
        service.start()
        yield service
    finally:
        with suppress(AttributeError):
            service.kill()
        # The next one must not wait for the lease of one that was killed.
        server.admin.delete("/apis/coordination.k8s.io/v1/namespaces/default/leases/poise")
        shutil.rmtree(folder)


@contextmanager
def kube_scheduler(server: KubeServer, program: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run kube-scheduler as it is, but for its limits."""
    options = ("--leader-elect=false", "--secure-port=0", "--kube-api-qps=100000", "--kube-api-burst=100000")
    with (server.root / "kube-scheduler.log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--kubeconfig={server.kubeconfig('admin')}", *options], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Rates:
    """Binds a second up to the last one: `whole` from the start of the process on, `steady` from the first bind on."""

    whole: float
    steady: float


def bound_in(server: KubeServer, namespaces: Sequence[str], pods: int, program: Path | None) -> Rates:
    """Let one scheduler bind pods that are there when it starts: Poise, or the program given."""
    add_pods(server, namespaces, pods, "poise" if program is None else "default-scheduler")
    try:
        with watching(server) as binds:
            began = monotonic()
            with poise(server) if program is None else kube_scheduler(server, program) as scheduler:
                process = scheduler.process if isinstance(scheduler, Service) else scheduler
                binds.wait(pods, lambda: process.poll() is None)
            first, last = min(binds.moments), max(binds.moments)
    finally:
        remove_pods(server, namespaces)
    return Rates(pods / (last - began), (pods - 1) / (last - first))


def measure_rates(pods: int, turns: int, program: Path) -> Iterator[bool]:
    """Compare the binds a second of both."""
    ours: list[Rates] = []
    theirs: list[Rates] = []
    with KubeServer() as server:
        namespaces = [server.namespace("tenant") for _ in range(4)]
        add_nodes(server, -(-pods // 8), untainted=True)
        for turn in range(turns):
            # Whoever comes second in a turn has a server that is warmer: they take turns in that, too.
            for is_ours in (True, False) if turn % 2 else (False, True):
                rates = bound_in(server, namespaces, pods, None if is_ours else program)
                (ours if is_ours else theirs).append(rates)
                name = "Poise" if is_ours else "kube-scheduler"
                print(f"  {name}: {rates.whole:,.0f} binds a second, {rates.steady:,.0f} from the first on", flush=True)
    for since in ("whole", "steady"):
        mine, other = (median(getattr(each, since) for each in rates) for rates in (ours, theirs))
        where = "from the start of the process on" if since == "whole" else "from the first bind on"
        text = f"{pods:,} pods in gangs of {GANG}: {where}, Poise binds {mine:,.0f} a second, kube-scheduler {other:,.0f}"
        text += f": {mine / other:.2f} times as many"
        yield say(text, mine / other >= LEAST_RATIO, f"at least {LEAST_RATIO:g} times")


def measure_size(nodes: int, pods: int) -> Iterator[bool]:
    """Measure a decision on a large cluster, and what it takes until all that have room are bound."""
    with KubeServer() as server:
        namespaces = [server.namespace("tenant") for _ in range(4)]
        began = monotonic()
        add_nodes(server, nodes)
        add_pods(server, namespaces, pods, "poise", GPUS_EACH)
        print(f"  {nodes:,} nodes and {pods:,} pods made in {monotonic() - began:.0f} s", flush=True)
        # A gang is on nodes of one type.
        of_types = [len(range(first, nodes, len(PRODUCTS))) for first in range(len(PRODUCTS))]
        fitting = min(pods, sum(each * 8 // (GANG * GPUS_EACH) * GANG for each in of_types))
        with watching(server) as binds:
            before, began = requests_of(server), monotonic()
            with poise(server) as service:
                ready = monotonic()
                binds.wait(fitting, lambda: service.process.poll() is None)
                took = max(binds.moments) - ready
                sleep(30.0)  # reasons of those that wait are told, and another look is taken at everything
                total, mean, bound = decisions(service)
                peak, launched = service.peak(), counter(service, "poise_runs_launched_total")
                calls = requests_of(server) - before
        say(f"it answers {ready - began:.1f} s after its start; {len(binds.moments):,} pods bound in {took:.1f} s, "
            f"{launched:,} gangs started", len(binds.moments) == fitting, f"{fitting:,} pods")  # fmt: skip
        text = f"{total:,} decisions, {mean * 1e3:.1f} ms on average, all within {bound:g} s"
        yield say(text, bound <= MOST_DECISION, f"under {MOST_DECISION:g} s")
        yield say(f"peak memory {peak / (1 << 20):,.0f} MiB", peak < MOST_MEMORY, "under 1 GiB")
        count = sum(calls.values())
        most = ", ".join(f"{what} {number:,}" for what, number in calls.most_common(6))
        text = f"{count:,} requests, {count / pods:.2f} a pod ({most})"
        yield say(text, count / pods <= MOST_CALLS, f"at most {MOST_CALLS:g} a pod")


def main() -> int:
    """Measure, print, and say by the exit code whether all bars hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pods", type=int, default=PODS, help="that are bound in each turn")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each scheduler; 0: leave the comparison out")
    parser.add_argument("--nodes", type=int, default=NODES, help="of the large cluster; 0: leave it out")
    parser.add_argument("--pending", type=int, default=PENDING, help="pods of the large cluster")
    given = parser.parse_args()
    if find_assets() is None:
        print("kubernetes: skipped: there is no etcd or no kube-apiserver here; `make kubernetes` gets them")
        return 0
    held: list[bool] = []
    program = cache() / "kube-scheduler"
    if not program.is_file():
        print("kubernetes: no comparison: there is no kube-scheduler here; `make kubernetes WITH=kube-scheduler` gets it")
    elif given.turns:
        held += measure_rates(given.pods, given.turns, program)
    if given.nodes:
        held += measure_size(given.nodes, given.pending)
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
