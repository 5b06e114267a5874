"""Server, runners and replicas are killed with SIGKILL at random moments while 50 jobs run: nothing is lost or done twice.

Most jobs are one process; some are two or three ranks that do each step together, and must go on at the same step, each
with its own random numbers.

POISE_CRASH_KILLS and POISE_CRASH_SEED say how often, and which random numbers:

    POISE_CRASH_KILLS=600 POISE_CRASH_SEED=7 python -m pytest -s tests/e2e/test_crashes.py
"""

import os
from collections.abc import Callable

import pytest
from tests.e2e.crashing import PEER_GONE, CrashJob, Havoc, chain, joint_chain, survive
from tests.e2e.service import Service

JOBS = 50
KILLS = int(os.environ.get("POISE_CRASH_KILLS", "200"))
SEED = int(os.environ.get("POISE_CRASH_SEED", "1"))
STEPS, SECONDS = 120 * KILLS // 200, 0.025
"""Of a job: the more kills, the longer, so that there is always something to kill."""


def a_job(service: Service, number: int) -> CrashJob:
    """Most jobs are one process; some are two or three that do each step together."""
    seed, ranks = f"seed-{number}", {1: 2, 5: 3}.get(number % 10, 1)
    often = {"checkpoint": {"every": 0.2, "deadline": 20.0}}
    if ranks == 1:
        command = service.counting(STEPS, SECONDS, seed)
        return CrashJob({"command": command, "gpus": 2 if number % 4 == 0 else 1, **often}, 1, STEPS, chain(seed, STEPS))
    # Steps half as long: ranks wait for each other at each, and hold several GPUs meanwhile.
    command, retry = service.ranks(STEPS, SECONDS / 2, seed), {"exit_codes": [PEER_GONE]}
    fields = {"command": command, "gpus": ranks, "replicas": "gpu", "retry": retry, **often}
    return CrashJob(fields, ranks, STEPS, joint_chain(seed, STEPS, ranks))


@pytest.mark.slow
def test_processes_killed_at_random_lose_nothing_and_do_nothing_twice(a_service: Callable[..., Service]) -> None:
    service = a_service("--cluster", "v100:4,k80:4", "--round", "2s", "--log-format", "json")
    service.up()
    havoc = Havoc(service, SEED)
    try:
        survive(service, havoc, [a_job(service, number) for number in range(JOBS)], KILLS)
    except BaseException as error:
        error.add_note(f"POISE_CRASH_SEED={SEED} POISE_CRASH_KILLS={KILLS}; killed {dict(havoc.counts)}; {service.state}")
        raise
