"""A small network with JAX: random numbers follow from the step, so there is no generator to save.

python examples/live/train_jax.py --steps N

Prints a digest of the weights.
"""

import argparse
import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from poise.worker import attach

SAMPLES, BATCH = 512, 32


def init(key: jax.Array) -> list[dict[str, jax.Array]]:
    """Return the weights of two layers."""
    shapes = [(16, 64), (64, 1)]
    return [
        {"weights": jax.random.normal(each, shape) / shape[0] ** 0.5, "bias": jnp.zeros(shape[1])}
        for each, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    ]


def loss_of(layers: list[dict[str, jax.Array]], inputs: jax.Array, wanted: jax.Array, key: jax.Array) -> jax.Array:
    """Return the mean squared error, with dropout."""
    hidden = jnp.tanh(inputs @ layers[0]["weights"] + layers[0]["bias"])
    kept = jax.random.bernoulli(key, 0.9, hidden.shape)
    found = jnp.where(kept, hidden / 0.9, 0.0) @ layers[1]["weights"] + layers[1]["bias"]
    return jnp.mean((found - wanted) ** 2)


@partial(jax.jit, donate_argnums=0)
def advance(state: tuple, inputs: jax.Array, wanted: jax.Array, step: jax.Array) -> tuple:
    """One step of gradient descent with momentum; returns the new state and the loss."""
    layers, speeds = state
    draw, drop = jax.random.split(jax.random.fold_in(jax.random.key(1), step))
    rows = jax.random.choice(draw, SAMPLES, (BATCH,), replace=False)
    loss, slopes = jax.value_and_grad(loss_of)(layers, inputs[rows], wanted[rows], drop)
    speeds = jax.tree.map(lambda speed, slope: 0.9 * speed - 0.05 * slope, speeds, slopes)
    return (jax.tree.map(jnp.add, layers, speeds), speeds), loss


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="A small network with JAX.")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    inputs = jax.random.normal(jax.random.key(0), (SAMPLES, 16))
    wanted = jnp.tanh(jnp.prod(inputs[:, :4], axis=1, keepdims=True))
    layers = init(jax.random.key(2))
    state = (layers, jax.tree.map(jnp.zeros_like, layers))

    def save(path: str) -> None:
        with open(path, "wb") as file:  # given a name, savez would add .npz to it
            np.savez(file, *jax.tree.leaves(state))

    def load(path: str) -> None:
        nonlocal state
        with np.load(path) as found:
            state = jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(found[name]) for name in found.files])

    lease = attach(save=save, load=load)
    for step in lease.steps(options.steps):
        state, loss = advance(state, inputs, wanted, step)
        lease.report(loss=loss)
    leaves = [np.asarray(each).tobytes() for each in jax.tree.leaves(state)]
    print(hashlib.sha256(b"".join(leaves)).hexdigest())


if __name__ == "__main__":
    main()
