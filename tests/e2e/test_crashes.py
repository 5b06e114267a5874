"""Server, runners and replicas are killed with SIGKILL at random moments while 50 jobs run: nothing is lost or done twice.

Most jobs are one process; some are two or three ranks that do each step together, and must go on at the same step, each
with its own random numbers.

POISE_CRASH_KILLS and POISE_CRASH_SEED say how often, and which random numbers:

    POISE_CRASH_KILLS=600 POISE_CRASH_SEED=7 python -m pytest -s tests/e2e/test_crashes.py
"""

import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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

JOBS = 50
KILLS = int(os.environ.get("POISE_CRASH_KILLS", "200"))
SEED = int(os.environ.get("POISE_CRASH_SEED", "1"))
STEPS, SECONDS = 120 * KILLS // 200, 0.025
"""Of a job: the more kills, the longer, so that there is always something to kill."""
FIRST, LAST = 12, 20
"""Jobs that are submitted before the first kill, and kills after the last submission: jobs run all the time."""
PAUSE = 0.3
"""Most seconds between two kills."""
MOST_A_JOB = 25
"""Kills of one job: in the end a job that dies again and again is given up, and on a slow machine few are there."""
SERVER = "server"
PEER_GONE = 70
"""Exit code of a rank that finds another one dead; such runs are forgiven, whichever end the runner sees first."""


def ranks_of(number: int) -> int:
    """Processes of a job: of most jobs one, of some two or three that do each step together."""
    return {1: 2, 5: 3}.get(number % 10, 1)


def chain(seed: str) -> str:
    """What examples/live/count_steps.py prints when nothing interrupts it."""
    hashed = hashlib.sha256(seed.encode()).hexdigest()
    for step in range(STEPS):
        hashed = hashlib.sha256(f"{hashed} {step}".encode()).hexdigest()
    return hashed


def joint_chain(seed: str, ranks: int) -> str:
    """What tests/e2e/workers/ranks.py prints when nothing interrupts it."""
    draws = [random.Random(f"{seed}/{rank}") for rank in range(ranks)]
    hashed = hashlib.sha256(seed.encode()).hexdigest()
    for step in range(STEPS):
        drawn = " ".join(f"{step} {draw.getrandbits(32)}" for draw in draws)
        hashed = hashlib.sha256(f"{hashed} {drawn}".encode()).hexdigest()
    return hashed


