"""What a live service says of its jobs: every number is right, every sentence is of the job it is about."""

from pathlib import Path

from tests.machine import BOB, Service, a_request

# GPUs of several types


def test_gpus_of_mixed_types_are_counted_by_type(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="hlas", cluster="v100:2,k80:2")
    [mixed] = service.submit(a_request(micro_batches=8, replicas="gpu", steps=4, duration=144_000.0))
    row = service.engine.show(mixed).job
    assert (row.gpus, row.gpu_type) == (4, "v100+k80")
    service.restart()
    assert service.engine.show(mixed).job.gpu_type == "v100+k80"
    [waits] = service.submit(a_request(gpus=2, gpu_types=("v100",)), by=BOB)
    assert service.engine.show(waits).job.gpus == 0
    evidence = service.engine.why(waits).evidence
    assert evidence[:2] == ("it can use v100; held of those: 2 GPUs", f"held by job {mixed} (tenant alice, 2 v100)")
    [either] = service.submit(a_request(gpus=2), by=BOB)
    assert service.engine.why(either).evidence[:2] == (
        "it can use v100, k80; held of those: 4 GPUs",
        f"held by job {mixed} (tenant alice, 2 v100 and 2 k80)",
    )
