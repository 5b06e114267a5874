"""A soak: one service, thousands of short real jobs of several tenants, holds, cancels and other policies in between.

    python -m tests.bench.soak --minutes 13 --seed 1

Prints a table, and ends with exit code 1 if a bar is missed: memory, open files and threads of the server do not grow, a job
leaves little on the disk, and each job ends as it should. Takes the minutes asked for, and a few more until the last jobs
have ended. Not part of `make test` or `make bench`.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import linear_regression, median
from time import monotonic, sleep

from tests.bench.speed import say
from tests.e2e.service import EXAMPLES, Service, until

from poise.service.client import Client, JobRequest, ServerRefusedError
from poise.service.wire.request import RetrySpec
from poise.service.wire.views import JobState

CLUSTER, ROUND = "v100:8,k80:8", 2.0
TENANTS = ("red", "green", "blue", "white")
POLICIES = ("max-min", "las", "fifo", "srtf", "max-min")
QUEUED, AT_ONCE = 120, 20
"""Jobs that are kept waiting or running, and how many are submitted together."""
GAP = 0.25
"""Seconds between two looks."""
POLICY_SECONDS = 7.0
LAST_SECONDS = 300.0
"""Longest time until the last jobs have ended."""
MOST_GROWTH, MOST_FILES, MOST_THREADS, MOST_DISK = 3.0, 8, 4, 64.0
"""MiB per 1,000 jobs; open files and threads more than before; KiB per job. Jobs that have ended are remembered, which takes
about 1 MiB per 1,000; on the disk each has a dozen small files, of one block each."""


class Kind(Enum):
    """A job, and what becomes of it unless it is cancelled."""

    SHORT = "true"
    SLOW = "sleep"
    WRONG = "false"
    TRAINING = "count_steps.py"

    def command(self, number: int) -> tuple[str, ...]:
        """What it runs."""
        count = (sys.executable, str(EXAMPLES / "count_steps.py"), "--steps", "40", "--seconds-per-step", "0.05")
        words = {Kind.SHORT: ("true",), Kind.SLOW: ("sleep", "0.1"), Kind.WRONG: ("false",)}
        return words.get(self, (*count, "--seed", str(number)))

    @property
    def end(self) -> JobState:
        """How it ends."""
        return JobState.FAILED if self is Kind.WRONG else JobState.SUCCEEDED


@dataclass(frozen=True)
class Look:
    """What the server takes at a moment: jobs that have ended, MiB, open files, threads."""

    ended: int
    memory: float
    files: int
    threads: int


@dataclass
class Soak:
    """The jobs of a soak, and what was done to them."""

    service: Service
    client: Client
    draw: random.Random
    kinds: dict[str, Kind] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)
    looks: list[Look] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Keep the service busy for so long, and let everything end."""
        until_then = monotonic() + seconds
        change = monotonic() + POLICY_SECONDS
        while monotonic() < until_then:
            alive = self._alive()
            if len(alive) < QUEUED:
                self._submit()
            self._meddle(alive)
            if monotonic() >= change:
                self.client.set_policy(self.draw.choice(POLICIES))
                self.done["policy changes"] += 1
                change = monotonic() + POLICY_SECONDS
            self._look(len(self.kinds) - len(alive))
            sleep(GAP)
        for job in self.held:
            self._wish("release", job)
        until(lambda: not self._alive(), "jobs have not ended", LAST_SECONDS)
        self._look(len(self.kinds))

    def _alive(self) -> list[str]:
        return [row.id for row in self.client.queue(limit=1_000).jobs]

    def _submit(self) -> None:
        kinds = self.draw.choices(list(Kind), [60, 30, 5, 5], k=AT_ONCE)
        requests = [
            JobRequest(
                command=kind.command(len(self.kinds) + place),
                tenant=self.draw.choice(TENANTS),
                gpus=self.draw.choice((1, 1, 1, 2, 4)),
                retry=RetrySpec(on_errors=0),
            )
            for place, kind in enumerate(kinds)
        ]
        try:
            jobs = self.client.submit_all(requests)
        except ServerRefusedError as error:
            if error.status != 429:  # the service may bound how fast one may submit
                raise
            self.done["submissions put off"] += 1
        else:
            self.kinds.update((job.id, kind) for job, kind in zip(jobs, kinds, strict=True))

    def _meddle(self, alive: Sequence[str]) -> None:
        for verb, chance in (("cancel", 0.3), ("hold", 0.3)):
            if alive and self.draw.random() < chance:
                self._wish(verb, self.draw.choice(alive))
        if self.held and self.draw.random() < 0.4:
            self._wish("release", self.draw.choice(sorted(self.held)))

    def _wish(self, verb: str, job: str) -> None:
        try:
            getattr(self.client, verb)(job)
        except ServerRefusedError:
            return  # it has ended meanwhile
        self.done[f"{verb}s"] += 1
        if verb == "cancel":
            self.cancelled.add(job)
        elif verb == "hold":
            self.held.add(job)

    def _look(self, ended: int) -> None:
        folder = Path(f"/proc/{self.service.server.pid}")
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        memory = int(fields["VmRSS"].split()[0]) / 1024
        self.looks.append(Look(ended, memory, len(os.listdir(folder / "fd")), int(fields["Threads"])))

    def ends(self) -> dict[str, JobState]:
        """How each job that the service knows has ended."""
        found: dict[str, JobState] = {}
        while (page := self.client.queue(states=list(JobState), limit=1_000, offset=len(found))).jobs:
            found.update((row.id, row.state) for row in page.jobs)
        return found


