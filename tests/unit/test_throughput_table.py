"""The CSV format, and how a table reads the gaps between its measurements."""

import re
from pathlib import Path

import pytest

from poise.scheduler.model.errors import ThroughputError
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.measurements import Alone, Throughputs
from poise.scheduler.throughput.table import MOST_BYTES, JobClass, read_throughputs

HEADER = "model,batch_size,gpu_type,gpus,locality,steps_per_second,with_model,with_batch_size,with_steps_per_second,source"
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/throughput-tables.md"
PACKED, RACK, CLUSTER = Locality.PACKED, Locality.RACK, Locality.CLUSTER


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def table_of(file: Path, *rows: str, reference: str = "v100") -> Throughputs:
    file.write_text("\n".join((f"# reference: {reference}", HEADER, *rows)) + "\n", encoding="utf-8")
    return read_throughputs(file)


def a_table(*rates: tuple[str, int | None, str, int, Locality, float]) -> Throughputs:
    return Throughputs.of(
        "t",
        "v100",
        [Alone(JobClass(model, size), gpu_type, gpus, level, rate) for model, size, gpu_type, gpus, level, rate in rates],
    )


def test_table_reads_the_example_of_its_page(file: Path) -> None:
    found = re.search(r"```csv\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    file.write_text(found[1], encoding="utf-8")
    table = read_throughputs(file)
    assert (table.name, table.reference, table.gpu_types) == ("table.csv", "v100", ("v100", "k80"))
    assert table.models() == ("ResNet-50", "LM")
    assert table.rate("resnet50", 64, "v100", 4, RACK) == 12
    assert table.pair(JobClass("LM", 80), JobClass("ResNet-50", 64), "v100", 1) == (13.1, 2.9)


def test_page_python_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})


def test_table_may_leave_out_optional_columns_and_order_them_freely(file: Path) -> None:
    file.write_text(
        "# a comment\n#reference:V100\n\nGPUS,model,gpu_type,locality,batch_size,steps_per_second\n"
        "2, Res Net ,V100,Packed,,3.5\n",
        encoding="utf-8-sig",
    )
    assert read_throughputs(str(file)).rate("resnet", None, "v100", 2, PACKED) == 3.5


@pytest.mark.parametrize("spelling", ["ResNet-50", "resnet50", "RESNET_50", "Res net-50"])
def test_model_names_match_whatever_the_case_and_separators(spelling: str) -> None:
    assert a_table(("ResNet-50", 16, "v100", 1, PACKED, 4.0)).rate(spelling, 16, "V100", 1, PACKED) == 4.0


def test_batch_size_that_was_not_measured_is_not_known() -> None:
    table = a_table(("lm", 16, "v100", 1, PACKED, 4.0))
    assert table.knows("lm", 16)
    assert not table.knows("lm", 32)
    assert not table.knows("resnet", None)
    assert table.rate("lm", 32, "v100", 1, PACKED) == 0.0


def test_batch_size_left_empty_answers_only_for_jobs_that_state_none() -> None:
    table = a_table(("lm", None, "v100", 1, PACKED, 4.0), ("lm", 16, "v100", 1, PACKED, 2.0))
    assert [table.rate("lm", size, "v100", 1, PACKED) for size in (16, 32, None)] == [2.0, 0.0, 4.0]
    assert [table.knows("lm", size) for size in (16, 32, None)] == [True, False, True]


def test_batch_size_not_stated_takes_the_smallest_measured() -> None:
    table = a_table(("lm", 80, "v100", 1, PACKED, 1.0), ("lm", 5, "v100", 1, PACKED, 9.0))
    assert table.rate("lm", None, "v100", 1, PACKED) == 9.0


@pytest.mark.parametrize(("gpus", "want"), [(1, 5.0), (2, 10.0), (3, 15.0), (4, 16.0), (8, 32.0)])
def test_gpu_count_scales_from_the_nearest_smaller_else_from_the_nearest_larger(gpus: int, want: float) -> None:
    table = a_table(("lm", None, "v100", 2, PACKED, 10.0), ("lm", None, "v100", 4, PACKED, 16.0))
    assert table.rate("lm", None, "v100", gpus, PACKED) == want


def test_gpu_count_measured_as_zero_is_not_scaled_over() -> None:
    table = a_table(("lm", None, "v100", 1, PACKED, 10.0), ("lm", None, "v100", 2, PACKED, 0.0))
    assert [table.rate("lm", None, "v100", gpus, PACKED) for gpus in (1, 2, 4)] == [10.0, 0.0, 0.0]
    assert table.measures("lm", None, "v100")
    assert not table.measures("lm", None, "k80")


