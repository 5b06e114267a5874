"""Leases that end with an epoch, or where a validation is due: the same steps and weights as of an uninterrupted run."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainings import data, huggingface_model, lightning_class, rows, weights

from poise.worker import WorkerError
from poise.worker.testing import preempting

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

Length = int | list[int]

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

Trained = tuple[int, list[bytes]]
"""Steps and weights."""

_ALONE: dict[str, Trained] = {}


def uninterrupted(train: Callable[..., Trained], *arguments: Any, **more: Any) -> Trained:
    """What a run comes to that is left alone; trained once for all the ways to interrupt it."""
    key = f"{train.__name__} {[each for each in arguments if not isinstance(each, Path)]} {more}"
    if key not in _ALONE:
        _ALONE[key] = train(*arguments, **more)
    return _ALONE[key]


def _lightning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def _validated(lightning: Any) -> Any:
    """Its loader for validations draws a random number, as loaders do, and its learning rate follows from what they find."""

    class Module(lightning_class(lightning)):  # type: ignore[misc]
        def validation_step(self, batch: Any, _: int) -> None:
            self.log("found", torch.nn.functional.mse_loss(self.network(batch[0]), batch[1]))

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data(), batch_size=20)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            stepped = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return [optimizer], [stepped, {"scheduler": plateau, "monitor": "found", "strict": False}]

    return Module()


def train_with_lightning(batch_size: int, **more: Any) -> Trained:
    """Steps and weights. Of 40 samples; without `limit_val_batches=0` it validates after every epoch."""
    lightning = _lightning()
    from poise.worker.lightning import LeaseCallback
    from poise.worker.pytorch import Batches

    callback, module = LeaseCallback(), _validated(lightning)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(accelerator="cpu", callbacks=[callback], num_sanity_val_steps=0, **quiet, **more)
        trainer.fit(module, Batches(data(), batch_size=batch_size, seed=3), ckpt_path=callback.newest())
    return trainer.global_step, weights(module)


@pytest.mark.parametrize("after", [[4, 1], [4, 4], [3, 1], [5, 3], [8], [11], [1, 3, 4, 3], 4, 2, 1])
@pytest.mark.parametrize("more", [{"limit_val_batches": 0}, {}])
def test_worker_lightning_leaves_at_the_end_of_an_epoch_and_goes_on_exactly(after: Length, more: dict[str, Any]) -> None:
    want = uninterrupted(train_with_lightning, 10, max_epochs=3, **more)
    assert want[0] == 12
    with preempting(after_steps=after) as poise:
        assert poise.run(train_with_lightning, 10, max_epochs=3, **more) == want
        assert poise.starts > 1
        assert poise.run(train_with_lightning, 10, max_epochs=3, **more) == want  # done: nothing is trained twice


@pytest.mark.parametrize("after", [1, 2, [1, 1], [3, 1]])
def test_worker_lightning_leaves_epochs_of_a_single_batch(after: Length) -> None:
    want = uninterrupted(train_with_lightning, 40, max_epochs=5)
    assert want[0] == 5
    with preempting(after_steps=after) as poise:
        assert poise.run(train_with_lightning, 40, max_epochs=5) == want
        assert poise.starts == (5 if after == 1 else 3)


@pytest.mark.parametrize("after", [1, 2, 3, [4, 1]])
@pytest.mark.parametrize(
    "more",
    [
        {"max_steps": 10},
        {"max_epochs": 3, "accumulate_grad_batches": 3},
        {"max_epochs": 3, "val_check_interval": 0.5},
        {"max_epochs": 3, "val_check_interval": 2, "accumulate_grad_batches": 2},
        {"max_epochs": 3, "val_check_interval": 3, "check_val_every_n_epoch": None},
        {"max_epochs": 3, "check_val_every_n_epoch": 2},
    ],
)
def test_worker_lightning_validates_and_accumulates_as_without_an_interruption(after: Length, more: dict[str, Any]) -> None:
    want = uninterrupted(train_with_lightning, 10, **more)
    with preempting(after_steps=after) as poise:
        assert poise.run(train_with_lightning, 10, **more) == want
        assert poise.starts > 1


def test_worker_lightning_leaves_where_every_step_is_validated() -> None:
    with preempting(after_steps=2) as poise:
        steps, _ = poise.run(train_with_lightning, 10, max_epochs=2, val_check_interval=1)
        assert (steps, poise.starts) == (8, 3)


def train_with_huggingface(folder: Path, **more: Any) -> Trained:
    """Steps and weights, of epochs of 4 steps. Its evaluations draw a random number, as loaders do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        from poise.worker.huggingface import LeaseCallback

        callback, model = LeaseCallback(), huggingface_model()
        settings = {"max_steps": 10, "save_strategy": "no", "save_total_limit": 2, "seed": 5, "report_to": [], **more}
        batch_size, patience = settings.pop("batch_size", 10), settings.pop("patience", None)
        stopping = [] if patience is None else [transformers.EarlyStoppingCallback(patience)]
        arguments = transformers.TrainingArguments(
            str(folder), use_cpu=True, per_device_train_batch_size=batch_size, disable_tqdm=True, **settings
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows(), eval_dataset=rows()[:8], callbacks=[*stopping, callback]
        )
        trainer.train(resume_from_checkpoint=callback.newest())
    return trainer.state.global_step, weights(model)


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
"""The greatest loss, so that the best model is not the last one."""


