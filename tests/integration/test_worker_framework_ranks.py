"""Lightning and the Hugging Face Trainer on two ranks with dropout: the same weights, interrupted or not."""

import json
import warnings
from pathlib import Path

import pytest
from tests.leases import Job
from tests.ranks import all_ended, start_ranks

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

SETUP = """
import hashlib, os, random, warnings, numpy, torch
warnings.simplefilter("ignore")
from tests.trainings import data, huggingface_model, lightning_class, rows, weights
torch.set_num_threads(1)

def told(model):
    print(hashlib.sha256(b"".join(weights(model))).hexdigest())
"""
LIGHTNING = f"""{SETUP}
import logging
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning.pytorch as lightning
from poise.worker.lightning import LeaseCallback
from poise.worker.pytorch import Batches

class Module(lightning_class(lightning)):
    def training_step(self, batch, number):
        noisy = batch[0] + random.random() + numpy.random.random()
        return torch.nn.functional.mse_loss(self.network(noisy), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

module, lease = Module(), LeaseCallback()
for seed in (torch.manual_seed, random.seed, numpy.random.seed):
    seed(100 + int(os.environ["RANK"]))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=13, callbacks=[lease], **quiet)
trainer.fit(module, Batches(data(), batch_size=8, seed=3), ckpt_path=lease.newest())
told(module)
"""
HUGGINGFACE = f"""{SETUP}
from transformers import Trainer, TrainingArguments
from poise.worker.huggingface import LeaseCallback

model, lease = huggingface_model(), LeaseCallback()
more = dict(use_cpu=True, save_strategy="no", save_total_limit=1, report_to=[], seed=5, per_device_train_batch_size=4)
arguments = TrainingArguments(os.environ["POISE_CHECKPOINT_DIR"] + "-out", max_steps=13, disable_tqdm=True, **more)
trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[lease])
torch.manual_seed(100 + int(os.environ["RANK"]))
trainer.train(resume_from_checkpoint=lease.newest())
told(model)
"""


def _whole(job: Job, script: Path) -> list[str]:
    found = all_ended(start_ranks(job, script, 2))
    assert [code for code, _ in found] == [0, 0], found
    return [said.splitlines()[-1] for _, said in found]


@pytest.mark.parametrize(
    ("library", "text"), [("lightning.pytorch", LIGHTNING), ("transformers", HUGGINGFACE)], ids=["Lightning", "Hugging Face"]
)
def test_ranks_of_frameworks_with_dropout_end_with_the_weights_of_an_uninterrupted_run(
    tmp_path: Path, library: str, text: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(library, reason=f"{library} is not installed")
    script = tmp_path / "train.py"
    script.write_text(text)
    want = _whole(Job(tmp_path / "alone"), script)
    assert len(want[0]) == 64
    job = Job(tmp_path / "shared")
    for steps in ("2", "5"):  # 5 steps are an epoch
        found = all_ended(start_ranks(job, script, 2, POISE_LEASE_STEPS=steps))
        assert [code for code, _ in found] == [75, 75], found
        assert json.loads((job.run_dir / "stop.json").read_text())["step"] == job.saved()
    assert _whole(job, script) == want
