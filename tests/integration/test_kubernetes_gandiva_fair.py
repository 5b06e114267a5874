"""The heterogeneous set-up of Gandiva_fair (EuroSys 2020) on a real API server, against its simulation.

Twelve V100, 24 P100 and 128 K80 in nodes of four; four tenants, each a namespace that trains one model in Jobs of one, two
or four pods that outlast the test. Jobs leave by `suspend`, and controllers make their pods anew when it is their turn. Pods
only pretend to run, and their kubelets note how long each had its GPU: that is compared, not what the scheduler has decided.
A quantum is shorter than the minute of the paper, and with it all other times of the policy.

The simulator gets the jobs with the times at which they were found, and what a start costs here: pods leave, are made anew
and are bound in seconds, in which their GPUs are idle. A quantum is so short that these seconds count.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from time import sleep, time  # noqa: TID251 - journals carry this clock, and what kubelets note is compared with them
from typing import NamedTuple, Self

import pytest
from tests.e2e.kube_service import KubeService
from tests.e2e.service import until
from tests.kube.controllers import JOBS, Controllers
from tests.kube.kubelet import Pretend
from tests.kube.server import GPU, Json, KubeServer

from poise.cli.options import journal_file
from poise.engine.journal import JournalReader
from poise.lab.analysis.tenant_usage import TenantUsage
from poise.lab.experiment import Experiment, simulate
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.model.action import JournalEntry, Launch
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.event import Submitted
from poise.service.backends.kubernetes import names

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

PRODUCTS = {"v100": ("Tesla-V100-SXM2-16GB", 12), "p100": ("Tesla-P100-PCIE-16GB", 24), "k80": ("Tesla-K80", 128)}
MODELS = {"vae": "VAE", "superres": "SuperResolution", "lstm": "LSTM", "resnext": "ResNeXt50"}
PER_NODE, GANGS, JOBS_EACH = 4, (1, 2, 4), 36
QUANTUM, QUANTA = 20.0, 9
POLICY = f"gandiva-fair:quantum={QUANTUM},rest={5 * QUANTUM},cost={QUANTUM}"
TOLERANCE = 0.03

Usage = Mapping[tuple[str, str], float]
"""GPU-seconds by tenant and GPU type."""


class Metered(Pretend):
    """Notes when each pod got its GPU and when it gave it back, by the clock of this machine."""

    def __init__(self, server: KubeServer) -> None:
        super().__init__(server)
        self._held_from: dict[str, tuple[str, str, int, float]] = {}
        self._held_until: dict[str, float] = {}

    def _begin(self, pod: Json, gpus: frozenset[int]) -> None:
        meta = pod["metadata"]
        self._held_from[meta["uid"]] = meta["namespace"], pod["spec"]["nodeName"], len(gpus), time()
        super()._begin(pod, gpus)

    def release(self, uid: str) -> None:
        self._held_until.setdefault(uid, time())
        super().release(uid)

    def usage(self, spaces: Mapping[str, str], since: float, until: float) -> Usage:
        """How much the pods in these namespaces, tenant to namespace, have had between two moments."""
        tenants = {space: tenant for tenant, space in spaces.items()}
        found = dict.fromkeys(((tenant, kind) for tenant in spaces for kind in PRODUCTS), 0.0)
        for uid, (space, node, gpus, began) in self._held_from.items():
            seconds = min(self._held_until.get(uid, until), until) - max(began, since)
            found[tenants[space], node.partition("-")[0]] += max(seconds, 0.0) * gpus
        return found


class Books(NamedTuple):
    """What a journal says: GPU-seconds from decision to decision, and how many GPUs were given out in launches."""

    booked: Usage
    started: Usage

    @classmethod
    def of(cls, entries: Iterable[JournalEntry], cluster: Cluster, until: float) -> Self:
        """Read a journal up to a moment."""
        usage, started, tenants = TenantUsage(cluster), Counter[tuple[str, str]](), dict[str, str]()
        for entry in entries:
            if entry.now > until:
                break
            usage.take(entry)
            tenants |= {event.job.id: event.job.tenant for event in entry.events if isinstance(event, Submitted)}
            for action in entry.actions:
                if isinstance(action, Launch):
                    for node, mask in action.gpus:
                        started[tenants[action.job], cluster.nodes[node].gpu_type] += mask.bit_count()
        usage.take(JournalEntry(until, (), ()))
        held = {tenant: zip(usage.types, each.held, strict=True) for tenant, each in usage.tenants.items()}
        return cls({(tenant, kind): 3600 * each for tenant, had in held.items() for kind, each in had}, started)

    def after(self, cost: float) -> Usage:
        """GPU-seconds that are left of these if each start of a GPU takes so long."""
        return {key: each - cost * self.started[key] for key, each in self.booked.items()}


def simulated(journal: Path, seconds: float) -> tuple[Books, Books, float]:
    """Return the books of a journal and of a simulation of its jobs, and when the first of them was submitted."""
    with journal_file(journal) as file:
        reader = JournalReader(file)
        header, entries = reader.header, [*reader.entries()]
    found = [event.job for entry in entries for event in entry.events if isinstance(event, Submitted)]
    first = found[0].submitted
    live = Books.of(entries, header.cluster, first + seconds)
    jobs = (replace(job, submitted=job.submitted - first, duration=100 * seconds) for job in found)
    experiment = Experiment(header.cluster, header.policy, header.placement, settings=header.settings, until=seconds)
    file = journal / "simulated.jsonl"
    simulate(Trace("four tenants", tuple(TraceJob(job) for job in jobs)), experiment, journal=file)
    return live, Books.of(JournalReader(file).entries(), header.cluster, seconds), first


def shares(usage: Usage, by: Iterable[str]) -> dict[str, float]:
    """Each tenant's part of what all have had on these types."""
    kinds = set(by)
    had = {
        name: sum(amount for (tenant, kind), amount in usage.items() if tenant == name and kind in kinds) for name in MODELS
    }
    return {tenant: each / sum(had.values()) for tenant, each in had.items()}


