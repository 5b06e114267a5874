"""What ranks of PyTorch tell each other about a step: sums and copies of many tensors in few messages.

Every function is called on all ranks, with tensors of the same shapes and types in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

# Not plain imports, so that types are the same whether or not torch is installed.
torch: Any = import_module("torch")
dist: Any = import_module("torch.distributed")

MESSAGE_BYTES = 32 << 20
"""Tensors of one type and device are joined up to this size: large enough for any network, small beside a model."""


def add_over_ranks(tensors: Sequence[Any]) -> None:
    """Replace each tensor by the sum of those of all ranks."""
    _in_messages(tensors, lambda message: dist.all_reduce(message, async_op=True))


def copy_from_rank(tensors: Sequence[Any], rank: int) -> None:
    """Replace each tensor by that of one rank."""
    _in_messages(tensors, lambda message: dist.broadcast(message, rank, async_op=True))


def gathered(tensor: Any) -> list[Any]:  # noqa: ANN401  torch.Tensor
    """Return the tensors of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def _in_messages(tensors: Sequence[Any], send: Callable[[Any], Any]) -> None:
    """Send tensors joined to messages, and write what comes back into them. Two messages are under way at a time."""
    under_way: list[tuple[list[Any], Any, Any]] = []
    with torch.no_grad():
        for group in _messages(tensors):
            flat = [_plain(tensor).reshape(-1) for tensor in group]
            message = torch.cat(flat)
            under_way.append((group, message, send(message)))
            if len(under_way) > 1:
                _receive(*under_way.pop(0))
        for each in under_way:
            _receive(*each)


def _messages(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    kinds: dict[tuple[Any, Any], list[Any]] = {}
    sizes: dict[tuple[Any, Any], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if kinds.get(kind) and sizes[kind] + size > MESSAGE_BYTES:
            yield kinds.pop(kind)
        if kind not in kinds:
            kinds[kind], sizes[kind] = [], 0
        kinds[kind].append(tensor)
        sizes[kind] += size
    yield from kinds.values()


def _receive(group: Sequence[Any], message: Any, work: Any) -> None:  # noqa: ANN401  torch's
    work.wait()
    plain = [_plain(tensor) for tensor in group]
    for tensor, part in zip(plain, message.split([each.numel() for each in plain]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _plain(tensor: Any) -> Any:  # noqa: ANN401  torch.Tensor
    """Return the same memory as numbers that every back end of torch.distributed can send."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
