"""The notebook of a study: short, shipped without outputs, and executed in a real kernel of this interpreter."""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "study.ipynb"
MOST_LINES = 30
MOST_SECONDS = 120
"""On a machine that is busy with other things; alone it takes a few."""


def a_notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def code_of(notebook: Any) -> list[str]:
    return [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines() if line.strip()]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel that is this interpreter; nothing is read from or written to the user's home."""
    folder = tmp_path / "jupyter" / "kernels" / "study"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "study", "language": "python"}))
    places = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")
    for name in places:
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    return "study"


def test_the_notebook_is_short_and_carries_no_outputs() -> None:
    notebook = a_notebook()
    assert len(code_of(notebook)) < MOST_LINES
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert NOTEBOOK.stat().st_size < 10_000


@pytest.mark.slow
def test_the_notebook_compares_five_policies_at_three_loads_with_intervals_and_two_figures(
    kernel: str, tmp_path: Path
) -> None:
    notebook = a_notebook()
    NotebookClient(
        notebook, timeout=MOST_SECONDS, kernel_name=kernel, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [each for each in outputs if each.output_type in ("stream", "error")]
    figures = [base64.b64decode(each.data["image/png"]) for each in outputs if "image/png" in each.get("data", {})]
    assert len(figures) == 2
    assert all(len(each) > 10_000 for each in figures)
    comparison, swept = (each.data for each in outputs if "÷ fifo" in str(each) or "average JCT" in str(each))
    for policy in ("fifo", "srtf", "tiresias", "max-min", "themis"):
        assert f">{policy}<" in comparison["text/html"]
        assert swept["text/html"].count(f">{policy}<") == 3
    assert len(re.findall(r"±", swept["text/plain"])) > 15
    means = next(each.data["text/plain"] for each in outputs if "avg_jct_low" in str(each))
    assert len(means.splitlines()) == 16


STUDY = """
import poise
import poise.lab.progress
from poise.policies import Order, PreemptionRule, Rank, Unfitting

poise.lab.progress.PATIENCE = poise.lab.progress._OFTEN = 0.0
mine = Order(
    rank=lambda job, _previous, _memory: Rank(-job.submitted), preemption=PreemptionRule.NEVER, unfitting=Unfitting.SKIPPED
)
swept = poise.sweep("synthetic:jobs=40", policies=["fifo", mine], seeds=3, cluster="gpu:8", processes=2, progress="bar")
len(swept.runs)
"""


@pytest.mark.slow
def test_a_kernel_works_in_processes_with_policies_of_its_own_and_takes_its_bar_away(kernel: str, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(STUDY)])  # type: ignore[no-untyped-call]
    shown: list[str] = []

    def hear(cell: Any, cell_index: int, execute_reply: Any) -> None:
        shown.append(execute_reply["content"]["status"])

    NotebookClient(notebook, timeout=MOST_SECONDS, kernel_name=kernel, on_cell_executed=hear).execute()
    assert shown == ["ok"]
    bar, result = notebook.cells[0].outputs
    assert bar.data == {"text/plain": "", "text/html": ""}
    assert result.data["text/plain"] == "6"
