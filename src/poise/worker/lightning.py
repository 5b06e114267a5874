"""Lightning: a callback that reports, saves and leaves when the lease ends.

    from poise.worker.lightning import LeaseCallback
    from poise.worker.pytorch import Batches

    lease = LeaseCallback()
    trainer = Trainer(max_epochs=10, callbacks=[lease])
    trainer.fit(model, Batches(data, batch_size=32, seed=0), ckpt_path=lease.newest())

Lightning resumes at the right batch of an epoch only with a loader that knows its position, such as `Batches`. A lease that
ends with the last batch of an epoch is left when the next epoch begins, with the same number of steps done: what Lightning
does at the end of an epoch, such as a validation, has been done then. Where a validation is due in the middle of an epoch,
the lease is left one step later; if one is due there too, that one is left out.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from poise.worker.generators import generators
from poise.worker.lease import StopRequest, Writers, attach
from poise.worker.protocol import WorkerError, say
from poise.worker.pytorch import restore_random

# Not a plain import: it is under either name, and types are to be the same whether or not it is installed.
_CALLBACK: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning").Callback

_REMEDY = "submit it with --replicas gpu, and have devices times num_nodes of the Trainer be WORLD_SIZE"


class LightningLeaseCallback(_CALLBACK):  # type: ignore[misc]  # its types are not known
    """The lease of this process, for users `LeaseCallback`. Saves with `trainer.save_checkpoint`, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._lease = attach(writers=Writers.ALL)
        self._last = 0
        self._random: Mapping[str, Any] | None = None
        self._deferred = StopRequest.GO_ON  # what to do at the next boundary at which a checkpoint can be resumed
        self._is_between_epochs = False
        self._metrics: dict[str, Any] = {}
        # Said here: when Lightning waits for processes that are never started, no callback comes any more.
        gpus, processes = os.environ.get("POISE_GPUS", ""), self._lease.world_size
        if self._lease.rank == 0 and gpus.isdecimal() and int(gpus) > processes:
            say(f"the job has {gpus} GPUs and WORLD_SIZE={processes}; Lightning starts no processes here: {_REMEDY}")

    def newest(self) -> str | None:
        """Return the `ckpt_path` to give to `trainer.fit`."""
        return self._lease.newest()

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning does not keep: random generators, metrics, and whether an epoch begins."""
        return {"random": generators(), "metrics": self._metrics, "between epochs": self._is_between_epochs}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep it until training begins: what is set up before that draws random numbers too."""
        self._random = state_dict["random"]
        self._metrics = state_dict.get("metrics", {})
        self._is_between_epochs = state_dict.get("between epochs", False)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  Lightning's
        """Begin or resume training."""
        if trainer.global_step == 0 and self.newest() is not None:
            raise WorkerError("there is a checkpoint: give trainer.fit(..., ckpt_path=callback.newest())")
        size, wanted = trainer.world_size, self._lease.world_size
        if "POISE_RUN_DIR" in os.environ and size != wanted:
            say(f"Lightning trains with a world size of {size}, and the job has WORLD_SIZE={wanted}: {_REMEDY}")
        self._restore_random(trainer)
        trainer.callback_metrics.update(self._metrics)
        self._last = trainer.global_step
        # Steps in all are not known where the module itself has its optimizers step, or where training has no end.
        total = trainer.estimated_stepping_batches if pl_module.automatic_optimization else 0
        self._lease.begin(self._last, int(total) if 0 < total < float("inf") else None)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  Lightning's
        """Between two epochs: do what was deferred at the last batch of the one before."""
        if self._is_between_epochs:
            # Resumed between two epochs: Lightning would take the batches of the one before for those of this one.
            trainer.fit_loop.epoch_loop.restarting = False
            progress = trainer.fit_loop.epoch_progress
            for count in (progress.total, progress.current):
                count.ready = count.completed + 1  # it counts this epoch once or twice, depending on its version
            self._restore_random(trainer)
        self._is_between_epochs = True  # part of the checkpoint that may be written now
        self._do_deferred(trainer)
        self._is_between_epochs = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # noqa: ANN401  Lightning's
        """Between two optimizer steps: report, save, leave."""
        step = trainer.global_step
        if step == self._last:
            return
        self._last = step
        before, request = self._deferred, self._lease.check(step)
        self._deferred = before if request is StopRequest.GO_ON else request
        # Saved at the last batch, the end of the epoch would be left out, and Lightning would count epochs wrongly from then
        # on; saved before a validation, that would be left out, and the random numbers that it draws. Deferred once only:
        # where every step is validated, one validation has to be left out.
        is_validated = before is StopRequest.GO_ON and trainer.fit_loop.epoch_loop._should_check_val_fx(
            trainer.fit_loop._data_fetcher
        )
        if not (0 <= trainer.max_steps <= step or trainer.is_last_batch or is_validated):
            self._do_deferred(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  Lightning's
        """Have the epoch in which training was resumed end like any other.

        Lightning takes no step of the plateau schedulers there, as it has not kept their metrics; this callback has.
        """
        monitored = (each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau)
        if all(name in trainer.callback_metrics for name in monitored):
            trainer.fit_loop._restarting = False  # its setter sets it again where there is a max_steps

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  Lightning's
        """Write a last checkpoint: all steps are done."""
        self._lease.finish(trainer.global_step, trainer.save_checkpoint)

    def _do_deferred(self, trainer: Any) -> None:  # noqa: ANN401  Lightning's
        request, self._deferred = self._deferred, StopRequest.GO_ON
        if request is not StopRequest.GO_ON:
            self._metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
        if request is StopRequest.LEAVE:
            self._lease.leave(trainer.global_step, trainer.save_checkpoint)
        elif request is StopRequest.CHECKPOINT:
            self._lease.checkpoint(trainer.global_step, trainer.save_checkpoint)

    def _restore_random(self, trainer: Any) -> None:  # noqa: ANN401  Lightning's
        # Lightning's own checkpoint has what rank 0 knows. A checkpoint of the lease has the generators of each rank.
        if self._random is not None and not self._lease.restore_generators(trainer.global_step):
            restore_random(self._random, self._lease.rank)


LeaseCallback = LightningLeaseCallback  # the name that scripts use
