"""What each rank has of its own in a checkpoint: its random generators, without which dropout does not go on as it was.

Rank 0 alone writes checkpoints. Each of the others leaves its part in the run's directory at the same boundary, and rank 0
puts all parts beside the checkpoint before that gets its name. So they count from the same instant.

    rank-<r>.json     in the run's directory, of each rank but 0: {"version", "step", "generators"}
    ranks-<n>.json    beside the checkpoint `step-<n>`: {"version", "ranks"}, a list by rank; null: that rank did not come
"""

import hashlib
import json
import os
import random
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from time import monotonic, sleep
from typing import Any

from poise.worker.protocol import VERSION, Watched, WorkerEnv, replace_json, say

PATIENCE = 30.0
"""Seconds that rank 0 waits for the others. They complete each step together, so they are there in far less. Longer than
a run goes on without one of its ranks, so that rank 0 writes nothing when another was killed."""
AGAIN = 1.0
"""Seconds that it waits once a rank has failed to come: such ranks do not train in step."""
_GAP = 0.002


class Ranks:
    """The parts of all ranks of a run. Alone, or outside Poise, a process has nothing to add to what `save` writes."""

    def __init__(self, where: WorkerEnv) -> None:
        self._where = where
        self._run_dir = where.run_dir if where.world_size > 1 else None
        self._others = {rank: Watched(self._run_dir, _name(rank)) for rank in range(1, where.world_size)}
        self._patience = PATIENCE
        self._own: dict[str, Any] = {}

    def begin(self) -> None:
        """Remove what an earlier attempt of this rank has left in the run's directory."""
        if self._run_dir is not None and self._where.rank:
            with suppress(OSError):
                os.unlink(os.path.join(self._run_dir, _name(self._where.rank)))

    def tell(self, step: int) -> None:
        """Note this rank's generators as they are at this boundary, and let rank 0 have them."""
        if self._run_dir is None:
            return
        pass  # import gone  # here, since single ranks need none of its imports

        self._own = generators()
        if self._where.rank:
            try:
                # Not forced to the disk: rank 0 does so with what it makes of it.
                replace_json(self._run_dir, _name(self._where.rank), _part(step, self._own), flush=lambda _: None)
            except OSError as error:
                say(f"rank 0 cannot be told the random state of rank {self._where.rank} at step {step}: {error}")

    def gathered(self, step: int) -> bytes | None:
        """On rank 0: wait for the parts of this boundary; the contents of `ranks-<step>.json`. None: no part is needed."""
        if self._run_dir is None:
            return None
        parts: list[Mapping[str, Any] | None] = [self._own, *[None] * len(self._others)]
        missing, deadline = dict(self._others), monotonic() + self._patience
        while True:
            for rank, watched in list(missing.items()):
                fields = watched.fields()
                if fields.get("step") == step:
                    parts[rank] = fields["generators"]
                    del missing[rank]
            if not missing or monotonic() >= deadline:
                break
            sleep(_GAP)
        if missing:
            names = ", ".join(map(str, missing))
            say(f"no random state of rank {names} at step {step} after {self._patience:g} s: it will go on with another")
            self._patience = AGAIN
        return json.dumps({"version": VERSION, "ranks": parts}).encode("ascii")

    def restore(self, text: bytes | None, step: int) -> bool:
        """Go on with this rank's generators out of `ranks-<step>.json`; whether that was possible.

        A rank that has no part there gets a stream of its own, which follows from the parts, the step and its number.
        """
        parts = None if text is None else _parts(text)
        if parts is None:
            return False
        pass  # import gone

        own = parts[self._where.rank] if self._where.rank < len(parts) else None
        if own is None:
            seed(f"{json.dumps(parts)}/{step}/{self._where.rank}")
        else:
            restore(own)
        return True


def _name(rank: int) -> str:
    return f"rank-{rank}.json"


def _part(step: int, own: Mapping[str, Any]) -> dict[str, object]:
    return {"step": step, "generators": own}


def _parts(text: bytes) -> list[Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    parts = found.get("ranks") if isinstance(found, dict) and found.get("version") == VERSION else None
    return parts if isinstance(parts, list) else None


# The random generators of this process, as plain values: those of Python, of numpy and of torch, on CPU and CUDA.
#
# A library that is not imported has not been used; it is neither asked nor imported. Generators that a script makes for
# itself
# (`torch.Generator`, `numpy.random.default_rng`) are not known here.

Generators = Mapping[str, Any]
"""States by library. Each value survives JSON unchanged."""


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
    """Go on with these generators."""
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
    """Seed each generator with a number that follows from a text."""
    drawn = number(text) >> 31  # numpy takes 32 bits
    random.seed(drawn)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(drawn)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(drawn)


def number(text: str) -> int:
    """Return a number of 63 bits that follows from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def text_of(tensor: Any) -> str:  # noqa: ANN401  torch.Tensor
    """Write a tensor of bytes as text."""
    return b64encode(bytes(tensor.tolist())).decode("ascii")


def _tensor(torch: Any, text: str) -> Any:  # noqa: ANN401  torch, torch.Tensor
    return torch.tensor(list(b64decode(text)), dtype=torch.uint8)
