"""A linear model with plain NumPy: what is saved is what the next step reads.

python examples/live/train_numpy.py --steps N

Prints the weights. Its random generator is one that it made for itself, so it saves that too.
"""

import argparse
import json

import numpy as np

from poise.worker import attach


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="A linear model with plain NumPy.")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    fixed = np.random.default_rng(0)
    inputs = fixed.normal(size=(256, 8))
    wanted = inputs @ np.arange(8.0)
    weights, speed = np.zeros(8), np.zeros(8)
    random = np.random.default_rng(1)

    def save(path: str) -> None:
        with open(path, "wb") as file:  # given a name, savez would add .npz to it
            np.savez(file, weights=weights, speed=speed, random=json.dumps(random.bit_generator.state))

    def load(path: str) -> None:
        with np.load(path) as found:
            weights[:], speed[:] = found["weights"], found["speed"]
            random.bit_generator.state = json.loads(str(found["random"]))

    lease = attach(save=save, load=load)
    for _ in lease.steps(options.steps):
        rows = random.integers(len(inputs), size=32)
        error = inputs[rows] @ weights - wanted[rows]
        speed = 0.9 * speed - 0.01 * inputs[rows].T @ error / len(rows)
        weights += speed
        lease.report(loss=np.mean(error**2))
    print(json.dumps(weights.tolist()))


if __name__ == "__main__":
    main()
