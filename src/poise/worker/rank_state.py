"""What each rank has of its own in a checkpoint: its random generators, without which dropout does not go on as it was.

Rank 0 alone writes checkpoints. Each of the others leaves its part in the run's directory at the same boundary, and rank 0
puts all parts beside the checkpoint before that gets its name. So they count from the same instant.

    rank-<r>.json     in the run's directory, of each rank but 0: {"version", "step", "generators"}
    ranks-<n>.json    beside the checkpoint `step-<n>`: {"version", "ranks"}, a list by rank; null: that rank did not come
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from poise.worker.protocol import VERSION, Watched, WorkerEnv, replace_json, say

PATIENCE = 30.0
"""Seconds that rank 0 waits for the others. They complete each step together, so they are there in far less. Longer than
a run goes on without one of its ranks, so that rank 0 writes nothing when another was killed."""
AGAIN = 1.0
"""Seconds that it waits once a rank has failed to come: such ranks do not train in step."""
_GAP = 0.002


class Ranks:
    """The parts of all ranks of a run. Alone, or outside Poise, a process has nothing to add to what `save` writes."""

    def __init__(self, where: WorkerEnv) -> None:
        self._where = where
        self._run_dir = where.run_dir if where.world_size > 1 else None
        self._others = {rank: Watched(self._run_dir, _name(rank)) for rank in range(1, where.world_size)}
        self._patience = PATIENCE
        self._own: dict[str, Any] = {}

    def begin(self) -> None:
        """Remove what an earlier attempt of this rank has left in the run's directory."""
        if self._run_dir is not None and self._where.rank:
            with suppress(OSError):
                os.unlink(os.path.join(self._run_dir, _name(self._where.rank)))

    def tell(self, step: int) -> None:
        """Note this rank's generators as they are at this boundary, and let rank 0 have them."""
        if self._run_dir is None:
            return
        from poise.worker.generators import generators  # slow to import, and single ranks do not need it

        self._own = generators()
        if self._where.rank:
            try:
                # Not forced to the disk: rank 0 does so with what it makes of it.
                replace_json(self._run_dir, _name(self._where.rank), _part(step, self._own), flush=lambda _: None)
            except OSError as error:
                say(f"rank 0 cannot be told the random state of rank {self._where.rank} at step {step}: {error}")

    def gathered(self, step: int) -> bytes | None:
        """On rank 0: wait for the parts of this boundary; the contents of `ranks-<step>.json`. None: no part is needed."""
        if self._run_dir is None:
            return None
        parts: list[Mapping[str, Any] | None] = [self._own, *[None] * len(self._others)]
        missing, deadline = dict(self._others), monotonic() + self._patience
        while True:
            for rank, watched in list(missing.items()):
                fields = watched.fields()
                if fields.get("step") == step:
                    parts[rank] = fields["generators"]
                    del missing[rank]
            if not missing or monotonic() >= deadline:
                break
            sleep(_GAP)
        if missing:
            names = ", ".join(map(str, missing))
            say(f"no random state of rank {names} at step {step} after {self._patience:g} s: it will go on with another")
            self._patience = AGAIN
        return json.dumps({"version": VERSION, "ranks": parts}).encode("ascii")

    def restore(self, text: bytes | None, step: int) -> bool:
        """Go on with this rank's generators out of `ranks-<step>.json`; whether that was possible.

        A rank that has no part there gets a stream of its own, which follows from the parts, the step and its number.
        """
        parts = None if text is None else _parts(text)
        if parts is None:
            return False
        from poise.worker.generators import restore, seed

        own = parts[self._where.rank] if self._where.rank < len(parts) else None
        if own is None:
            seed(f"{json.dumps(parts)}/{step}/{self._where.rank}")
        else:
            restore(own)
        return True


def _name(rank: int) -> str:
    return f"rank-{rank}.json"


def _part(step: int, own: Mapping[str, Any]) -> dict[str, object]:
    return {"step": step, "generators": own}


def _parts(text: bytes) -> list[Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    parts = found.get("ranks") if isinstance(found, dict) and found.get("version") == VERSION else None
    return parts if isinstance(parts, list) else None
