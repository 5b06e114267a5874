"""The contract of `LiveBackend`: one suite over all back ends."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.backends import LocalStage, Stage, a_request, an_order, notice, python, require
from tests.kube_stage import FakeKubeStage, RealKubeStage
from tests.ray_cluster import RayDaemons
from tests.ray_stage import RayStage
from tests.remote import RemoteStage

from poise.service.backends.api import (
    BackendEvent,
    DesiredState,
    LiveBackend,
    RunBegan,
    RunEnded,
    RunEnding,
    RunNotice,
    RunOrder,
    RunProgressed,
)
from poise.service.backends.local.orders import Isolation
from poise.service.backends.null import NullBackend
from poise.service.wire.request import MOST_STEPS

LONG = 1000.0
SHORT = 0.05


class Scene(Stage):
    """A back end of any kind.

    prefix   of the names of jobs, for the back end and not for the test: one that goes on from test to test remembers names
    """

    backend: Any
    prefix = ""

    def order(self, job: str, seconds: float, *, epoch: int = 1, **more: Any) -> RunOrder:
        """A run of that many seconds, on a GPU of its own."""
        slot = int(job) if job.isdigit() else 0
        request = a_request(python(f"import time; time.sleep({seconds})"), duration=seconds, **more)
        return an_order(self.prefix + job, request, slot, epoch=epoch)

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """Ask a run to leave."""
        self.backend.stop(self.prefix + job, epoch, notice)

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run."""
        self.backend.kill(self.prefix + job, epoch, reason)

    def tell(self, news: BackendEvent) -> None:
        if isinstance(news, RunBegan | RunProgressed | RunEnded):
            news = replace(news, job=news.job.removeprefix(self.prefix))
        super().tell(news)


class NullScene(Scene):
    def __init__(self) -> None:
        super().__init__()
        self.backend: LiveBackend = NullBackend(self.tell)

    def reopen(self, *runs: tuple[RunOrder, DesiredState]) -> None:
        self.backend.close()
        self.backend = NullBackend(self.tell)
        self.backend.adopt(runs)

    def close(self) -> None:
        self.backend.close()


class LocalScene(LocalStage, Scene):
    pass


class RemoteScene(RemoteStage, Scene):
    pass


class RayScene(RayStage, Scene):
    def __init__(self, daemons: RayDaemons, folder: Path) -> None:
        self.prefix = f"{uuid4().hex[:8]}-"
        super().__init__(daemons, folder)


class InPods:
    """Orders of runs in pods."""

    def order(self, job: str, seconds: float, *, epoch: int = 1, **more: Any) -> RunOrder:
        """The same, in an image."""
        return super().order(job, seconds, epoch=epoch, image="job", **more)  # type: ignore[misc,no-any-return]


class KubernetesScene(InPods, RealKubeStage, Scene):
    pass


class FakeKubernetesScene(InPods, FakeKubeStage, Scene):
    pass


LiveScene = LocalScene | NullScene | RemoteScene | RayScene | KubernetesScene | FakeKubernetesScene
KUBERNETES = pytest.param(
    "kubernetes", marks=[pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes"), pytest.mark.slow]
)
RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow])


@pytest.fixture(params=["local", "isolated", "remote", "null", "fake-kubernetes", RAY, KUBERNETES])
def scene(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScene]:
    level = Isolation.FULL if request.param == "isolated" else Isolation.NONE
    require(level, tmp_path_factory.mktemp("trial"))
    made: LiveScene
    match request.param:
        case "null":
            made = NullScene()
        case "remote":
            made = RemoteScene(tmp_path)
        case "fake-kubernetes":
            made = FakeKubernetesScene(tmp_path)
        case "kubernetes":
            made = KubernetesScene(request.getfixturevalue("fresh_kube"), tmp_path)
        case "ray":
            made = RayScene(request.getfixturevalue("ray_cluster"), request.getfixturevalue("ray_folder"))
        case _:
            made = LocalScene(tmp_path, isolation=level)
    yield made
    made.close()


def test_run_begins_and_finishes(scene: LiveScene) -> None:
    scene.backend.launch(scene.order("1", SHORT))
    ended = scene.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FINISHED, None, (0,))
    assert scene.wait(RunBegan, "1").at <= ended.at


def test_run_that_is_stopped_yields_once(scene: LiveScene) -> None:
    scene.backend.launch(scene.order("1", LONG, preemption="restart"))
    scene.wait(RunBegan, "1")
    scene.stop("1", 1, notice())
    scene.stop("1", 1, notice())
    assert scene.wait(RunEnded, "1").how is RunEnding.YIELDED
    scene.stop("1", 1, notice())
    scene.backend.launch(scene.order("2", SHORT))
    scene.wait(RunEnded, "2")
    assert len(scene.of(RunEnded, "1")) == 1


def test_run_begins_only_once_the_run_before_it_has_left_its_gpus(scene: LiveScene) -> None:
    """Orders name their GPUs, and the engine does not wait between a stop and the launch that it makes room for."""
    scene.backend.launch(scene.order("first", LONG, preemption="restart"))
    scene.wait(RunBegan, "first")
    scene.stop("first", 1, notice())
    scene.backend.launch(scene.order("second", SHORT))
    scene.wait(RunEnded, "second")
    told = [(type(each), each.job) for each in scene.news]
    assert told.index((RunEnded, "first")) < told.index((RunBegan, "second"))


