"""Runs a script that does no more steps than it is let: `python held.py FILE SCRIPT [WORD]...`; FILE says how many."""

import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from poise.worker import Lease

let = Path(sys.argv[1])
steps = Lease.steps


def held(lease: Lease, total: int) -> Iterator[int]:
    for step in steps(lease, total):
        while step >= int(let.read_text(encoding="ascii") or 0):
            time.sleep(0.02)
        yield step


Lease.steps = held  # type: ignore[assignment, method-assign]
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
