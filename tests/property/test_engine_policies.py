"""Every policy, live, through a life of arrivals, failures, holds, cancellations, crashes and changes of policy."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.machine import ALICE, BOB, LingeringBackend, Service, a_request
from tests.machine_laws import check_books, check_standing

from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.policies.catalogue import POLICIES
from poise.service.backends.api import RunEnding
from poise.service.server.service_api import RequestRefusedError, Verb
from poise.service.wire.request import JobRequest

STEPS = 40
COMBINED = ("max-min+packed", "las+stable", "max-min+partitioned", "max-min+fallback", "fifo+agnostic", "max-min+plain")
MODELS = (("ResNet-18", 128), ("LM", 80), ("Recommendation", 2048), ("A3C", None), ("nobody-knows", None))
"""Of those that the shipped table knows, some gain by sharing GPUs."""
CAUSES = ("traceback-from-crash", "network-error", "killed", "import-error", "node-lost")


class Life:
    """A service to which things happen by chance."""

    def __init__(self, directory: Path, seed: int, policies: tuple[str, ...]) -> None:
        self.draw = Random(seed)
        self.policies = policies
        settings = Settings(
            round=10.0, retries=2, cadence=self.draw.choice(list(Cadence)), minimum_run=self.draw.choice((0.0, 1.0))
        )
        self.service = Service(directory, policies[0], "v100:8,k80:4", settings, backend=LingeringBackend)
        self.jobs: list[str] = []

    def go_on(self) -> None:
        """Something happens; perhaps the service crashes over it."""
        happen: tuple[tuple[Callable[[], None], int], ...] = (
            (self.arrive, 20), (self.pass_time, 25), (self.leave, 15), (self.end, 10), (self.want, 15),
            (self.service.restart, 5), (self.renew, 7), (self.end_and_want, 3),
        )  # fmt: skip
        if self.draw.random() < 0.1:
            self.service.crash_at = self.draw.randint(0, 6)
        self.draw.choices([each for each, _ in happen], [weight for _, weight in happen])[0]()
        self.service.settle()
        check_standing(self.service)

    def arrive(self) -> None:
        with suppress(RequestRefusedError):
            requests = [self.a_request() for _ in range(self.draw.randint(1, 3))]
            self.jobs += self.service.submit(*requests, by=self.draw.choice((ALICE, BOB)))

    def a_request(self) -> JobRequest:
        draw = self.draw
        given: dict[str, Any] = {"gpus": draw.choice((1, 1, 1, 2, 2, 3, 4)), "hold": draw.random() < 0.1}
        model, batch = draw.choice(MODELS)
        duration = draw.uniform(10, 500)
        given |= draw.choice(
            ({}, {"duration": duration}, {"duration": duration, "model": model, "batch_size": batch}, {"steps": 100})
        )
        given |= draw.choice(({}, {}, {"gpus": 2, "min_gpus": 1, "max_gpus": 4}, {"micro_batches": draw.choice((2, 8))}))
        given |= draw.choice(({}, {}, {}, {"gpu_types": ("k80",)}, {"preemption": "never"}, {"app": "one"}, {"weight": 2.0}))
        return a_request(**given)

    def pass_time(self) -> None:
        self.service.pass_time(self.draw.choice((0.5, 3, 10, 10, 10, 37)))

    def leave(self) -> None:
        """Somebody who was asked to leave does, perhaps with all its work done."""
        if self.service.machine.leaving:
            job, _ = self.draw.choice(sorted(self.service.machine.leaving))
            how = self.draw.choice((RunEnding.YIELDED, RunEnding.YIELDED, RunEnding.YIELDED, RunEnding.FINISHED))
            self.service.machine.end(job, how, steps=1.0)

    def end(self) -> None:
        """A run ends by itself, perhaps while the service is away."""
        machine = self.service.machine
        able = sorted(machine.alive.keys() - machine.leaving)
        if not able:
            return
        job, _ = self.draw.choice(able)
        how = self.draw.choice((RunEnding.FAILED, RunEnding.FAILED, RunEnding.FINISHED, RunEnding.YIELDED))
        is_away = self.draw.random() < 0.3
        if is_away:
            self.service.loop.backend.close()
        machine.end(job, how, cause=self.draw.choice(CAUSES) if how is RunEnding.FAILED else None, steps=1.0, code=1)
        if is_away:
            machine.now += self.draw.choice((1, 20, 100))
            self.service.restart()

    def want(self) -> None:
        if self.service.loop.state.records:
            self._want(self.draw.choice(sorted(self.service.loop.state.records)))

    def _want(self, job: str) -> None:
        with suppress(RequestRefusedError):
            verb = self.draw.choice(("hold", "hold", "stop", "release", "release", "release", "cancel"))
            self.service.engine.change(ALICE, job, Verb(verb))

    def renew(self) -> None:
        """A new chapter."""
        if self.draw.random() < 0.5:
            self.service.engine.set_policy(ALICE, self.draw.choice(self.policies))
        else:
            self.service.engine.set_weight(ALICE, self.draw.choice(("alice", "bob")), self.draw.choice((0.5, 3.0)))

    def end_and_want(self) -> None:
        """A run ends just as a command for its job arrives."""
        if self.service.machine.alive:
            job, _ = self.draw.choice(sorted(self.service.machine.alive))
            self._want(job)
            self.service.machine.end(job, self.draw.choice((RunEnding.FINISHED, RunEnding.YIELDED)), steps=1.0)
            self._want(job)

    def finish(self) -> None:
        """Nothing bad happens any more, until all jobs have ended."""
        service = self.service
        service.crash_at = None
        for _ in range(400):
            for job, record in service.loop.state.records.items():
                if record.held and record.finished is None:
                    service.engine.change(ALICE, job, Verb.RELEASE)
            for job, epoch in sorted(service.machine.alive):
                if (job, epoch) in service.machine.leaving:
                    service.machine.end(job, RunEnding.YIELDED, steps=1.0)
                elif self.draw.random() < 0.5:
                    service.machine.end(job, RunEnding.FINISHED)
            service.pass_time(self.draw.choice((1, 10, 37)))
            if not service.loop.state.records:
                assert not service.machine.alive
                return
        raise AssertionError(f"some jobs never end: {list(service.loop.state.records)}")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, *COMBINED])
def test_under_every_policy_random_events_leave_no_job_unfinished(policy: str, tmp_path: Path) -> None:
    life = Life(tmp_path, sum(map(ord, policy)), (policy, "las"))
    for _ in range(STEPS):
        life.go_on()
    life.finish()
    check_books(life.service, life.jobs)
