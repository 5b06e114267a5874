"""Micro-batches in one process of PyTorch: random numbers, weights, and what cannot be, each with one clear line."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poise.worker import Lease, WorkerError, attach

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("one_thread")]

nn = torch.nn


def _model(*more: Any) -> Any:
    return nn.Sequential(nn.Linear(3, 2), *more)


def _step(lease: Lease, model: Any, batch: Any = 6, **more: Any) -> Any:
    """Compute all parts of a batch of ones."""
    parts = lease.micro_batches(batch, model, **more)
    for part in parts:
        part.backward(model(torch.ones(len(part), 3)).mean())
    return parts


def test_gradients_that_were_there_are_no_part_of_the_sum() -> None:
    """So a script may forget to set them to zero."""
    model, lease = _model(), attach()
    _step(lease, model, parts=3)
    want = [weights.grad.clone() for weights in model.parameters()]
    _step(lease, model, parts=3)
    assert all(torch.equal(weights.grad, each) for weights, each in zip(model.parameters(), want, strict=True))


def test_weights_that_are_frozen_meanwhile_stay_as_they_are() -> None:
    """As with `optimizer.zero_grad()`, which takes from frozen weights the gradient that they had before."""
    model, lease = _model(nn.Linear(2, 1)), attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(lease, model, parts=2)
    model[0].requires_grad_(False)
    want = model[0].weight.clone()
    _step(lease, model, parts=2)
    optimizer.step()
    assert torch.equal(model[0].weight, want)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_buffer_that_parts_replace_has_changed_however_often(parts: int) -> None:
    """A tensor may be given the id of one that was there before."""
    from poise.worker.buffers import Buffers

    model = nn.Module()
    model.register_buffer("average", torch.zeros(1))
    buffers = Buffers([model])
    for _ in range(parts):
        model.average = 0.9 * model.average + 0.1
    assert buffers.changed() == [True]


def test_loss_of_the_whole_batch_is_the_mean_over_its_samples_and_is_reported() -> None:
    model, lease = _model(), attach()
    parts = lease.micro_batches(torch.arange(5.0), model, parts=2)
    for part in parts:
        part.backward(model(torch.ones(len(part), 3)).sum() * 0.0 + part.batch.mean())
    assert parts.loss == 2.0
    assert lease._progress.loss == 2.0


def test_several_models_are_summed_together() -> None:
    """As the two halves of one network."""
    first, second, lease = _model(), nn.Linear(2, 1), attach()
    for part in lease.micro_batches(4, first, second, parts=2):
        part.backward(second(first(torch.ones(len(part), 3))).mean())
    assert all(weights.grad is not None for each in (first, second) for weights in each.parameters())


def _drawn() -> tuple[float, float, float]:
    return random.uniform(0, 1), float(np.random.random()), torch.rand(1).item()


def test_random_numbers_follow_from_seed_step_and_part_and_those_of_the_rank_go_on() -> None:
    model, lease = _model(), attach()

    def drawn(**more: Any) -> list[tuple[float, float, float]]:
        found = []
        for part in lease.micro_batches(6, model, parts=3, **more):
            found.append(_drawn())
            part.backward(model(torch.ones(2, 3)).mean())
        return found

    torch.manual_seed(5)
    want = torch.rand(2)
    torch.manual_seed(5)
    first = [torch.rand(1)]
    at_step = []
    for step in (0, 1):
        lease.begin(step, None)
        lease.check(step)
        at_step.append(drawn())
        at_step.append(drawn())  # a second loop in one step, as of a second model
    assert torch.equal(torch.cat([*first, torch.rand(1)]), want)
    lease.check(1)
    assert drawn() == at_step[2]  # the same as in the run before
    assert drawn(seed=1) not in at_step
    assert len({part for each in at_step for part in each}) == 12
    torch.manual_seed(5)
    assert [part[2] for part in drawn(seed=None)][:2] == want.tolist()


def test_part_without_weight_counts_for_nothing() -> None:
    model, lease = _model(), attach()
    parts = lease.micro_batches(4, model, parts=2)
    for part in parts:
        loss = model(torch.ones(2, 3)).mean()
        part.backward(loss if part.index else loss * float("nan"), weight=5 * part.index)
    alone = model(torch.ones(2, 3)).mean()
    [want, _] = torch.autograd.grad(alone, list(model.parameters()))
    torch.testing.assert_close(model[0].weight.grad, want)
    assert parts.loss == pytest.approx(alone.item())


def _left(lease: Lease) -> None:
    for _ in lease.micro_batches(4, _model(), parts=2):
        break


def _not_begun(lease: Lease) -> None:
    lease.micro_batches(4, _model(), parts=2)


@pytest.mark.parametrize("misuse", [_left, _not_begun])
@pytest.mark.parametrize("at_last", [False, True])
def test_loop_over_parts_that_was_left_is_told_before_the_next_step(misuse: Callable[[Lease], None], at_last: bool) -> None:
    lease, at = attach(), 3 if at_last else 2
    steps = lease.steps(4)
    for _ in range(at + 1):
        step = next(steps)
    misuse(lease)
    with pytest.raises(WorkerError) as found:
        next(steps)
    assert str(found.value).startswith(f"micro_batches: the loop over the parts of step {step} was not gone through")


def _no_backward(lease: Lease) -> None:
    for _ in lease.micro_batches(4, _model(), parts=2):
        pass


def _twice(lease: Lease) -> None:
    for part in lease.micro_batches(4, model := _model(), parts=2):
        part.backward(model(torch.ones(2, 3)).mean())
        part.backward(model(torch.ones(2, 3)).mean())


def _no_mean(lease: Lease) -> None:
    for part in lease.micro_batches(4, model := _model(), parts=2):
        part.backward(model(torch.ones(2, 3)))


def _number(lease: Lease) -> None:
    for part in lease.micro_batches(4, _model(), parts=2):
        part.backward(0.5)


def _weighted(weight: Any) -> Callable[[Lease], None]:
    def misuse(lease: Lease) -> None:
        for part in lease.micro_batches(4, model := _model(), parts=2):
            part.backward(model(torch.ones(2, 3)).mean(), weight=weight)

    return misuse


def _again(lease: Lease) -> None:
    list(_step(lease, _model()))


def _early(lease: Lease) -> None:
    lease.micro_batches(4, _model()).loss  # noqa: B018


def _with(*models: Callable[[], Any]) -> Callable[[Lease], None]:
    def misuse(lease: Lease) -> None:
        _step(lease, *[make() for make in models]) if models else lease.micro_batches(4)

    return misuse


@pytest.mark.parametrize(
    ("misuse", "problem"),
    [
        (_no_backward, "micro_batches: part 0 was left without part.backward(loss)"),
        (_twice, "micro_batches: backward was called twice for part 0; add its losses before"),
        (_no_mean, "backward: expected the mean loss of part 0, one number, got shape (2, 2)"),
        (_number, "backward: expected the loss of part 0 as a tensor, got float"),
        (_weighted("x"), "weight: expected a number, got 'x'"),
        (_weighted(-1), "weight: expected a number of 0 or more, got -1"),
        (_weighted(float("nan")), "weight: expected a number of 0 or more, got nan"),
        (_again, "micro_batches: its parts can be gone through once; call it anew for another batch"),
        (_early, "loss: the loss of the whole batch is known once all parts have been gone through"),
        (_with(), "micro_batches: expected the model after the batch, as in lease.micro_batches(rows, model)"),
        (_with(lambda: torch.ones(2)), "model: expected a torch.nn.Module, got Tensor"),
        (_with(lambda: nn.Dropout()), "model: none of its weights requires a gradient"),
        (
            _with(lambda: nn.LazyLinear(2)),
            "model: its weights are not made yet; pass a sample through it before the first step",
        ),
        (
            _with(lambda: nn.Embedding(3, 2, sparse=True)),
            "model: sparse gradients cannot be added; make the embedding with sparse=False",
        ),
        (
            _with(lambda: nn.DataParallel(_model())),
            "model: DataParallel divides the model itself; give the module that it wraps",
        ),
        (
            _with(lambda: nn.SyncBatchNorm(2)),
            "model: a SyncBatchNorm waits for ranks that have no part; use BatchNorm, which normalises within a part",
        ),
        (
            _with(lambda: _model(nn.Linear(2, 2, device="meta"))),
            "model: expected its weights on one device, got cpu, meta",
        ),
    ],
)
def test_misuse_of_micro_batches_has_one_clear_line(misuse: Callable[[Lease], None], problem: str) -> None:
    with pytest.raises(WorkerError) as found:
        misuse(attach())
    assert str(found.value) == problem


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(WorkerError) as found:
        _step(attach(), _model())
    assert str(found.value) == "micro_batches: the job has 3 ranks; call dist.init_process_group() first"


def test_process_group_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when processes are started by a launcher that sets no WORLD_SIZE: each would train by itself."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(WorkerError) as found:
        _step(attach(), _model())
    assert str(found.value) == "micro_batches: torch.distributed has a world size of 2, and WORLD_SIZE is 1"
