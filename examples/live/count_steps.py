"""A pretend training without dependencies: a chain of hashes, s(k+1) = sha256(s(k), k), one a step.

python examples/live/count_steps.py --steps N [--seconds-per-step S] [--speeds v100=1.0,k80=0.3] [--seed TEXT]

A step takes S seconds on a GPU type of speed 1, S / 0.3 on one of speed 0.3; types that are not named have speed 1. It
prints the last hash, which is the same after any number of interruptions.
"""

import argparse
import hashlib
import os
import time

from poise.worker import attach


class Chain:
    """The training state: one hash."""

    def __init__(self, seed: str) -> None:
        self.hash = hashlib.sha256(seed.encode()).hexdigest()
        self.steps = 0

    def advance(self, step: int) -> None:
        """One step; that it is the right one is checked."""
        if step != self.steps:
            raise AssertionError(f"step {step} comes after {self.steps} steps")
        self.hash = hashlib.sha256(f"{self.hash} {step}".encode()).hexdigest()
        self.steps += 1

    def save(self, path: str) -> None:
        """Write it to a new file."""
        with open(path, "w", encoding="ascii") as file:
            file.write(f"{self.steps} {self.hash}\n")

    def load(self, path: str) -> None:
        """Read it."""
        with open(path, encoding="ascii") as file:
            steps, self.hash = file.read().split()
        self.steps = int(steps)


def speeds(text: str) -> dict[str, float]:
    """`v100=1.0,k80=0.3` as numbers by GPU type."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    found = {name.strip().lower(): float(value) for name, _, value in pairs}
    if not all(speed > 0 for speed in found.values()):
        raise ValueError(text)
    return found


def main() -> None:
    """Count the steps."""
    parser = argparse.ArgumentParser(description="A chain of hashes, one a step.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    parser.add_argument("--speeds", type=speeds, default={}, help="relative speed by GPU type: v100=1.0,k80=0.3")
    parser.add_argument("--seed", default="0")
    options = parser.parse_args()
    seconds = options.seconds_per_step / options.speeds.get(os.environ.get("POISE_GPU_TYPE", "").lower(), 1.0)
    chain = Chain(options.seed)
    lease = attach(save=chain.save, load=chain.load)
    due = time.monotonic()
    for step in lease.steps(options.steps):
        # To a moment rather than for a time, so that what the loop costs does not add up; time that was lost stays lost.
        due = max(due + seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        chain.advance(step)
    print(chain.hash)


if __name__ == "__main__":
    main()