LEVELS = {
    "packed alone holds everywhere": ({PACKED: 8.0}, (8.0, 8.0, 8.0)),
    "cluster takes rack": ({PACKED: 8.0, RACK: 6.0}, (8.0, 6.0, 6.0)),
    "rack takes packed even if cluster is slower": ({PACKED: 8.0, CLUSTER: 5.0}, (8.0, 8.0, 5.0)),
    "packed takes the nearest wider": ({RACK: 6.0, CLUSTER: 5.0}, (6.0, 6.0, 5.0)),
    "cluster alone holds everywhere": ({CLUSTER: 5.0}, (5.0, 5.0, 5.0)),
}


@pytest.mark.parametrize(("given", "want"), LEVELS.values(), ids=LEVELS)
def test_locality_not_given_takes_the_nearest_narrower(
    given: dict[Locality, float], want: tuple[float, float, float]
) -> None:
    table = a_table(*(("lm", None, "v100", 4, level, rate) for level, rate in given.items()))
    assert table.row("lm", None, "v100", 4) == want
    assert table.flat().row("lm", None, "v100", 4) == (want[0],) * 3


def test_locality_means_nothing_to_one_gpu() -> None:
    table = a_table(("lm", None, "v100", 4, PACKED, 8.0), ("lm", None, "v100", 4, RACK, 4.0))
    assert table.row("lm", None, "v100", 1) == (2.0, 2.0, 2.0)
    assert table.row("lm", None, "v100", 2) == (4.0, 2.0, 2.0)
    assert a_table(("lm", None, "v100", 1, RACK, 4.0), ("lm", None, "v100", 1, PACKED, 8.0)).row("lm", None, "v100", 1) == (
        8.0,
        8.0,
        8.0,
    )


def test_pair_answers_both_ways_round_and_is_not_scaled(file: Path) -> None:
    table = table_of(file, "a,1,v100,2,packed,4,,,,", "b,,v100,2,packed,6,,,,", "a,1,v100,2,packed,3,b,,5,x")
    a, b = JobClass("A", 1), JobClass("B")
    assert table.pair(a, b, "V100", 2) == (3.0, 5.0)
    assert table.pair(b, a, "v100", 2) == (5.0, 3.0)
    assert table.pair(a, b, "v100", 1) is None
    assert table.pair(a, a, "v100", 2) is None
    assert table.pair(a, JobClass("nobody"), "v100", 2) is None


def test_speedup_is_the_geometric_mean_and_counts_a_model_once() -> None:
    table = a_table(
        ("a", 1, "v100", 1, PACKED, 1.0), ("a", 1, "k80", 1, PACKED, 2.0),
        ("a", 2, "v100", 1, PACKED, 1.0), ("a", 2, "k80", 1, PACKED, 8.0),
        ("b", None, "v100", 1, PACKED, 9.0), ("b", None, "k80", 1, PACKED, 9.0),
        ("c", None, "v100", 1, PACKED, 9.0), ("c", None, "k80", 1, PACKED, 0.0),
        ("d", None, "v100", 2, PACKED, 9.0), ("d", None, "k80", 2, PACKED, 900.0),
        ("e", None, "p40", 1, PACKED, 9.0),
    )  # fmt: skip
    assert table.speedup("K80") == pytest.approx(2.0)
    assert table.speedup("v100") == 1.0
    assert table.speedup("p40") is None
    assert table.speedup("h100") is None


def test_flat_keeps_packed_rates_pairs_and_skews(file: Path) -> None:
    table = table_of(file, "vgg16,,v100,2,packed,4,,,,", "vgg16,,v100,2,rack,3,,,,", "vgg16,,v100,2,packed,1,VGG16,,1,")
    flat = table.flat()
    assert flat.row("vgg16", None, "v100", 2) == (4.0, 4.0, 4.0)
    assert flat.pair(JobClass("vgg16"), JobClass("vgg16"), "v100", 2) == (1.0, 1.0)
    assert flat.skew("VGG-16") == table.skew("vgg16") == pytest.approx(0.7427, abs=1e-4)
    assert table.row("vgg16", None, "v100", 2) == (4.0, 3.0, 3.0)
    assert hash(flat) == hash(table)


