"""What a training script imports: the lease on its GPUs. Standard library only; nothing slow is imported with it.

    from poise.worker import attach

    lease = attach(save=save, load=load)    # save(path) writes the training state there, load(path) reads it
    for step in lease.steps(10_000):
        train(step)

Inside Poise the loop begins at the step after the last checkpoint, reports progress, and at the end of the lease saves and
exits with code 75, so that the next start continues at the same step. Outside Poise it is a plain loop.

Frameworks have modules of their own: `pytorch`, `lightning`, `huggingface`; `lease.micro_batches(batch, model)` imports
PyTorch when it is called. `testing` fakes preemptions for tests of scripts.
"""

from poise.worker.lease import Lease, StopRequest, Writers, attach
from poise.worker.protocol import CHECKPOINT_FAILED, YIELDED, Notice, WorkerError

Wish = StopRequest  # its name in version 0.1

__all__ = ["CHECKPOINT_FAILED", "YIELDED", "Lease", "Notice", "StopRequest", "Wish", "WorkerError", "Writers", "attach"]
