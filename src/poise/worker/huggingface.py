"""Hugging Face Trainer: a callback that reports, has checkpoints written and leaves when the lease ends.

    from poise.worker.huggingface import LeaseCallback

    lease = LeaseCallback()
    trainer = Trainer(model, TrainingArguments("out", save_total_limit=2), train_dataset=data, callbacks=[lease])
    trainer.train(resume_from_checkpoint=lease.newest())

The Trainer writes checkpoints to its `output_dir`; complete ones are copied into the job's own directory. They are not
linked: whoever writes the same files again, such as a job with the same `output_dir`, would write into what is kept.
"""

import os
import shutil
from importlib import import_module
from typing import Any

from poise.worker.lease import Wish, attach
from poise.worker.protocol import WorkerError

# Not plain imports, so that types are the same whether or not they are installed.
_CALLBACK: Any = import_module("transformers").TrainerCallback
_distributed: Any = import_module("torch.distributed")


class LeaseCallback(_CALLBACK):  # type: ignore[misc]  # its types are not known
    """The lease of this process. Saves as the Trainer does."""

    def __init__(self) -> None:
        self._lease = attach()
        self._wish = Wish.GO_ON

    def newest(self) -> str | None:
        """The `resume_from_checkpoint` to give to `trainer.train`."""
        return self._lease.newest()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401  theirs
        """Training begins, or goes on."""
        if state.global_step == 0 and self.newest() is not None:
            raise WorkerError("there is a checkpoint: give trainer.train(resume_from_checkpoint=callback.newest())")
        self._lease.begin(state.global_step, state.max_steps if state.max_steps > 0 else None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ANN401  theirs
        """Between two optimizer steps: report, and ask for a checkpoint if one is due."""
        wish, is_done = self._lease.wish(state.global_step), state.global_step >= state.max_steps
        self._wish = Wish.GO_ON if is_done else wish
        if is_done or wish is not Wish.GO_ON:
            control.should_save = True
        if self._wish is Wish.LEAVE:
            control.should_evaluate = False
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401  theirs
        """A checkpoint is written, whoever asked for it: take it over; leave if it was the last of this lease."""
        if _distributed.is_available() and _distributed.is_initialized():
            _distributed.barrier()  # every rank writes a file of its own
        written = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")

        def take(path: str) -> None:
            shutil.copytree(written, path)

        if self._wish is Wish.LEAVE:
            self._lease.leave(state.global_step, take)
        self._lease.checkpoint(state.global_step, take)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401  theirs
        """All steps are done; the checkpoint of the last was asked for as it ended."""
        self._lease.finish(state.global_step, None)
