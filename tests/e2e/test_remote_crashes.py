"""The crash test over machines: server, agents, runners and replicas are killed, and nodes are cut off, while 30 jobs run.

Some jobs are gangs over two or three nodes. Where network namespaces can be made, each node has one, and half of the cuts
pull its cable; the others stop all its processes, as when a machine stands still. Some are shorter than the lease of a node
and some longer, so that its jobs start elsewhere before it is back.

POISE_CRASH_KILLS and POISE_CRASH_SEED say how often, and which random numbers:

    POISE_CRASH_KILLS=600 POISE_CRASH_SEED=7 python -m pytest -s tests/e2e/test_remote_crashes.py
"""

import os
from collections.abc import Callable

import pytest
from tests.e2e.crashing import NodeHavoc, mixed_jobs, survive
from tests.e2e.machines import Machines, check_epochs

JOBS = 30
KILLS = int(os.environ.get("POISE_CRASH_KILLS", "150"))
SEED = int(os.environ.get("POISE_CRASH_SEED", "1"))
STEPS, SECONDS = 120 * max(KILLS, 50) // 150, 0.025
"""Of a job: the more kills, the longer, so that there is always something to kill."""
FENCE = 6.0


class MachineHavoc(NodeHavoc):
    """Harm to machines: their agents are killed, their cables pulled, or all their processes stopped."""

    def __init__(self, machines: Machines, seed: int) -> None:
        super().__init__(machines, [*machines.machines], FENCE, seed)
        self._machines = machines

    def kill_agent(self, node: str) -> bool:
        """Kill it, and start another one at once."""
        self._machines.machines[node].kill()
        self._machines.start_agents(node)
        return True

    def cut_off(self, node: str) -> Callable[[], None]:
        """Pull its cable, if it has one, or stop all its processes."""
        machine, network = self._machines.machines[node], self._machines.network
        if network is not None and self.random.random() < 0.5:
            network.cut(node)
            return lambda: network.heal(node)
        machine.pause()
        return machine.resume


@pytest.mark.slow
def test_machines_that_fail_at_random_lose_nothing_and_do_nothing_twice(a_cluster: Callable[..., Machines]) -> None:
    machines = a_cluster("--round", "2s", "--log-format", "json", fence=FENCE)
    machines.up()
    havoc = MachineHavoc(machines, SEED)
    try:
        survive(machines, havoc, mixed_jobs(machines, JOBS, STEPS, SECONDS), KILLS)
        check_epochs(machines.stamps)
        for name, machine in machines.machines.items():
            assert "Traceback" not in machine.log, name
    except BaseException as error:
        error.add_note(f"POISE_CRASH_SEED={SEED} POISE_CRASH_KILLS={KILLS}; killed {dict(havoc.counts)}; {machines.state}")
        raise