BAD_ROWS = {
    "no model": ("-,1,v100,1,packed,1,,,,", "3: model: expected the name of a model, got '-'"),
    "batch size 0": ("a,0,v100,1,packed,1,,,,", "3: batch_size: expected a whole number from 1"),
    "batch size not a number": ("a,x,v100,1,packed,1,,,,", "3: batch_size: expected a whole number from 1"),
    "no type": ("a,1,,1,packed,1,,,,", "3: gpu_type: expected a GPU type such as v100, got nothing"),
    "odd type": ("a,1,v 100,1,packed,1,,,,", "3: gpu_type: expected a GPU type such as v100, got 'v 100'"),
    "no GPU": ("a,1,v100,0,packed,1,,,,", "3: gpus: expected a whole number from 1 to 1,000,000, got '0'"),
    "half a GPU": ("a,1,v100,0.5,packed,1,,,,", "3: gpus: expected a whole number"),
    "endless count": (f"a,1,v100,{'9' * 5000},packed,1,,,,", "3: gpus: expected a whole number"),
    "unknown locality": ("a,1,v100,1,near,1,,,,", "3: locality: expected one of packed, rack, cluster, got 'near'"),
    "negative rate": ("a,1,v100,1,packed,-1,,,,", "3: steps_per_second: expected steps per second: 0 or a number from"),
    "nan rate": ("a,1,v100,1,packed,nan,,,,", "3: steps_per_second: expected"),
    "infinite rate": ("a,1,v100,1,packed,inf,,,,", "3: steps_per_second: expected"),
    "absurd rate": ("a,1,v100,1,packed,1e300,,,,", "3: steps_per_second: expected"),
    "grouped digits": ("a,1,v100,1,packed,1_0,,,,", "3: steps_per_second: expected"),
    "no rate": ("a,1,v100,1,packed,,,,,", "3: steps_per_second: expected"),
    "pair without its second rate": ("a,1,v100,1,packed,1,b,,,", "3: with_steps_per_second: expected"),
    "second rate without a pair": ("a,1,v100,1,packed,1,,,2,", "3: with_steps_per_second: expected nothing where"),
    "second batch size without a pair": ("a,1,v100,1,packed,1,,2,,", "3: with_batch_size: expected nothing where"),
    "spread pair": ("a,1,v100,2,rack,1,b,,1,", "3: locality: expected packed for a pair, got 'rack'"),
    "short row": ("a,1,v100,1", "3: expected 10 fields as in the header, got 4"),
    "open quote": ('"a,1,v100,1,packed,1,,,,', "3: expected a line of CSV"),
    "same row twice": ("A,1,v100,1,packed,1,,,,\na,01,V100,1,PACKED,2,,,,", "4: model: expected one row"),
    "same pair turned round": ("a,,v100,1,packed,1,b,,1,\nb,,v100,1,packed,1,a,,1,", "4: model: expected one row"),
    "only a pair": ("a,,v100,1,packed,1,b,,1,", ": expected at least one row of a job alone"),
    "no row": ("", ": expected at least one row of a job alone"),
    "reference without a row": ("a,1,k80,1,packed,1,,,,", ": reference: expected a type with a row (k80), got 'v100'"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "want"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_row_is_refused_by_file_line_and_field(file: Path, row: str, want: str) -> None:
    with pytest.raises(ThroughputError) as caught:
        table_of(file, row)
    assert f"table.csv:{want}".replace("::", ":") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(file))


BAD_FILES = {
    "empty": (b"", "or above the header a line `# reference: GPU_TYPE`, got nothing"),
    "blank": (b"\n \n", "got nothing"),
    "no reference": (HEADER.encode(), "got 'model,batch_size"),
    "no header": (b"# reference: v100\n", "expected a header model,batch_size"),
    "missing column": (b"# reference: v100\nmodel,gpus\n", ":2: header: expected the column 'batch_size'"),
    "unknown column": (b"# reference: v100\n" + HEADER.encode() + b",speed\n", ":2: header: unknown column 'speed'"),
    "column twice": (b"# reference: v100\n" + HEADER.encode() + b",gpus\n", ":2: header: the column 'gpus' stands"),
    "not UTF-8": (b"# reference: v100\n# \xff\xfe\n", ":2: expected UTF-8 text, got the byte 0xff"),
    "binary": (bytes(range(256)) * 64, "expected"),
    "NUL": (b"# reference: v100\n" + HEADER.encode() + b"\n\0,1,v100,1,packed,1,,,,\n\0\n", "expected"),
    "one endless line": (b"# reference: v100\n" + b"x" * 1_000_000, "expected"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "want"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_refused_in_one_line(file: Path, content: bytes, want: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ThroughputError) as caught:
        read_throughputs(file)
    assert want in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_file_of_two_gigabytes_is_refused_unread(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(2 * 1024**3)
    assert file.stat().st_size > MOST_BYTES
    with pytest.raises(ThroughputError, match="expected a throughput table of at most 32 MB, got more"):
        read_throughputs(file)


def test_missing_file_and_directory_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ThroughputError, match=r"nowhere\.csv: cannot read the throughput table: No such file"):
        read_throughputs(tmp_path / "nowhere.csv")
    with pytest.raises(ThroughputError, match="cannot read the throughput table: Is a directory"):
        read_throughputs(tmp_path)
    with pytest.raises(ThroughputError, match="cannot read the throughput table"):
        read_throughputs("a\0b")
