"""Micro-batches in PyTorch: the gradient of a whole batch, whichever ranks compute its parts.

Each rank computes its share of the parts, which may be none, and adds up their gradients weighted by their samples. After
the last part the ranks add these sums once:

    ∇ (mean over the batch) = Σ over ranks Σ over parts  (samples of the part / samples of the batch) ∇ (mean over the part)

One short message goes before the gradients. It has the loss, which weights have a gradient on any rank, and which buffers
have changed. All ranks wait for it, so no rank completes a step without rank 0, as the lease requires of several ranks.

A model in DistributedDataParallel is kept from adding gradients by itself, and from sending its buffers: it would wait for
ranks that compute fewer parts.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import WeakSet

from poise.worker import generators
from poise.worker.batch import DividedBatch, is_array
from poise.worker.buffers import Buffers
from poise.worker.collectives import add_over_ranks, copy_from_rank, gathered
from poise.worker.micro_batches import samples_of
from poise.worker.protocol import WorkerEnv, WorkerError, say

# Not plain imports, so that types are the same whether or not torch is installed.
torch: Any = import_module("torch")
dist: Any = import_module("torch.distributed")
_DDP: Any = import_module("torch.nn.parallel").DistributedDataParallel

_alike: "WeakSet[Any]" = WeakSet()
"""Models that are known to be the same on all ranks."""


class BatchShares(NamedTuple):
    """What the lease knows of one use of micro-batches."""

    env: WorkerEnv
    by_rank: list[range]  # micro-batches of each rank
    complete: Callable[[float], object]  # called with the loss of the whole batch


class Part:
    """One micro-batch, as the loop over a rank's parts gets it.

    index    its number among the parts of the batch, from 0
    batch    its samples, in the shape of the whole batch
    """

    def __init__(self, index: int, batch: Any, samples: int, add: Callable[["Part", Any, float], None]) -> None:  # noqa: ANN401
        self.index, self.batch = index, batch
        self._samples, self._add = samples, add
        self.is_done = False

    def __len__(self) -> int:
        return self._samples

    def backward(self, loss: Any, *, weight: Any = None) -> None:  # noqa: ANN401  torch.Tensor
        """Compute the gradient of the part's loss, and add it with the part's weight.

        loss     the mean over the samples of the part
        weight   what the mean was taken over, where that is not samples, as the number of tokens that count
        """
        if self.is_done:
            raise WorkerError(f"micro_batches: backward was called twice for part {self.index}; add its losses before")
        self._add(self, loss, len(self) if weight is None else _weight(weight))
        self.is_done = True


class Accumulation:
    """This rank's parts of one batch, gone through once in a loop.

    Before the first part the gradients of the models are removed; after the last, they are those of the whole batch.
    """

    def __init__(
        self,
        batch: Any,  # noqa: ANN401  see DividedBatch
        models: Sequence[Any],
        shares: BatchShares,
        *,
        seed: str | None,
        scaler: Any,  # noqa: ANN401  torch.amp.GradScaler
    ) -> None:
        self._models = _Models(models)
        _require_group(shares.env)
        self._batch, self._shares, self._seed, self._scaler = DividedBatch(batch), shares, seed, scaler
        self._several = shares.env.world_size > 1
        exact = torch.float32 if self._models.device.type == "mps" else torch.float64  # which that device has not
        self._total = torch.zeros(2, dtype=exact, device=self._models.device)  # weights, and losses by weight
        self._loss: float | None = None
        self._is_begun = False

    @property
    def loss(self) -> float:
        """Mean loss of the whole batch, of all ranks; there after the loop."""
        if self._loss is None:
            raise WorkerError("loss: the loss of the whole batch is known once all parts have been gone through")
        return self._loss

    def __iter__(self) -> Iterator[Part]:
        """Go through this rank's parts that have samples."""
        if self._is_begun:
            raise WorkerError("micro_batches: its parts can be gone through once; call it anew for another batch")
        self._is_begun = True
        return self._parts()

    def _parts(self) -> Iterator[Part]:
        models, count = self._models, self._shares.by_rank[-1].stop
        if self._several and not models.are_alike:
            models.make_alike(self._batch, count)
        models.remove_gradients()
        if self._scaler is not None:
            self._scaler.scale(self._total.new_zeros(()))  # its factor is made at the first use, and ranks may have no part
        buffers = Buffers(models.modules) if self._several else None
        with models.unsynchronised():
            yield from self._own_parts(count)
        if buffers is None:
            weight, losses = self._total.tolist()
        else:
            weight, losses = self._add_ranks(buffers, last=min(count, self._batch.samples) - 1)
        if weight not in (0.0, self._batch.samples):
            models.multiply_gradients(self._batch.samples / weight)
        self._loss = losses / weight if weight else float("nan")
        self._shares.complete(self._loss)

    def _own_parts(self, count: int) -> Iterator[Part]:
        with _RandomNumbers(self._seed) as random_numbers:
            for index in self._shares.by_rank[self._shares.env.rank]:
                if rows := samples_of(index, count, self._batch.samples):
                    random_numbers.begin(index)
                    part = Part(index, self._batch.part(rows), len(rows), self._add)
                    yield part
                    if not part.is_done:
                        raise WorkerError(f"micro_batches: part {index} was left without part.backward(loss)")

    def _add(self, part: Part, loss: Any, weight: float) -> None:  # noqa: ANN401  torch.Tensor
        if not (is_array(loss) and hasattr(loss, "backward")):
            raise WorkerError(f"backward: expected the loss of part {part.index} as a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise WorkerError(
                f"backward: expected the mean loss of part {part.index}, one number, got shape {tuple(loss.shape)}"
            )
        if not weight:
            return  # nothing of it counts; the mean over nothing is no number
        value = loss.detach().to(self._total).reshape(())
        self._total += torch.stack([torch.full_like(value, weight), value * weight])
        scaled = loss * (weight / self._batch.samples)
        (scaled if self._scaler is None else self._scaler.scale(scaled)).backward()

    def _add_ranks(self, buffers: Buffers, last: int) -> tuple[float, float]:
        """Add what the ranks have; return all weights, and losses by weight.

        last   the last part that has samples: buffers become those of its rank
        """
        models, changed = self._models, buffers.changed()
        has = [weights.grad is not None for weights in models.weights]
        sparse = [weights.grad.is_sparse for weights, is_there in zip(models.weights, has, strict=True) if is_there]
        flags = [self._batch.samples, sum(sparse), *has, *changed]
        told = torch.cat([self._total, torch.tensor(flags, dtype=torch.float64, device=models.device)])
        dist.all_reduce(told)
        weight, losses, samples, any_sparse, *marks = told.tolist()
        if samples != self._batch.samples * self._shares.env.world_size:
            raise WorkerError(
                f"batch: rank {dist.get_rank()} was given {self._batch.samples} samples and other ranks another number; "
                "give all ranks the whole batch, each takes its parts"
            )
        if any_sparse:
            raise WorkerError("micro_batches: sparse gradients cannot be added; make the embedding with sparse=False")
        given = [weights for weights, mark in zip(models.weights, marks, strict=False) if mark]
        for weights in given:
            if weights.grad is None:
                weights.grad = torch.zeros_like(weights)
        add_over_ranks([weights.grad for weights in given])
        owner = next(rank for rank, share in enumerate(self._shares.by_rank) if last in share)
        buffers.join([mark > 0 for mark in marks[len(has) :]], owner)
        return weight, losses


