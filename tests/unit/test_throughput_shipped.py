"""The numbers of the shipped table, against the publications that they are from."""

import csv
import json
import math
import re
import statistics
from pathlib import Path

import pytest

import poise.scheduler.throughput
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.table import JobClass, shipped

DATA = Path(poise.scheduler.throughput.__file__).parent / "data"
SHARED = Path(__file__).resolve().parents[3] / "shared/data"
PACKED, RACK, CLUSTER = Locality.PACKED, Locality.RACK, Locality.CLUSTER

# Gandiva_fair, Table 1: ms a mini-batch on K80; speed-up of P40, P100, V100.
GANDIVA_FAIR = {
    "VAE": (11.5, 1.17, 1.19, 1.25),
    "SuperResolution": (207.5, 1.43, 1.73, 1.87),
    "DCGAN": (183.4, 4.34, 4.31, 6.42),
    "GRU": (48.4, 3.00, 2.58, 4.81),
    "LSTM": (48.9, 3.10, 3.58, 4.81),
    "ResNet50": (134, 3.17, 3.34, 5.14),
    "ResNeXt50": (2005.7, 3.70, 4.12, 6.33),
}
LAMBDA = {
    "resnet50-fp16": "resnet50",
    "bert-base-fp16": "bert_base_squad",
    "bert-large-fp16": "bert_large_squad",
    "ssd-fp16": "ssd",
    "gnmt-fp16": "gnmt",
}


