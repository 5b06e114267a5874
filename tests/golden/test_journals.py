"""Journals of many set-ups, byte for byte: whatever is changed inside, the same decisions must come out.

A change that is meant to decide otherwise writes the digests anew with `python -m tests.golden.test_journals`, and says in
the changelog what it changed and why.
"""

import hashlib
import json
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from poise.cli.app import poise

DIGESTS = Path(__file__).parents[1] / "data" / "journals.json"

MODELS = "models=resnet50/resnet18/lstm"
MIXED = f"synthetic:jobs=40,seed=3,rate=60,sizes=gavel,durations=lognormal:2500:1,{MODELS},tenants=4,weights=1:0.7/3:0.3"
PLAIN = "synthetic:jobs=60,seed=5,rate=90,sizes=gavel,durations=lognormal:2000:1.2,tenants=5"
APPS = f"synthetic:jobs=30,seed=7,rate=30,apps=0.5:4,durations=lognormal:2500:1,{MODELS}"
THREE = "--cluster v100:4,p100:4,k80:4"
ONE = "--cluster gpu:12"

SETUPS = [
    *(
        f"{PLAIN} {ONE} --restart-overhead 30 --policy {name}"
        for name in ("fifo", "srtf", "las", "tiresias-gittins", "stride")
    ),
    *(
        f"{MIXED} {THREE} --restart-overhead 20 --policy {name}"
        for name in ("max-min", "finish-time", "min-cost", "hierarchical", "strategy-proof", "sjf", "allox", "gandiva-fair")
    ),
    f"{APPS} {THREE} --policy themis --faults mtbf=2d,repair=1h",
    f"{MIXED} {THREE} --policy max-min+packed --cadence rounds --no-backfill",
    f"{MIXED} {THREE} --policy finish-time+packed --preset gavel",
    f"{MIXED} {THREE} --policy max-min+partitioned:k=2 --estimate profiled:types=1",
    f"{PLAIN} --cluster gpu:16 --policy tiresias --preset tiresias",
    f"{PLAIN} --cluster gpu:16@8 --policy las --faults mtbf=2d,repair=2h --failures philly",
    f"{MIXED} {THREE} --policy srtf --faults mtbf=1d,repair=1h --failures philly --retry cause --backoff 120",
    f"{PLAIN} --cluster gpu:24@8 --policy tiresias --validation-pool 2 --validation-time 200 --failures philly",
    f"{PLAIN} --cluster gpu:16@4 --policy las --packed-wait 600 --rack-wait 1200",
    f"{PLAIN} --cluster gpu:24@8 --policy fifo-skip --packed-wait 900 --defragment 60",
    f"{MIXED} {THREE} --policy las --micro-batches 2",
    f"{MIXED} {THREE} --policy hlas --micro-batches 2 --faults mtbf=2d,repair=1h",
    f"{MIXED} {THREE} --policy hare --micro-batches 1 --failures 0.2",
    f"{MIXED} {THREE} --policy optimus --elastic",
    f"{MIXED} {THREE} --policy gandiva --elastic --failures 0.2",
    f"{PLAIN} --cluster gpu:16@8 --policy philly --preset philly --failures philly --faults mtbf=3d,repair=3h",
]


def digest(setup: str, folder: Path) -> str:
    """SHA-256 of the journal that `poise simulate` writes."""
    result = CliRunner().invoke(poise, ["simulate", *shlex.split(setup), "--quiet", "--json", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    (journal,) = folder.glob("journal*")
    return hashlib.sha256(journal.read_bytes()).hexdigest()


def test_every_setup_has_a_digest() -> None:
    assert list(json.loads(DIGESTS.read_text())) == SETUPS


@pytest.mark.parametrize("setup", SETUPS)
def test_the_journal_of_a_setup_is_the_same_to_the_byte(setup: str, tmp_path: Path) -> None:
    assert digest(setup, tmp_path / "out") == json.loads(DIGESTS.read_text())[setup]


def main() -> None:
    """Write the digests anew."""
    with TemporaryDirectory() as folder:
        found = {setup: digest(setup, Path(folder) / str(place)) for place, setup in enumerate(SETUPS)}
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
