"""The recipe for micro-batches, as the how-to page shows it: the step of the whole batch, whatever the ranks' shares are."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.leases import Job
from tests.ranks import all_ended, start_ranks
from tests.trainings import block_of_the_page

from poise.worker.micro_batches import counts

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

PARTS = 4
SHARES = [
    ([1.0, 1.0], [2, 2]),
    ([3.0, 1.0], [3, 1]),
    ([1e3, 1.0], [4, 0]),
    ([1.0, 1.0, 2.0], [1, 1, 2]),
    ([1.0, 1.0, 1e3], [0, 0, 4]),
]
"""Speeds of ranks, and how many of the parts each gets."""

BEFORE = """
import json, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(90, 4)
wanted = torch.stack([inputs.sum(dim=1), inputs.prod(dim=1)], dim=1)
# No bias before a BatchNorm: its gradient is zero but for rounding, which AdamW makes as large as any other.
first, dropout = torch.nn.Linear(4, 8, bias=False), torch.nn.Dropout(0.2)
model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), dropout, torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
AFTER = """
print(json.dumps([weights.tolist() for weights in model.parameters()]))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "train.py"
    path.write_text(f"{BEFORE}\n{block_of_the_page('pytorch', having='add_gradients')}\n{AFTER}")
    return path


def _trained(job: Job, script: Path, speeds: Sequence[float], **variables: str) -> list[str]:
    """Run it; the weights of each rank."""
    shares = {"POISE_MICRO_BATCHES": str(PARTS), "POISE_RANK_SPEEDS": ",".join(map(str, speeds))}
    found = all_ended(start_ranks(job, script, len(speeds), **shares, **variables))
    code = 75 if variables else 0
    assert [exit_code for exit_code, _ in found] == [code] * len(speeds), found
    return [said for _, said in found]


def _apart(some: str, others: str) -> float:
    """The greatest distance of two weights."""
    pairs = zip(json.loads(some), json.loads(others), strict=True)
    return max(float((torch.tensor(one) - torch.tensor(other)).abs().max()) for one, other in pairs)


@pytest.fixture(scope="module")
def want(script: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of one process that computes all parts."""
    return _trained(Job(tmp_path_factory.mktemp("one")), script, [1.0])[0]


@pytest.fixture
def a_job(tmp_path: Path) -> Callable[[], Job]:
    made: list[Job] = []

    def make() -> Job:
        made.append(Job(tmp_path / str(len(made))))
        return made[-1]

    return make


@pytest.mark.parametrize(("speeds", "shares"), SHARES)
def test_ranks_with_any_shares_end_with_the_weights_of_one_process(
    a_job: Callable[[], Job], script: Path, want: str, speeds: list[float], shares: list[int]
) -> None:
    assert counts(PARTS, speeds) == shares
    got = _trained(a_job(), script, speeds)
    assert len(set(got)) == 1  # all ranks have the same weights to the bit
    assert _apart(got[0], want) < 1e-5
    assert _trained(a_job(), script, speeds) == got  # the same shares add in the same order


def test_shares_that_change_with_every_run_end_with_the_weights_of_one_process(
    a_job: Callable[[], Job], script: Path, want: str
) -> None:
    job = a_job()
    for speeds, _ in SHARES[1:]:
        _trained(job, script, speeds, POISE_LEASE_STEPS="3")
    assert job.saved() == 16  # ranks that are several do one step more
    assert _apart(_trained(job, script, [1.0])[0], want) < 1e-5
