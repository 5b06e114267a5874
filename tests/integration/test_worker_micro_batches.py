"""Micro-batches in PyTorch: the step of the whole batch, whatever ranks there are and whatever their shares are.

Each training is done by real processes that add gradients by gloo, in double precision: what differs is rounding, and not
more. The number of ranks is below, at and above the number of parts, so that some have no part.
"""

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from tests.leases import Job
from tests.ranks import all_ended, start_ranks

from poise.worker.micro_batches import counts

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

PARTS = 4
ALIKE = 1e-12
"""Bound of the relative distance of weights that were computed in double precision, with sums in another order."""
SHARES = {
    1: ([1.0], [4]),
    2: ([3.0, 1.0], [3, 1]),
    3: ([1.0, 1.0, 2.0], [1, 1, 2]),
    5: ([1.0] * 5, [1, 1, 1, 1, 0]),
}
"""Speeds of that many ranks, and how many of the parts each gets."""
UNEVEN = [([1e3, 1.0], [4, 0]), ([1.0, 1.0, 1e3], [0, 0, 4])]

SETUP = """
import json, os, torch, torch.distributed as dist
from torch import nn
from poise.worker import attach
from poise.worker.pytorch import State, batch_at

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
if os.environ["WORLD_SIZE"] != "1":
    dist.init_process_group("gloo")
torch.manual_seed(rank)  # ranks that build other weights get those of rank 0
torch.set_default_dtype(torch.float64)

class Model(nn.Module):
    # Some weights are frozen, some are used by no part, some by a single one, and some have another type. There is no
    # bias before a BatchNorm: its gradient is zero but for rounding, which AdamW makes as large as any other.
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8, bias=False), NORM, nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(8, 2))
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.unused, self.seldom = nn.Linear(4, 2), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2, dtype=OTHER_TYPE))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        self.seen += 1
        found = self.layers(inputs) * self.scale + self.frozen(inputs)
        is_seldom = (inputs == inputs_of_seldom).all(dim=1, keepdim=True)
        return torch.where(is_seldom, self.seldom(inputs), found) if is_seldom.any() else found

torch.manual_seed(7 if os.environ["WORLD_SIZE"] == "1" else 7 + rank)
model = Model()
inputs = torch.randn(90, 4, generator=torch.Generator().manual_seed(1))
inputs_of_seldom = inputs[17]
wanted = torch.stack([inputs.sum(dim=1), inputs.prod(dim=1)], dim=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
used = nn.parallel.DistributedDataParallel(model) if os.environ.get("DDP") and dist.is_initialized() else model
state = State(model=model, optimizer=optimizer)
lease = attach(save=state.save, load=state.load)

def batch_of(step):
    rows = batch_at(step, samples=len(inputs), batch_size=10, seed=0)
    return rows[: SIZES[step % len(SIZES)]]

def tell():
    assert model.unused.weight.grad is None  # a weight that no part uses is left alone
    found = {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}
    print(json.dumps({"weights": found, "losses": losses, "drawn": torch.rand(1).item()}))

losses = []
"""
STEP = """
for step in lease.steps(12):
    parts = lease.micro_batches(batch_of(step), used)
    for part in parts:
        part.backward(nn.functional.mse_loss(used(inputs[part.batch]), wanted[part.batch]))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(parts.loss)
tell()
"""
WHOLE = """
for step in range(12):
    rows = batch_of(step)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[rows]), wanted[rows])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
tell()
"""


def _setup(norm: str, dropout: float, sizes: Sequence[int], other: str = "torch.float64") -> str:
    named = {"NORM": norm, "DROPOUT": str(dropout), "SIZES": str(list(sizes)), "OTHER_TYPE": other}
    return reduce(lambda text, name: text.replace(name, named[name]), named, SETUP)


NOISY = _setup("nn.BatchNorm1d(8)", 0.2, [10, 9, 8])  # parts have 3 or 2 samples; a BatchNorm needs 2
PLAIN = _setup("nn.LayerNorm(8)", 0.0, [10, 3, 1, 5])  # also fewer samples than parts
MIXED = _setup("nn.BatchNorm1d(8, momentum=None)", 0.2, [10], "torch.float32")
SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
skipped = []
for step in lease.steps(12):
    parts = lease.micro_batches(batch_of(step), used, scaler=scaler)
    for part in parts:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(used(inputs[part.batch]), wanted[part.batch])
        part.backward(loss * float("inf") if (step, part.index) == (5, 3) else loss)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < before:
        skipped.append(step)
    else:
        losses.append(parts.loss)
