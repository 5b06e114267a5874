"""Lightning: a callback that reports, saves and leaves when the lease ends.

    from poise.worker.lightning import LeaseCallback
    from poise.worker.pytorch import Batches

    lease = LeaseCallback()
    trainer = Trainer(max_epochs=10, callbacks=[lease])
    trainer.fit(model, Batches(data, batch_size=32, seed=0), ckpt_path=lease.newest())

Lightning goes on at the right batch of an epoch only with a loader that can say where it is, such as `Batches`. A validation
that is due at the very step where the lease ends is left out.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from poise.worker.lease import Wish, Writers, attach
from poise.worker.protocol import WorkerError, say
from poise.worker.pytorch import random_state, restore_random

# Not a plain import: it is under either name, and types are to be the same whether or not it is installed.
_CALLBACK: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning").Callback

_REMEDY = "submit it with --replicas gpu, and have devices times num_nodes of the Trainer be WORLD_SIZE"


class LeaseCallback(_CALLBACK):  # type: ignore[misc]  # its types are not known
    """The lease of this process. Saves with `trainer.save_checkpoint`, on all ranks, between optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self._lease = attach(writers=Writers.ALL)
        self._last = 0
        self._random: Mapping[str, Any] | None = None
        # Said here: where Lightning waits for processes that nobody starts, it calls back no more.
        gpus, processes = os.environ.get("POISE_GPUS", ""), self._lease.world_size
        if self._lease.rank == 0 and gpus.isdecimal() and int(gpus) > processes:
            say(f"the job has {gpus} GPUs and WORLD_SIZE={processes}; Lightning starts no processes here: {_REMEDY}")

    def newest(self) -> str | None:
        """The `ckpt_path` to give to `trainer.fit`."""
        return self._lease.newest()

    def state_dict(self) -> dict[str, Any]:
        """Generators of random numbers: Lightning does not keep them."""
        return {"random": random_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """They are set when training begins: what is set up until then draws numbers too."""
        self._random = state_dict["random"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  Lightning's
        """Training begins, or goes on."""
        if trainer.global_step == 0 and self.newest() is not None:
            raise WorkerError("there is a checkpoint: give trainer.fit(..., ckpt_path=callback.newest())")
        size, wanted = trainer.world_size, self._lease.world_size
        if "POISE_RUN_DIR" in os.environ and size != wanted:
            say(f"Lightning trains with a world size of {size}, and the job has WORLD_SIZE={wanted}: {_REMEDY}")
        if self._random is not None:
            restore_random(self._random, self._lease.rank)
        self._last = trainer.global_step
        self._lease.begin(self._last, _total(trainer, pl_module))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # noqa: ANN401  Lightning's
        """Between two optimizer steps: report, save, leave."""
        step = trainer.global_step
        if step == self._last:
            return
        self._last = step
        wish = self._lease.wish(step)
        if _is_done(trainer):
            return
        if wish is Wish.LEAVE:
            self._lease.leave(step, trainer.save_checkpoint)
        elif wish is Wish.CHECKPOINT:
            self._lease.checkpoint(step, trainer.save_checkpoint)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  Lightning's
        """All steps are done."""
        self._lease.finish(trainer.global_step, trainer.save_checkpoint)


def _total(trainer: Any, module: Any) -> int | None:  # noqa: ANN401  Lightning's
    """Steps in all, as Lightning counts them; None: not known, as where the module itself has its optimizers step."""
    if not module.automatic_optimization:
        return None
    total = trainer.estimated_stepping_batches
    return int(total) if 0 < total < float("inf") else None


def _is_done(trainer: Any) -> bool:  # noqa: ANN401  Lightning's
    """Whether this was the last batch of all."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    return bool(trainer.is_last_batch and trainer.max_epochs == trainer.current_epoch + 1)
