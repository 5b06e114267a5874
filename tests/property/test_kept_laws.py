"""What counts as kept, whoever is killed at whichever point: never half a checkpoint, never one of a run long replaced."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.service.agent.checkpoint_stores import StoreProblemError
from poise.service.agent.kept_checkpoints import DamagedCheckpointError, KeptCheckpoints
from poise.service.wire.archives import PackedTree, packed


class KilledError(Exception):
    """The writer was killed."""


class Shelf:
    """A store in memory, whose writer is killed at its n-th operation. A blob that was being written is there in part."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.left = 10**9

    def _step(self) -> None:
        if self.left == 0:
            raise KilledError
        self.left -= 1

    def names(self) -> set[str]:
        return set(self.blobs)

    def write(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        self._step()
        written = b""
        for block in blocks:
            written += block[: len(block) // 2]
            self.blobs[name] = written
            self._step()
            written += block[len(block) // 2 :]
        self.blobs[name] = written
        self._step()

    def read(self, name: str) -> Iterator[bytes]:
        if name not in self.blobs:
            raise FileNotFoundError(name)
        yield self.blobs[name]

    def remove(self, name: str) -> None:
        self._step()
        self.blobs.pop(name, None)


def tree_of(folder: Path, step: int, text: str) -> PackedTree:
    (folder / f"step-{step}").write_text(text)
    return packed(folder, [f"step-{step}"])


def contents(kept: KeptCheckpoints, folder: Path) -> dict[int, str]:
    """What can be fetched of what counts."""
    found = {}
    for each in kept.counted():
        with TemporaryDirectory(dir=folder) as to:
            kept.fetch(each, Path(to))
            found[each.step] = Path(to, f"step-{each.step}").read_text()
    return found


@given(steps=st.lists(st.integers(1, 50), min_size=1, max_size=4, unique=True), after=st.integers(0, 60))
def test_writer_that_is_killed_anywhere_leaves_what_counted_before_or_one_more(steps: list[int], after: int) -> None:
    with TemporaryDirectory() as where:
        folder, shelf = Path(where), Shelf()
        kept = KeptCheckpoints(shelf)
        kept.begin(1)
        shelf.left = after
        done: dict[int, str] = {}
        going = None
        try:
            for step in sorted(steps):
                going = step
                kept.keep(step, 1, tree_of(folder, step, f"weights {step}"))
                done[step] = f"weights {step}"
                going = None
        except KilledError:
            pass
        shelf.left = 10**9
        found = contents(kept, folder)
        newest = dict(sorted(done.items())[-2:])
        allowed = [newest] if going is None else [newest, dict(sorted({**done, going: f"weights {going}"}.items())[-2:])]
        assert found in allowed
        # Another agent goes on where that one was killed.
        for step in sorted(steps):
            kept.keep(step, 1, tree_of(folder, step, f"weights {step}"))
        assert contents(kept, folder) == {step: f"weights {step}" for step in sorted(steps)[-2:]}
        assert len([name for name in shelf.blobs if name.endswith(".tar")]) <= 2


@given(late=st.integers(1, 100), base=st.integers(1, 100))
def test_upload_of_a_run_that_was_replaced_comes_too_late(late: int, base: int) -> None:
    with TemporaryDirectory() as where:
        folder, shelf = Path(where), Shelf()
        kept = KeptCheckpoints(shelf)
        kept.begin(1)
        kept.keep(base, 1, tree_of(folder, base, "kept in time"))
        assert [each.step for each in kept.begin(2)] == [base]
        if late != base:
            kept.keep(late, 1, tree_of(folder, late, "of a node that was lost"))
        assert contents(kept, folder) == {base: "kept in time"}
        kept.keep(base + 1, 2, tree_of(folder, base + 1, "of the second run"))
        assert contents(kept, folder) == {base: "kept in time", base + 1: "of the second run"}
        assert [each.step for each in kept.join(2)] == [base]


def test_nodes_of_one_run_begin_with_the_same_whatever_rank_0_has_kept_meanwhile(tmp_path: Path) -> None:
    kept = KeptCheckpoints(Shelf())
    with pytest.raises(StoreProblemError, match="is not there"):
        kept.join(1)
    assert kept.begin(1) == []
    kept.keep(5, 1, tree_of(tmp_path, 5, "five"))
    assert kept.join(1) == kept.begin(1) == []


def test_checkpoint_that_is_not_what_was_written_is_never_handed_out(tmp_path: Path) -> None:
    shelf = Shelf()
    kept = KeptCheckpoints(shelf)
    kept.begin(1)
    five = kept.keep(5, 1, tree_of(tmp_path, 5, "five"))
    assert not kept.drop(five)  # there is no other
    nine = kept.keep(9, 1, tree_of(tmp_path, 9, "nine"))
    whole = shelf.blobs[f"{nine.name}.tar"]
    for spoiled in (whole[:-512], whole.replace(b"nine\0", b"none\0"), b"", whole + b"x"):
        shelf.blobs[f"{nine.name}.tar"] = spoiled
        (tmp_path / "to").mkdir()
        with pytest.raises(DamagedCheckpointError):
            kept.fetch(nine, tmp_path / "to")
        for each in (tmp_path / "to").iterdir():
            each.unlink()
        os.rmdir(tmp_path / "to")
    assert kept.drop(nine)
    assert kept.counted() == [five]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"epoch": 2}', b'{"step": "9", "epoch": 1, "bytes": 1, "sha256": "x"}', b"\xff"]
)
def test_documents_that_make_no_sense_do_not_count(tmp_path: Path, text: bytes) -> None:
    shelf = Shelf()
    kept = KeptCheckpoints(shelf)
    kept.begin(1)
    five = kept.keep(5, 1, tree_of(tmp_path, 5, "five"))
    shelf.blobs |= {"step-9-1.tar": b"x", "step-9-1.json": text, "epoch-2.json": text, "something": b"else"}
    assert kept.counted() == [five]
