"""Plain PyTorch: all that a training needs to continue where it stopped, bit for bit on CPU.

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
        """Return all that it needs to continue."""

    def load_state_dict(self, state_dict: Any, /) -> Any:  # noqa: ANN401  theirs
        """Continue from there."""


class TrainingState:
    """The state of a training, for users `State`: named parts, and the random generators of torch, Python and numpy.

    Give the model itself, not its DistributedDataParallel wrapper, so that the number of ranks may change. Generators are
    those of rank 0. Inside Poise the lease keeps those of the other ranks as well; elsewhere these get streams of their own,
    derived from rank 0's.
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


State = TrainingState  # the name that scripts use


def batch_at(step: int, *, samples: int, batch_size: int, seed: int) -> Any:  # noqa: ANN401  torch.Tensor
    """Return the indices of one step's samples as a tensor: shuffled anew each epoch, the incomplete last batch left out.

    They follow from the arguments alone, so a training that resumes at any step sees the samples that it would have seen.
    """
    epoch, place = divmod(step, _batches(samples, batch_size))
    return _order(samples, seed, epoch)[place * batch_size : (place + 1) * batch_size]


def _batches(samples: int, batch_size: int) -> int:
    if not 1 <= batch_size <= samples:
        raise ValueError(f"batch_size: expected 1 to {samples}, the samples that there are, got {batch_size}")
    return samples // batch_size


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> Any:  # noqa: ANN401  torch.Tensor
    return torch.randperm(samples, generator=torch.Generator().manual_seed(generators.number(f"{seed}/{epoch}")))


class Batches:
    """The batches of a data set in the order of `batch_at`; an iteration ends with the epoch, the next one continues.

    It knows its position: give it to `State` as a part, or to Lightning. `batch_size` is that of all ranks together; each
    gets its share of each batch. `more` is for torch's DataLoader. What worker processes of the loader draw at random for a
    sample follows from the seed, the epoch and the sample, so it does not depend on resumptions, workers or ranks.
    """

    def __init__(self, data: Any, *, batch_size: int, seed: int, **more: Any) -> None:  # noqa: ANN401  torch's
        self._data, self._more = data, more
        self._size, self._seed = batch_size, seed
        self._next = 0
        env = worker_env(os.environ)
        mine = share(batch_size, env.rank, (1.0,) * env.world_size)
        self._mine = slice(mine.start, mine.stop)

    def __len__(self) -> int:
        return _batches(len(self._data), self._size)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the current epoch."""
        steps = range(self._next, (self._next // len(self) + 1) * len(self))
        batches = (batch_at(step, samples=len(self._data), batch_size=self._size, seed=self._seed) for step in steps)
        rows = [batch[self._mine].tolist() for batch in batches]
        # A generator of its own: a loader draws a seed for its workers, which must not disturb that of the training.
        generator = torch.Generator().manual_seed(0)
        data = self._data
        if self._more.get("num_workers"):  # without workers, samples are loaded with the generators of the training
            data = _SeededData(data, f"{self._seed}/{self._next // len(self)}")
        for batch in torch.utils.data.DataLoader(data, batch_sampler=rows, generator=generator, **self._more):
            self._next += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return its position."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue at a position."""
        self._next = state_dict["next"]


class WholeBatches(Batches):
    """The same batches, each whole on every rank: what `lease.micro_batches` takes."""

    def __init__(self, data: Any, *, batch_size: int, seed: int, **more: Any) -> None:  # noqa: ANN401  torch's
        super().__init__(data, batch_size=batch_size, seed=seed, **more)
        self._mine = slice(None)


class _SeededData:
    """A data set each of whose samples draws random numbers of its own, whichever process loads it.

    Whatever else is asked of it, as a `worker_init_fn` does, the data set answers.
    """

    __slots__ = ("_data", "_seed")

    def __init__(self, data: Any, seed: str) -> None:  # noqa: ANN401  torch's
        object.__setattr__(self, "_data", data)
        object.__setattr__(self, "_seed", seed)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  the data set's
        if name in _SeededData.__slots__:  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self._data, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._data, name, value)

    def __getstate__(self) -> tuple[Any, str]:
        return self._data, self._seed

    def __setstate__(self, state: tuple[Any, str]) -> None:
        _SeededData.__init__(self, *state)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401  a sample
        generators.seed(f"{self._seed}/{row}")
        return self._data[row]

    def __getitems__(self, rows: list[int]) -> Any:  # noqa: ANN401  samples
        """Load a batch at once if the data set can, as a loader would."""
        if not hasattr(self._data, "__getitems__"):
            return [self[row] for row in rows]
        generators.seed(f"{self._seed}/{rows[0]}")
        return self._data.__getitems__(rows)


def restore_random(state: Mapping[str, Any], rank: int) -> None:
    """Restore the generators on rank 0; the other ranks get streams of their own, derived from them."""
    if not isinstance(state["torch"], str):  # the first version of this file format had tensors
        state = {**state, "torch": generators.text_of(state["torch"])}
        if "cuda" in state:
            state.update(cuda=[generators.text_of(each) for each in state["cuda"]], device=0)
    if rank:
        generators.seed(f"{state['torch']}/{rank}")
    else:
        generators.restore(state)
