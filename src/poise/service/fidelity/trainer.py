"""A pretend training for measurements: steps that each take a fixed time, by GPU type.

Live jobs run this file as a script, so it imports the standard library and `poise.worker` only:

    python trainer.py STEPS SECONDS TYPE=SPEED...
"""

import os
import sys
import time
from pathlib import Path

from poise.worker import attach


def main(steps: int, seconds: float, *speeds: str) -> None:
    """Do `steps` steps of `seconds` each on a GPU type of speed 1; the state is the number of steps done."""
    relative = {name: float(speed) for name, _, speed in (each.partition("=") for each in speeds)}
    each = seconds / relative.get(os.environ.get("POISE_GPU_TYPE", ""), 1.0)
    done = [0]

    def save(path: str) -> None:
        Path(path).write_text(str(done[0]), encoding="ascii")

    def load(path: str) -> None:
        done[0] = int(Path(path).read_text(encoding="ascii"))

    due = time.monotonic()
    for step in attach(save=save, load=load).steps(steps):
        # Sleep until a time rather than for one, so that the cost of the loop does not add up; lost time stays lost.
        due = max(due + each, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        done[0] = step + 1


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
