"""Where a trace may come from: files, compressed files, archives, folders, standard input."""

import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace
from poise.scheduler.model.errors import RequestError, TraceError, UnknownNameError

HEADER = "job_id,submission_time,duration,num_gpu\n"
ONE = HEADER + "a,5,10,1\nb,1,20,2\n"
TWO = HEADER + "a,1,30,4\nc,5,40,8\n"
GAVEL = "A3C\tcmd\tdir\t--n\t0\t10\t1\t1\t-1\t0\n"


def packed(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def ids(trace: Trace) -> list[str]:
    return [each.job.id for each in trace.jobs]


def refused(source: Path | str, format: str = "auto") -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(str(source), format=format)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, lzma.compress, lambda data: packed({"x.csv": data}, "w")],
    ids=["plain", "gzip", "xz", "tar"],
)
@pytest.mark.parametrize("through", ["file", "stdin"])
def test_packing_makes_no_difference(
    pack: Callable[[bytes], bytes], through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pack(ONE.encode())
    path = tmp_path / "trace"
    path.write_bytes(data)
    give(monkeypatch, data)
    trace = read_trace(str(path) if through == "file" else "-")
    assert ids(trace) == ["b", "a"]
    assert trace.name == ("trace" if through == "file" else "stdin")
    assert trace.notes == ()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_archive_is_merged_by_time_with_the_stem_before_each_id(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "traces.tar.gz"
    if mode != "w:gz":
        path = path.with_name(f"traces.tar{mode[1:].replace(':', '.')}")
    path.write_bytes(packed({"two.csv": TWO.encode(), "LICENSE": b"MIT", "d/one.csv": ONE.encode()}, mode))
    trace = read_trace(str(path))
    assert ids(trace) == ["one/b", "two/a", "one/a", "two/c"]
    assert trace.notes == (
        "2 files merged by time; a job's id is <file>/<id>",
        "files left out because they are no itp trace: 1 (LICENSE)",
    )


def test_folder_reads_as_its_archive_does(tmp_path: Path) -> None:
    members = {"one.csv": ONE.encode(), "two.csv.gz": gzip.compress(TWO.encode()), "README.md": b"# traces"}
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, data in members.items():
        (folder / name).write_bytes(data)
    (tmp_path / "t.tgz").write_bytes(packed(members))
    assert read_trace(str(folder)).jobs == read_trace(str(tmp_path / "t.tgz")).jobs


def test_folder_with_an_archive_in_it_reads_what_is_in_that(tmp_path: Path) -> None:
    (tmp_path / "t.tgz").write_bytes(packed({"one.csv": ONE.encode(), "two.csv": TWO.encode()}))
    assert ids(read_trace(str(tmp_path))) == ["one/b", "two/a", "one/a", "two/c"]


def test_folder_with_one_trace_leaves_its_ids_alone(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text(ONE)
    (tmp_path / "LICENSE").write_text("MIT")
    assert ids(read_trace(str(tmp_path))) == ["b", "a"]


def test_files_of_one_stem_get_their_paths_as_prefixes(tmp_path: Path) -> None:
    for place, text in (("earth", ONE), ("venus", TWO)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "cluster_log.csv").write_text(text)
    want = ["earth/cluster_log/b", "venus/cluster_log/a", "earth/cluster_log/a", "venus/cluster_log/c"]
    assert ids(read_trace(str(tmp_path))) == want


def test_prefixes_that_make_ids_equal_are_refused(tmp_path: Path) -> None:
    for name, job in (("x.csv", "y/z/1"), ("x/y.csv", "z/1"), ("w/y.csv", "1")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{HEADER}{job},0,1,1\n")
    assert "expected new job ids, got 'x/y/z/1', as in" in refused(tmp_path)


def test_jobs_of_one_time_keep_the_order_of_files_and_rows(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.csv").write_text(HEADER + "2,0,1,1\n1,0,1,1\n")
    assert ids(read_trace(str(tmp_path))) == ["a/2", "a/1", "b/2", "b/1"]


def test_formats_in_one_folder_are_not_mixed_but_one_may_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ONE)
    (tmp_path / "b.trace").write_text(GAVEL)
    want = "expected files of one format, got itp (a.csv) and gavel (b.trace); choose a format"
    assert refused(tmp_path) == f"{tmp_path}: {want}"
    assert ids(read_trace(str(tmp_path), format="gavel")) == ["0"]


def test_error_in_an_archive_names_archive_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "t.tar.gz"
    path.write_bytes(packed({"one.csv": ONE.encode(), "two.csv": (TWO + "d,1,x,1\n").encode()}))
    assert refused(path) == f"{path}/two.csv:4: duration: expected a number, got 'x'"


def test_unprintable_member_name_is_made_printable(tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(packed({"a\x1b\n.csv": ONE.encode(), "b.csv": TWO.encode()}, "w"))
    assert ids(read_trace(str(tmp_path / "t.tar")))[0] == "a??/b"


def test_unknown_format_lists_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown trace format 'gavle'; did you mean gavel"):
        read_trace(str(tmp_path), format="gavle")


def test_unknown_content_lists_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("MIT License\n\nCopyright")
    known = "poise, gavel, shockwave, tiresias, philly, philly-csv, itp, helios, alibaba, sacct, kubernetes"
    assert refused(path) == f"{path}:1: expected a trace in a known format ({known}), got 'MIT License'"


@pytest.mark.parametrize("source", ["missing.csv", "", "a\0b", "x" * 5000, "missing/"])
def test_missing_file_is_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no such file" in refused(source) or "cannot be read" in refused(source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(ONE)
    path.chmod(0)
    assert refused(path) == f"{path}: cannot be read: Permission denied"


def test_folder_or_archive_without_a_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "README").write_text("hello")
    (tmp_path / "t.tar").write_bytes(packed({"README": b"hello"}, "w"))
    for source in (tmp_path / "sub", tmp_path / "t.tar"):
        assert refused(source) == f"{source}: expected at least one trace in a known format, got none"
    assert "expected at least one gavel trace, got none" in refused(tmp_path / "sub", "gavel")


@pytest.mark.parametrize(
    ("text", "format", "want"),
    [
        ("", "auto", "expected at least one job, got an empty file"),
        ("\n \n", "auto", "expected at least one job, got nothing but blanks at its beginning"),
        ("", "poise", "expected at least one job, got none"),
        ("", "gavel", "expected at least one job, got none"),
        ("", "philly", "expected at least one job, got none"),
        ("[]", "philly", "expected at least one job, got none"),
        (HEADER, "auto", "expected at least one job, got none"),
        ("job,submitted,gpus,duration\n", "auto", "expected at least one job, got none"),
        ("", "itp", "expected a header with the columns job_id, submission_time, duration, num_gpu, got nothing"),
    ],
)
def test_trace_without_jobs_is_refused(text: str, format: str, want: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    assert want in refused(path, format)


@pytest.mark.parametrize("format", ["auto", "poise", "itp", "philly"])
def test_bytes_that_are_no_text_are_refused_with_their_line(format: str, tmp_path: Path) -> None:
    starts = {"philly": '[{"jobid":\n', "poise": '{"job": 1, "submitted": 0, "gpus": 1, "steps": 1}\n'}
    path = tmp_path / "t"
    path.write_bytes(starts.get(format, HEADER).encode() + b"caf\xe9,1,2,3\n")
    assert refused(path, format) == f"{path}:2: expected UTF-8 text, got the byte 0xe9"


@pytest.mark.slow
def test_damaged_packing_is_refused(tmp_path: Path) -> None:
    rows = HEADER + "".join(f"{index},{index},1,1\n" for index in range(20_000))
    whole = {"t.gz": gzip.compress(rows.encode()), "t.xz": lzma.compress(rows.encode())}
    whole["t.tgz"] = packed({"a.csv": rows.encode()})
    for name, data in whole.items():
        path = tmp_path / name
        path.write_bytes(data[: len(data) // 2])
        assert "damaged or cut off" in refused(path)
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])
        with pytest.raises(TraceError):
            read_trace(str(path))
        path.write_text("not packed")
        assert "-compressed data, as its name says, got something else" in refused(path)


def test_archive_cut_off_between_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    path.write_bytes(packed({"one.csv": ONE.encode(), "two.csv": TWO.encode()}, "w")[:1024])
    assert "an entry's header is broken, or the end is missing" in refused(path)


def test_archive_with_a_broken_header_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    data = bytearray(packed({"one.csv": ONE.encode(), "two.csv": TWO.encode()}, "w"))
    data[1024] ^= 255
    path.write_bytes(data)
    assert "an entry's header is broken, or the end is missing" in refused(path)


def test_archive_entries_that_are_no_files_are_passed_over(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE):
            entry = tarfile.TarInfo("x")
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        entry = tarfile.TarInfo("n" * 300 + ".csv")
        entry.size = len(ONE)
        archive.addfile(entry, io.BytesIO(ONE.encode()))
    (tmp_path / "t.tar").write_bytes(buffer.getvalue())
    assert ids(read_trace(str(tmp_path / "t.tar"))) == ["b", "a"]


def test_synthetic_source_goes_to_the_generator() -> None:
    assert len(read_trace("synthetic:jobs=3").jobs) == 3
    with pytest.raises(RequestError, match="the knobs are jobs, seed"):
        read_trace("synthetic:help")
