"""Gavel's JSON tables."""

import json
from collections import Counter
from pathlib import Path

import pytest

from poise.scheduler.model.errors import ThroughputError
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.table import JobClass, Throughputs, read_throughputs

SHARED = Path(__file__).resolve().parents[3] / "shared/data/gavel"
PACKED = Locality.PACKED
SMALL = {
    "k80": {"('A3C', 1)": {"null": 3.5}},
    "v100": {
        "('A3C', 1)": {"null": 7.0, "('LM (batch size 5)', 1)": [4.0, 60.0], "('LM (batch size 5)', 2)": [1.0, 1.0]},
        "('LM (batch size 5)', 1)": {"null": 109.0, "('A3C', 1)": [60.0, 4.0]},
        "('LM (batch size 5)', 2)": {"null": 180.0},
    },
    "v100_unconsolidated": {"('LM (batch size 5)', 2)": {"null": 40.0, "('LM (batch size 5)', 2)": [9.0, 9.0]}},
}


def read(tmp_path: Path, content: object) -> Throughputs:
    file = tmp_path / "gavel.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_throughputs(file)


@pytest.fixture(scope="module", params=["simulation", "physical_cluster"])
def published(request: pytest.FixtureRequest) -> Path:
    path = SHARED / f"{request.param}_throughputs.json"
    if not path.exists():
        pytest.skip(f"needs {path}")
    return path


def test_gavel_table_is_recognised_by_its_content(tmp_path: Path) -> None:
    table = read(tmp_path, SMALL)
    assert (table.name, table.reference, table.gpu_types) == ("gavel.json", "v100", ("k80", "v100"))
    assert table.classes() == (JobClass("A3C"), JobClass("LM", 5))
    assert table.speedup("k80") == pytest.approx(0.5)
    assert table.skew("vgg16") is not None


def test_gavel_unconsolidated_holds_in_the_rack_and_across_racks(tmp_path: Path) -> None:
    table = read(tmp_path, SMALL)
    assert table.row("LM", 5, "v100", 2) == (180.0, 40.0, 40.0)
    assert table.row("LM", 5, "v100", 1) == (109.0, 109.0, 109.0)


def test_gavel_pairs_are_those_of_equal_packed_gangs(tmp_path: Path) -> None:
    table = read(tmp_path, SMALL)
    a3c, lm = JobClass("A3C"), JobClass("LM", 5)
    assert table.pair(a3c, lm, "v100", 1) == (4.0, 60.0)
    assert table.pair(lm, a3c, "v100", 1) == (60.0, 4.0)
    assert table.pair(lm, lm, "v100", 2) is None
    assert table.pair(a3c, lm, "v100", 2) is None


def test_gavel_reference_is_the_first_type_where_there_is_no_v100(tmp_path: Path) -> None:
    assert read(tmp_path, {"a100": {"('A3C', 1)": {"null": 1}}}).reference == "a100"


BAD = {
    "not JSON": ("{", ":1: expected JSON as Gavel writes it: Expecting property name"),
    "not JSON further down": ('{\n"v100": }', ":2: expected JSON as Gavel writes it"),
    "too deep": ('{"a":' * 200_000, ": expected JSON as Gavel writes it"),
    "endless number": ('{"v100": {"(\'A\', 1)": {"null": ' + "9" * 10_000 + "}}}", ": expected"),
    "empty": ({}, ": expected the speed of at least one job alone"),
    "types not an object": ({"v100": [1]}, ": v100: expected an object of job classes, got [1]"),
    "speeds not an object": ({"v100": {"('A', 1)": 3}}, ": v100 ('A', 1): expected an object of speeds, got 3"),
    "key not a gang": ({"v100": {"A3C": {"null": 1}}}, ": v100: expected a key like"),
    "gang of none": ({"v100": {"('A', 0)": {"null": 1}}}, ": v100: expected a key like"),
    "code as a key": ({"v100": {"__import__('os').getcwd()": {"null": 1}}}, ": v100: expected a key like"),
    "negative": ({"v100": {"('A', 1)": {"null": -1}}}, ": v100 ('A', 1): expected steps per second: 0 or a number"),
    "not finite": ({"v100": {"('A', 1)": {"null": float("nan")}}}, ": expected steps per second"),
    "text": ({"v100": {"('A', 1)": {"null": "3"}}}, "second: 0 or a number from 1e-09 to 1e+15, got '3'"),
    "truth value": ({"v100": {"('A', 1)": {"null": True}}}, ": expected steps per second"),
    "pair of one": ({"v100": {"('A', 1)": {"('A', 1)": [1.0]}}}, ": expected two speeds of a pair, got [1.0]"),
    "pair with text": ({"v100": {"('A', 1)": {"('A', 1)": [1.0, "x"]}}}, ": expected steps per second"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "want"), BAD.values(), ids=BAD)
