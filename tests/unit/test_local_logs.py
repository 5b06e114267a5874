"""A log that is written, rotated and read at the same time."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.service.backends.api import LogPart
from poise.service.backends.local.logs import TAIL, LogFile, read_log


class Logs:
    """The log of rank 0 of job `1`."""

    def __init__(self, folder: Path) -> None:
        (folder / "1" / "log").mkdir(parents=True)
        self.folder = folder / "1" / "log"
        self.jobs = os.open(folder, os.O_RDONLY)
        self.handle = os.open(self.folder, os.O_RDONLY)

    def writer(self, most: int = 100, kept: int = 3) -> LogFile:
        return LogFile(self.handle, 0, most, kept)

    def read(self, offset: int, limit: int = 1 << 20) -> tuple[str, int, int]:
        part = LogPart(*read_log(self.jobs, "1", 0, offset, limit))
        return part.text.decode(), part.offset, part.next

    def close(self) -> None:
        os.close(self.jobs)
        os.close(self.handle)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    made = Logs(tmp_path)
    yield made
    made.close()


@given(
    st.lists(st.text(st.sampled_from("abc\né€😀"), max_size=30), max_size=30),
    st.integers(8, 60),
    st.integers(4, 40),
    st.integers(2, 4),
)
def test_log_read_piece_by_piece_is_what_was_written(said: list[str], most: int, limit: int, kept: int) -> None:
    with TemporaryDirectory() as folder:
        logs = Logs(Path(folder))
        writer, got, at, whole = logs.writer(most, kept), "", 0, "".join(said)
        for each in said:
            writer.write(each.encode())
            text, offset, then = logs.read(at, limit)
            assert offset >= at
            assert whole.encode()[offset:then] == text.encode()
            got, at = got + text, then
        text, offset, end = logs.read(0)
        assert (end, whole.encode()[offset:]) == (len(whole.encode()), text.encode())
        assert len(list(logs.folder.iterdir())) <= kept
        writer.close()
        logs.close()


def test_log_that_is_followed_is_read_once_and_whole(logs: Logs) -> None:
    writer, got, at = logs.writer(50, 3), "", 0
    for number in range(100):
        writer.write(f"line {number}\n".encode())
        text, offset, at = logs.read(at)
        assert offset + len(text) == at
        got += text
    assert got == "".join(f"line {number}\n" for number in range(100))
    writer.close()


def test_negative_offset_counts_from_the_end_and_cuts_no_character(logs: Logs) -> None:
    writer = logs.writer()
    writer.write("aé€".encode())
    assert logs.read(-3) == ("€", 3, 6)
    assert logs.read(-2) == ("", 6, 6)
    assert logs.read(-4) == ("€", 3, 6)
    assert logs.read(-100) == ("aé€", 0, 6)
    assert logs.read(0, 2) == ("a", 0, 1)
    assert logs.read(100) == ("", 6, 6)
    writer.close()


def test_offset_of_what_was_deleted_leads_to_the_oldest_that_is_kept(logs: Logs) -> None:
    writer = logs.writer(10, 2)
    for number in range(5):
        writer.write(f"{number}".encode() * 10)
    assert logs.read(0) == ("3" * 10 + "4" * 10, 30, 50)
    writer.close()


def test_log_goes_on_where_the_run_before_left_it(logs: Logs) -> None:
    for epoch in (1, 2):
        writer = logs.writer(30, 9)
        writer.title(f"run {epoch}")
        writer.write(b"no newline")
        writer.close()
    assert logs.read(0)[0] == "--- run 1 ---\nno newline\n--- run 2 ---\nno newline"


def test_log_that_does_not_exist_is_empty(logs: Logs) -> None:
    assert logs.read(-5) == ("", 0, 0)
    assert read_log(logs.jobs, "2", 0, 7, 10) == (b"", 0, 0)


def test_log_that_is_a_link_is_not_followed(logs: Logs, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    (logs.folder / "0.log").symlink_to(tmp_path / "secret")
    assert logs.read(0) == ("", 0, 0)
    (logs.folder / "0.log.5").symlink_to(tmp_path / "secret")
    assert logs.read(-5) == ("", 0, 0)


@pytest.mark.parametrize("name", ["1", "1/log"])
def test_log_below_a_link_is_not_read(logs: Logs, tmp_path: Path, name: str) -> None:
    logs.writer().write(b"hello\n")
    (tmp_path / name).rename(tmp_path / "moved")
    (tmp_path / name).symlink_to(tmp_path / "moved")
    assert logs.read(0) == ("", 0, 0)


def test_part_that_was_taken_away_counts_as_deleted_with_all_before_it(logs: Logs) -> None:
    writer = logs.writer(10, 9)
    for number in range(4):
        writer.write(f"{number}".encode() * 10)
    (logs.folder / "0.log.10").unlink()
    (logs.folder / "0.log.10").mkdir()
    assert logs.read(0) == ("2" * 10 + "3" * 10, 20, 40)
    writer.close()


def test_disk_that_is_full_costs_lines_and_says_so(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    writer = logs.writer(1000)
    writer.write(b"before\n")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        writer.write(b"lost\n")
        writer.write(b"lost too\n")
    writer.write(b"after\n")
    assert logs.read(0)[0] == "before\n\n--- could not be written: 14 bytes ---\nafter\n"
    assert bytes(writer.tail) == b"before\nlost\nlost too\nafter\n"
    writer.close()


def test_end_of_the_log_that_is_kept_in_memory_is_bounded(logs: Logs) -> None:
    writer = logs.writer(1 << 20)
    for _ in range(50):
        writer.write(b"x" * 1000)
    assert len(writer.tail) == TAIL
    writer.close()


def test_unreadable_log_is_an_error_not_an_empty_log(logs: Logs) -> None:
    logs.writer().write(b"hello\n")
    closed = os.dup(logs.jobs)
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_log(closed, "1", 0, 0, 10)
    assert read_log(logs.jobs, "2", 0, 0, 10)[0] == b""
