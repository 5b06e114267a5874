"""Hugging Face Trainer: a callback that reports, has checkpoints written and leaves when the lease ends.

    from poise.worker.huggingface import LeaseCallback

    lease = LeaseCallback()
    trainer = Trainer(model, TrainingArguments("out", save_total_limit=2), train_dataset=data, callbacks=[lease])
    trainer.train(resume_from_checkpoint=lease.newest())

The Trainer writes checkpoints to its `output_dir`; complete ones are copied into the job's own directory. They are not
hard-linked: a job with the same `output_dir` that writes the files again would change the copy.

An evaluation that is due where the lease ends is done first, and the end of an epoch too. With `save_strategy="best"` the
Trainer decides for itself what it saves after an evaluation: the lease is left one step later then, and if an evaluation is
due there too, that one is left out.
"""

import os
import shutil
from importlib import import_module
from typing import Any

from poise.worker.lease import StopRequest, attach
from poise.worker.protocol import WorkerError

# Not plain imports, so that types are the same whether or not they are installed.
_CALLBACK: Any = import_module("transformers").TrainerCallback
_distributed: Any = import_module("torch.distributed")


class HuggingFaceLeaseCallback(_CALLBACK):  # type: ignore[misc]  # its types are not known
    """The lease of this process, for users `LeaseCallback`. Saves as the Trainer does."""

    def __init__(self) -> None:
        self._lease = attach()
        self._due = StopRequest.GO_ON
        self._was_deferred = False
        self._is_epoch_over = False

    def newest(self) -> str | None:
        """Return the `resume_from_checkpoint` to give to `trainer.train`."""
        return self._lease.newest()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401  theirs
        """Begin or resume training."""
        if state.global_step == 0 and self.newest() is not None:
            raise WorkerError("there is a checkpoint: give trainer.train(resume_from_checkpoint=callback.newest())")
        if args.save_only_model and "POISE_RUN_DIR" in os.environ:
            raise WorkerError("save_only_model: a job cannot go on without its optimizer; leave it out of TrainingArguments")
        self._lease.begin(state.global_step, state.max_steps if state.max_steps > 0 else None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ANN401  theirs
        """Between two optimizer steps: report, and ask for a checkpoint if one is due."""
        request = self._lease.check(state.global_step)
        self._due = self._due if request is StopRequest.GO_ON else request
        if state.global_step >= state.max_steps:
            self._due = StopRequest.GO_ON  # there is nothing to leave for
            control.should_save = True
        # A checkpoint of an epoch's last step resumes with the next epoch, so the end of this one has to come before it.
        self._is_epoch_over = self._due is not StopRequest.GO_ON and float(state.epoch).is_integer()
        if not self._is_epoch_over:
            self._ask(args, control)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ANN401  theirs
        """Between two epochs: ask for the checkpoint that was due at the last step."""
        self._is_epoch_over = False
        self._ask(args, control)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401  theirs
        """Take over the checkpoint that the Trainer has written, for whatever reason; leave if the lease ends with it."""
        if self._is_epoch_over:
            return
        if _distributed.is_available() and _distributed.is_initialized():
            _distributed.barrier()  # each rank writes a file of its own
        written = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")

        def take(path: str) -> None:
            shutil.copytree(written, path)

        # When the Trainer itself wants to stop early, it has to do so now: after a restart it would not remember.
        if self._due is StopRequest.LEAVE and not control.should_training_stop:
            self._lease.leave(state.global_step, take)
        self._lease.checkpoint(state.global_step, take)
        self._due, self._was_deferred = StopRequest.GO_ON, False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401  theirs
        """Report that all steps are done; the checkpoint of the last was asked for when it ended."""
        self._lease.finish(state.global_step, None)

    def _ask(self, args: Any, control: Any) -> None:  # noqa: ANN401  theirs
        if self._due is StopRequest.GO_ON:
            return
        if control.should_evaluate and args.save_strategy == "best":
            # Whatever is asked for, the Trainer saves after this evaluation only if the model is the best so far.
            if not self._was_deferred:
                self._was_deferred = True
                return
            control.should_evaluate = False
        control.should_save = True


LeaseCallback = HuggingFaceLeaseCallback  # the name that scripts use
