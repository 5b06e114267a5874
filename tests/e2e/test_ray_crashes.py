"""The crash test on Ray: server, agents, raylets, runners and replicas are killed, and nodes stand still, while 30 jobs run.

A raylet that was killed is started again at once; its node's runs live on, and its next agent finds them if it comes within
the node's lease. POISE_CRASH_KILLS and POISE_CRASH_SEED are as in `test_remote_crashes.py`.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
from tests.e2e.crashing import AGENT, SERVER, NodeHavoc, mixed_jobs, survive
from tests.e2e.machines import check_epochs, pause, resume
from tests.e2e.ray_service import RayService
from tests.e2e.test_remote_crashes import JOBS, KILLS, SECONDS, SEED, STEPS
from tests.ray_cluster import RayDaemons
from tests.ray_stage import release

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow]
FENCE = 20.0
"""Seconds of a lease: longer than Ray takes to start an agent again, even beside other work."""
RAYLET = "raylet"
RECOVERY = 3.0
"""Least seconds between two kills of a server, an agent or a raylet.

Each needs some seconds of CPU time to come back, and jobs have to run meanwhile, or there would be nothing else to kill.
"""


class RayHavoc(NodeHavoc):
    """Harm to Ray nodes. Ray itself starts agents again; raylets are started again here, one at a time."""

    harms = {**NodeHavoc.harms, SERVER: 3, AGENT: 4, RAYLET: 4}  # noqa: RUF012
    pause = 0.9  # so that a quarter of the kills is of what takes long to come back

    def __init__(self, service: RayService, seed: int) -> None:
        super().__init__(service, [*service.daemons.nodes], FENCE, seed)
        self._ray, self._daemons = service, service.daemons
        self._pool = ThreadPoolExecutor(1)
        self._starting: Future[None] | None = None
        self._calm = 0.0  # until when what takes long to come back is left alone

    def do(self, harm: str) -> bool:
        """Do harm of that kind."""
        is_heavy = harm in (SERVER, AGENT, RAYLET)
        if is_heavy and monotonic() < self._calm:
            return False
        is_done = self._kill_raylet() if harm == RAYLET else super().do(harm)
        if is_done and is_heavy:
            self._calm = monotonic() + RECOVERY
        return is_done

    def kill_agent(self, node: str) -> bool:
        """Kill the actor."""
        pid = self._agent(node)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def cut_off(self, node: str) -> Callable[[], None] | None:
        """Stop the actor and all runs of a node."""
        agent = self._agent(node)
        if agent is None:
            return None

        def found() -> set[int]:
            return {agent, *(each.pid for each in self._ray.processes(node))}

        pause(found)
        return lambda: resume(found())

    def heal(self) -> None:
        """Let all nodes back."""
        super().heal()
        if self._starting is not None:
            self._starting.result()

    def close(self) -> None:
        """Wait for what is being started, and leave no node stopped: the cluster is that of other tests too."""
        self._end_cut()
        self._pool.shutdown()

    def _kill_raylet(self) -> bool:
        if self._starting is not None and not self._starting.done():
            return False
        if self._starting is not None:
            self._starting.result()
        name = self.random.choice(self._nodes)
        self._daemons.kill_node(name)
        self._starting = self._pool.submit(self._daemons.start_node, name)
        return True

    def _agent(self, node: str) -> int | None:
        try:
            return self._daemons.agent(node)
        except LookupError:  # its raylet was killed
            return None


@pytest.fixture
def service(ray_cluster: RayDaemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayService]:
    """A service that has the cluster to itself."""
    release(ray_cluster)
    made = RayService(tmp_path, ray_cluster, "--round", "2s", "--log-format", "json", fence=FENCE)
    made.talk_to_it(monkeypatch)
    yield made
    made.close()
    release(ray_cluster)


def test_ray_nodes_that_fail_at_random_lose_nothing_and_do_nothing_twice(service: RayService) -> None:
    service.up()
    havoc = RayHavoc(service, SEED)
    try:
        survive(service, havoc, mixed_jobs(service, JOBS, STEPS, SECONDS), KILLS)
        check_epochs(service.stamps)
    except BaseException as error:
        error.add_note(f"POISE_CRASH_SEED={SEED} POISE_CRASH_KILLS={KILLS}; killed {dict(havoc.counts)}; {service.state}")
        raise
    finally:
        havoc.close()
