"""A small network on several GPUs, on one machine or on several, with DistributedDataParallel: bit for bit under preemption.

    poise submit -g 2 --replicas gpu -- python examples/live/train_ddp.py --steps 300

Each rank prints a digest of the weights. Each has its own dropout, and goes on with its own random numbers.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from train_pytorch import BATCH, SAMPLES, digest

from poise.worker import attach
from poise.worker.pytorch import State, batch_at


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="A small network on several GPUs.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # the same weights on all ranks
    inputs = torch.randn(SAMPLES, 16)
    wanted = inputs[:, :4].prod(dim=1, keepdim=True).tanh()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + dist.get_rank())  # a dropout of its own on each

    state = State(model=model, optimizer=optimizer)
    lease = attach(save=state.save, load=state.load)
    for step in lease.steps(options.steps):
        # Equal shares, where the ranks divide BATCH: DistributedDataParallel averages over ranks as if they were.
        mine = batch_at(step, samples=SAMPLES, batch_size=BATCH, seed=0).tensor_split(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.mse_loss(parallel(inputs[mine]), wanted[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lease.report(loss=loss)
        time.sleep(options.seconds_per_step)
    print(digest(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
