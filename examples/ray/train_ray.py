"""Ray Train under a lease: a `TorchTrainer` that is preempted as often as you like, and ends with the same weights.

    poise submit -g 2 -- python examples/ray/train_ray.py --steps 300

Ask for no more GPUs than one node has. The script starts a Ray of its own there, with a worker for each GPU, and the
training function attaches to the lease as any training script does. That is all: when the lease ends, the workers save and
end, and so does the Ray. By itself, without Poise, it trains without interruptions. Prints a digest of the weights.
"""

import argparse
import hashlib
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poise.worker import YIELDED, attach
from poise.worker.pytorch import State, batch_at

# Ray listens on the network, and nobody else may use this one. It looks at these variables when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))

import ray
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

SAMPLES, BATCH = 256, 32


def train_worker(config: dict[str, Any]) -> None:
    """Train, in each of Ray's workers, which share each batch."""
    rank, workers = train.get_context().get_world_rank(), train.get_context().get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights in all workers
    inputs = torch.randn(SAMPLES, 16)
    wanted = inputs[:, :4].prod(dim=1, keepdim=True).tanh()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = prepare_model(model)
    torch.manual_seed(1 + rank)  # a dropout of its own in each

    state = State(model=model, optimizer=optimizer)
    lease = attach(save=state.save, load=state.load)
    for step in lease.steps(config["steps"]):
        mine = batch_at(step, samples=SAMPLES, batch_size=BATCH, seed=0).tensor_split(workers)[rank]
        loss = nn.functional.mse_loss(parallel(inputs[mine]), wanted[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lease.report(loss=loss)
        time.sleep(config["seconds_per_step"])
    if rank == 0:
        Path(config["result"]).write_text(digest(model))


def digest(model: nn.Module) -> str:
    """Of all weights, bit by bit."""
    total = hashlib.sha256()
    for name, weights in sorted(model.state_dict().items()):
        total.update(name.encode() + weights.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    """Start a Ray on the GPUs of the job, and train on it."""
    parser = argparse.ArgumentParser(description="A small network with Ray Train.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=int(os.environ.get("POISE_GPUS", "1")))
    options = parser.parse_args()

    ray.init(address="local", num_cpus=options.workers + 1, num_gpus=options.workers, include_dashboard=False)
    with tempfile.TemporaryDirectory() as results:  # checkpoints are the lease's business
        result = Path(results, "digest")
        trainer = TorchTrainer(
            train_worker,
            train_loop_config={**vars(options), "result": str(result)},
            scaling_config=train.ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
            run_config=train.RunConfig(storage_path=results),
        )
        try:
            trainer.fit()
        except train.TrainingFailedError:
            if attach().preemption_notice() is None:
                raise
            sys.exit(YIELDED)  # the workers have left because the lease has ended
        print(result.read_text())  # noqa: T201  what it is for


if __name__ == "__main__":
    main()
