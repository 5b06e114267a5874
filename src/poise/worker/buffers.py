"""Buffers of a model whose ranks have computed different parts of a batch: the same on all ranks after the step.

Running statistics of a BatchNorm are those of one process that computes all parts one after the other. Each part n moves
them by r ← (1 − m) r + m s_n. On a rank that begins with r0, computes k parts and ends with r1, the parts together do

    r ← r1 + (1 − m)^k (r − r0)

so that the ranks' changes can be made one after the other. With `momentum=None` they are means over all parts so far:

    r ← (n0 r0 + Σ ((n0 + k) r1 − n0 r0)) / (n0 + Σ k)

Any other buffer that a part has changed becomes that of the rank with the last part.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from poise.worker.collectives import copy_from_rank, gathered

torch: Any = import_module("torch")  # not a plain import, so that types are the same whether or not it is installed
_BATCH_NORM: Any = import_module("torch.nn.modules.batchnorm")._BatchNorm


class Buffers:
    """The buffers of some modules, from before the parts of a batch until after them."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._norms = [each for each in modules if isinstance(each, _BATCH_NORM) and _tracks(each)]
        self._before = _statistics(self._norms)
        apart = {id(tensor) for norm in self._norms for tensor in norm.buffers(recurse=False)}
        self._places = [
            (module, name)
            for module in modules
            for name, tensor in module._buffers.items()
            if tensor is not None and id(tensor) not in apart
        ]
        self._marks = self._look()

    def changed(self) -> list[bool]:
        """Return which of them, running statistics left out, this rank's parts have changed."""
        pairs = zip(self._marks, self._look(), strict=True)
        return [before is not now or version != its for (before, version), (now, its) in pairs]

    def join(self, changed: Sequence[bool], last: int) -> None:
        """Make them the same on all ranks.

        changed   which of them a part has changed, on any rank
        last      the rank with the last part
        """
        others = [getattr(module, name) for (module, name), has in zip(self._places, changed, strict=True) if has]
        copy_from_rank(others, last)
        if self._before is not None:
            self._join_norms()

    def _look(self) -> list[tuple[Any, int]]:
        # The tensors themselves, not their ids: that of one that was replaced may be given to another.
        found = [getattr(module, name) for module, name in self._places]
        return [(tensor, tensor._version) for tensor in found]

    def _join_norms(self) -> None:
        before, ends = self._before, gathered(_statistics(self._norms))
        sizes = [2 * norm.running_mean.numel() for norm in self._norms]
        counts, values = before[: len(sizes)], before[len(sizes) :].split(sizes)
        ended = [(end[: len(sizes)], end[len(sizes) :].split(sizes)) for end in ends]
        for index, norm in enumerate(self._norms):
            n0, r0 = counts[index], values[index]
            moves = [(after[index] - n0, run[index]) for after, run in ended]
            n = n0 + sum(k for k, _ in moves)
            if norm.momentum is None:
                r = (n0 * r0 + sum((n0 + k) * r1 - n0 * r0 for k, r1 in moves)) / n.clamp(min=1)
            else:
                r = r0
                for k, r1 in moves:
                    r = r1 + (1.0 - norm.momentum) ** k * (r - r0)
            norm.num_batches_tracked.copy_(n)
            mean, var = r.chunk(2)
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)


def _tracks(norm: Any) -> bool:  # noqa: ANN401  a BatchNorm
    return norm.running_mean is not None and norm.num_batches_tracked is not None


def _statistics(norms: Sequence[Any]) -> Any:  # noqa: ANN401  torch.Tensor
    """Return how often each has been updated, and all means and variances; None: there are none."""
    if not norms:
        return None
    counts = torch.stack([norm.num_batches_tracked for norm in norms]).double()
    return torch.cat([counts, *(value.double() for norm in norms for value in (norm.running_mean, norm.running_var))])
