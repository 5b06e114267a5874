"""Whole seconds stay whole whatever the throughput table says of a job's model: ties and instants depend on it."""

from pathlib import Path

import pytest
from tests.shell import a_row, a_trace, jcts, simulated

SPLIT = """job_id,num_gpu,submit_time,iterations,model_name,duration,interval
0,2,0,1,{model},27,0
1,2,0,1,vgg16,27,0
2,4,1,1,vgg16,10,0
3,2,2,1,vgg16,100,0
"""


@pytest.mark.parametrize("model", ["resnet50", "googlenet", "lstm"])
def test_two_equal_durations_end_at_one_instant_whatever_is_known_of_their_models(tmp_path: Path, model: str) -> None:
    """Both end at 27, so the gang of four goes next: 27, 27, 36, and 135 for the last."""
    trace = tmp_path / "split.csv"
    trace.write_text(SPLIT.format(model=model))
    got = simulated(str(trace), "--preset", "tiresias", "--cluster", "gpu:4", "--policy", "fifo-skip")
    assert got["avg_jct"] == 56.25


@pytest.mark.parametrize("policy", ["srtf", "srsf", "srtf+stable"])
def test_equal_remaining_times_are_equal_whatever_is_known_of_their_models(tmp_path: Path, policy: str) -> None:
    rows = (a_row("first", duration=27, model="resnet50"), a_row("second", duration=27))
    trace = a_trace(tmp_path, *rows)
    assert jcts(trace, tmp_path, "--cluster", "gpu:1", "--policy", policy) == {"first": 27, "second": 54}