assert skipped == [5], skipped
tell()
"""
WEIGHTED = """
# The mean over what a mask leaves, of which some parts have more, some less, and some nothing.
for step in lease.steps(12):
    rows = batch_of(step)
    batch = {"rows": rows, "counts": torch.arange(len(rows)) % 7 < 3, "none": None}
    parts = lease.micro_batches(batch, used)
    for part in parts:
        rows, counts = part.batch["rows"], part.batch["counts"]
        each = (used(inputs[rows]) - wanted[rows]).square().mean(dim=1) * counts
        part.backward(each.sum() / counts.sum(), weight=counts.sum())
    optimizer.step()
    losses.append(parts.loss)
tell()
"""
WHOLE_WEIGHTED = """
for step in range(12):
    rows = batch_of(step)
    rows = rows[torch.arange(len(rows)) % 7 < 3]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[rows]), wanted[rows])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
tell()
"""


class Training:
    """A script, and what one process comes to."""

    def __init__(self, folder: Path, setup: str, loop: str = STEP, *, alone: str | None = None) -> None:
        self.script = folder / "train.py"
        self.script.write_text(setup + (alone or loop))
        self.want = self.run(Job(folder), [1.0])[0]
        self.script.write_text(setup + loop)

    def run(self, job: Job, speeds: Sequence[float], **variables: str) -> list[dict[str, Any]]:
        """What each rank came to."""
        shares = {"POISE_MICRO_BATCHES": str(PARTS), "POISE_RANK_SPEEDS": ",".join(map(str, speeds))}
        found = all_ended(start_ranks(job, self.script, len(speeds), **shares, **variables))
        code = 75 if "POISE_LEASE_STEPS" in variables else 0
        assert [exit_code for exit_code, _ in found] == [code] * len(speeds), found
        return [] if code else [json.loads(said) for _, said in found]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("noisy"), NOISY)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("plain"), PLAIN, alone=WHOLE)


def _apart(some: dict[str, Any], others: dict[str, Any]) -> float:
    """The greatest distance of two weights, statistics or losses, relative to those of one name."""
    pairs = [(some["weights"][name], others["weights"][name]) for name in others["weights"] if name != "seen"]
    pairs.append((some["losses"], others["losses"][-len(some["losses"]) :]))
    tensors = ((torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)) for one, other in pairs)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in tensors)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("wrapped", ["", "1"], ids=["plain", "DDP"])
def test_ranks_end_with_the_weights_of_one_process(tmp_path: Path, noisy: Training, ranks: int, wrapped: str) -> None:
    speeds, shares = SHARES[ranks]
    assert counts(PARTS, speeds) == shares
    got = noisy.run(Job(tmp_path), speeds, DDP=wrapped)
    assert all(each["weights"] == got[0]["weights"] for each in got)  # to the bit
    assert all(each["losses"] == got[0]["losses"] for each in got)
    assert _apart(got[0], noisy.want) < ALIKE
    of_last = [share for share in shares if share][-1]
    assert got[0]["weights"]["seen"] == [12 * of_last]  # other buffers become those of the rank with the last part


@pytest.mark.parametrize(("speeds", "shares"), UNEVEN)
def test_ranks_of_which_one_computes_all_parts_end_with_the_weights_of_one_process(
    tmp_path: Path, noisy: Training, speeds: list[float], shares: list[int]
) -> None:
    assert counts(PARTS, speeds) == shares
    assert _apart(noisy.run(Job(tmp_path), speeds, DDP="1")[0], noisy.want) < ALIKE


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_parts_have_the_gradient_of_the_whole_batch_computed_at_once(tmp_path: Path, plain: Training, ranks: int) -> None:
    """Without random numbers there need be no parts: one process computes the mean over the whole batch."""
    assert _apart(plain.run(Job(tmp_path), SHARES[ranks][0])[0], plain.want) < ALIKE


@pytest.mark.parametrize("wrapped", ["", "1"], ids=["plain", "DDP"])
def test_ranks_that_change_in_number_end_with_the_weights_of_one_process(
    tmp_path: Path, noisy: Training, wrapped: str
) -> None:
    job, saved = Job(tmp_path), []
    for ranks in (2, 5, 1, 3):
        noisy.run(job, SHARES[ranks][0], DDP=wrapped, POISE_LEASE_STEPS="1")
        saved.append(job.saved())
    assert saved == [2, 4, 5, 7]  # ranks that are several do one step more
    assert _apart(noisy.run(job, SHARES[2][0], DDP=wrapped)[0], noisy.want) < ALIKE


def test_same_shares_give_the_same_bits_interrupted_or_not(tmp_path: Path, noisy: Training) -> None:
    speeds, job = SHARES[3][0], Job(tmp_path / "shared")
    want = noisy.run(Job(tmp_path / "alone"), speeds, DDP="1")
    for steps in ("3", "2"):
        noisy.run(job, speeds, DDP="1", POISE_LEASE_STEPS=steps)
    got = noisy.run(job, speeds, DDP="1")
    assert [each["weights"] for each in got] == [each["weights"] for each in want]
    assert [each["drawn"] for each in got] == [each["drawn"] for each in want]  # and each rank its own random numbers
    assert len({each["drawn"] for each in want}) == 3


@pytest.mark.parametrize(
    ("setup", "loop", "alone", "bound"),
    [
        pytest.param(MIXED, STEP, None, 1e-6, id="weights of two types"),
        pytest.param(PLAIN, WEIGHTED, WHOLE_WEIGHTED, ALIKE, id="weights of parts"),
        pytest.param(NOISY, SCALED, None, 1e-2, id="scaled and autocast"),
    ],
)
def test_ranks_of_which_one_has_no_part_end_with_the_weights_of_one_process(
    tmp_path: Path, setup: str, loop: str, alone: str | None, bound: float
) -> None:
    training = Training(tmp_path, setup, loop, alone=alone)
    got = training.run(Job(tmp_path / "ranks"), SHARES[5][0], DDP="1")
    assert all(each["weights"] == got[0]["weights"] for each in got)
    assert _apart(got[0], training.want) < bound


OTHERS = """
from poise.worker import WorkerError
for step in lease.steps(2):
    rows = batch_of(step)
    try:
        for part in lease.micro_batches(BATCH, model):
            part.backward(nn.functional.mse_loss(model(inputs[:1]), wanted[:1]))
    except WorkerError as error:
        print(error)
        break
