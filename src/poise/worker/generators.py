"""The random generators of this process as plain values: those of Python, numpy and torch, on CPU and CUDA.

A library that is not imported has not been used, so it is neither asked nor imported. Generators that a script makes for
itself (`torch.Generator`, `numpy.random.default_rng`) are not covered.

A module of its own because its imports are slow: a training with one rank needs none of them.
"""

import hashlib
import random
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

Generators = Mapping[str, Any]  # States by library. Each value survives JSON unchanged.


def generators() -> dict[str, Any]:
    """Return the state of each generator."""
    state: dict[str, Any] = {"python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    if torch := sys.modules.get("torch"):
        state["torch"] = text_of(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [text_of(each) for each in torch.cuda.get_rng_state_all()]
            state["device"] = torch.cuda.current_device()
    return state


def restore(state: Generators) -> None:
    """Set each generator to the given state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import_module("numpy").random.set_state(tuple(state["numpy"]))
    if "torch" in state:
        torch = import_module("torch")
        torch.set_rng_state(_tensor(torch, state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            count, device = torch.cuda.device_count(), torch.cuda.current_device()
            for index, text in cuda_states(state["cuda"], state["device"], count=count, device=device).items():
                torch.cuda.set_rng_state(_tensor(torch, text), index)


def cuda_states(states: Sequence[str], used: int, *, count: int, device: int) -> dict[int, str]:
    """Match saved CUDA generators to devices: one by one if there are as many, otherwise the one in use alone."""
    return dict(enumerate(states)) if len(states) == count else {device: states[used]}


def seed(text: str) -> None:
    """Seed each generator with a number that is derived from a text."""
    drawn = number(text) >> 31  # numpy takes 32 bits
    random.seed(drawn)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(drawn)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(drawn)


def number(text: str) -> int:
    """Return a number of 63 bits that is derived from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def text_of(tensor: Any) -> str:  # noqa: ANN401  torch.Tensor
    """Write a tensor of bytes as text."""
    return b64encode(bytes(tensor.tolist())).decode("ascii")


def _tensor(torch: Any, text: str) -> Any:  # noqa: ANN401  torch, torch.Tensor
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