class _Models:
    """The modules whose gradients are computed, and what can be said of them."""

    def __init__(self, models: Sequence[Any]) -> None:
        if not models:
            raise WorkerError("micro_batches: expected the model after the batch, as in lease.micro_batches(rows, model)")
        for each in models:
            if not isinstance(each, torch.nn.Module):
                raise WorkerError(f"model: expected a torch.nn.Module, got {type(each).__name__}")
        self._models = list(models)
        self.modules = list({id(part): part for each in models for part in each.modules()}.values())
        _refuse(self.modules)
        tensors = {id(weights): weights for each in models for weights in each.parameters()}.values()
        for weights in tensors:
            if torch.nn.parameter.is_lazy(weights):
                raise WorkerError("model: its weights are not made yet; pass a sample through it before the first step")
            if hasattr(weights, "placements"):
                raise WorkerError("model: its weights are divided over ranks; micro-batches need them whole on each rank")
        devices = sorted({str(weights.device) for weights in tensors})
        if len(devices) > 1:
            raise WorkerError(f"model: expected its weights on one device, got {', '.join(devices)}")
        self._every = list(tensors)
        self.weights = [weights for weights in tensors if weights.requires_grad]
        if not self.weights:
            raise WorkerError("model: none of its weights requires a gradient")
        self._tensors = [*self._every, *(buffer for part in self.modules for buffer in part.buffers(recurse=False))]
        self.device = self.weights[0].device

    @property
    def are_alike(self) -> bool:
        """Whether they are known to be the same on all ranks."""
        return all(each in _alike for each in self._models)

    def make_alike(self, batch: DividedBatch, parts: int) -> None:
        """Give all ranks the weights of rank 0, as DistributedDataParallel does; what cannot be alike is refused."""
        shapes = [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in self._tensors]
        facts = {
            "the models have other weights": shapes,
            "the number of parts is another": parts,
            "the batches have other samples; give all ranks the whole batch": _content(batch),
        }
        # Samples themselves are as printed, which has the first and the last of large tensors; addresses tell nothing.
        printed = [*map(repr, facts.values()), re.sub(r"cuda:\d+|0x[0-9a-f]+", "", repr(batch.given))]
        mine = torch.tensor([generators.number(each) for each in printed], device=self.device)
        *differs, is_varied = (torch.stack(gathered(mine)) != mine).any(dim=0).tolist()
        for text, is_other in zip(facts, differs, strict=True):
            if is_other:
                raise WorkerError(f"micro_batches: ranks differ: {text}")
        if is_varied and dist.get_rank() == 0:
            say("micro_batches: ranks were given other samples in the first step; give all ranks the whole batch")
        copy_from_rank(self._tensors, 0)
        _alike.update(self._models)

    def remove_gradients(self) -> None:
        """Remove them from all weights: one that was frozen meanwhile would be moved by its last gradient ever on."""
        for weights in self._every:
            weights.grad = None

    def multiply_gradients(self, factor: float) -> None:
        """Multiply all gradients by a number."""
        for weights in self.weights:
            if weights.grad is not None:
                weights.grad.mul_(factor)

    def unsynchronised(self) -> ExitStack:
        """Keep what is wrapped in DistributedDataParallel from waiting for other ranks."""
        stack = ExitStack()
        for each in self.modules:
            if isinstance(each, _DDP):
                stack.enter_context(each.no_sync())
                # It would send its buffers before the first forward; they are the same on all ranks after each step.
                each.require_forward_param_sync = False
        return stack