"""

OBJECTS = """
# They are printed with their addresses, which differ.
other = nn.Linear(4, 2)
for part in lease.micro_batches([object() for _ in range(rank * 1000 + 4)][-4:], other):
    part.backward(other(inputs[:1]).mean())
"""


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("rows if step else rows[rank:]", "ranks differ: the batches have other samples; give all ranks the whole batch"),
        ("rows + rank", "ranks differ: the batches have other samples; give all ranks the whole batch"),
        (
            "rows[rank:] if step else rows",
            "other ranks another number; give all ranks the whole batch, each takes its parts",
        ),
    ],
)
def test_ranks_with_other_batches_all_refuse(tmp_path: Path, batch: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN + OTHERS.replace("BATCH", batch))
    found = all_ended(start_ranks(Job(tmp_path), script, 2))
    assert all(code == 0 and text.rstrip().endswith(said) for code, text in found), found


def test_ranks_with_other_samples_are_told_so_once(tmp_path: Path) -> None:
    """As of a loader that gives each rank its own share already. It may be meant: random changes of the same samples."""
    script = tmp_path / "train.py"
    script.write_text(PLAIN + OBJECTS + OTHERS.replace("BATCH", "inputs[rows] + rank"))
    found = all_ended(start_ranks(Job(tmp_path), script, 2))
    said = "poise: micro_batches: ranks were given other samples in the first step; give all ranks the whole batch"
    assert [code for code, _ in found] == [0, 0], found
    assert [text.count(said) for _, text in found] == [1, 0]
