"""What each rank has of its own in a checkpoint: its random generators, without which dropout would differ after a resume.

Only rank 0 writes checkpoints. Each other rank leaves its part in the run's directory at the same boundary, and rank 0 puts
all parts beside the checkpoint before that gets its name, so that both become complete at once.

    rank-<r>.json     in the run's directory, of each rank but 0: {"version", "step", "generators"}
    ranks-<n>.json    beside the checkpoint `step-<n>`: {"version", "ranks"}, a list by rank; null: that rank did not come
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from poise.worker.protocol import VERSION, WatchedFile, WorkerEnv, replace_json, say

PATIENCE = 30.0
"""Seconds that rank 0 waits for the others. They complete each step together, so they come in far less. Longer than a run
goes on without one of its ranks, so that rank 0 writes nothing when another was killed."""
AGAIN = 1.0  # seconds that it waits once a rank has failed to come: such ranks do not train in step
_POLL_SECONDS = 0.002


class RankStates:
    """The parts of all ranks of a run. A single process, or one outside Poise, has nothing to add to what `save` writes."""

    def __init__(self, env: WorkerEnv) -> None:
        self._rank = env.rank
        self._run_dir = env.run_dir if env.world_size > 1 else None
        self._others = {rank: WatchedFile(self._run_dir, _name(rank)) for rank in range(1, env.world_size)}
        self._patience = PATIENCE
        self._own: dict[str, Any] = {}

    def begin(self) -> None:
        """Remove what an earlier attempt of this rank has left in the run's directory."""
        if self._run_dir is not None and self._rank:
            with suppress(OSError):
                os.unlink(os.path.join(self._run_dir, _name(self._rank)))

    def hurry(self) -> None:
        """Wait for no rank for long: some may be gone."""
        self._patience = min(self._patience, AGAIN)

    def publish(self, step: int) -> None:
        """Note this rank's generators as they are at this boundary, and pass them to rank 0."""
        if self._run_dir is None:
            return
        from poise.worker.generators import generators  # here: slow to import, and single ranks do not need it

        self._own = generators()
        if self._rank:
            try:
                # Not forced to the disk: rank 0 does that with what it makes of it.
                fields = {"step": step, "generators": self._own}
                replace_json(self._run_dir, _name(self._rank), fields, flush=lambda _: None)
            except OSError as error:
                say(f"rank 0 cannot be told the random state of rank {self._rank} at step {step}: {error}")

    def gather(self, step: int) -> bytes | None:
        """On rank 0: wait for the parts of this boundary, and return `ranks-<step>.json`; None: no parts are needed."""
        if self._run_dir is None:
            return None
        parts: list[Mapping[str, Any] | None] = [self._own, *[None] * len(self._others)]
        missing, deadline = dict(self._others), monotonic() + self._patience
        while True:
            for rank, file in list(missing.items()):
                fields = file.fields()
                if fields.get("step") == step:
                    parts[rank] = fields["generators"]
                    del missing[rank]
            if not missing or monotonic() >= deadline:
                break
            sleep(_POLL_SECONDS)
        if missing:
            names = ", ".join(map(str, missing))
            say(f"no random state of rank {names} at step {step} after {self._patience:g} s: it will go on with another")
            self._patience = AGAIN
        return json.dumps({"version": VERSION, "ranks": parts}).encode("ascii")

    def restore(self, text: bytes | None, step: int) -> bool:
        """Restore this rank's generators from the contents of `ranks-<step>.json`; False: not possible.

        A rank that has no part there gets a stream of its own, derived from all parts, the step and its rank.
        """
        if text is None:
            return False
        try:
            found = json.loads(text)
        except ValueError:
            return False
        parts = found.get("ranks") if isinstance(found, dict) and found.get("version") == VERSION else None
        if not isinstance(parts, list):
            return False
        from poise.worker.generators import restore, seed

        own = parts[self._rank] if self._rank < len(parts) else None
        if own is None:
            seed(f"{json.dumps(parts)}/{step}/{self._rank}")
        else:
            restore(own)
        return True


def _name(rank: int) -> str:
    return f"rank-{rank}.json"
