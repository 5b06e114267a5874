"""Data and networks of small trainings, for the tests that compare their weights."""

from typing import Any

import pytest
from tests.docs_runner import ROOT, blocks

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


def data() -> Any:
    """Forty samples, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 6, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def network() -> Any:
    """A small network with dropout, so that random numbers count; sets the generator of torch."""
    torch.manual_seed(7)
    nn = torch.nn
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def weights(model: Any) -> list[bytes]:
    """All of them, to be compared bit by bit."""
    return [value.detach().numpy().tobytes() for value in model.state_dict().values()]


def huggingface_model() -> Any:
    """The network, as a Trainer takes it."""

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
            return {"loss": torch.nn.functional.mse_loss(self.network(inputs), labels)}

    return Model()


def rows() -> list[dict[str, Any]]:
    """The samples, as a Trainer takes them."""
    return [{"inputs": inputs, "labels": wanted} for inputs, wanted in data()]


def lightning_class(lightning: Any) -> Any:
    """The network, as Lightning takes it: a class without optimizers."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _: int) -> Any:
            return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

    return Module


def block_of_the_page(word: str, *, having: str = "") -> str:
    """The first block of the how-to page that imports from this module, and has this text."""
    page = (ROOT / "docs" / "how-to" / "make-a-training-script-resumable.md").read_text(encoding="utf-8")
    found = (block.text for block in blocks(page) if block.language == "text" and f"poise.worker.{word} " in block.text)
    return next(text for text in found if having in text)
