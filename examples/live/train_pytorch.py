"""A small network on made-up data, with PyTorch: interrupted as often as you like, it ends with the same weights.

python examples/live/train_pytorch.py --steps N [--seed N] [--rate R] [--seconds-per-step S]

Prints a digest of the weights. Dropout and the shuffled data make sure that every random number counts. `--seconds-per-step`
slows it down, so that there is something to watch.
"""

import argparse
import hashlib
import time

import torch
from torch import nn

from poise.worker import attach
from poise.worker.pytorch import State, batch_at

SAMPLES, BATCH = 512, 32


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="A small network on made-up data.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    inputs = torch.randn(SAMPLES, 16)
    wanted = inputs[:, :4].prod(dim=1, keepdim=True).tanh()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, options.steps))

    state = State(model=model, optimizer=optimizer, scheduler=scheduler)
    lease = attach(save=state.save, load=state.load)
    for step in lease.steps(options.steps):
        rows = batch_at(step, samples=SAMPLES, batch_size=BATCH, seed=options.seed)
        loss = nn.functional.mse_loss(model(inputs[rows]), wanted[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        lease.report(loss=loss)
        time.sleep(options.seconds_per_step)
    print(digest(model))


def digest(model: nn.Module) -> str:
    """Of all weights, bit by bit."""
    total = hashlib.sha256()
    for name, weights in sorted(model.state_dict().items()):
        total.update(name.encode() + weights.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
