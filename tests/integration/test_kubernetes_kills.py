"""SIGKILL to the service a hundred times while it binds, creates, suspends and deletes pods on a real API server.

Half of the kills come at any moment, half at a certain write: before it is sent, on its way, or after it was answered. Jobs
of both kinds come and go meanwhile (tests/kube_work.py).

POISE_CRASH_KILLS and POISE_CRASH_SEED are as in `tests/e2e/test_crashes.py`.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.backends import until
from tests.e2e.crashing import check_journal
from tests.e2e.killable import Death
from tests.kube.controllers import Controllers
from tests.kube.server import KubeServer
from tests.kube_work import AgentPods, Served, Work, check_ended_once, check_gangs, check_own, gang_of, owned, until_done

from poise.service.backends.kubernetes import names
from poise.service.wire.views import JobDetail, JobState

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

KILLS = int(os.environ.get("POISE_CRASH_KILLS", "100"))
SEED = int(os.environ.get("POISE_CRASH_SEED", "1"))
LAST_WRITE = 6
"""A server that is to die at a write dies at one of its first ones."""
WRITE_SECONDS = 1.5
"""A server that has had nothing to write for so long is killed."""
CALM = 10
"""After so many kills the service is left alone until no gang is bound in part."""
CALM_SECONDS = 60.0
"""In which that has to be so: less than the time after which a gang gives up (`gang_runs.GANG_START_SECONDS`)."""


class Record:
    """What a watch has told of the pods, from the first one on.

    terms      of the leader that has bound or created a pod, in the order in which that was done
    bound      uids of pods by gang and epoch for which they were bound
    succeeded  epoch for which they were bound by gang and uid, of pods that have succeeded; some are deleted later
    refused    pods that their node did not take: it had no GPUs left
    """

    def __init__(self, server: KubeServer, namespace: str) -> None:
        self.terms: list[int] = []
        self.bound: dict[tuple[str, str], set[str]] = {}
        self.succeeded: dict[str, dict[str, int]] = {}
        self.refused: list[str] = []
        self._uids: set[str] = set()
        self._watch = server.admin.watch(f"/api/v1/namespaces/{namespace}/pods")
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        for event in self._watch:
            pod = event["object"]
            meta, notes = pod["metadata"], pod["metadata"].get("annotations", {})
            if pod["spec"].get("nodeName") and meta["uid"] not in self._uids:
                self._uids.add(meta["uid"])
                self.terms.append(int(notes[names.TERM]))
                if names.EPOCH in notes:
                    self.bound.setdefault((gang_of(pod), notes[names.EPOCH]), set()).add(meta["uid"])
            if pod["status"].get("phase") == "Succeeded" and names.EPOCH in notes:
                self.succeeded.setdefault(gang_of(pod), {})[meta["uid"]] = int(notes[names.EPOCH])
            if pod.get("status", {}).get("reason", "").startswith(("OutOf", "Unexpected")):
                self.refused.append(meta["name"])

    def close(self) -> None:
        self._watch.close()
        self._thread.join(10)


class Killer:
    """Kills the service, again and again."""

    def __init__(self, service: Served, work: Work) -> None:
        self.counts: Counter[str] = Counter()
        self.starts: list[float] = []  # seconds until it answered
        self._service, self._work, self._random = service, work, random.Random(SEED)

    def rage(self, kills: int) -> None:
        """Kill a service that runs so many times; there is one again at the end."""
        for number in range(1, kills + 1):
            if number % 2:
                self._kill_at_a_moment()
            else:
                self._kill_at_a_write()
            if number % CALM == 0 or number == kills:
                self._up()
                until_calm(self._work)

    def _up(self, death: Death | None = None) -> None:
        if not self._service.is_alive():
            began = monotonic()
            self._service.start(death)
            while self._service.is_alive() and not self._service.has_answered:
                sleep(0.005)
            if self._service.is_alive():
                self.starts.append(monotonic() - began)

    def _kill_at_a_moment(self) -> None:
        if self._random.random() < 0.2:  # now and then before it answers
            if not self._service.is_alive():
                self._service.start()
            sleep(self._random.uniform(0.0, 0.5))
            self.counts["while starting"] += 1
        else:
            self._up()
            sleep(self._random.uniform(0.0, 1.0))
            self.counts["at any moment"] += 1
        self._service.kill()

    def _kill_at_a_write(self) -> None:
        death = Death(self._random.randint(1, LAST_WRITE), self._random.choice(("before", "sent", "after")))
        self._service.kill()
        self._up(death)
        deadline = monotonic() + WRITE_SECONDS
        while self._service.is_alive() and monotonic() < deadline:
            sleep(0.005)
        self.counts["no write" if self._service.is_alive() else death.when] += 1
        self._service.kill()


def until_calm(work: Work) -> None:
    """Wait until no gang is bound in part, which must not take long with a service that is left alone."""
    deadline = monotonic() + CALM_SECONDS
    while found := work.partly_bound():
        assert monotonic() < deadline, f"bound in part: {found}"
        sleep(0.1)


@pytest.fixture
def service(fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    made = Served.of(fresh_kube, tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_service_that_is_killed_a_hundred_times_binds_whole_gangs_and_ends_every_job_once(
    service: Served, fresh_kube: KubeServer, tmp_path: Path
) -> None:
    began = monotonic()
    record, work = Record(fresh_kube, service.namespace), Work(fresh_kube, service.namespace, tmp_path, SEED)
    killer = Killer(service, work)
    kubelet, controllers = AgentPods(fresh_kube, tmp_path / "pods", service.agents), Controllers(fresh_kube, 0.25)
    try:
        with kubelet, controllers, ThreadPoolExecutor(1) as pool:
            client = service.up()
            coming = pool.submit(work.come, service.client(patience=0.5))
            try:
                killer.rage(KILLS)
            finally:
                work.enough()
            coming.result()
            raged = monotonic() - began
            until_done(client, work)
            details = {row.id: client.show(row.id) for row in client.queue(states=list(JobState), limit=500).jobs}
            check_gangs(work, details)
            check_bound(work, record, details)
            check_own(work, details)
            until(lambda: not owned(fresh_kube, service, "pods") and not owned(fresh_kube, service, "services"))
            assert (kubelet.problems, controllers.problems) == ([], [])
        service.kill()
        check_journal(service, details)
        check_leaders(service, record)
    except BaseException as error:
        problems = [*kubelet.problems[-3:], *controllers.problems[-3:]]
        error.add_note(
            f"POISE_CRASH_SEED={SEED} POISE_CRASH_KILLS={KILLS}; {dict(killer.counts)}; {problems}; {service.log[-3000:]}"
        )
        raise
    finally:
        record.close()
    starts = sorted(killer.starts)
    print(  # noqa: T201 - the figures of docs/explanation/surviving-crashes.md
        f"\n{killer.counts.total()} kills {dict(killer.counts)} in {raged:.0f} s of {monotonic() - began:.0f} s;"
        f" a start took {starts[len(starts) // 2]:.2f} s, at most {starts[-1]:.2f} s;"
        f" {len(work.gangs)} gangs, {len(work.jobs)} jobs of Poise, {sum(len(each.runs) for each in details.values())} runs,"
        f" {sum(each.preemptions for each in details.values())} preemptions, {len(record.terms)} pods placed"
    )


def check_bound(work: Work, record: Record, details: dict[str, JobDetail]) -> None:
    """The last run of each gang has bound all of it that was left, and each of its pods has succeeded once."""
    found = {each.job.name: each for each in details.values()}
    for name, size in work.gangs.items():
        last, succeeded = check_ended_once(found[name]), record.succeeded[name]
        assert len(succeeded) == size, found[name]
        earlier = sum(epoch < last for epoch in succeeded.values())  # on the way out of runs that were preempted
        assert len(record.bound.get((name, str(last)), ())) + earlier == size, found[name]


def check_leaders(service: Served, record: Record) -> None:
    """Nobody has acted after its successor has, no GPU was given out twice, and nobody has waited for a dead leader."""
    assert record.terms == sorted(record.terms)
    assert record.terms[-1] <= service.starts
    assert record.refused == []
    assert "Traceback" not in service.log
    assert '"level": "error"' not in service.log
    assert " leads; its lease " not in service.log, "a dead leader has the same lock"
