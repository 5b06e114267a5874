"""Ray Tune whose trials are jobs of Poise: Tune chooses what to try, Poise when and where it runs.

    python examples/ray/tune_sweep.py --trials 4        while `poise serve` runs; POISE_URL and POISE_TOKEN if elsewhere

All trials are jobs of one app, so that the scheduler sees the sweep as a whole. A trial follows the loss of its job and
reports it to Tune; a trial that Tune stops has its job cancelled. A job that is preempted makes its trial longer, and
nothing else. Tune itself needs no GPU. Prints the best rate and its loss.
"""

import argparse
import math
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from poise.client import Client

# Ray listens on the network, and nobody else may use this one. It looks at these variables when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # no files for TensorBoard

import ray
from ray import tune

TRAINING = str(Path(__file__).resolve().parents[1] / "live" / "train_pytorch.py")
EVERY = 1.0  # seconds between two looks at a job


class Trial(tune.Trainable):
    """A training with one set of values: a job of Poise."""

    def setup(self, config: dict[str, Any]) -> None:
        """Submit the job. It runs in the folder of the sweep; trials are moved to other ones by Tune."""
        self.client = Client.from_config()
        options = {"--rate": config["rate"], "--steps": config["steps"], "--seconds-per-step": config["seconds_per_step"]}
        command = [sys.executable, TRAINING, *(str(word) for option in options.items() for word in option)]
        self.job = self.client.submit(
            command=command, cwd=config["folder"], app=config["app"], name=f"rate-{config['rate']:g}", gpus=1
        )

    def step(self) -> dict[str, Any]:
        """Look at it."""
        time.sleep(EVERY)
        shown = self.job.show()
        if shown.job.state.is_final and shown.job.state != "SUCCEEDED":
            raise RuntimeError(f"job {shown.job.id} is {shown.job.state}")
        return {"loss": math.inf if shown.loss is None else shown.loss, "done": shown.job.state.is_final}

    def cleanup(self) -> None:
        """Cancel it, if the trial ends first."""
        if not self.job.state.is_final:
            self.job.cancel()
        self.client.close()


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(description="Search for a learning rate.")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    parser.add_argument("--app", default="sweep")
    options = parser.parse_args()

    ray.init(address="local", num_cpus=options.trials, num_gpus=0, include_dashboard=False)  # trials use none: they wait
    rates = [0.3 / 3**place for place in range(options.trials)]
    with tempfile.TemporaryDirectory() as results:
        tuner = tune.Tuner(
            Trial,
            param_space={
                **vars(options),
                "rate": tune.grid_search(rates),
                "folder": os.getcwd(),
            },  # Tune has trials leave it
            tune_config=tune.TuneConfig(metric="loss", mode="min"),
            run_config=tune.RunConfig(
                storage_path=results,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # Poise keeps those of the jobs
                verbose=0,
            ),
        )
        best = tuner.fit().get_best_result()
    print(f"{best.config['rate']:g} {best.metrics['loss']:.6f}")  # noqa: T201  what it is for


if __name__ == "__main__":
    main()
