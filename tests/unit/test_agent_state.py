"""What a node remembers: who it is, whose runs it has, and until when it may run anything."""

import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from poise.scheduler.model.errors import PoiseError
from poise.service.agent.node_state import NodeStateDir
from poise.service.backends.local.runner.fence import read_lease, since_boot
from poise.service.backends.local.state_dir import StateDir


@pytest.fixture
def state(tmp_path: Path) -> NodeStateDir:
    return NodeStateDir(tmp_path / "node")


def test_node_is_the_same_after_a_restart_of_its_agent(state: NodeStateDir) -> None:
    state.belong_to("a" * 32)
    state.close()
    again = NodeStateDir(state.path)
    assert (again.identity, again.service) == (state.identity, "a" * 32)


def test_directory_has_one_agent_at_a_time(state: NodeStateDir) -> None:
    with pytest.raises(PoiseError, match="another agent works there"):
        NodeStateDir(state.path)


def test_jobs_of_another_service_are_put_aside(state: NodeStateDir) -> None:
    state.belong_to("a" * 32)
    (state.path / "jobs" / "1").mkdir(parents=True)
    state.belong_to("b" * 32)
    assert not (state.path / "jobs").exists()
    assert (state.path / f"jobs-of-{'a' * 32}" / "1").exists()


def test_node_may_go_to_and_fro_between_services(state: NodeStateDir) -> None:
    for service in "abab":
        assert state.belong_to(service * 32)
        assert not state.belong_to(service * 32)
        (state.path / "jobs" / "1").mkdir(parents=True)
    assert {path.name for path in state.path.glob("jobs-of-*")} == {
        f"jobs-of-{'a' * 32}",
        f"jobs-of-{'b' * 32}",
        f"jobs-of-{'a' * 32}-2",
    }


def test_files_that_are_written_after_a_change_of_service_are_of_the_new_one(state: NodeStateDir) -> None:
    state.belong_to("a" * 32)
    files = StateDir(state.path)
    files.make_run("1", 1)
    assert state.belong_to("b" * 32)
    files.reopen()
    files.make_run("2", 1)
    assert [path.name for path in (state.path / "jobs").iterdir()] == ["2"]
    files.close()


def test_lease_has_run_out_before_the_first_answer_and_once_it_is_over(state: NodeStateDir) -> None:
    assert state.has_run_out()
    state.renew(since_boot(), 60.0)
    assert not state.has_run_out()
    state.renew(since_boot() - 61.0, 60.5)
    assert state.has_run_out()


def until(state: NodeStateDir) -> float:
    """When the lease of a node ends."""
    found = read_lease(state.lease_file)
    assert found is not None
    return found.until


def fenced(state: NodeStateDir, since: float) -> tuple[int, str]:
    """How a process ends that has a fence, and what it says of it."""
    script = (
        "import sys, time; from poise.service.backends.local.runner.fence import Fence\n"
        "fence = Fence(sys.argv[1], 60.0, float(sys.argv[2])); time.sleep(0.2)\n"
        "print(fence.is_running_out, fence.has_run_out)"
    )
    argv = [sys.executable, "-c", script, state.lease_file, str(since)]
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def test_runner_whose_node_has_shorter_leases_by_now_is_not_asked_to_leave(state: NodeStateDir) -> None:
    state.renew(since_boot(), 20.0)
    assert fenced(state, state.leased_since) == (0, "False False\n")


def test_runner_of_a_run_that_was_ordered_before_a_gap_takes_no_later_lease_for_its_own(state: NodeStateDir) -> None:
    """A machine slept while its Python started: the run may have been started elsewhere since."""
    state.renew(since_boot() - 61.0, 60.0)
    ordered = state.leased_since
    sleep(0.002)
    state.renew(since_boot(), 60.0)
    assert fenced(state, ordered)[0] == -signal.SIGKILL
    assert fenced(state, state.leased_since)[0] == 0


def test_leases_without_a_gap_belong_together_over_a_restart_of_the_agent(tmp_path: Path) -> None:
    first = NodeStateDir(tmp_path / "node")
    first.renew(since_boot(), 60.0)
    since = first.leased_since
    first.renew(since_boot() + 10.0, 60.0)
    assert first.leased_since == since
    first.close()
    second = NodeStateDir(tmp_path / "node")
    assert not second.has_run_out()
    second.renew(since_boot() + 20.0, 30.0)
    assert second.leased_since == since
    assert until(second) > since_boot() + 49.0
    second.close()


def test_lease_is_counted_from_when_the_request_was_sent(state: NodeStateDir) -> None:
    sent = since_boot() - 5.0
    state.renew(sent, 60.0)
    assert until(state) == pytest.approx(sent + 60.0, abs=0.001)


def test_shorter_lease_of_a_new_server_cuts_a_longer_one_short(state: NodeStateDir) -> None:
    state.renew(since_boot(), 600.0)
    sent = since_boot()
    state.renew(sent, 10.0)
    assert until(state) == pytest.approx(sent + 10.0, abs=0.001)


def test_answer_to_an_older_request_that_comes_late_does_not_lengthen_a_lease(state: NodeStateDir) -> None:
    sent = since_boot()
    state.renew(sent, 60.0)
    state.renew(sent - 20.0, 60.0)
    assert until(state) <= sent + 60.0 + 0.001


def test_lease_of_an_earlier_boot_is_none(state: NodeStateDir) -> None:
    Path(state.lease_file).write_text(f"{since_boot() + 1e6:.3f} 0.000 00000000-0000-0000-0000-000000000000\n" * 2)
    assert read_lease(state.lease_file) is None


def test_lease_that_is_being_written_is_not_read(state: NodeStateDir) -> None:
    state.renew(since_boot(), 60.0)
    line, same = Path(state.lease_file).read_text().splitlines()
    assert line == same
    Path(state.lease_file).write_text(f"{line}\n9{same[1:]}\n")
    assert read_lease(state.lease_file) is None


def test_lease_is_renewed_on_a_disk_that_is_full(state: NodeStateDir) -> None:
    state.renew(since_boot(), 60.0)
    before = Path(state.lease_file).stat()
    state.renew(since_boot() + 30.0, 60.0)
    after = Path(state.lease_file).stat()
    assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)


def test_check_of_the_lease_leaves_it_as_it_is_and_says_if_it_cannot_be_written(state: NodeStateDir) -> None:
    state.renew(since_boot(), 60.0)
    before = read_lease(state.lease_file)
    state.check()
    assert read_lease(state.lease_file) == before
    Path(state.lease_file).unlink()
    Path(state.lease_file).mkdir()
    with pytest.raises(IsADirectoryError):
        state.check()
