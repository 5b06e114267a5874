"""`make bench`: what 1,000 nodes with 5,000 runs cost the server.

Bars (issue "Several machines"): server CPU under 20 % of one core; a decision in under 1 s. The server is a real
`poise serve --backend remote`; agents are simulated ones in one process (`tests/simulated_agents.py`), which speak the real
protocol. Runs take 5 minutes on average, and each that finishes is followed by a new job. All jobs have room, so that none
waits for long. With `--waiting 1000` they ask for more GPUs than there are, some wait, and decisions cost more.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, process_time, sleep

from tests.bench.live import TENANTS, Service, counter, decisions
from tests.bench.speed import say
from tests.shell import PATIENCE
from tests.simulated_agents import AgentTotals, serve_all

from poise.scheduler.model.cluster import parse_cluster
from poise.service.backends.remote.identity import TOKEN_FILE

CLUSTER, RUNS, MEAN_SECONDS = "v100:4000@8,k80:4000@8", 5_000, 300.0
AT_ONCE = 10
"""Jobs of one submission."""
MOST_CPU, MOST_DECISION = 0.2, 1.0
_SIZES = {1: 0.76, 2: 0.15, 4: 0.085, 16: 0.005}
"""On average 1.48 GPUs, so that 8,000 GPUs hold some 5,400 runs; some need two nodes."""


def some_jobs(draw: random.Random, count: int) -> dict[str, object]:
    """A submission of so many jobs."""
    jobs = [
        {
            "command": ["train.py"], "tenant": f"t{draw.randrange(TENANTS)}", "duration": MEAN_SECONDS,
            "gpus": draw.choices(tuple(_SIZES), tuple(_SIZES.values()))[0],
        }
        for _ in range(count)
    ]  # fmt: skip
    return {"jobs": jobs}


class JobStream:
    """Submits jobs so that there is always the same number of them."""

    def __init__(self, service: Service, totals: AgentTotals, jobs: int) -> None:
        self._service, self._totals, self._jobs = service, totals, jobs
        self._draw = random.Random(0)
        self.submitted = 0

    def refill(self, at_once: int = AT_ONCE) -> None:
        """Submit as many as have finished, in groups."""
        missing = self._jobs - (self.submitted - self._totals.finished)
        if missing >= at_once:
            line = self._service.line()
            for _ in range(missing // at_once):
                line.ask("POST", "/v1/jobs", some_jobs(self._draw, at_once))
                self.submitted += at_once


def main() -> int:
    """Measure, print, and say by the exit code whether all bars hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0, help="of measuring")
    parser.add_argument("--policy", default="max-min")
    parser.add_argument("--waiting", type=int, default=0, help=f"jobs beyond {RUNS:,}; some 400 of them find room")
    parser.add_argument("--round", type=float, default=360.0, help="as `poise serve` has it by default")
    given = parser.parse_args()
    options = (
        "--backend", "remote", "--agents", "127.0.0.1:0", "--cluster", CLUSTER, "--policy", given.policy,
        "--round", str(given.round),
    )  # fmt: skip
    print(f"poise serve {' '.join(options)}; {RUNS:,} runs", flush=True)
    with tempfile.TemporaryDirectory(prefix="poise-bench-") as folder:
        service = Service(Path(folder) / "state", options)
        try:
            service.start()
            return 0 if measure(service, given.seconds, RUNS + given.waiting) else 1
        finally:
            service.kill()


def measure(service: Service, seconds: float, jobs: int) -> bool:
    """Start everything, wait until all runs are there, and measure."""
    totals, nodes = AgentTotals(), parse_cluster(CLUSTER).nodes
    token = (service.state / TOKEN_FILE).read_text(encoding="ascii").strip()
    port = int(service.agents.rpartition(":")[2])
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve_all(nodes, port, token, MEAN_SECONDS, totals))

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = Thread(target=serve)
    began, before = monotonic(), service.cpu()
    thread.start()
    try:
        stream = JobStream(service, totals, jobs)
        stream.refill(100)
        while totals.alive < RUNS * 0.95:
            if not thread.is_alive():
                raise RuntimeError("the agents have ended")
            if monotonic() - began > PATIENCE:
                raise RuntimeError(f"only {totals.alive:,} runs are alive after {PATIENCE:g} s")
            stream.refill()
            sleep(0.1)
        took, cost = monotonic() - began, service.cpu() - before
        say(
            f"{len(nodes):,} nodes joined and {totals.alive:,} runs began in {took:.1f} s, {cost:.1f} CPU seconds",
            True,
            "no bar",
        )
        sleep(15.0)
        return _steady(service, stream, totals, seconds)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _steady(service: Service, stream: JobStream, totals: AgentTotals, seconds: float) -> bool:
    began, cpu, own = monotonic(), service.cpu(), process_time()
    begun, finished, left, requests = totals.begun, totals.finished, totals.left, totals.requests
    count, commits = decisions(service)[0], counter(service, "poise_journal_commits_total")
    alive = []
    while (elapsed := monotonic() - began) < seconds:
        stream.refill()
        alive.append(totals.alive)
        sleep(0.2)
    busy = (service.cpu() - cpu) / elapsed
    total, mean, bound = decisions(service)
    rate = (totals.requests - requests) / elapsed
    say(
        f"{min(alive):,} to {max(alive):,} runs alive for {elapsed:.0f} s: {totals.begun - begun:,} began, "
        f"{totals.finished - finished:,} finished, {totals.left - left:,} left; {rate:,.0f} requests of agents a second, "
        f"{(counter(service, 'poise_journal_commits_total') - commits) / elapsed:.0f} commits a second; "
        f"agents and client {(process_time() - own) / elapsed:.0%} of a core",
        min(alive) > 0.9 * RUNS, f"at least {0.9 * RUNS:,.0f} runs",
    )  # fmt: skip
    held = say(f"server: {busy:.1%} of a core", busy < MOST_CPU, f"under {MOST_CPU:.0%}")
    text = f"{total - count:,} decisions, {mean * 1e3:.1f} ms on average since the start, all within {bound:g} s"
    return say(text, bound <= MOST_DECISION, f"under {MOST_DECISION:g} s") and held


if __name__ == "__main__":
    sys.exit(main())
