"""Several ranks as real processes: what they come to is what they come to undisturbed, random numbers of each included."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.service import until
from tests.leases import Job
from tests.ranks import Rank, all_ended, start_ranks

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

SETUP = """
import hashlib, os, random, time, numpy, torch, torch.distributed as dist
from poise.worker import attach
from poise.worker.pytorch import Batches, State

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inputs = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
network = torch.nn.Sequential(torch.nn.Linear(4, 8), NORM, torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(network.parameters(), lr=0.005, momentum=0.9)
batches = Batches(data, batch_size=12, seed=0)
for seed in (torch.manual_seed, random.seed, numpy.random.seed):
    seed(100 + rank)

def noise(inputs):
    return inputs + torch.rand_like(inputs) + random.random() + numpy.random.random()

def endless():
    while True:
        yield from batches

def told():
    assert all(value.isfinite().all() for value in network.state_dict().values())
    values = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
    drawn = (torch.rand(1).item(), random.random(), numpy.random.random())
    print(hashlib.sha256(values).hexdigest(), *drawn)
"""

TRAINING = """
state = State(network=network, optimizer=optimizer, batches=batches)
lease = attach(save=state.save, load=state.load)
for step, (samples, wanted) in zip(lease.steps(40), endless()):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(noise(samples)), wanted).backward()
    ADD
    optimizer.step()
    time.sleep(float(os.environ.get("PAUSE", 0)))
told()
"""


def _script(norm: str, model: str, add: str) -> str:
    return f"{SETUP.replace('NORM', norm)}\nmodel = {model}\n{TRAINING.replace('ADD', add)}"


DDP = _script("torch.nn.BatchNorm1d(8)", "torch.nn.parallel.DistributedDataParallel(network)", "pass")
# DDP puts its buckets together anew after the first step, and three ranks then add in another order; but not with this.
KEPT_BUCKETS = DDP.replace("(network)", "(network, find_unused_parameters=True)")
# Without DDP each rank has statistics of its own in a BatchNorm.
SUMMED = _script("torch.nn.LayerNorm(8)", "network", "[dist.all_reduce(each.grad) for each in model.parameters()]")


class Training:
    """A script that several ranks run, and what they print when nothing interrupts them."""

    def __init__(self, folder: Path, text: str, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.script = folder / "train.py"
        self.script.write_text(text)
        self.want = self.whole(Job(folder / "alone"))

    def start(self, job: Job, **variables: str) -> list[Rank]:
        return start_ranks(job, self.script, self.ranks, **variables)

    def whole(self, job: Job) -> list[str]:
        """Run it to its end; what each rank printed."""
        found = all_ended(self.start(job))
        assert [code for code, _ in found] == [0] * self.ranks, found
        return [said.splitlines()[-1] for _, said in found]


def _left(job: Job, processes: Sequence[Rank]) -> None:
    """The run ends by itself, all ranks before the same step."""
    found = all_ended(processes)
    assert [code for code, _ in found] == [75] * len(processes), found
    assert json.loads((job.run_dir / "stop.json").read_text()) == {"version": 1, "step": job.saved()}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("two"), DDP, ranks=2)


def test_ranks_under_ddp_with_dropout_that_leave_end_with_the_weights_of_an_uninterrupted_run(
    training: Training, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    _left(job, training.start(job, POISE_LEASE_STEPS="1"))
    assert job.saved() == 2
    processes = training.start(job, PAUSE="0.05")
    until(lambda: job.steps() > 2, "no step was done")
    job.end_lease()
    _left(job, processes)
    assert training.whole(job) == training.want


def test_ranks_under_ddp_with_dropout_that_are_killed_end_with_the_weights_of_an_uninterrupted_run(
    training: Training, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    for killed in (0, 1):
        before = job.saved()
        processes = training.start(job, PAUSE="0.05", POISE_CHECKPOINT_EVERY="0.000001")
        until(lambda before=before: job.saved() > before + 2, "nothing was saved")  # type: ignore[misc]
        processes[killed].kill()
        processes[1 - killed].kill()
        all_ended(processes)
    assert 6 <= job.saved() < 40
    assert training.whole(job) == training.want


@pytest.mark.parametrize("text", [SUMMED, KEPT_BUCKETS], ids=["added by hand", "DDP that keeps its buckets"])
def test_three_ranks_that_add_in_one_order_end_with_the_weights_of_an_uninterrupted_run(tmp_path: Path, text: str) -> None:
    training, job = Training(tmp_path, text, ranks=3), Job(tmp_path / "shared")
    for steps in ("4", "9"):
        _left(job, training.start(job, POISE_LEASE_STEPS=steps))
    assert job.saved() == 15
    assert training.whole(job) == training.want
