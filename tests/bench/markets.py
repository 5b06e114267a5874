"""`make bench`: what simulations under auctions, trades, affinities, marginal gains and quotas cost.

Bars (issue "Themis, Gandiva_fair and the schedulers they are compared with"): all ten ITP clusters as one trace (69,351
jobs) on `gpu:2048@8` in under two minutes of one core each, Themis in under ten; an auction over 1,000 apps and 500 free
GPUs in under a second. Without ../shared/data a synthetic trace of the same size stands in, and the output says so.
"""

import sys

from tests.bench.speed import large_trace, say

from poise.engine.assembly import PRESETS
from poise.lab.bench import WorkloadDraw, time_auction
from poise.lab.experiment import Experiment, simulate
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.policies.themis import Themis

MOST_SECONDS = {"ffdl": 120, "philly": 120, "optimus": 120, "gandiva": 120, "gandiva-fair": 120, "themis": 600}
APPS, AUCTION_SECONDS = 1_000, 1.0


def main() -> int:
    """Measure, print, and say by the exit code whether all bars hold."""
    trace = large_trace()
    held = [_auction()]
    for policy, most in MOST_SECONDS.items():
        preset = PRESETS[policy]
        experiment = Experiment(parse_cluster("gpu:2048@8"), policy, preset.placement, settings=preset.settings)
        summary = simulate(trace, experiment).summary
        text = f"{policy}: {summary.cpu_seconds:.1f} CPU seconds, {summary.preemptions:,} preemptions"
        held.append(say(text, summary.cpu_seconds < most, f"under {most}"))
    return 0 if all(held) else 1


def _auction() -> bool:
    seconds = min(time_auction(Themis(), WorkloadDraw(APPS, seed=0, gpus=APPS // 2), 3, lambda _done: None).seconds)
    return say(f"auction of {APPS // 2} GPUs over {APPS:,} apps: {seconds:.3f} CPU s", seconds < AUCTION_SECONDS, "under 1")


if __name__ == "__main__":
    sys.exit(main())
