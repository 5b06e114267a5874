"""No input makes a reader go on for ever or fill the memory: streams that do not end are refused."""

import gzip
import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from poise.lab.traces import parsing, reader
from poise.lab.traces.parsing import MOST_BLANK, MOST_BYTES, lines, objects
from poise.lab.traces.reader import read_trace
from poise.lab.traces.registry import format_names
from poise.scheduler.model.errors import TraceError

ENDLESS = {
    "zeros": b"\0",
    "newlines": b"\n",
    "blanks": b" ",
    "blank lines": b" \r\n",
    "noise": bytes(range(256)),
    "open objects": b'{"job": ',
    "open list": b'[{"jobid": 1, "attempts": ',
    "brackets": b"[",
    "open quotes": b'"a,b',
    "tabs": b"\t",
    "words": b"lorem ipsum ",
    "open text": b'[{"jobid": "x',
}


class Endless(io.RawIOBase):
    """The same bytes over and over, and how many of them were taken."""

    def __init__(self, pattern: bytes) -> None:
        super().__init__()
        self._pattern = pattern * (1 + (1 << 16) // len(pattern))
        self.taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._pattern[: len(buffer)]
        buffer[: len(piece)] = piece
        self.taken += len(piece)
        return len(piece)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 32 * MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format", format_names())
@pytest.mark.parametrize("pattern", ENDLESS.values(), ids=ENDLESS)
def test_endless_garbage_is_refused_after_a_few_megabytes(
    pattern: bytes, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Endless(pattern)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(stream)))
    with pytest.raises(TraceError) as caught:
        read_trace("-", format=format)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert stream.taken < 6 * MOST_BYTES


@pytest.mark.parametrize("format", ["auto", "poise", "philly"])
def test_file_of_two_gigabytes_of_nothing_takes_little_memory(format: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with path.open("wb") as file:
        file.truncate(2 << 30)
    with little_memory(), pytest.raises(TraceError):
        read_trace(str(path), format=format)


@pytest.mark.parametrize("packing", ["gz", "xz"])
def test_decompression_bomb_is_bounded_by_the_length_of_a_line(packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{packing}"
    bomb = b"\0" * (64 << 20)
    path.write_bytes(gzip.compress(bomb, 1) if packing == "gz" else lzma.compress(bomb, preset=0))
    del bomb
    with little_memory(), pytest.raises(TraceError, match=r"t\.\w\w:1: expected lines of at most 1,048,576 bytes"):
        read_trace(str(path), format="itp")


def test_archive_header_that_claims_a_gigabyte_is_refused(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = tarfile.XHDTYPE, 1 << 30
    path = tmp_path / "t.tar.gz"
    path.write_bytes(gzip.compress(entry.tobuf(tarfile.USTAR_FORMAT) + b"a" * (64 << 20), 1))
    with little_memory(), pytest.raises(TraceError, match=r"a header of 1,073,741,824 bytes"):
        read_trace(str(path))


def test_archive_of_too_many_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_FILES", 10)
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        for index in range(11):
            archive.addfile(tarfile.TarInfo(str(index)))
    with pytest.raises(TraceError, match="more than 10 entries"):
        read_trace(str(path))


def test_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_FILES", 1)
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    with pytest.raises(TraceError, match="expected at most 1 files, got 2"):
        read_trace(str(tmp_path))


def test_trace_of_too_many_jobs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "MOST_JOBS", 2)
    path = tmp_path / "t"
    path.write_text("job,submitted,gpus,steps\n" + "".join(f"{index},0,1,1\n" for index in range(3)))
    with pytest.raises(TraceError, match=r"t:4: expected at most 2 jobs, got more"):
        read_trace(str(path))


def test_line_of_just_the_limit_is_read_and_one_byte_more_is_not() -> None:
    (line,) = lines(io.BytesIO(b"x" * (MOST_BYTES - 1) + b"\n"), "f")
    assert len(line[1]) == MOST_BYTES - 1
    with pytest.raises(TraceError, match=r"f:2: expected lines of at most"):
        list(lines(io.BytesIO(b"a\n" + b"x" * MOST_BYTES + b"\n"), "f"))


def test_blank_lines_are_passed_over_up_to_a_limit() -> None:
    assert list(lines(io.BytesIO(b"a\n" + b"\n" * MOST_BLANK + b"b"), "f"))[-1] == (MOST_BLANK + 2, "b")
    with pytest.raises(TraceError, match=r"f:1001: expected jobs, got more than 1,000 blank lines"):
        list(lines(io.BytesIO(b"\n" * (MOST_BLANK + 1)), "f"))


def test_objects_are_read_one_at_a_time_with_their_lines() -> None:
    text = b'\xef\xbb\xbf[\n{"a": 1},\n\n{"a":\n2}\n]\n'
    assert list(objects(io.BytesIO(text), "f")) == [(2, {"a": 1}), (4, {"a": 2})]
    assert list(objects(io.BytesIO(b'{"a": 1}{"a": 2}\n{"a": 3}'), "f")) == [
        (1, {"a": 1}),
        (1, {"a": 2}),
        (2, {"a": 3}),
    ]


def test_objects_longer_than_a_chunk_are_whole() -> None:
    text = '[{"a": "é' + "x" * 300_000 + '"}, {"b": [1, 2]}]'
    (_, first), (_, second) = objects(io.BytesIO(text.encode()), "f")
    assert len(first["a"]) == 300_001
    assert second == {"b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (b'[{"a": 1}', "f:1: expected a comma or the end of the list, got the end of the file"),
        (b'[{"a": 1} {"a": 2}]', "f:1: expected a comma or the end of the list, got '{'"),
        (b'[{"a": 1},\n]', "f:2: expected a JSON object, got ']'"),
        (b'[{"a": 1}]\nx', "f:2: expected nothing after the end of the list, got 'x'"),
        (b"[1]", "f:1: expected a JSON object, got '1]'"),
        (b'[{"a": 1},\n{"a":\n x}]', "f:3: expected a whole JSON object, got a broken one (Expecting value)"),
        (b'[{"a": ' + b"[" * 100_000, "f:1: expected a JSON object, got one nested too deeply or a number too long"),
        (b'[{"a": ' + b"1" * 10_000 + b"}]", "f:1: expected a JSON object, got one nested too deeply or a number"),
        (b'[{"a": "' + b"x" * MOST_BYTES + b'"}]', "f:1: expected JSON objects of at most 1,048,576 bytes"),
        (b"[" + b" " * (2 * MOST_BYTES) + b"]", "f:1: expected jobs, got more than 1,048,576 blank characters"),
        (b'[{"a": 1},\n{"\xff"}]', "f:2: expected UTF-8 text, got the byte 0xff"),
        (b'[{"a": "\xc3', "f:1: expected UTF-8 text, got the byte 0xc3"),
    ],
)
def test_broken_documents_are_refused_with_their_line(text: bytes, want: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(objects(io.BytesIO(text), "f"))
    assert str(caught.value).startswith(want)
