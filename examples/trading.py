"""What trading GPU types is worth to each tenant: the heterogeneous set-up of Gandiva_fair (EuroSys 2020), simulated.

python examples/trading.py [FILE] [--hours H] [--jobs N] [--seeds N]

The cluster has 12 V100, 24 P100 and 128 K80 in nodes of four. Four tenants with equal tickets train one model each, in many
jobs of 1, 2 or 4 GPUs that outlast the run: models that gain little from a fast GPU (VAE, SuperResolution) and models that
gain much (LSTM, ResNeXt50). Speeds are those of the paper's Table 1, which the shipped table has. A tenant's work is its
GPU-hours of each type times its model's speed there, K80 = 1. Each trace is run twice, without trades and with them.

A short run by default, in seconds; docs/explanation/trading.md has the long one.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from poise.engine.journal import JournalReader
from poise.lab.analysis.tenant_usage import TenantUsage
from poise.lab.experiment import Experiment, simulate
from poise.lab.report.figures import bars, standalone
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.job import Job
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped

CLUSTER = parse_cluster("v100:12,p100:24,k80:128")
MODELS = {"vae": "VAE", "superres": "SuperResolution", "lstm": "LSTM", "resnext": "ResNeXt50"}
GANGS = (1, 2, 4)
HOUR = 3600.0


@dataclass(frozen=True)
class Got:
    """A tenant's GPUs of each type on average, and its work in K80s."""

    gpus: tuple[float, ...]
    work: float


def jobs(count: int, seed: int, hours: float) -> Trace:
    """So many jobs of each tenant, all there at the start, each longer than the run."""
    draw = random.Random(seed)
    order = [tenant for tenant in MODELS for _ in range(count)]
    draw.shuffle(order)
    found = []
    for place, tenant in enumerate(order):
        duration = 10 * hours * HOUR  # on a V100
        found.append(Job(f"{tenant}-{place}", 0.0, draw.choice(GANGS), duration, tenant=tenant, model=MODELS[tenant]))
    return Trace("four tenants", tuple(TraceJob(job) for job in found))


def speeds(tenant: str) -> tuple[float, ...]:
    """Speed of the tenant's model on one GPU of each type of the cluster; K80 = 1."""
    job = Job("any", 0.0, 1, 1.0, model=MODELS[tenant])
    packed = [rates[0] for rates in Speeds(shipped(), CLUSTER).estimate(job).rates]
    return tuple(each / packed[CLUSTER.gpu_types.index("k80")] for each in packed)


def ran(trace: Trace, trade: str, hours: float) -> tuple[dict[str, Got], TenantUsage]:
    """What each tenant got with or without trades, and all that the journal says."""
    experiment = Experiment(CLUSTER, f"gandiva-fair:trade={trade}", until=hours * HOUR)
    with TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        simulate(trace, experiment, journal=journal)
        books = TenantUsage.of(JournalReader(journal).entries(), CLUSTER)
    return {name: _got(name, books.tenants[name].held, hours) for name in MODELS}, books


def _got(tenant: str, gpu_hours: list[float], hours: float) -> Got:
    gpus = tuple(each / hours for each in gpu_hours)
    return Got(gpus, sum(each * speed for each, speed in zip(gpus, speeds(tenant), strict=True)))


def mean(runs: Sequence[Mapping[str, Got]], tenant: str) -> Got:
    """Over seeds."""
    columns = zip(*(each[tenant].gpus for each in runs), strict=True)
    return Got(tuple(fmean(column) for column in columns), fmean(each[tenant].work for each in runs))


def main(asked: argparse.Namespace) -> None:
    """Simulate, print, draw, and say where."""
    traces = [jobs(asked.jobs, seed, asked.hours) for seed in range(asked.seeds)]
    without = [ran(trace, "off", asked.hours)[0] for trace in traces]
    found = [ran(trace, "on", asked.hours) for trace in traces]
    with_trade = [each for each, _ in found]
    sys.stdout.write(f"{'':12}{'without trade':^24}{'with trade':^24}{'work':>8}\n")
    sys.stdout.write(f"{'tenant':12}" + "".join(f"{name:>8}" for name in (*CLUSTER.gpu_types, *CLUSTER.gpu_types)) + "\n")
    gains = {}
    for tenant in MODELS:
        before, after = mean(without, tenant), mean(with_trade, tenant)
        gains[tenant] = after.work / before.work - 1
        cells = "".join(f"{each:8.2f}" for each in (*before.gpus, *after.gpus))
        sys.stdout.write(f"{tenant:12}{cells}{gains[tenant]:+8.1%}\n")
    sys.stdout.write("\ntrades of the last run:\n")
    for deal in found[-1][1].trades:
        terms = f"{deal.gpus:.2f} {deal.fast} of {deal.seller} for {deal.price:.2f} {deal.slow} each"
        sys.stdout.write(f"  {deal.buyer} buys {terms}\n")
    title = "More work done thanks to trades, by tenant"
    asked.file.write_text(standalone(bars(gains, title=title, unit="percent", best="highest")), encoding="utf-8")
    sys.stdout.write(f"\nfigure: {asked.file}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("trading.svg"))
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=36, help="of each tenant")
    parser.add_argument("--seeds", type=int, default=1)
    main(parser.parse_args())
