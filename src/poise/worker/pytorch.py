"""Plain PyTorch: all that a training needs to go on where it stopped, bit for bit on CPU.

from poise.worker import attach
from poise.worker.pytorch import State, batch_at

state = State(model=model, optimizer=optimizer, scheduler=scheduler)
lease = attach(save=state.save, load=state.load)
for step in lease.steps(10_000):
    rows = batch_at(step, samples=len(data), batch_size=32, seed=0)
    ...
"""

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

from poise.worker import generators
from poise.worker.micro_batches import share
from poise.worker.protocol import worker_env

# Not a plain import, so that types are the same whether or not it is installed.
torch: Any = import_module("torch")


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a gradient scaler, ..."""

    def state_dict(self) -> Any:  # noqa: ANN401  theirs
        """All that it needs to go on."""

    def load_state_dict(self, state_dict: Any, /) -> Any:  # noqa: ANN401  theirs
        """Go on from there."""


class TrainingState:
    """The state of a training: of named parts, and of the random generators of torch, Python and numpy.

    Give the model itself, not what DistributedDataParallel makes of it, so that the number of ranks may change. Generators
    are those of rank 0. Inside Poise the lease keeps those of the other ranks as well; elsewhere these get streams of their
    own that follow from rank 0's.
    """

    def __init__(self, **parts: Stateful) -> None:
        self._parts = parts

    def save(self, path: str) -> None:
        """Write it to a new file."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        torch.save({"parts": parts, "random": generators.generators()}, path)

    def load(self, path: str) -> None:
        """Read it. The parts must be those that were saved."""
        # The file is the job's own, written by this class: objects that a state_dict contains are welcome.
        found = torch.load(path, map_location="cpu", weights_only=False)
        if set(found["parts"]) != set(self._parts):
            saved, wanted = ", ".join(sorted(found["parts"])), ", ".join(sorted(self._parts))
            raise ValueError(f"the checkpoint has {saved}; expected {wanted}")
        for name, part in self._parts.items():
            part.load_state_dict(found["parts"][name])
        restore_random(found["random"], worker_env(os.environ).rank)


def batch_at(step: int, *, samples: int, batch_size: int, seed: int) -> Any:  # noqa: ANN401  torch.Tensor
    """Indices of the samples of one step, as a tensor: shuffled anew every epoch, the rest of an epoch left out.

    They follow from the arguments alone, so a training that resumes at any step sees the samples that it would have seen.
    """
    epoch, place = divmod(step, _batches(samples, batch_size))
    return _order(samples, seed, epoch)[place * batch_size : (place + 1) * batch_size]


def _batches(samples: int, batch_size: int) -> int:
    if not 1 <= batch_size <= samples:
        raise ValueError(f"batch_size: expected 1 to {samples}, the samples that there are, got {batch_size}")
    return samples // batch_size


class Batches:
    """The batches of a data set, in the order of `batch_at`; an iteration ends with the epoch, the next one goes on.

    It knows where it is: give it to `TrainingState` as a part, or to Lightning. `batch_size` is that of all ranks
    together, each of
    which gets its part of every batch. `more` is for torch's DataLoader. What its worker processes draw at random is the one
    thing that is not the same after a resumption within an epoch.
    """

    def __init__(self, data: Any, *, batch_size: int, seed: int, **more: Any) -> None:  # noqa: ANN401  torch's
        self._data, self._more = data, more
        self._size, self._seed = batch_size, seed
        self._next = 0
        where = worker_env(os.environ)
        self._rank = where.rank
        mine = share(batch_size, where.rank, (1.0,) * where.world_size)
        self._mine = slice(mine.start, mine.stop)

    def __len__(self) -> int:
        return _batches(len(self._data), self._size)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader(range(self._next, (self._next // len(self) + 1) * len(self))):
            self._next += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on there."""
        self._next = state_dict["next"]

    def _loader(self, steps: range) -> Any:  # noqa: ANN401  torch's
        batches = (batch_at(step, samples=len(self._data), batch_size=self._size, seed=self._seed) for step in steps)
        rows = [batch[self._mine].tolist() for batch in batches]
        # A generator of its own: a loader draws a seed for its workers, which must not disturb that of the training. By
        # rank, since workers of different ranks that draw the same numbers would change different samples in the same way.
        seed = generators.number(f"{self._seed}/{steps.start}/{self._rank}/workers")
        generator = torch.Generator().manual_seed(seed)
        return torch.utils.data.DataLoader(self._data, batch_sampler=rows, generator=generator, **self._more)


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> Any:  # noqa: ANN401  torch.Tensor
    return torch.randperm(samples, generator=torch.Generator().manual_seed(generators.number(f"{seed}/{epoch}")))


def restore_random(state: Mapping[str, Any], rank: int) -> None:
    """Go on with these generators on rank 0; the other ranks get streams of their own that follow from them."""
    if not isinstance(state["torch"], str):
        state = _plain(state)
    if rank:
        generators.seed(f"{state['torch']}/{rank}")
    else:
        generators.restore(state)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the tensors of a checkpoint that has them, as the first ones had, into plain values."""
    plain = {**state, "torch": generators.text_of(state["torch"])}
    if "cuda" in state:
        plain.update(cuda=[generators.text_of(each) for each in state["cuda"]], device=0)
    return plain


State = TrainingState  # its name until 0.1
