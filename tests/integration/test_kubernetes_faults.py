"""A real API server in trouble: refusals, lost answers, watches that are behind, break and expire, and a minute of absence.

Every seventh request or so fails in one way or another (tests/kube/faults.py). Jobs of both kinds come and go meanwhile
(tests/kube_work.py): nothing is lost, nothing is done or bound twice.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest
from tests.backends import until
from tests.e2e.crashing import check_journal
from tests.kube.controllers import Controllers
from tests.kube.server import KubeServer
from tests.kube_work import AgentPods, Served, Work, check_gangs, check_own, owned, until_done

from poise.service.wire.views import JobState

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

SEED = 1
WORKING_SECONDS, AWAY_SECONDS = 20.0, 60.0
LOST = "/poise could not be renewed in time"


class Restarted(Served):
    """A service that is started again whenever it has ended, as Kubernetes does it."""

    codes = (1,)
    trouble = SEED

    def watch_over(self, closing: threading.Event) -> None:
        while not closing.wait(0.2):
            if not self.is_alive():
                self.start()


def test_nothing_is_lost_or_done_twice_whatever_the_api_server_does(
    fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Restarted.of(fresh_kube, tmp_path, monkeypatch)
    work, closing = Work(fresh_kube, service.namespace, tmp_path, SEED), threading.Event()
    kubelet, controllers = AgentPods(fresh_kube, tmp_path / "pods", service.agents), Controllers(fresh_kube, 0.25)
    try:
        with kubelet, controllers, ThreadPoolExecutor(2) as pool:
            service.start()
            watching = pool.submit(service.watch_over, closing)
            try:
                until(lambda: service.has_answered)
                client = service.client()
                coming = pool.submit(work.come, service.client(patience=0.5))
                try:
                    sleep(WORKING_SECONDS)
                    with work.pause:
                        fresh_kube.compact()  # all watches are cut, and too old to go on
                    sleep(WORKING_SECONDS)
                    with work.pause, fresh_kube.down():
                        sleep(AWAY_SECONDS)
                    sleep(WORKING_SECONDS / 2)
                finally:
                    work.enough()
                coming.result()
                until_done(client, work)
                details = {row.id: client.show(row.id) for row in client.queue(states=list(JobState), limit=500).jobs}
                check_gangs(work, details)
                check_own(work, details)
                until(lambda: not owned(fresh_kube, service, "pods") and not owned(fresh_kube, service, "services"))
            finally:
                closing.set()
            watching.result()
        service.codes = (-9,)
        service.kill()
        check_journal(service, details)
        assert LOST in service.log, "who cannot renew its lease stops"
        assert "Traceback" not in service.log
    except BaseException as error:
        error.add_note(f"{[*kubelet.problems[-3:], *controllers.problems[-3:]]}; {service.log[-3000:]}")
        raise
    finally:
        service.close()
    runs, preemptions = (
        sum(each) for each in zip(*((len(one.runs), one.preemptions) for one in details.values()), strict=True)
    )
    print(  # noqa: T201 - the figures of docs/explanation/surviving-crashes.md
        f"\n{len(work.gangs)} gangs, {len(work.jobs)} jobs of Poise, {runs} runs, {preemptions} preemptions,"
        f" {service.starts} starts"
    )