def _size(folder: Path) -> int:
    """Bytes that a folder takes on the disk."""
    return sum(512 * each.lstat().st_blocks for each in (folder, *folder.rglob("*")))


def measured(soak: Soak) -> Iterator[bool]:
    """Print how each measurement stands to its bar; whether it holds."""
    jobs, ends = len(soak.kinds), soak.ends()
    lost = set(soak.kinds) ^ set(ends)
    yield say(f"{jobs:,} jobs submitted, {len(lost)} lost", jobs > 0 and not lost, "none")
    open_ones = [job for job, state in ends.items() if not state.is_final]
    yield say(f"{len(open_ones)} have not ended", not open_ones, "none")
    # A cancel may come when a job has just ended.
    wrong = [
        job
        for job, kind in soak.kinds.items()
        if ends.get(job) not in ({kind.end, JobState.CANCELLED} if job in soak.cancelled else {kind.end})
    ]
    yield say(f"{len(wrong)} have ended in another way than they were to {wrong[:5]}", not wrong, "none")
    steady = soak.looks[len(soak.looks) // 3 :]
    slope = linear_regression([look.ended / 1_000 for look in steady], [look.memory for look in steady]).slope
    memory = f"memory {steady[0].memory:.0f} to {steady[-1].memory:.0f} MiB, {slope:+.2f} MiB per 1,000 jobs"
    yield say(memory, slope < MOST_GROWTH, f"under {MOST_GROWTH:g}")
    half = len(steady) // 2
    for name, most in (("files", MOST_FILES), ("threads", MOST_THREADS)):
        before, after = (median(getattr(look, name) for look in part) for part in (steady[:half], steady[half:]))
        yield say(f"{name} {before:g}, then {after:g}", after - before <= most, f"at most {most} more")
    disk = _size(soak.service.state) / 1024 / max(1, jobs)
    yield say(f"disk {disk:.1f} KiB per job", disk < MOST_DISK, f"under {MOST_DISK:g}")
    left = soak.service.processes()
    yield say(f"{len(left)} processes left", not left, "none")
    yield say(f"{soak.service.log.count('Traceback')} tracebacks in the log", "Traceback" not in soak.service.log, "none")


def main() -> int:
    """Soak, print, and say by the exit code whether all bars hold."""
    parser = argparse.ArgumentParser(description="Thousands of short real jobs on one service.")
    parser.add_argument("--minutes", type=float, default=13.0, help="of submitting; the last jobs end after that")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not 0 < given.minutes < 24 * 60:
        parser.error(f"--minutes: expected more than 0 and less than a day, got {given.minutes:g}")
    with tempfile.TemporaryDirectory(prefix="poise-soak-") as folder:
        os.environ.update(POISE_STATE=f"{folder}/state", XDG_CONFIG_HOME=f"{folder}/config")
        service = Service(Path(folder), "--cluster", CLUSTER, "--round", ROUND, "--log-format", "json")
        try:
            soak = Soak(service, service.up(), random.Random(given.seed))
            began = monotonic()
            soak.run(60 * given.minutes)
            took = monotonic() - began
            done = ", ".join(f"{count:,} {what}" for what, count in sorted(soak.done.items()))
            print(f"{len(soak.kinds):,} jobs in {took:.0f} s, {len(soak.kinds) / took:.1f} a second; {done}", flush=True)
            held = list(measured(soak))
        finally:
            service.close()
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