def test_run_is_launched_once_however_often_it_is_ordered(scene: LiveScene) -> None:
    order = scene.order("1", SHORT)
    scene.backend.launch(order)
    scene.backend.launch(order)
    scene.wait(RunEnded, "1")
    scene.backend.launch(scene.order("2", SHORT))
    scene.wait(RunEnded, "2")
    assert len(scene.of(RunBegan, "1")) == len(scene.of(RunEnded, "1")) == 1


def test_run_that_is_killed_yields(scene: LiveScene) -> None:
    scene.backend.launch(scene.order("1", LONG))
    scene.wait(RunBegan, "1")
    scene.kill("1", 1, "cancelled by ann")
    scene.kill("1", 1, "cancelled by ann")
    assert scene.wait(RunEnded, "1").how is RunEnding.YIELDED


def test_job_runs_again_after_it_yielded(scene: LiveScene) -> None:
    scene.backend.launch(scene.order("1", LONG, preemption="restart"))
    scene.wait(RunBegan, "1")
    scene.stop("1", 1, notice())
    scene.wait(RunEnded, "1")
    scene.backend.launch(scene.order("1", SHORT, epoch=2))
    assert scene.wait(RunEnded, "1", 2).how is RunEnding.FINISHED


@pytest.mark.parametrize("desired", [DesiredState.LEAVE, DesiredState.GONE])
def test_run_that_never_began_and_is_not_wanted_yields_without_codes(scene: LiveScene, desired: DesiredState) -> None:
    scene.reopen((scene.order("1", LONG), desired))
    ended = scene.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.YIELDED, ())
    assert not scene.of(RunBegan, "1")


def test_run_that_never_began_and_is_wanted_begins_at_adoption(scene: LiveScene) -> None:
    scene.reopen((scene.order("1", SHORT), DesiredState.RUN))
    assert scene.wait(RunEnded, "1").how is RunEnding.FINISHED


def test_orders_for_unknown_runs_are_ignored(scene: LiveScene) -> None:
    scene.stop("9", 4, notice())
    scene.kill("9", 4, "no reason")
    scene.backend.launch(scene.order("1", SHORT))
    scene.wait(RunEnded, "1")
    assert {news.job for news in scene.news} == {"1"}


def test_closed_back_end_reports_nothing_more(scene: LiveScene) -> None:
    scene.backend.launch(scene.order("1", LONG))
    scene.wait(RunBegan, "1")
    scene.backend.close()
    scene.backend.close()
    assert not scene.of(RunEnded, "1")


class Clock:
    """A monotonic clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_null_run_keeps_its_work_over_preemptions() -> None:
    stage, clock = Stage(), Clock()
    backend = NullBackend(stage.tell, clock=clock)
    request = a_request("", duration=10.0)
    backend.launch(an_order("1", request))
    clock.now = 4.0
    backend.stop("1", 1, notice())
    assert stage.wait(RunEnded, "1").steps == 4.0
    backend.launch(an_order("1", request, epoch=2))
    clock.now = 9.0
    backend.stop("1", 2, notice())
    assert stage.wait(RunEnded, "1", 2).steps == 9.0
    backend.launch(an_order("1", request, epoch=3))
    clock.now = 10.0
    backend.launch(an_order("2", a_request("", duration=1.0)))  # so that it looks at the clock
    assert stage.wait(RunEnded, "1", 3).steps == 10.0
    backend.close()


def test_null_run_counts_steps_where_both_steps_and_duration_are_known() -> None:
    stage, clock = Stage(), Clock()
    backend = NullBackend(stage.tell, clock=clock)
    backend.launch(an_order("1", a_request("", duration=10.0, steps=500)))
    clock.now = 4.0
    backend.stop("1", 1, notice())
    assert stage.wait(RunEnded, "1").steps == 200.0
    backend.close()


@pytest.mark.parametrize(("duration", "steps"), [(1e-320, 1), (5e-324, 1e15), (1e-9, 1e15)])
def test_null_run_that_takes_next_to_no_time_is_reported_with_finite_numbers(duration: float, steps: float) -> None:
    stage = Stage()
    backend = NullBackend(stage.tell)
    backend.launch(an_order("1", a_request("", duration=duration, steps=steps)))
    report, ended = stage.wait(RunProgressed, "1"), stage.wait(RunEnded, "1")
    assert (report.steps, report.throughput) == (0.0, MOST_STEPS)
    assert (ended.how, ended.steps) == (RunEnding.FINISHED, steps)
    backend.close()


def test_null_run_of_unknown_length_goes_on_until_it_is_asked_to_leave() -> None:
    stage, clock = Stage(), Clock()
    backend = NullBackend(stage.tell, clock=clock)
    backend.launch(an_order("1", a_request("")))
    clock.now = 1e9
    backend.launch(an_order("2", a_request("", duration=1e-9)))
    clock.now = 2e9
    backend.launch(an_order("3", a_request("", duration=1e-9)))
    stage.wait(RunEnded, "2")
    assert not stage.of(RunEnded, "1")
    backend.kill("1", 1, "enough")
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED
    backend.close()