def _refuse(modules: Sequence[Any]) -> None:
    for each in modules:
        name = type(each).__name__
        if name in ("DataParallel", "FullyShardedDataParallel"):
            raise WorkerError(f"model: {name} divides the model itself; give the module that it wraps")
        if name == "SyncBatchNorm" and each.training:
            raise WorkerError(
                "model: a SyncBatchNorm waits for ranks that have no part; use BatchNorm, which normalises within a part"
            )
        if isinstance(each, _DDP) and each.static_graph:
            raise WorkerError("model: DistributedDataParallel with static_graph=True adds gradients early; leave it out")
        if getattr(each, "sparse", False) is True and isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise WorkerError("model: sparse gradients cannot be added; make the embedding with sparse=False")


def _require_group(env: WorkerEnv) -> None:
    has_group = dist.is_available() and dist.is_initialized()
    if env.world_size > 1 and not has_group:
        raise WorkerError(f"micro_batches: the job has {env.world_size} ranks; call dist.init_process_group() first")
    if has_group and (size := dist.get_world_size()) != env.world_size:
        raise WorkerError(f"micro_batches: torch.distributed has a world size of {size}, and WORLD_SIZE is {env.world_size}")


def _content(batch: DividedBatch) -> object:
    """Return what has to be the same on all ranks: the number of samples, or the numbers of rows if it consists of these.

    Samples themselves may differ: each rank may have drawn random numbers to vary them. So that is said, not refused.
    """
    given = batch.given
    if isinstance(given, torch.Tensor) and given.dim() == 1 and not given.is_floating_point():
        return given.tolist()
    return batch.samples


def _weight(weight: Any) -> float:  # noqa: ANN401  a number or a tensor of one
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise WorkerError(f"weight: expected a number, got {weight!r}") from None
    if not 0 <= number < float("inf"):
        raise WorkerError(f"weight: expected a number of 0 or more, got {number:g}")
    return number


class _RandomNumbers:
    """Random numbers that follow from the part alone; afterwards the generators go on as if there had been no parts."""

    def __init__(self, seed: str | None) -> None:
        self._seed = seed

    def __enter__(self) -> Self:
        self._before = None if self._seed is None else generators.generators()
        return self

    def begin(self, part: int) -> None:
        """Seed for a part."""
        if self._seed is not None:
            generators.seed(f"{self._seed}/{part}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            generators.restore(self._before)
