"""Kills at random moments while jobs run, and what must hold afterwards. Shared by the crash tests of all back ends.

`Havoc` kills what a `Service` runs; a subclass may do other harm too (`harms`), as `NodeHavoc` does to nodes. `survive` is a
crash test from its first submission to its last check.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic, sleep
from typing import Any

import pytest
from tests.e2e.service import PATIENCE, Kind, Service, ended, until

from poise.engine.journal import read_entry, read_header
from poise.engine.loop import replay
from poise.lab.analysis.history import History
from poise.scheduler.model.cluster import bits
from poise.service.client import Client
from poise.service.server.dependencies import core_of
from poise.service.server.records import MOST_RUNS
from poise.service.server.storage.store import Store
from poise.service.wire.views import JobDetail, JobState

FIRST, LAST = 12, 20
"""Jobs that are submitted before the first kill, and kills after the last submission: jobs run all the time."""
MOST_A_JOB = 25
"""Kills of one job: in the end a job that dies again and again is given up, and on a slow machine few are there."""
SERVER, AGENT, CUT = "server", "agent", "cut"
PEER_GONE = 70
"""Exit code of a rank that finds another one dead; such runs are forgiven, whichever end the runner sees first."""
UNTOLD = re.compile("^poise: no random state of rank ", re.MULTILINE)
"""What rank 0 says if it had to leave at once and ranks of other nodes had not told their random numbers."""
MOST_UNTOLD = 0.1
"""Of the jobs of a test."""


@dataclass(frozen=True)
class CrashJob:
    """A job of a crash test: what is submitted, how many ranks it has, and what it prints unless something goes wrong."""

    fields: dict[str, Any]
    ranks: int
    steps: int
    prints: str


def chain(seed: str, steps: int) -> str:
    """What examples/live/count_steps.py prints when nothing interrupts it."""
    hashed = hashlib.sha256(seed.encode()).hexdigest()
    for step in range(steps):
        hashed = hashlib.sha256(f"{hashed} {step}".encode()).hexdigest()
    return hashed


def joint_chain(seed: str, steps: int, ranks: int) -> str:
    """What tests/e2e/workers/ranks.py prints when nothing interrupts it."""
    draws = [random.Random(f"{seed}/{rank}") for rank in range(ranks)]
    hashed = hashlib.sha256(seed.encode()).hexdigest()
    for step in range(steps):
        drawn = " ".join(f"{step} {draw.getrandbits(32)}" for draw in draws)
        hashed = hashlib.sha256(f"{hashed} {drawn}".encode()).hexdigest()
    return hashed


class Havoc:
    """Does harm, and counts it. `idle`: it finds nothing to kill but the server."""

    harms: dict[str, float] = {SERVER: 2, Kind.RUNNER.value: 6, Kind.REPLICA.value: 9}  # noqa: RUF012 - a subclass has more
    """What is done, and how often relative to the rest."""
    pause = 0.3
    """Most seconds between two kills."""

    def __init__(self, service: Service, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.idle = False
        self.random = random.Random(seed)
        self._by_job: Counter[str] = Counter()
        self._service = service

    @property
    def kills(self) -> int:
        """How often something was killed; a subclass may do other harm besides."""
        return self.counts.total()

    def rage(self, kills: int) -> None:
        """Do harm until so many were killed."""
        deadline = monotonic() + PATIENCE + 4 * kills
        while self.kills < kills:
            assert monotonic() < deadline, f"nothing was left to kill: {self.counts}"
            harm = self.random.choices([*self.harms], [*self.harms.values()])[0]
            is_done = self.do(harm)
            self.counts[harm] += is_done
            sleep(self.random.uniform(0.0, self.pause) if is_done else 0.05)

    def do(self, harm: str) -> bool:
        """Do harm of that kind; say whether there was something to do it to."""
        return self._kill_server() if harm == SERVER else self._kill_one(Kind(harm))

    def heal(self) -> None:
        """Undo what does not pass by itself."""

    def _kill_server(self) -> bool:
        """Now and then the server is killed before it answers; else it would seldom get that far."""
        if not self._service.is_ready() and self.random.random() >= 0.3:
            return False
        self._service.kill()
        self._service.start()
        return True

    def _kill_one(self, kind: Kind) -> bool:
        found = [each for each in self._service.processes() if self._by_job[each.job] < MOST_A_JOB]
        self.idle = not found
        victims = [each for each in found if each.kind is kind]
        if victims and (victim := self.random.choice(victims)).kill():
            self._by_job[victim.job] += 1
            return True
        return False


class NodeHavoc(Havoc):
    """Also kills agents, and cuts nodes off for shorter or longer than their lease, one at a time.

    nodes   their names
    fence   seconds of a lease
    """

    harms = {**Havoc.harms, AGENT: 1.5, CUT: 1}  # noqa: RUF012

    def __init__(self, service: Service, nodes: Sequence[str], fence: float, seed: int) -> None:
        super().__init__(service, seed)
        self._nodes, self._fence = nodes, fence
        self._cut: tuple[float, Callable[[], None]] | None = None  # until when, and what heals it

    @property
    def kills(self) -> int:
        """How often something was killed, besides cuts."""
        return self.counts.total() - self.counts[CUT]

    def kill_agent(self, node: str) -> bool:
        """SIGKILL to the agent of a node, which comes back; say whether there was one."""
        raise NotImplementedError

    def cut_off(self, node: str) -> Callable[[], None] | None:
        """Cut a node off; return what heals it. None: it cannot be done now."""
        raise NotImplementedError

    def do(self, harm: str) -> bool:
        """Do harm of that kind, after what is due to be healed."""
        if self._cut is not None and monotonic() > self._cut[0]:
            self._end_cut()
        if harm == AGENT:
            return self.kill_agent(self.random.choice(self._nodes))
        return self._cut_one_off() if harm == CUT else super().do(harm)

    def heal(self) -> None:
        """Let the node back that is cut off."""
        self._end_cut()

    def _end_cut(self) -> None:
        if self._cut is not None:
            self._cut[1]()
            self._cut = None

    def _cut_one_off(self) -> bool:
        seconds = self._fence * self.random.choice([self.random.uniform(0.1, 0.4), self.random.uniform(1.2, 1.5)])
        heal = None if self._cut is not None else self.cut_off(self.random.choice(self._nodes))
        if heal is not None:
            self._cut = monotonic() + seconds, heal
        return heal is not None


def mixed_jobs(service: Service, count: int, steps: int, seconds: float) -> list[CrashJob]:
    """Make jobs, most of which are one process; some are gangs of 2, 4 or 6 ranks, with steps of half as many seconds.

    Ranks of a gang wait for each other at each step, and hold several GPUs meanwhile.
    """
    jobs = []
    for number in range(count):
        seed, ranks = f"seed-{number}", {1: 4, 4: 2, 7: 6}.get(number % 10, 1)
        fields: dict[str, Any] = {"checkpoint": {"every": 0.2, "deadline": 20.0}}
        if ranks == 1:
            fields |= {"command": service.counting(steps, seconds, seed), "gpus": 2 if number % 4 == 0 else 1}
            jobs.append(CrashJob(fields, 1, steps, chain(seed, steps)))
        else:
            fields |= {"command": service.ranks(steps, seconds / 2, seed), "gpus": ranks, "replicas": "gpu"}
            fields["retry"] = {"exit_codes": [PEER_GONE]}
            jobs.append(CrashJob(fields, ranks, steps, joint_chain(seed, steps, ranks)))
    return jobs


def survive(service: Service, havoc: Havoc, jobs: Sequence[CrashJob], kills: int) -> dict[str, JobDetail]:
    """Submit these jobs to a service that is up, do so much harm meanwhile, and check that it has cost nothing but time."""
    began = monotonic()
    client = service.client()
    with ThreadPoolExecutor(1) as pool:
        submitting = pool.submit(submit_all, service.client(), havoc, jobs, kills)
        until(service.processes, "no job has begun")
        havoc.rage(kills)
        havoc.heal()
        submitted = submitting.result()
    raged = monotonic() - began
    details = check_work(client, submitted)
    page = client.queue(states=list(JobState), limit=500)
    assert (page.total, {row.id for row in page.jobs}) == (len(jobs), set(submitted))
    check_quiet(service)
    service.kill()
    check_journal(service, details)
    print(  # noqa: T201 - the figures of docs/explanation/surviving-crashes.md
        f"\n{havoc.kills} kills {dict(havoc.counts)} in {raged:.0f} s of {monotonic() - began:.0f} s;"
        f" {sum(detail.runs[-1].epoch for detail in details.values())} runs,"
        f" {sum(detail.preemptions for detail in details.values())} preemptions"
    )
    return details


def submit_all(client: Client, havoc: Havoc, jobs: Sequence[CrashJob], kills: int) -> dict[str, CrashJob]:
    """Submit all jobs, each by itself, spread over the kills; what each is by its number."""
    submitted = {}
    for number, job in enumerate(jobs):
        due = max(0, number - FIRST) * (kills - LAST) // (len(jobs) - FIRST)
        until(lambda due=due: havoc.idle or havoc.kills >= due, "the kills have stopped", PATIENCE + 4 * kills)  # type: ignore[misc]
        submitted[client.submit(name=f"count-{number}", **job.fields).id] = job
    return submitted


def check_work(client: Client, submitted: dict[str, CrashJob]) -> dict[str, JobDetail]:
    """Every job has done every step once: the hash says so, and so do its runs, each of which begins where one ended."""
    details, untold = {}, list[str]()
    for number, job in submitted.items():
        detail = details[number] = ended(client, number)
        logs = [client.log(number, replica=rank) for rank in range(job.ranks)]
        printed = [set(re.findall("^[0-9a-f]{64}$", log, re.MULTILINE)) for log in logs]
        if UNTOLD.search(logs[0]) and any(len(run.gpus) > 1 for run in detail.runs):
            # TERM came while another node did not answer. The work counts; its ranks go on with other random numbers.
            untold.append(number)
            assert printed == [printed[0]] * job.ranks, f"job {number}: ranks differ"
            assert len(printed[0]) == 1, f"job {number}"
        else:
            assert printed == [{job.prints}] * job.ranks, f"job {number}"
        kept = [run.kept for run in detail.runs if run.kept is not None]
        assert kept == sorted(kept), detail
        assert kept[-1] == detail.steps == job.steps
        check_runs(detail, job.steps)
        check_ranks(detail, logs)
    assert len(untold) <= MOST_UNTOLD * len(submitted), untold
    return details


def check_ranks(detail: JobDetail, logs: Sequence[str]) -> None:
    """All ranks of a run that came to begin have begun at the same step, which is where the run before it ended."""
    begun = {run.epoch: run.begun for run in detail.runs}
    for log in logs:
        assert "AssertionError" not in log, log
        for text in log.split("--- run ")[1:]:
            epoch, steps = int(text.split()[0]), re.findall("^begins at step ([0-9]+)$", text, re.MULTILINE)
            if epoch in begun:  # of a job with bad luck the last ones are told
                assert [float(step) for step in steps] in ([], [begun[epoch]]), detail


def check_runs(detail: JobDetail, steps: int) -> None:
    """Steps that runs kept lie side by side, without a gap or an overlap. Of a job with bad luck the last ones are told."""
    first = detail.runs[0]
    assert (first.epoch, first.begun) == (1, 0.0) or len(detail.runs) == MOST_RUNS, detail
    reached = first.begun
    for run in detail.runs:
        assert run.begun == reached, detail
        reached = reached if run.kept is None else run.kept
    assert sum((run.kept or run.begun) - run.begun for run in detail.runs) == steps - first.begun
    assert [run.epoch for run in detail.runs] == list(range(first.epoch, first.epoch + len(detail.runs)))


def check_journal(service: Service, details: dict[str, JobDetail]) -> None:
    """Charged once and for what was held; no job and no GPU held twice at a time; the core decides the same again."""
    store = Store(service.state)
    try:
        chapters = store.chapters()
        ends = [first for _, first in chapters[1:]] + [None]
        for (header, first), end in zip(chapters, ends, strict=True):
            replay(core_of(read_header(header)), map(read_entry, store.entries(first, end)))
        entries = [read_entry(document) for document in store.entries(1)]
        books = store.tenants()
    finally:
        store.close()
    history = History.of(entries, read_header(chapters[-1][0]).cluster)  # nodes may have joined since the first
    charged = {job: detail.gpu_seconds for job, detail in details.items()}
    assert charged == pytest.approx({job: history.jobs[job].gpu_seconds for job in details})
    assert sum(seconds for _, seconds, _ in books.values()) == pytest.approx(sum(charged.values()))
    assert set(history.jobs) == set(details)
    assert {job: life.epoch for job, life in history.jobs.items()} == {
        job: each.runs[-1].epoch for job, each in details.items()
    }
    moments = [entry.now for entry in entries]
    assert moments == sorted(moments)
    check_disjoint(history)


def check_disjoint(history: History) -> None:
    """Neither a job nor a GPU has two stints at a time."""
    spans: dict[object, list[tuple[float, float]]] = {}
    for stint in history.runs:
        gpus = [(node, bit) for node, mask in stint.gpus for bit in bits(mask)]
        for each in (stint.job, *gpus):
            spans.setdefault(each, []).append((stint.start, stint.end))
    for holder, found in spans.items():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(found))), (holder, found)


def check_quiet(service: Service) -> None:
    """Nothing is left, nobody met another, and no server complained."""
    until(lambda: not service.processes(), f"left behind: {service.processes()}")
    assert service.violations == ""
    assert "Traceback" not in service.log
    assert '"level": "error"' not in service.log
