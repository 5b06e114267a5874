"""Two machines write the same journal of one workload, to the byte, whatever their processors can do."""

from pathlib import Path

import numpy as np
import pytest
from tests.shell import poise_apart

FOUND = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
OLD = {"OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": " ".join(FOUND)}
"""Makes numpy take this machine for one of 2008: whatever it chooses by the processor, it then chooses otherwise."""


def journal(folder: Path, *words: str, **environment: str) -> bytes:
    workload = ("synthetic:jobs=60,seed=7", "--cluster", "v100:4,p100:4,k80:4")
    said = poise_apart("simulate", *workload, *words, "--quiet", "--out", folder, folder=None, **environment)
    assert said.code == 0, said.err
    return (folder / "journal.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("max-min+agnostic", ()),
        ("hierarchical", ()),
        ("strategy-proof", ()),
        ("hare", ("--micro-batches", "2")),
        ("max-throughput", ("--estimate", "profiled:types=1")),
    ],
)
def test_a_journal_does_not_depend_on_the_processor(policy: str, more: tuple[str, ...], tmp_path: Path) -> None:
    here, there = (
        journal(tmp_path / name, "--policy", policy, *more, **how) for name, how in (("here", {}), ("there", OLD))
    )
    assert here == there
