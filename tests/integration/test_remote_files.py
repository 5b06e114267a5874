"""Working directories on other machines: shipped with a job and unpacked once per node, or missing, which is said."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.backends import a_request, an_order
from tests.remote import NODES, RemoteStage

from poise.service.agent import checkpoint_keeper
from poise.service.backends.api import RunEnded, RunEnding, RunOrder, RunPart
from poise.service.backends.local.shipped_files import archive_path
from poise.service.client.shipping import packed_folder

HERE = {node.name: RunPart(node.name, node.gpu_type, (0,)) for node in NODES}
READS = """
import os
print(os.getcwd(), open("pkg/data.txt").read())
open("made", "a").write("x")
print(open("made").read())
raise SystemExit(75)  # there is more to do
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteStage]:
    monkeypatch.setattr(checkpoint_keeper, "PATIENCE", 0.5)
    made = RemoteStage(tmp_path, NODES[:2])
    yield made
    made.close()


def shipped(stage: RemoteStage, text: str = "hello") -> str:
    """The name of a working directory that the server has."""
    folder = stage.folder / "project"
    (folder / "pkg").mkdir(parents=True, exist_ok=True)
    (folder / "pkg" / "data.txt").write_text(text)
    (folder / "run.sh").write_text("#!/bin/sh\nexec cat pkg/data.txt\n")
    (folder / "run.sh").chmod(0o755)
    tree, sha256 = packed_folder(folder, 1 << 20)
    path = archive_path(stage.folder / "server", "default", sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(tree.blocks()))
    return sha256


def order(stage: RemoteStage, node: str, sha256: str, job: str = "1", epoch: int = 1, command: str = READS) -> RunOrder:
    made = an_order(job, a_request(command, files=sha256), parts=(HERE[node],), epoch=epoch)
    stage.backend.launch(made)
    return made


def text(stage: RemoteStage, job: str = "1") -> list[str]:
    lines = stage.backend.log(job, 0, 0, 1 << 20).text.decode().splitlines()
    return [line for line in lines if not line.startswith("--- run")]


def test_files_are_unpacked_once_per_job_and_node_and_are_where_it_runs(stage: RemoteStage) -> None:
    sha256 = shipped(stage)
    for epoch, node in enumerate(["v100-0", "v100-0", "v100-1"], start=1):
        order(stage, node, sha256, epoch=epoch)
        assert stage.wait(RunEnded, "1", epoch).how is RunEnding.YIELDED, text(stage)
    places = [stage.folder / node / "jobs" / "1" / "files" for node in ("v100-0", "v100-1")]
    assert text(stage) == [f"{places[0]} hello", "x", f"{places[0]} hello", "xx", f"{places[1]} hello", "x"]
    archive_path(stage.folder / "server", "default", sha256).unlink()  # a node that has it does not ask again
    order(stage, "v100-1", sha256, job="2")
    assert stage.wait(RunEnded, "2").how is RunEnding.YIELDED


def test_program_of_the_files_is_found_there(stage: RemoteStage) -> None:
    sha256 = shipped(stage, "of the files")
    made = an_order("1", a_request(("./run.sh",), files=sha256), parts=(HERE["v100-0"],))
    stage.backend.launch(made)
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert text(stage) == ["of the files"]


def test_files_that_the_server_has_not_got_are_the_cause_of_a_failed_run(stage: RemoteStage) -> None:
    order(stage, "v100-0", "0" * 64)
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "shipped-files-missing")
    assert "the files of the job are not on the server" in text(stage)[0]


def test_damaged_files_are_never_run(stage: RemoteStage) -> None:
    sha256 = shipped(stage)
    path = archive_path(stage.folder / "v100-0", "default", sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(archive_path(stage.folder / "server", "default", sha256).read_bytes().replace(b"hello", b"hullo"))
    order(stage, "v100-0", sha256)
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "shipped-files-missing")
    assert not (stage.folder / "v100-0" / "jobs" / "1" / "files").exists()


def test_what_a_node_lacks_is_said(stage: RemoteStage) -> None:
    missing = str(stage.folder / "nowhere")
    lacking = {
        "1": (a_request("", cwd=missing), "working-directory-missing", "`poise submit --ship` brings it along"),
        "2": (a_request(("no-such-python", "x")), "program-missing", "cannot start: no-such-python"),
        "3": (a_request("", venv=missing), "virtual-environment-gone", "it has no bin/python"),
    }
    for job, (request, cause, said) in lacking.items():
        stage.backend.launch(an_order(job, request, parts=(HERE["v100-0"],)))
        assert stage.wait(RunEnded, job).cause == cause
        assert said in " ".join(text(stage, job)), text(stage, job)


def test_variables_and_virtual_environments_are_those_of_the_request(stage: RemoteStage) -> None:
    venv = stage.folder / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "tool"):
        (venv / "bin" / name).write_text('#!/bin/sh\necho "$LR $VIRTUAL_ENV"\n')
        (venv / "bin" / name).chmod(0o755)
    request = a_request(("tool",), env={"LR": "0.1"}, venv=str(venv))
    stage.backend.launch(an_order("1", request, parts=(HERE["v100-0"],)))
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert text(stage) == [f"0.1 {venv}"]
    assert os.path.isdir(stage.folder / "v100-0" / "jobs" / "1" / "work")
