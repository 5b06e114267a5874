"""A classifier trained by epochs, on one GPU or on several: loader workers, validation, schedule, mixed precision, clipping.

    python examples/live/train_epochs.py --epochs 4
    poise submit -g 2 --replicas gpu -- python examples/live/train_epochs.py --epochs 40

Prints what each epoch comes to, and at the end a digest of the weights. Interrupted anywhere, also in the middle of an
epoch, it ends with the same weights.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from train_pytorch import digest

from poise.worker import attach
from poise.worker.pytorch import Batches, State


class Rings(torch.utils.data.Dataset):
    """Points of the plane, each in one of three rings; moved a little at random each time that they are loaded."""

    def __init__(self, samples: int, seed: int, noise: float) -> None:
        self.points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
        self.labels = self.points.norm(dim=1).clamp(max=2.5).long()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = self.points[row]
        return point + self.noise * torch.randn(2), self.labels[row]


@torch.no_grad()
def validated(model: nn.Module, data: Rings, device: torch.device) -> float:
    """Return the part of the samples that the model of rank 0 gets right, on all ranks.

    Each rank has running statistics of its own in a BatchNorm, so each would find something else, and go on with another
    learning rate than the others.
    """
    model.eval()
    found = model(data.points.to(device)).argmax(dim=1)
    model.train()
    right = (found == data.labels.to(device)).float().mean()
    if dist.is_initialized():
        dist.broadcast(right, src=0)
    return right.item()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="A classifier trained by epochs.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    options = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("nccl" if is_cuda else "gloo")

    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)).to(device)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    torch.manual_seed(1 + rank)  # a dropout of its own on each
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    scaler = torch.amp.GradScaler(device.type, enabled=is_cuda)  # bfloat16, which CPUs have, needs none
    # batch_size is that of all ranks together: each loads its share. A multiple of the ranks, so that shares are equal.
    batches = Batches(Rings(600, seed=1, noise=0.1), batch_size=60, seed=0, num_workers=options.workers)
    held_out = Rings(300, seed=2, noise=0.0)

    state = State(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler, batches=batches)
    lease = attach(save=state.save, load=state.load)
    endless = (batch for _ in iter(int, 1) for batch in batches)  # one epoch after the other
    for step, (points, labels) in zip(lease.steps(options.epochs * len(batches)), endless, strict=False):
        with torch.autocast(device.type, torch.float16 if is_cuda else torch.bfloat16):
            loss = cross_entropy(parallel(points.to(device)), labels.to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        lease.report(loss=loss)
        time.sleep(options.seconds_per_step)
        if (step + 1) % len(batches) == 0:  # before the lease looks again: it never ends between an epoch and this
            right = validated(model, held_out, device)
            schedule.step(right)
            if rank == 0:
                print(f"epoch {step // len(batches)}: {right:.1%} right")
    if rank == 0:
        print(digest(model))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
