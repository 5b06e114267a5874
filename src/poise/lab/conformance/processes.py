"""Whether a policy decides alike in every process: sets of texts have another order in each, unless Python is told not to.

Run as a program, this prints the digest of the journals of some worlds: `python -m poise.lab.conformance.processes SPEC`.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from hashlib import sha256
from itertools import chain

from poise.engine import outside
from poise.engine.journal import entry_line
from poise.lab.conformance.play import play
from poise.lab.conformance.worlds import World, odd_worlds, random_world
from poise.scheduler.policies.catalogue import Capability, capabilities_of, policy_named

WORLDS = 12
"""Random worlds that are run in each process, besides the odd ones."""
LONGEST = 60.0
"""Seconds after which a process is given up."""
_SEEDS = ("1", "2")


def differs_by_process(spec: str) -> str | None:
    """Say so if two processes with different orders of sets give different journals; None as well if they cannot be run."""
    digests = {seed: _digest_with(spec, seed) for seed in _SEEDS}
    if None in digests.values() or len(set(digests.values())) == 1:
        return None
    settings = " and ".join(f"PYTHONHASHSEED={seed}" for seed in _SEEDS)
    return f"journals differ between {settings}: an order comes from a set, or from a hash of a text"


def digest(spec: str, worlds: Iterable[World]) -> str:
    """The digest of the journals of these worlds; a world in which the policy raises something counts by that alone."""
    found = sha256()
    pairs = Capability.PAIRS in capabilities_of(spec)
    for world in worlds:
        try:
            entries = play(policy_named(spec), world, pairs=pairs).entries
        except Exception as error:  # whatever a policy raises
            found.update(type(error).__name__.encode())
            continue
        found.update("".join(map(entry_line, entries)).encode())
    return found.hexdigest()


def _digest_with(spec: str, seed: str) -> str | None:
    """The digest that another process finds, whose sets are in the order of this seed."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__, spec]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


if __name__ == "__main__":
    named = sys.argv[1]
    outside.find(named)
    sys.stdout.write(digest(named, chain(odd_worlds(), map(random_world, range(WORLDS)))))