@pytest.mark.parametrize("after", [[2], [4, 4], [3, 1]])
@pytest.mark.parametrize(
    "more",
    [
        {"eval_strategy": "steps", "eval_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"eval_strategy": "epoch"},
        {"eval_strategy": "epoch", "save_strategy": "epoch", **BEST},
        {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, **BEST},
        {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", **BEST},
        {"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"},
        {"eval_strategy": "epoch", "batch_size": 5, "gradient_accumulation_steps": 3, "max_steps": 9},
    ],
)
def test_worker_huggingface_evaluates_as_without_an_interruption(
    after: Length, more: dict[str, Any], tmp_path: Path
) -> None:
    want = uninterrupted(train_with_huggingface, tmp_path / "alone", **more)
    with preempting(after_steps=after) as poise:
        assert poise.run(train_with_huggingface, tmp_path / "shared", **more) == want
        assert poise.starts > 1


def test_worker_huggingface_under_preempting_is_one_rank_of_one_as_under_poise(tmp_path: Path) -> None:
    groups = []

    def grouped() -> None:
        train_with_huggingface(tmp_path)
        groups.append(torch.distributed.is_initialized())

    with preempting(after_steps=[]) as poise:
        poise.run(grouped)
    assert groups == [True]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("after", [[2], [4], [2, 2], [3, 1]])
def test_worker_huggingface_stops_early_where_it_would_have(after: Length, tmp_path: Path) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "patience": 1, **BEST}
    want = uninterrupted(train_with_huggingface, tmp_path / "alone", **more)
    assert want[0] == 4
    with preempting(after_steps=after) as poise:
        assert poise.run(train_with_huggingface, tmp_path / "shared", **more) == want


def test_worker_huggingface_of_these_tests_ends_with_another_model_than_the_best(tmp_path: Path) -> None:
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    last = train_with_huggingface(tmp_path / "last", **{**every, **BEST, "load_best_model_at_end": False})
    assert train_with_huggingface(tmp_path / "best", **every, **BEST) != last


def test_worker_huggingface_leaves_where_every_step_is_evaluated_and_the_best_are_saved(tmp_path: Path) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "loss"}
    with preempting(after_steps=[3, 3]) as poise:
        steps, _ = poise.run(train_with_huggingface, tmp_path, **more)
        assert (steps, poise.starts) == (10, 3)


def test_worker_huggingface_without_the_optimizer_is_refused_inside_poise(tmp_path: Path) -> None:
    train_with_huggingface(tmp_path / "outside", save_only_model=True)
    with preempting(after_steps=[2]) as poise, pytest.raises(WorkerError, match=r"^save_only_model: .* leave it out"):
        poise.run(train_with_huggingface, tmp_path / "inside", save_only_model=True)
