"""What each rank has of its own in a checkpoint: its random generators, which go on as if nothing had happened."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.worker import Lease, attach, rank_state
from poise.worker.checkpoints import Checkpoints
from poise.worker.generators import cuda_states, generators, restore, seed


def _drawn() -> tuple[float, float]:
    return random.uniform(0, 1), float(np.random.random())


@given(st.integers(0, 2**32), st.integers(0, 700), st.booleans())
def test_generators_restored_from_json_draw_the_same_again(start: int, drawn: int, gauss: bool) -> None:
    seed(str(start))
    for _ in range(drawn):
        _drawn()
    if gauss:
        random.gauss(0, 1), np.random.normal()  # each keeps a second number for the next time
    state = json.loads(json.dumps(generators()))
    want = [_drawn(), random.gauss(0, 1), np.random.normal()]
    seed("else")
    restore(state)
    assert [_drawn(), random.gauss(0, 1), np.random.normal()] == want


def test_cuda_generators_go_to_their_devices_or_to_the_one_in_use() -> None:
    assert cuda_states(["a", "b"], 1, count=2, device=0) == {0: "a", 1: "b"}
    assert cuda_states(["a", "b"], 1, count=1, device=0) == {0: "b"}
    assert cuda_states(["a"], 0, count=4, device=2) == {2: "a"}


class Gang:
    """Ranks that take turns in one process, each with a lease and generators of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.epoch = folder, 0
        self.checkpoints = folder / "checkpoint"
        self._set = monkeypatch.setenv

    def begin(self, size: int) -> list[Lease]:
        """Start the next run."""
        self.epoch += 1
        run_dir = self.folder / f"run-{self.epoch}"
        run_dir.mkdir()
        self._set("POISE_RUN_DIR", str(run_dir))
        self._set("POISE_CHECKPOINT_DIR", str(self.checkpoints))
        self._set("WORLD_SIZE", str(size))
        return [self._attach(rank) for rank in range(size)]

    def _attach(self, rank: int) -> Lease:
        self._set("RANK", str(rank))
        return attach(save=lambda path: Path(path).write_text("weights"), load=lambda path: Path(path).read_text())

    def save(self, size: int, step: int) -> list[tuple[float, float]]:
        """Save at a step, rank 0 last; what each rank draws next."""
        leases, drawn = self.begin(size), []
        for rank in reversed(range(size)):
            seed(f"{step}/{rank}")
            _drawn()
            leases[rank].checkpoint(step, lambda path: Path(path).write_text("weights"))
            drawn.append(_drawn())
        return drawn[::-1]

    def resumed(self, size: int) -> list[tuple[float, float]]:
        """Start anew; what each rank draws first."""
        drawn = []
        for lease in self.begin(size):
            seed("at the start of the script")
            next(lease.steps(100))
            drawn.append(_drawn())
        return drawn


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gang:
    return Gang(tmp_path, monkeypatch)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_goes_on_with_its_own_generators(gang: Gang, size: int) -> None:
    want = gang.save(size, step=4)
    assert len(set(want)) == size
    assert gang.resumed(size) == want


def test_rank_that_was_not_there_gets_a_stream_that_follows_from_the_others(gang: Gang) -> None:
    want = gang.save(2, step=4)
    first = gang.resumed(4)
    assert first[:2] == want
    assert len(set(first)) == 4
    assert gang.resumed(4) == first
    assert gang.resumed(1) == want[:1]
    gang.save(2, step=5)
    assert not set(gang.resumed(4)[2:]) & set(first)


def test_checkpoint_without_parts_of_ranks_is_loaded_as_before(gang: Gang) -> None:
    gang.save(2, step=4)
    (gang.checkpoints / "ranks-4.json").unlink()
    drawn = gang.resumed(2)
    seed("at the start of the script")
    assert drawn == [_drawn()] * 2


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2, "ranks": []}', '{"version": 1}'])
def test_parts_of_ranks_that_make_no_sense_are_left_alone(gang: Gang, text: str) -> None:
    gang.save(2, step=4)
    (gang.checkpoints / "ranks-4.json").write_text(text)
    drawn = gang.resumed(2)
    seed("at the start of the script")
    assert drawn == [_drawn()] * 2


def test_rank_that_does_not_come_is_said_and_waited_for_once(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_state, "PATIENCE", 0.01)
    monkeypatch.setattr(rank_state, "AGAIN", 0.02)
    first = gang.begin(2)[0]
    for step in (3, 4):
        first.checkpoint(step, lambda path: Path(path).write_text("weights"))
    assert capsys.readouterr().err.splitlines() == [
        "poise: no random state of rank 1 at step 3 after 0.01 s: it will go on with another",
        "poise: no random state of rank 1 at step 4 after 0.02 s: it will go on with another",
    ]
    assert json.loads((gang.checkpoints / "ranks-4.json").read_text())["ranks"][1] is None
    drawn = gang.resumed(2)
    assert drawn[0] != drawn[1]


def test_ranks_that_leave_tell_their_state_at_the_step_they_leave_at(gang: Gang) -> None:
    """Parts of an earlier checkpoint of the same run do not count for a later one."""
    leases = gang.begin(2)
    for step in (1, 2):
        for rank in (1, 0):
            leases[rank].begin(0, 10) if step == 1 else None
            seed(f"{step}/{rank}")
            leases[rank].checkpoint(step, lambda path: Path(path).write_text("weights"))
    told = [json.loads((gang.checkpoints / f"ranks-{step}.json").read_text())["ranks"] for step in (1, 2)]
    assert all(None not in parts for parts in told)
    assert [part["python"] for part in told[0]] != [part["python"] for part in told[1]]


def _save(path: str) -> None:
    Path(path).write_text("weights")


def _fails() -> bytes:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("parts", [_fails, lambda: 1 // 0])
def test_checkpoint_whose_parts_cannot_be_written_leaves_nothing(tmp_path: Path, parts: Callable[[], bytes]) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.write(1, _save, lambda: b"{}")
    with pytest.raises((OSError, ZeroDivisionError)):
        checkpoints.write(2, _save, parts)
    assert sorted(os.listdir(tmp_path)) == ["ranks-1.json", "step-1"]


def test_parts_of_ranks_go_with_their_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    for step in range(1, 5):
        checkpoints.write(step, _save, lambda: b"{}")
    assert sorted(os.listdir(tmp_path)) == ["ranks-3.json", "ranks-4.json", "step-3", "step-4"]
    (tmp_path / "ranks-9.json").write_text("of a run that died before step-9 had its name")
    (tmp_path / "saving-ranks-8").write_text("half of it")
    checkpoints.sweep()
    assert sorted(os.listdir(tmp_path)) == ["ranks-3.json", "ranks-4.json", "step-3", "step-4"]


def test_parts_left_by_a_run_of_more_ranks_do_not_count_for_a_later_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    (tmp_path / "ranks-2.json").write_text("of a run that died before step-2 had its name")
    checkpoints.write(2, _save)
    assert (os.listdir(tmp_path), checkpoints.ranks(2)) == (["step-2"], None)


def test_single_rank_keeps_nothing_beside_its_checkpoint(gang: Gang) -> None:
    [lease] = gang.begin(1)
    lease.checkpoint(3, _save)
    assert os.listdir(gang.checkpoints) == ["step-3"]
