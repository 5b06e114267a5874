"""Scripts that join a process group by themselves: recognised from their text, without being run."""

import os
from pathlib import Path

import pytest
from tests.fake_desk import SUBMITTED, talking

from poise.service.client import JobRequest
from poise.service.client.scripts import MOST_BYTES, joins_process_group
from poise.service.client.submission import with_files
from poise.service.wire.request import LONE_PROCESS, is_lone_process, notes_on

DDP = """
import torch.distributed as dist
def main():
    dist.init_process_group("nccl")
main()
"""


def write(folder: Path, text: str | bytes, name: str = "train.py") -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    "command",
    [
        "python train.py", "python3 -u train.py --lr 0.1", "python3.12 -X faulthandler -W error train.py", "./train.py",
        "/usr/bin/python -OO train.py", "python -Xdev -Wignore ./train.py",
    ],
)  # fmt: skip
def test_a_script_that_python_runs_is_read(command: str, tmp_path: Path) -> None:
    write(tmp_path, DDP)
    assert joins_process_group(command.split(), str(tmp_path))


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 2 train.py", "accelerate launch train.py", "deepspeed train.py",
        "mpirun -n 2 python train.py", "python -m torch.distributed.run train.py",
        "python -um torch.distributed.launch train.py", "bash train.py", "python -c train.py", "python - train.py", "python",
        "python -u", "python absent.py", "python .", "pythonic train.py", "python \x00.py", "python pipe",
    ],
)  # fmt: skip
def test_launchers_and_what_is_no_script_say_nothing(command: str, tmp_path: Path) -> None:
    write(tmp_path, DDP)
    os.mkfifo(tmp_path / "pipe")
    assert not joins_process_group(command.split(" "), str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed import init_process_group\ninit_process_group()",
        "import torch\ntorch.distributed.init_process_group('gloo')",
        "re.match('\\d')\ninit_process_group()",  # of which Python would warn
        "if True:\n    with open('x'):\n        a.b.init_process_group(backend=f'{x}')",
        "print 'Python 2'\ninit_process_group('gloo')",  # no Python of this version
        "# -*- coding: latin-1 -*-\n# \xe9\ninit_process_group()".encode("latin-1"),
    ],
)
def test_a_call_is_found_wherever_it_is(text: str | bytes, tmp_path: Path) -> None:
    write(tmp_path, text)
    assert joins_process_group(("python", "train.py"), str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "# init_process_group()",
        '"""Call init_process_group() yourself."""',
        "print('init_process_group()')",
        "from torch.distributed import init_process_group",
        "def init_process_group(): pass",
        "import lightning\nlightning.Trainer(devices=2, strategy='ddp').fit(model)",
        DDP + "\nimport torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)",
        DDP + "\nProcess(target=main).start()",
        "print 'Python 2'\n# init_process_group('gloo')",
        "(" * 10_000 + "init_process_group",
        "x = 1\0 init_process_group",
        DDP + "#" * MOST_BYTES,
        b"\xff\xfe init_process_group",
    ],
    ids=range(13),
)
def test_mentions_and_scripts_that_start_their_own_processes_are_no_calls(text: str | bytes, tmp_path: Path) -> None:
    write(tmp_path, text)
    assert not joins_process_group(("python", "train.py"), str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "is_told"),
    [
        ({"gpus": 2}, True), ({"gpus": 1}, False), ({"gpus": 2, "min_gpus": 1}, True), ({"gpus": 1, "max_gpus": 2}, True),
        ({"micro_batches": 4}, True), ({"micro_batches": 1}, False), ({"gpus": 2, "replicas": "gpu"}, False),
    ],
)  # fmt: skip
def test_the_hint_is_for_one_process_per_node_beside_several_gpus(fields: dict[str, object], is_told: bool) -> None:
    request = JobRequest.model_validate({"command": ("x",), "process_group": True, **fields})
    assert is_lone_process(request) is is_told
    assert notes_on([JobRequest(command=("x",), gpus=9), request]) == ((f"replicas: {LONE_PROCESS}",) if is_told else ())
    assert not is_lone_process(request.model_copy(update={"process_group": False}))


@pytest.mark.usefixtures("no_venv")
def test_the_client_reads_the_script_in_the_folder_of_the_job(tmp_path: Path) -> None:
    write(tmp_path, DDP)
    client, desk = talking(SUBMITTED)
    client.submit(command=["python", "train.py"], cwd=tmp_path)
    client.submit(command=["python", "train.py"], cwd=tmp_path, image="pytorch")
    client.submit(command=["python", "train.py"], cwd=tmp_path / "elsewhere")
    assert [body["jobs"][0].get("process_group") for body in desk.bodies] == [True, None, None]
    assert with_files(JobRequest(command=("python", f"{tmp_path}/train.py")), tmp_path, "0" * 64).process_group
