"""Trainings with PyTorch, Lightning and the Hugging Face Trainer end with the same weights, interrupted or not."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainings import block_of_the_page, data, huggingface_model, lightning_class, network, rows, weights

from poise.worker import WorkerError, attach
from poise.worker.testing import preempting

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("one_thread")]

STEPS = 13
"""Of three epochs, of which the first has 5 steps, the second too, and the third is cut short."""


def _lightning_module(lightning: Any) -> Any:
    class Module(lightning_class(lightning)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    return Module()


def train_plainly(steps: int = STEPS) -> list[bytes]:
    from poise.worker.pytorch import Batches, State

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    batches = Batches(data(), batch_size=8, seed=3)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)
    lease = attach(save=state.save, load=state.load)
    endless = (batch for _ in iter(int, 1) for batch in batches)
    for _, (inputs, wanted) in zip(lease.steps(steps), endless, strict=False):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        scheduler.step()
    return weights(model)


def train_with_lightning(made: Callable[[Any], Any] = _lightning_module, **length: int) -> list[bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
        from poise.worker.lightning import LeaseCallback
    from poise.worker.pytorch import Batches

    callback, module = LeaseCallback(), made(lightning)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        length = length or {"max_steps": STEPS}
        trainer = lightning.Trainer(accelerator="cpu", callbacks=[callback], **length, **quiet)
        trainer.fit(module, Batches(data(), batch_size=8, seed=3), ckpt_path=callback.newest())
    return weights(module)


def _two_optimizers(lightning: Any) -> Any:
    """As in an adversarial training: Lightning's steps are those of both, its estimate is in batches."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.networks = torch.nn.ModuleList([network(), network()])
            self.automatic_optimization = False

        def training_step(self, batch: Any, _: int) -> None:
            for optimizer, part in zip(self.optimizers(), self.networks, strict=True):
                optimizer.zero_grad()
                self.manual_backward(torch.nn.functional.mse_loss(part(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=0.01) for part in self.networks]

    return Module()


def train_with_huggingface(folder: Path, steps: int = STEPS) -> list[bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        pytest.importorskip("accelerate", reason="accelerate is not installed")

    from poise.worker.huggingface import LeaseCallback

    callback, model = LeaseCallback(), huggingface_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=steps, use_cpu=True, save_strategy="no", save_total_limit=1, report_to=[], seed=5
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.newest())
    return weights(model)


@pytest.mark.parametrize("after", [1, 4, [2, 3, 5], [12], [13]])
def test_worker_pytorch_ends_with_the_weights_of_an_uninterrupted_run(after: int | list[int]) -> None:
    want = train_plainly()
    with preempting(after_steps=after) as poise:
        assert poise.run(train_plainly) == want


@pytest.mark.slow
@pytest.mark.parametrize("after", [4, [5], [1, 4, 5], [12]])
def test_worker_lightning_ends_with_the_weights_of_an_uninterrupted_run(after: int | list[int]) -> None:
    want = train_with_lightning()
    with preempting(after_steps=after) as poise:
        assert poise.run(train_with_lightning) == want
        assert poise.starts > 1
        assert poise.run(train_with_lightning) == want  # begun again when all steps were done: nothing is trained twice


@pytest.mark.slow
@pytest.mark.parametrize("after", [4, [5], [1, 4, 5], [12]])
def test_worker_huggingface_ends_with_the_weights_of_an_uninterrupted_run(after: int | list[int], tmp_path: Path) -> None:
    want = train_with_huggingface(tmp_path / "alone")
    with preempting(after_steps=after) as poise:
        assert poise.run(train_with_huggingface, tmp_path / "shared") == want
        assert poise.starts > 1
        assert poise.run(train_with_huggingface, tmp_path / "shared") == want


@pytest.mark.slow
def test_worker_huggingface_keeps_copies_of_checkpoints(tmp_path: Path) -> None:
    want = train_with_huggingface(tmp_path / "alone")
    starts = []

    def meddled_with(folder: Path) -> list[bytes]:
        """As by a second job with the same output_dir: what the first one left there is written over in place."""
        for file in folder.glob("checkpoint-*/*"):
            file.write_bytes(b"another job's")
        starts.append(len(list(folder.glob("checkpoint-*/*"))))
        return train_with_huggingface(folder)

    with preempting(after_steps=[4]) as poise:
        assert poise.run(meddled_with, tmp_path / "shared") == want
    assert starts[0] == 0 < starts[1]


@pytest.mark.slow
@pytest.mark.parametrize("length", [{"max_steps": 20}, {"max_epochs": 2}])
def test_worker_lightning_with_two_optimizers_leaves_to_the_very_end(length: dict[str, int]) -> None:
    want = train_with_lightning(_two_optimizers, **length)
    with preempting(after_steps=[14, 2, 2, 2]) as poise:
        assert poise.run(train_with_lightning, _two_optimizers, **length) == want
        assert poise.starts == 4  # of 20 steps; after the last there is nothing to leave for


def test_worker_state_refuses_a_checkpoint_of_other_parts(tmp_path: Path) -> None:
    from poise.worker.pytorch import State

    State(model=network()).save(str(tmp_path / "one"))
    with pytest.raises(ValueError, match="the checkpoint has model; expected network"):
        State(network=network()).load(str(tmp_path / "one"))


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_state_reads_the_tensors_of_the_first_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    from poise.worker.pytorch import State

    model, path = network(), str(tmp_path / "step-1")
    generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
    want = float(torch.rand(1))
    torch.save({"parts": {"model": model.state_dict()}, "random": generators}, path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    drawn = []
    for _ in range(2):
        State(model=model).load(path)
        drawn.append(float(torch.rand(1)))
    assert drawn[0] == drawn[1]
    assert (drawn[0] == want) == (rank == 0)


def test_worker_batches_of_all_ranks_are_the_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from poise.worker.pytorch import Batches

    whole = [batch[0] for batch in Batches(data(), batch_size=8, seed=3)]
    parts = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        parts.append([batch[0] for batch in Batches(data(), batch_size=8, seed=3)])
    assert all(torch.equal(torch.cat(mine), want) for mine, want in zip(zip(*parts, strict=True), whole, strict=True))


def test_worker_whole_batches_are_those_of_one_rank_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from poise.worker.pytorch import Batches, WholeBatches

    alone = [batch[0] for batch in Batches(data(), batch_size=8, seed=3)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    batches = WholeBatches(data(), batch_size=8, seed=3)
    batches.load_state_dict({"next": 2})
    assert all(torch.equal(mine[0], want) for mine, want in zip(batches, alone[2:], strict=True))


def test_worker_batches_larger_than_the_data_are_refused() -> None:
    from poise.worker.pytorch import batch_at

    with pytest.raises(ValueError, match="expected 1 to 4"):
        batch_at(0, samples=4, batch_size=5, seed=0)


def test_worker_lightning_that_would_begin_anew_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
        from poise.worker.lightning import LeaseCallback
    (tmp_path / "step-3").touch()
    monkeypatch.setenv("POISE_CHECKPOINT_DIR", str(tmp_path))
    with pytest.raises(WorkerError, match="ckpt_path"):
        LeaseCallback().on_train_start(type("Trainer", (), {"global_step": 0}), None)


@pytest.mark.slow
def test_worker_lightning_says_so_where_its_processes_are_not_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remedy = "submit it with --replicas gpu, and have devices times num_nodes of the Trainer be WORLD_SIZE"
    for name, value in {"POISE_GPUS": "2", "RANK": "0", "WORLD_SIZE": "2", "POISE_RUN_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    train_with_lightning(max_steps=1)
    assert _said(capsys) == [f"poise: Lightning trains with a world size of 1, and the job has WORLD_SIZE=2: {remedy}"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    train_with_lightning(max_steps=1)
    assert _said(capsys) == [f"poise: the job has 2 GPUs and WORLD_SIZE=1; Lightning starts no processes here: {remedy}"]


def _said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lightning logs where standard error was when it was imported, which may have been in this very test."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("poise: ")]


def _names() -> dict[str, Any]:
    """What the blocks of the page take as given."""
    model, samples = network(), data()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    given = {"torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler, "data": samples}
    return {**given, "inputs": samples.tensors[0], "wanted": samples.tensors[1]}


def test_worker_page_shows_a_pytorch_script_that_runs() -> None:
    names = _names()
    before = weights(names["model"])
    exec(block_of_the_page("pytorch"), names)
    assert weights(names["model"]) != before


@pytest.mark.slow
def test_worker_page_shows_a_lightning_script_that_runs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
        names = {**_names(), "module": _lightning_module(lightning)}
        exec(block_of_the_page("lightning"), names)
    assert names["trainer"].global_step == 10


@pytest.mark.slow
def test_worker_page_shows_a_huggingface_script_that_runs(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers", reason="transformers is not installed")
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        names = {**_names(), "model": huggingface_model(), "rows": rows(), "output_dir": str(tmp_path)}
        exec(block_of_the_page("huggingface"), names)
    assert names["trainer"].state.global_step == 10
