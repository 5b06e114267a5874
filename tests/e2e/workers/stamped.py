"""Runs a script and stamps when it lives: `python stamped.py FOLDER SCRIPT [WORD]...`.

FOLDER/JOB/EPOCH-RANK gets a line at the beginning, at each step, at the end, and twenty times a second meanwhile: seconds
since boot, what it was, and a full stop. So the intervals of two runs can be compared wherever they were.
"""

import atexit
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from poise.worker import Lease

folder = Path(sys.argv[1]) / os.environ["POISE_JOB"]
folder.mkdir(exist_ok=True)
out = os.open(folder / f"{os.environ['POISE_EPOCH']}-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
steps = Lease.steps


def stamp(what: str) -> None:
    os.write(out, f"{time.clock_gettime(time.CLOCK_BOOTTIME):.6f} {what} .\n".encode())


def stamped(lease: Lease, total: int) -> Iterator[int]:
    for step in steps(lease, total):
        stamp(f"step {step}")
        yield step


def beat() -> None:
    while True:
        stamp("lives")
        time.sleep(0.05)


stamp("begins")
atexit.register(stamp, "ends")
threading.Thread(target=beat, daemon=True).start()
Lease.steps = stamped  # type: ignore[assignment, method-assign]
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