class Havoc:
    """Kills, and counts what it killed. `idle`: it finds nothing to kill but the server."""

    def __init__(self, service: Service, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.idle = False
        self._by_job: Counter[str] = Counter()
        self._service = service
        self._random = random.Random(seed)

    def rage(self, kills: int) -> None:
        """So many kills. Now and then the server is killed before it answers; else it would seldom get that far."""
        deadline = monotonic() + PATIENCE + kills
        while self.counts.total() < kills:
            assert monotonic() < deadline, f"nothing was left to kill: {self.counts}"
            kind = self._random.choices([SERVER, Kind.RUNNER, Kind.REPLICA], [2, 6, 9])[0]
            if isinstance(kind, Kind):
                self._kill_one(kind)
            elif self._service.is_ready() or self._random.random() < 0.3:
                self._service.kill()
                self.counts[SERVER] += 1
                self._service.start()
            sleep(self._random.uniform(0.0, PAUSE))

    def _kill_one(self, kind: Kind) -> None:
        found = [each for each in self._service.processes() if self._by_job[each.job] < MOST_A_JOB]
        self.idle = not found
        victims = [each for each in found if each.kind is kind]
        if victims and (victim := self._random.choice(victims)).kill():
            self.counts[kind.value] += 1
            self._by_job[victim.job] += 1


def submit_all(service: Service, client: Client, havoc: Havoc) -> dict[str, int]:
    """All jobs, each with a submission of its own, spread over the kills; the number by job."""
    numbers = {}
    for number in range(JOBS):
        due = max(0, number - FIRST) * (KILLS - LAST) // (JOBS - FIRST)
        until(lambda due=due: havoc.idle or havoc.counts.total() >= due, "the kills have stopped", PATIENCE + KILLS)  # type: ignore[misc]
        job = client.submit(
            name=f"count-{number}", checkpoint={"every": 0.2, "deadline": 20.0}, **fields_of(service, number)
        )
        numbers[job.id] = number
    return numbers


def fields_of(service: Service, number: int) -> dict[str, Any]:
    """What a job runs, and on how many GPUs."""
    seed, ranks = f"seed-{number}", ranks_of(number)
    if ranks == 1:
        return {"command": service.counting(STEPS, SECONDS, seed), "gpus": 2 if number % 4 == 0 else 1}
    # Steps half as long: ranks wait for each other at each, and hold several GPUs meanwhile.
    command, retry = service.ranks(STEPS, SECONDS / 2, seed), {"exit_codes": [PEER_GONE]}
    return {"command": command, "gpus": ranks, "replicas": "gpu", "retry": retry}


def check_work(client: Client, numbers: dict[str, int]) -> dict[str, JobDetail]:
    """Every job has done every step once: the hash says so, and so do its runs, each of which begins where one ended."""
    details = {}
    for job, number in numbers.items():
        detail = details[job] = ended(client, job)
        ranks = ranks_of(number)
        logs = [client.log(job, replica=rank) for rank in range(ranks)]
        want = chain(f"seed-{number}") if ranks == 1 else joint_chain(f"seed-{number}", ranks)
        assert [set(re.findall("^[0-9a-f]{64}$", log, re.MULTILINE)) for log in logs] == [{want}] * ranks, f"job {job}"
        kept = [run.kept for run in detail.runs if run.kept is not None]
        assert kept == sorted(kept), detail
        assert kept[-1] == detail.steps == STEPS
        check_runs(detail)
        check_ranks(detail, logs)
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


def check_runs(detail: JobDetail) -> None:
    """Steps that runs kept lie side by side, without a gap or an overlap. Of a job with bad luck the last ones are told."""
    first = detail.runs[0]
    assert (first.epoch, first.begun) == (1, 0.0) or len(detail.runs) == MOST_RUNS, detail
    reached = first.begun
    for run in detail.runs:
        assert run.begun == reached, detail
        reached = reached if run.kept is None else run.kept
    assert sum((run.kept or run.begun) - run.begun for run in detail.runs) == STEPS - first.begun
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
    history = History.of(entries, read_header(chapters[0][0]).cluster)
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


@pytest.mark.slow
def test_processes_killed_at_random_lose_nothing_and_do_nothing_twice(a_service: Callable[..., Service]) -> None:
    service = a_service("--cluster", "v100:4,k80:4", "--round", "2s", "--log-format", "json")
    began = monotonic()
    client = service.up()
    havoc = Havoc(service, SEED)
    try:
        with ThreadPoolExecutor(1) as pool:
            submitting = pool.submit(submit_all, service, service.client(), havoc)
            until(service.processes, "no job has begun")
            havoc.rage(KILLS)
            numbers = submitting.result()
        raged = monotonic() - began
        details = check_work(client, numbers)
        page = client.queue(states=list(JobState), limit=500)
        assert (page.total, {row.id for row in page.jobs}) == (JOBS, set(numbers))
        check_quiet(service)
        service.kill()
        check_journal(service, details)
    except BaseException as error:
        error.add_note(f"POISE_CRASH_SEED={SEED} POISE_CRASH_KILLS={KILLS}; killed {dict(havoc.counts)}; {service.state}")
        raise
    print(  # noqa: T201 - the figures of docs/explanation/surviving-crashes.md
        f"\n{havoc.counts.total()} kills {dict(havoc.counts)} in {raged:.0f} s of {monotonic() - began:.0f} s;"
        f" {sum(detail.runs[-1].epoch for detail in details.values())} runs,"
        f" {sum(detail.preemptions for detail in details.values())} preemptions"
    )
