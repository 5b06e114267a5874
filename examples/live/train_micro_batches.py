"""A small network on any mix of GPUs: each step is the same micro-batches, whoever computes them.

    poise submit --micro-batches 6 --replicas gpu -- python examples/live/train_micro_batches.py --steps 300

Prints a digest of the weights. With another number of ranks, or other shares, gradients are added in another order, so that
weights differ by rounding and the digest is another one: compare the weights themselves, which `--out` writes to a file.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from train_pytorch import SAMPLES, digest

from poise.worker import attach
from poise.worker.pytorch import State, batch_at

BATCH = 36


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="A small network on any mix of GPUs.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    parser.add_argument("--out", help="file for the trained weights")
    options = parser.parse_args()

    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 16)
    wanted = inputs[:, :4].prod(dim=1, keepdim=True).tanh()
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    state = State(model=model, optimizer=optimizer)
    lease = attach(save=state.save, load=state.load)
    for step in lease.steps(options.steps):
        rows = batch_at(step, samples=SAMPLES, batch_size=BATCH, seed=0)  # of all ranks together
        for part in lease.micro_batches(rows, model):  # those of this rank, which may be none
            loss = nn.functional.mse_loss(model(inputs[part.batch]), wanted[part.batch])
            part.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the gradient is that of all rows, on every rank
        optimizer.step()
        time.sleep(options.seconds_per_step)
    if options.out and lease.rank == 0:
        torch.save(model.state_dict(), options.out)
    print(digest(model))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
