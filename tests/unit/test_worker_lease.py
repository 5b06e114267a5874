"""The loop of a training script: every step once, whatever happens in between."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import sleep
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends import until

from poise.worker import CHECKPOINT_FAILED, YIELDED, Lease, Notice, StopRequest, WorkerError, Writers, attach
from poise.worker.protocol import replace_json
from poise.worker.testing import preempting


class Training:
    """The steps that were done and kept, in order. Saves fail, or write rubbish, when they are told to."""

    def __init__(self, failing: frozenset[int] = frozenset(), spoilt: frozenset[int] = frozenset()) -> None:
        self.done: list[int] = []
        self.failing, self.spoilt = failing, spoilt

    def save(self, path: str) -> None:
        if len(self.done) in self.failing:
            raise OSError(28, "No space left on device")
        text = "rubbish" if len(self.done) in self.spoilt else json.dumps(self.done)
        Path(path).write_text(text, encoding="utf-8")

    def load(self, path: str) -> None:
        self.done = json.loads(Path(path).read_text(encoding="utf-8"))

    def attach(self, **more: object) -> Lease:
        return attach(save=self.save, load=self.load, **more)  # type: ignore[arg-type]

    def run(
        self, total: int, during: Mapping[int, Callable[[], object]] = MappingProxyType({}), **more: object
    ) -> list[int]:
        """Train. `during`: what happens in the course of a step."""
        for step in self.attach(**more).steps(total):
            during.get(step, int)()
            self.done.append(step)
        return self.done


class Run:
    """A run's directory, and a lease that can be ended."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.checkpoints = folder / "run", folder / "checkpoint"
        self._set = monkeypatch.setenv
        self._set("POISE_CHECKPOINT_DIR", str(self.checkpoints))
        self._set("POISE_LEASE_VERSION", "1")
        self.begin()

    def begin(self) -> None:
        """The next run of the job."""
        self.folder = self.folder.with_name(f"{self.folder.name}-next")
        self.folder.mkdir()
        self._set("POISE_RUN_DIR", str(self.folder))
        replace_json(str(self.folder), "lease.json", {"job": "a", "epoch": 1, "ends": None, "cause": None, "text": None})

    def end(self) -> None:
        fields = {"job": "a", "epoch": 1, "ends": 99.5, "cause": "share", "text": "b is behind its share"}
        replace_json(str(self.folder), "lease.json", fields)

    def says(self, name: str) -> dict[str, object]:
        found = json.loads((self.folder / name).read_text())
        assert isinstance(found, dict)
        return found

    def saved(self) -> list[str]:
        return sorted(os.listdir(self.checkpoints))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


@given(st.integers(0, 12), st.lists(st.integers(1, 5), max_size=6))
def test_steps_kept_are_each_done_once_whatever_the_leases(total: int, leases: list[int]) -> None:
    with preempting(after_steps=leases) as poise:
        assert poise.run(lambda: Training().run(total)) == list(range(total))


@given(st.integers(1, 12), st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)), st.lists(st.integers(1, 5), max_size=6))
def test_steps_kept_are_each_done_once_whatever_fails(
    total: int, failing: set[int], spoilt: set[int], leases: list[int]
) -> None:
    """Saves that raise, and saves that write what cannot be loaded: each such trouble once, as when a disk was full."""
    started: list[Training] = []
    codes: set[object] = {CHECKPOINT_FAILED}
    complaints = {"it would never end"}

    def train() -> list[int]:
        started.append(Training(frozenset(failing), frozenset(spoilt)))
        return started[-1].run(total, checkpoint_every=1e-9)

    with preempting(after_steps=leases) as poise:
        for _ in range(40):
            try:
                assert poise.run(train) == list(range(total))
                break
            except SystemExit as left:
                codes.add(left.code)
            except AssertionError as stuck:
                complaints.add(str(stuck).partition(": ")[2])
            failing.discard(len(started[-1].done))
            spoilt.clear()
            _remove_rubbish(Path(poise.checkpoint_dir))
        else:
            pytest.fail("it never came to its end")
    assert (codes, complaints) == ({CHECKPOINT_FAILED}, {"it would never end"})


def _remove_rubbish(folder: Path) -> None:
    """Where nothing can be loaded a run refuses to begin anew; its owner has to decide, and does so here."""
    found = list(folder.glob("step-*"))
    if all(path.read_text() == "rubbish" for path in found):
        for path in found:
            path.unlink()


