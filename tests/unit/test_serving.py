"""What a service says of itself when it stops."""

from poise.server.serving import holders
from poise.wire.views import NodeRow, Nodes


def test_jobs_that_share_a_gpu_are_counted_one_by_one() -> None:
    jobs = ("1+2", "1+2", "3", None)
    row = NodeRow(name="n", gpu_type="v100", gpus=4, free=1, rack="r", alive=True, jobs=jobs)
    assert holders(Nodes(nodes=(row,))) == {"1", "2", "3"}