def test_gavel_table_that_is_wrong_is_refused_in_one_line(tmp_path: Path, content: object, want: str) -> None:
    with pytest.raises(ThroughputError) as caught:
        read(tmp_path, content)
    assert want.removeprefix(":") in str(caught.value)
    assert "gavel.json:" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_gavel_published_tables_hold_26_classes_of_which_19_are_distributed(published: Path) -> None:
    table, raw = read_throughputs(published), json.loads(published.read_text(encoding="utf-8"))
    assert (table.reference, set(table.gpu_types)) == ("v100", {"k80", "p100", "v100"})
    assert len(table.classes()) == 26
    for gpu_type in table.gpu_types:
        gangs = Counter(key.rsplit(", ", 1)[1].rstrip(")") for key in raw[gpu_type])
        assert gangs == {"1": 26, "2": 19, "4": 19, "8": 19}


def test_gavel_published_tables_hold_1759_pairs_a_type_each_answered_as_written(published: Path) -> None:
    table, raw = read_throughputs(published), json.loads(published.read_text(encoding="utf-8"))
    classes = table.classes()
    for gpu_type in table.gpu_types:
        written = sum(len(speeds) - 1 for speeds in raw[gpu_type].values())
        answered = sum(
            table.pair(one, other, gpu_type, gpus) is not None
            for one in classes for other in classes for gpus in (1, 2, 4, 8)
        )  # fmt: skip
        assert written == answered == 1759
        want = raw[gpu_type]["('ResNet-18 (batch size 16)', 1)"]["('ResNet-50 (batch size 16)', 1)"]
        got = table.pair(JobClass("resnet18", 16), JobClass("resnet50", 16), gpu_type, 1)
        assert got == tuple(want)


def test_gavel_published_rates_are_answered_as_written(published: Path) -> None:
    table, raw = read_throughputs(published), json.loads(published.read_text(encoding="utf-8"))
    for gpu_type in table.gpu_types:
        for gpus in (2, 4, 8):
            key = f"('LM (batch size 80)', {gpus})"
            packed, rack, cluster = table.row("LM", 80, gpu_type, gpus)
            assert packed == raw[gpu_type][key]["null"]
            assert rack == cluster == raw[f"{gpu_type}_unconsolidated"][key]["null"]
        alone = raw[gpu_type]["('LM (batch size 80)', 1)"]["null"]
        assert table.row("LM", 80, gpu_type, 1) == (alone, alone, alone)
    # It does not fit: nothing is scaled over a measured 0.
    assert table.rate("ResNet-50", 128, "k80", 2, PACKED) == 0.0


def test_gavel_simulation_table_has_recommendation_slower_on_v100_than_on_k80() -> None:
    path = SHARED / "simulation_throughputs.json"
    if not path.exists():
        pytest.skip(f"needs {path}")
    table = read_throughputs(path)
    assert table.rate("Recommendation", 512, "v100", 1, PACKED) < table.rate("Recommendation", 512, "k80", 1, PACKED)
