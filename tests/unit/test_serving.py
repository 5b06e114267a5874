"""What a service says of itself when it stops."""

from poise.service.server.startup import holders
from poise.service.wire.views import NodeList, NodeRow


def test_jobs_that_share_a_gpu_are_counted_one_by_one() -> None:
    jobs = ("1+2", "1+2", "3", None)
    row = NodeRow(name="n", gpu_type="v100", gpus=4, free=1, rack="r", alive=True, jobs=jobs)
    assert holders(NodeList(nodes=(row,))) == {"1", "2", "3"}
