"""When a run may be asked to leave: once it has attached, at any time, or never."""

from pathlib import Path

import pytest
from tests.machine import LingeringBackend, Service, a_request

from poise.service.backends.api import RunEnding


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_a_job_that_never_yields_is_not_preempted(service: Service) -> None:
    first, second = service.submit(a_request(gpus=2, preemption="never"), a_request(gpus=2))
    for _ in range(10):
        service.pass_time(10)
    assert service.engine.show(first).preemptions == 0
    assert service.engine.show(second).job.started is None


def test_a_script_that_knows_nothing_of_poise_keeps_its_gpus(service: Service) -> None:
    service.machine.unaware.add("1")
    first, second = service.submit(a_request(gpus=2), a_request(gpus=2))
    for _ in range(10):
        service.pass_time(10)
    assert service.engine.show(first).preemptions == 0
    assert service.engine.show(second).job.started is None
    assert (
        "it is not preempted: it has not reported that it did a step and can save it" in service.engine.why(first).evidence
    )
    assert f"held by job {first} (tenant alice, 2 v100, not preempted)" in service.engine.why(second).evidence


def test_a_script_that_keeps_its_own_checkpoints_is_restarted(service: Service) -> None:
    service.machine.unaware.add("1")
    first, second = service.submit(a_request(gpus=2, preemption="restart"), a_request(gpus=2))
    for _ in range(3):
        service.pass_time(10)
    assert service.engine.show(first).preemptions >= 1
    assert service.engine.show(second).job.started is not None


@pytest.mark.parametrize(
    ("steps", "checkpoint", "throughput", "is_attached"),
    [(0.0, 0.0, None, False), (1.0, None, 2.0, False), (1.0, 0.0, None, True), (0.0, 0.0, 2.0, True)],
)
def test_a_run_is_attached_once_it_has_done_a_step_and_can_save(
    service: Service, steps: float, checkpoint: float | None, throughput: float | None, is_attached: bool
) -> None:
    service.machine.unaware.add("1")
    [job] = service.submit(a_request(gpus=2))
    service.machine.report(job, steps=steps, checkpoint=checkpoint, throughput=throughput)
    service.settle()
    run = service.loop.state.records[job].current
    assert run is not None
    assert (run.attached is not None) == is_attached
    service.restart()
    assert service.loop.state.records[job].current == run


def test_a_job_that_was_asked_to_leave_and_kept_nothing_is_not_asked_again_before_it_saves(tmp_path: Path) -> None:
    service = Service(tmp_path, backend=LingeringBackend)
    first, second = service.submit(a_request(gpus=2), a_request(gpus=2))
    machine = service.machine
    service.pass_time(10)
    assert machine.leaving == {(first, 1)}
    machine.end(first, RunEnding.FAILED, cause="model-checkpoint-error", code=73)
    service.settle()
    service.pass_time(10)
    machine.end(second, RunEnding.YIELDED, steps=1.0)
    service.settle()
    for _ in range(5):
        service.pass_time(10)
    assert list(machine.alive) == [(first, 2)]
    assert not machine.leaving
    machine.report(first, steps=3.0, checkpoint=2.0, throughput=1.0)
    service.settle()
    service.pass_time(10)
    assert machine.leaving == {(first, 2)}