def submit(server: KubeServer, spaces: Mapping[str, str]) -> int:
    """Make the Jobs of all tenants, mixed; return how many."""
    draw = random.Random(0)
    order = [tenant for tenant in spaces for _ in range(JOBS_EACH)]
    draw.shuffle(order)
    for number, tenant in enumerate(order):
        pods = draw.choice(GANGS)
        container = {"name": "main", "image": "any", "resources": {"limits": {GPU: "1"}}}
        template = {
            "metadata": {"annotations": {names.MODEL: MODELS[tenant]}},
            "spec": {"schedulerName": "poise", "restartPolicy": "Never", "containers": [container]},
        }
        spec = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "template": template}
        job = {"metadata": {"name": f"{tenant}-{number}"}, "spec": spec}
        server.admin.post(f"{JOBS}/namespaces/{spaces[tenant]}/jobs", job)
    return len(order)


def test_four_tenants_get_the_shares_of_gpu_time_that_the_simulation_gives_them(
    fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = QUANTUM * QUANTA
    nodes = {
        f"{kind}-{each}": (name, PER_NODE) for kind, (name, gpus) in PRODUCTS.items() for each in range(gpus // PER_NODE)
    }
    spaces = {tenant: fresh_kube.namespace(tenant) for tenant in MODELS}
    for tenant, space in spaces.items():
        fresh_kube.admin.patch(f"/api/v1/namespaces/{space}", {"metadata": {"labels": {names.TENANT: tenant}}})
    kubelet = Metered(fresh_kube)
    options = ("--policy", POLICY, "--cadence", "events", "--minimum-run", "0s")
    service = KubeService(tmp_path, fresh_kube, nodes, *options, kubelet=kubelet)
    service.talk_to_it(monkeypatch)
    with Controllers(fresh_kube, 0.25) as controllers:
        try:
            client = service.up()
            count = submit(fresh_kube, spaces)
            until(lambda: client.queue(limit=1).total == count, "not all Jobs were found")
            sleep(seconds)  # the submissions took a moment, so all of the time that is compared has passed then
            service.stop()
        finally:
            service.close()
    assert (kubelet.problems, controllers.problems) == ([], [])
    live, alone, first = simulated(service.state, seconds)
    got = kubelet.usage(spaces, first, first + seconds)
    cost = (sum(live.booked.values()) - sum(got.values())) / sum(live.started.values())
    want = alone.after(cost)
    columns = {kind: [kind] for kind in PRODUCTS} | {"all": [*PRODUCTS]}
    pairs = {name: (shares(got, kinds), shares(want, kinds)) for name, kinds in columns.items()}
    lines = ["", f"{'':10}" + "".join(f"{name:>18}" for name in pairs)]
    lines += [each.ljust(10) + "".join(f"{a[each]:9.2%}{b[each]:9.2%}" for a, b in pairs.values()) for each in MODELS]
    lines.append(f"GPUs in use: {sum(got.values()) / seconds:.1f}, simulated {sum(want.values()) / seconds:.1f}")
    starts = [sum(each.started.values()) for each in (live, alone)]
    lines.append(f"a start takes {cost:.2f} s; GPUs were started {starts[0]} times, simulated {starts[1]}")
    print("\n".join(lines))  # noqa: T201 - the figures of docs/explanation/fidelity.md
    for had, expected in pairs.values():
        assert had == pytest.approx(expected, abs=TOLERANCE)