def rows(name: str) -> list[dict[str, str]]:
    text = (DATA / name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def lambda_rows(name: str) -> list[dict[str, str]]:
    path = SHARED / "lambda-benchmark" / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    with path.open(encoding="utf-8") as source:
        return list(csv.DictReader(source))


def test_shipped_reference_is_v100_and_every_row_names_its_source() -> None:
    assert shipped().reference == "v100"
    assert shipped() is shipped()
    assert all(row["source"].strip() for row in rows("throughputs.csv"))


@pytest.mark.parametrize("model", GANDIVA_FAIR)
def test_shipped_has_gandiva_fair_table_1(model: str) -> None:
    milliseconds, p40, p100, v100 = GANDIVA_FAIR[model]
    table = shipped()
    k80 = table.rate(model, None, "k80", 1, PACKED)
    assert k80 == pytest.approx(1000 / milliseconds, rel=1e-6)
    for gpu_type, speedup in (("p40", p40), ("p100", p100), ("v100", v100)):
        assert table.rate(model, None, gpu_type, 1, PACKED) / k80 == pytest.approx(speedup, rel=1e-6)


def test_shipped_has_the_placement_fixture_of_themis() -> None:
    table = shipped()
    assert table.row("vgg16", None, "p100", 4) == (103.6, 80.4, 80.4)
    assert table.row("inception-v3", None, "p100", 4) == (242.0, 243.0, 243.0)
    assert round(103.6 / 80.4, 3) == 1.289


def test_shipped_relative_speeds_rise_with_the_generations() -> None:
    speeds = [shipped().speedup(name) or 0.0 for name in ("k80", "p40", "p100", "v100", "a100", "h100", "h200", "b200")]
    assert speeds == sorted(speeds)
    assert shipped().speedup("v100") == 1.0
    assert all((shipped().speedup(name) or 0.0) > 0 for name in shipped().gpu_types)


def test_shipped_scaling_is_never_more_than_linear() -> None:
    table = shipped()
    for model, batch_size in table.classes():
        for gpu_type in table.gpu_types:
            one, eight = (table.rate(model, batch_size, gpu_type, gpus, PACKED) for gpus in (1, 8))
            assert eight <= 8 * one * (1 + 1e-9)


def test_shipped_pairs_have_their_jobs_alone_and_are_no_faster_together() -> None:
    table, pairs = shipped(), [row for row in rows("throughputs.csv") if row["with_model"]]
    assert len({(row["model"], row["with_model"]) for row in pairs}) == 8
    for row in pairs:
        jobs = [
            JobClass(row[f"{prefix}model"], int(size) if (size := row[f"{prefix}batch_size"]) else None)
            for prefix in ("", "with_")
        ]
        rates = table.pair(jobs[0], jobs[1], row["gpu_type"], 1)
        assert rates is not None
        for job, rate in zip(jobs, rates, strict=True):
            assert 0 < rate <= table.rate(*job, row["gpu_type"], 1, PACKED)


@pytest.mark.parametrize("row", rows("models.csv"), ids=lambda row: row["model"])
def test_model_sizes_follow_from_the_arithmetic_in_their_source(row: dict[str, str]) -> None:
    found = re.fullmatch(r".* ([\dx]+) fp32; (\d+) parameters fp32", row["source"])
    assert found is not None
    megabytes = [4 * math.prod(map(int, shape.split("x"))) / 2**20 for shape in found.groups()]
    assert [float(row["largest_tensor_mb"]), float(row["size_mb"])] == pytest.approx(megabytes, rel=1e-4)
    assert shipped().skew(row["model"]) == pytest.approx(megabytes[0] / megabytes[1], rel=1e-4)


def test_skew_tells_vgg_from_resnet() -> None:
    skews = {name: shipped().skew(name) or 0.0 for name in ("vgg11", "vgg16", "vgg19", "alexnet", "resnet50")}
    assert min(skews["vgg11"], skews["vgg16"], skews["vgg19"], skews["alexnet"]) > 0.6
    assert skews["resnet50"] < 0.1
    assert shipped().skew("a model of our own") is None


@pytest.mark.parametrize("model", LAMBDA)
def test_shipped_has_lambdas_first_benchmark_as_measured(model: str) -> None:
    published = {row["name_gpu"]: row for row in lambda_rows("pytorch-train-throughput-fp16.csv")}
    shipped_rows = [row for row in rows("throughputs.csv") if row["model"] == model and "-v2-" not in row["source"]]
    assert {"v100", "a100", "h100", "h100-pcie"} <= {row["gpu_type"] for row in shipped_rows}
    for row in shipped_rows:
        measured = published[row["source"].split(", ")[-1]]
        assert (float(row["gpus"]), float(row["steps_per_second"])) == (
            float(measured["num_gpu"]),
            float(measured[LAMBDA[model]]),
        )


@pytest.mark.parametrize("model", LAMBDA)
def test_shipped_chains_lambdas_second_benchmark_through_the_h100(model: str) -> None:
    column = LAMBDA[model]
    first = {row["name_gpu"]: float(row[column]) for row in lambda_rows("pytorch-train-throughput-fp16.csv")}
    second = {row[""]: float(row[column]) for row in lambda_rows("pytorch-train-throughput-v2-fp16.csv")}
    chained = [row for row in rows("throughputs.csv") if row["model"] == model and "-v2-" in row["source"]]
    assert {row["gpu_type"] for row in chained} == {"h200", "b200"}
    for row in chained:
        gpus, name = row["gpus"], row["source"].split(", ")[2].split(":")[0]
        (measured,) = (rate for system, rate in second.items() if system.startswith(name))
        median = statistics.median(rate for system, rate in second.items() if f"_{gpus}xH100_80GB_SXM5" in system)
        old = first["H100 80GB SXM5" if gpus == "1" else "8x H100 80GB SXM5"]
        assert float(row["steps_per_second"]) == pytest.approx(measured * old / median, rel=1e-6)


def test_shipped_rows_of_gavel_are_gavels() -> None:
    path = SHARED / "gavel/simulation_throughputs.json"
    if not path.exists():
        pytest.skip(f"needs {path}")
    gavel = json.loads(path.read_text(encoding="utf-8"))

    def key(model: str, batch_size: str) -> str:
        return str((f"{model} (batch size {batch_size})" if batch_size else model, 1))

    ours = [row for row in rows("throughputs.csv") if "gavel" in row["source"]]
    assert len(ours) == 15 + 24
    for row in ours:
        speeds = gavel[row["gpu_type"]][key(row["model"], row["batch_size"])]
        if row["with_model"]:
            want = speeds[key(row["with_model"], row["with_batch_size"])]
            got = [float(row["steps_per_second"]), float(row["with_steps_per_second"])]
        else:
            want, got = [speeds["null"]], [float(row["steps_per_second"])]
        assert got == pytest.approx(want, rel=1e-6)
