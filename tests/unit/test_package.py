"""The package itself: what it offers by name, that looking at it costs nothing, and that its types are known to checkers."""

import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest

import poise
import poise.service.client

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md"


def test_what_the_package_offers_is_listed_and_there() -> None:
    assert {"Client", "__version__"} <= set(poise.__all__) <= set(dir(poise))
    assert poise.Client is poise.service.client.Client
    assert all(getattr(poise, name) is not None for name in dir(poise))


def test_names_are_sorted_and_the_reference_has_them_all() -> None:
    assert poise.__all__ == sorted(poise.__all__)
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in poise.__all__ if name not in page and name != "__version__"] == []


@pytest.mark.parametrize("name", ["SimulationResult", "ComparisonResult", "SweepResult", "Table", "Trace"])
def test_the_reference_has_every_attribute(name: str) -> None:
    kind = getattr(poise, name)
    attributes = {each for each in {*vars(kind), *kind.__annotations__} if not each.startswith("_")}
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]
    inside = {"write_csv", "write_json"} if name == "Table" else {"of"}
    assert [each for each in sorted(attributes - inside) if f"{each}" not in section] == []


def test_importing_the_package_brings_nothing_in() -> None:
    look = (
        "import sys; before = set(sys.modules); import poise; assert {'Client', 'simulate'} <= set(dir(poise));"
        " print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "['poise']\n"


def test_a_simulation_brings_no_optional_library_in() -> None:
    look = (
        "import sys, poise; poise.compare('synthetic:jobs=3', policies='fifo').jobs;"
        " print({'pandas', 'polars', 'pyarrow', 'matplotlib', 'httpx', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    assert not hasattr(poise, "Cleint")


def test_type_checkers_know_what_things_are() -> None:
    """mypy checks the types of this test; running it checks the values."""
    trace = poise.synthetic(jobs=3)
    assert_type(trace, poise.Trace)
    assert_type(trace[0], poise.Job)
    assert_type(trace[:2], poise.Trace)
    result = poise.simulate(trace, cluster="gpu:4", policy="srtf", restart_overhead="30s", cadence="events")
    assert_type(result, poise.SimulationResult)
    assert_type(result.summary.avg_jct, float | None)
    assert_type(result.jobs, poise.Table)
    comparison = poise.compare(trace, cluster=poise.cluster("gpu:4"), policies=["fifo", "srtf"], processes=1)
    assert_type(comparison["fifo"], poise.SimulationResult)
    assert_type([each.policy for each in comparison], list[str])
    assert_type(comparison.best("avg_jct"), str)
    swept = poise.sweep(trace, policies="fifo", loads=[1, 2], processes=1)
    assert_type(swept.means, poise.Table)
    assert (Path(poise.__file__).parent / "py.typed").exists()