def test_steps_outside_poise_are_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    for step in Training().attach().steps(3):
        assert signal.getsignal(signal.SIGTERM) is before
        assert step < 3
    assert Training().run(4) == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == []


def test_steps_outside_poise_are_resumed_from_a_directory_of_the_scripts_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Training().run(9, {4: lambda: 1 // 0}, checkpoint_dir=tmp_path, checkpoint_every=1e-9)
    again = Training()
    assert next(again.attach(checkpoint_dir=tmp_path).steps(9)) == 4
    assert again.done == [0, 1, 2, 3]
    assert Training().run(9, checkpoint_dir=tmp_path) == list(range(9))


def test_lease_end_is_noticed_before_the_next_step(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    with pytest.raises(SystemExit) as left:
        training.run(10, {4: run.end})
    assert left.value.code == YIELDED == 75
    assert training.done == [0, 1, 2, 3, 4]
    assert run.saved() == ["step-5"]
    assert (run.says("progress.json")["steps"], run.says("progress.json")["checkpoint"]) == (5, 5)
    assert attach().preemption_notice() == Notice(99.5, "share", "b is behind its share")
    assert capsys.readouterr().err == "poise: leaving before step 5 (b is behind its share); 5 steps are saved\n"


def test_lease_end_before_the_first_step_saves_nothing(run: Run) -> None:
    run.end()
    with pytest.raises(SystemExit) as left:
        Training().run(10)
    assert left.value.code == YIELDED
    assert not run.checkpoints.exists()


def test_lease_end_in_the_last_step_does_not_keep_the_job_from_finishing(run: Run) -> None:
    training = Training()
    assert training.run(3, {2: run.end}) == [0, 1, 2]
    assert run.saved() == ["step-3"]


def test_run_that_died_after_the_last_step_trains_no_more(run: Run) -> None:
    assert Training().run(3) == [0, 1, 2]
    run.begin()
    again = Training()
    assert list(again.attach().steps(3)) == []
    assert again.done == [0, 1, 2]
    assert (run.says("progress.json")["steps"], run.says("progress.json")["total"]) == (3, 3)


def test_term_ends_the_loop_at_the_next_step_with_a_checkpoint(run: Run) -> None:
    training = Training()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        training.run(10, {2: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert left.value.code == YIELDED
    assert run.saved() == ["step-3"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_loop_in_another_thread_does_without_term(run: Run) -> None:
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.extend(Training().run(3)))
    thread.start()
    thread.join()
    assert done == [0, 1, 2]
    assert run.saved() == ["step-3"]


@pytest.mark.usefixtures("run")
def test_child_processes_still_die_of_term() -> None:
    for _ in Training().attach().steps(1):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_save_that_fails_at_the_end_of_the_lease_is_a_checkpoint_failure(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(failing=frozenset({2}))
    with pytest.raises(SystemExit) as left:
        training.run(10, {1: run.end})
    assert left.value.code == CHECKPOINT_FAILED == 73
    want = "the checkpoint of 2 steps failed at the end of the lease: OSError: [Errno 28] No space left on device"
    assert run.says("failure.json") == {"version": 1, "cause": "model-checkpoint-error", "text": want}
    assert capsys.readouterr().err.endswith(f"poise: {want}\n")
    assert run.saved() == []


def test_save_that_fails_in_between_is_said_and_training_goes_on(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(failing=frozenset({2}))
    assert training.run(4, checkpoint_every=1e-9) == [0, 1, 2, 3]
    assert "poise: the checkpoint of 2 steps failed (OSError: [Errno 28] No space left on device); going on, 1 step is" in (
        capsys.readouterr().err
    )
    assert run.saved() == ["step-3", "step-4"]
    assert not (run.folder / "failure.json").exists()


@pytest.mark.usefixtures("run")
def test_checkpoints_are_as_far_apart_as_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's word counts for more than the script's."""
    monkeypatch.setenv("POISE_CHECKPOINT_EVERY", "3600")
    lease = Training().attach(checkpoint_every=1e-9)
    lease.begin(0, 10)
    assert [lease.check(step) for step in range(10)] == [StopRequest.GO_ON] * 10


def test_checkpoint_that_cannot_be_loaded_is_set_aside_for_the_one_before(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.checkpoints.mkdir()
    (run.checkpoints / "step-2").write_text("[0, 1]")
    (run.checkpoints / "step-5").write_text("[0, 1, 2")
    training = Training()
    assert training.run(6) == [0, 1, 2, 3, 4, 5]
    assert run.saved() == ["bad-step-5", "step-2", "step-6"]
    assert "poise: the checkpoint of 5 steps cannot be loaded: JSONDecodeError: " in capsys.readouterr().err


def test_run_without_a_checkpoint_that_can_be_loaded_does_not_begin_anew(run: Run) -> None:
    run.checkpoints.mkdir()
    (run.checkpoints / "step-2").write_text("[0,")
    (run.checkpoints / "step-5").write_text("[0,")
    with pytest.raises(SystemExit) as left:
        Training().run(6)
    assert left.value.code == CHECKPOINT_FAILED
    assert run.says("failure.json")["text"] == "none of the checkpoints can be loaded (of 5, 2 steps)"
    assert run.saved() == ["step-2", "step-5"]


@pytest.mark.parametrize("first", ["0", "1"])
def test_checkpoint_that_ranks_cannot_load_ends_the_run_and_the_next_takes_the_one_before(
    run: Run, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Ranks that fell back each by itself could begin at different steps. The other may be told to leave before it loads."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    run.checkpoints.mkdir()
    (run.checkpoints / "step-2").write_text("[0, 1]")
    (run.checkpoints / "step-5").write_text("[0,")
    monkeypatch.setenv("RANK", first)
    with pytest.raises(SystemExit) as left:
        Training().run(6)
    assert left.value.code == CHECKPOINT_FAILED
    assert run.says("failure.json")["text"] == (
        "the checkpoint of 5 steps cannot be loaded; the next run begins with 2 steps"
    )
    assert run.saved() == ["bad-step-5", "step-2"]
    run.begin()
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert Training().run(6) == [0, 1, 2, 3, 4, 5]


def _ranks(count: int, monkeypatch: pytest.MonkeyPatch, **more: object) -> list[tuple[Training, Iterator[int]]]:
    monkeypatch.setattr("poise.worker.rank_state.PATIENCE", 0.0)  # ranks that take turns cannot wait for each other
    monkeypatch.setenv("WORLD_SIZE", str(count))
    found = []
    for rank in range(count):
        monkeypatch.setenv("RANK", str(rank))
        training = Training()
        found.append((training, training.attach(**more).steps(10)))
    return found


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_stop_at_the_same_step_whichever_comes_first(run: Run, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """A step is begun by all in any order, and done when all have begun it."""
    ranks = _ranks(3, monkeypatch)
    order = ranks[first:] + ranks[:first]
    codes: list[object] = []
    for at in range(10):
        if at == 4:
            run.end()
        begun = []
        for training, steps in order:
            try:
                begun.append((training, next(steps)))
            except SystemExit as left:
                codes.append(left.code)
        for training, step in begun:
            training.done.append(step)
        if codes:
            break
    assert codes == [YIELDED] * 3
    assert [training.done for training, _ in ranks] == [list(range(5))] * 3
    assert run.says("stop.json") == {"version": 1, "step": 5}
    assert run.saved() == ["ranks-5.json", "step-5"]


def test_rank_0_takes_the_last_step_only_once_all_nodes_know_that_it_is_the_last(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POISE_NODES", "2")
    training, steps = _ranks(2, monkeypatch)[0]
    training.done.append(next(steps))
    run.end()
    went_on = threading.Event()

    def acknowledge() -> None:
        until(lambda: (run.folder / "stop.json").exists())
        sleep(0.1)
        assert not went_on.is_set()
        replace_json(str(run.folder), "stop.acknowledged.json", {"step": 2})

    agent = threading.Thread(target=acknowledge)
    agent.start()
    training.done.append(next(steps))
    went_on.set()
    agent.join()
    with pytest.raises(SystemExit) as left:
        next(steps)
    assert left.value.code == YIELDED
    assert training.done == [0, 1]
    assert "step-2" in run.saved()


def test_rank_0_leaves_where_it_stands_if_term_comes_before_all_nodes_know(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POISE_NODES", "2")
    training, steps = _ranks(2, monkeypatch)[0]
    training.done.append(next(steps))
    run.end()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as left:
        next(steps)
    assert left.value.code == YIELDED
    assert run.says("stop.json") == {"version": 1, "step": 2}
    assert "step-1" in run.saved()


def test_rank_0_alone_writes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    second = _ranks(2, monkeypatch, checkpoint_every=1e-9)[1]
    assert list(second[1]) == list(range(10))
    assert sorted(os.listdir(run.folder)) == ["lease.json", "rank-1.json"]
    assert not run.checkpoints.exists()


@pytest.mark.slow
def test_checkpoints_in_pieces_are_written_by_all_ranks_at_the_same_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.worker.rank_state.PATIENCE", 0.0)  # ranks that take turns cannot wait for each other
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked: list[tuple[int, int, str]] = []
    leases = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        leases.append(attach(checkpoint_every=1e-9, writers=Writers.ALL))
        leases[-1].begin(0, 10)
    for step in range(6):
        for lease in leases:

            def save(path: str, rank: int = lease.rank, step: int = step) -> None:
                asked.append((step, rank, os.path.basename(path)))
                os.makedirs(path, exist_ok=True)

            if lease.check(step) is StopRequest.CHECKPOINT:
                lease.checkpoint(step, save)
                lease.checkpoint(step, save)  # once more on all ranks or on none: they wait for each other
    assert asked == [(step, rank, f"saving-{step}") for step in (2, 4) for rank in (0, 1)]
    assert {"step-2", "step-4"} <= set(run.saved())


def test_checkpoints_in_pieces_that_ranks_cannot_agree_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone would come to `save`, and wait there for the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorkerError, match="outside Poise, ranks that all write cannot agree on a step"):
        attach(checkpoint_dir="kept", checkpoint_every=600, writers=Writers.ALL)


def test_script_without_save_begins_at_0_and_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run.end()
        with pytest.raises(SystemExit) as left:
            list(attach().steps(5))
        assert left.value.code == YIELDED
    assert run.says("progress.json")["checkpoint"] is None
    assert "nothing is saved by this script" in capsys.readouterr().err


def test_loss_is_reported_with_progress(run: Run) -> None:
    lease = attach()
    for _ in lease.steps(1):
        lease.report(loss=0.25)
    assert run.says("progress.json")["loss"] == 0.25


def test_lease_is_good_for_one_loop() -> None:
    lease = attach()
    assert list(lease.steps(2)) == [0, 1]
    with pytest.raises(WorkerError, match="count all steps of the training in one"):
        lease.steps(2)


def test_second_loop_of_a_run_is_refused_before_it_takes_the_checkpoints_of_the_first(run: Run) -> None:
    assert Training().run(3) == [0, 1, 2]
    second = Training()
    with pytest.raises(WorkerError, match="a job has one training loop: count all its steps in one, or submit the second"):
        second.run(5)
    assert second.done == []
    assert run.saved() == ["step-3"]
    with pytest.raises(WorkerError, match="a job has one training loop"):
        attach().begin(0, 5)  # as Lightning does


@pytest.mark.usefixtures("run")
def test_second_loop_of_a_script_that_saves_nothing_is_done() -> None:
    for steps in (2, 3):
        assert list(attach().steps(steps)) == list(range(steps))


def test_attach_refuses_what_makes_no_sense() -> None:
    with pytest.raises(WorkerError, match="both save and load"):
        attach(save=print)
    with pytest.raises(WorkerError, match="checkpoint_every: expected seconds above 0, got 0"):
        attach(checkpoint_every=0)
    with pytest.raises(WorkerError, match="expected 0 or more, got -1"):
        attach().steps(-1)
    with pytest.raises(TypeError):
        attach().steps(1.5)  # type: ignore[arg-type]


def test_preempting_tells_a_script_that_does_not_resume() -> None:
    def forgetful() -> None:
        list(attach().steps(5))

    with preempting(after_steps=2) as poise, pytest.raises(AssertionError, match="it would never end"):
        poise.run(forgetful)
    with pytest.raises(ValueError, match="after_steps: expected 1 or more"), preempting(after_steps=0):
        pass


def test_preempting_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_JOB", "mine")
    before = dict(os.environ)
    with preempting(after_steps=[1]) as poise:
        assert poise.run(lambda: (Training().run(3), os.environ["POISE_JOB"])[1]) == "test"
        with suppress(ZeroDivisionError):
            poise.run(lambda: 1 // 0)
    assert dict(os.environ) == before
