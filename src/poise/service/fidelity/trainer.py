"""A pretend training for measurements: steps that each take their time, by GPU type. Run as a script by live jobs.

python trainer.py STEPS SECONDS TYPE=SPEED...
"""

import os
import sys
import time
from pathlib import Path

from poise.worker import attach


def main(steps: int, seconds: float, *speeds: str) -> None:
    """So many steps, of so many seconds each on a GPU type of speed 1; the state is their number."""
    relative = {name: float(speed) for name, _, speed in (each.partition("=") for each in speeds)}
    each = seconds / relative.get(os.environ.get("POISE_GPU_TYPE", ""), 1.0)
    done = [0]

    def save(path: str) -> None:
        Path(path).write_text(str(done[0]), encoding="ascii")

    def load(path: str) -> None:
        done[0] = int(Path(path).read_text(encoding="ascii"))

    due = time.monotonic()
    for step in attach(save=save, load=load).steps(steps):
        # To a moment rather than for a time, so that what the loop costs does not add up; time that was lost stays lost.
        due = max(due + each, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        done[0] = step + 1


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
