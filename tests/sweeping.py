"""What the tests of sweeps share: small grids, and rows without what differs from run to run."""

from pathlib import Path
from typing import Any

from tests.shell import poise

SMALL = ("synthetic:jobs=30,seed=7", "--cluster", "gpu:8@8")
STEADY = ("synthetic:jobs=450,rate=60,durations=exponential:3000", "--cluster", "gpu:64")
"""A cell takes about a tenth of a second."""
GRID = ("--policies", "srtf,fifo", "--loads", "1,2", "--seeds", "3")
EFFORT = ("cpu_seconds", "policy_seconds")


def without_effort(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in EFFORT} for row in rows]


def swept(*words: object) -> list[dict[str, Any]]:
    return without_effort(poise("compare", *words, "--json").json)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
