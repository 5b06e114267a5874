"""What a job that means harm gets of the service and of others, with a real `poise serve` as root and as a plain user."""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.backends import require
from tests.e2e.service import WORKERS, Kind, Service, ended, until
from tests.shell import COMMAND

from poise.service.backends.local.orders import Isolation
from poise.service.client import Client
from poise.service.wire.views import JobState

pytestmark = pytest.mark.slow
Started = Callable[..., Service]

UNPRIVILEGED = """
import os, sys
from poise.service.backends.local.runner import isolation
isolation._drop_privileges(but=frozenset(range(64)) - {isolation.CAP_SYS_ADMIN})
for cap in {isolation.CAP_SYS_ADMIN}:
    isolation.libc.prctl(isolation.PR_CAPBSET_DROP, cap, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command without the right to mount: what it may do comes from a user namespace, as it does for a plain user."""
AS = {"privileged": (COMMAND,), "unprivileged": (sys.executable, "-c", UNPRIVILEGED, COMMAND)}


@pytest.fixture(params=AS)
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    require(Isolation.FULL, tmp_path_factory.mktemp("trial"))
    return AS[request.param]


def harm(service: Service, client: Client) -> dict[str, Any]:
    """What the hostile job got."""
    victim = client.submit(name="victim", command=(sys.executable, str(WORKERS / "hostile.py"), "/nowhere", "0", "1"))
    until(lambda: client.show(victim.id).job.state.is_final, "the victim has not ended")
    kept = service.state / "jobs" / victim.id / "checkpoint" / "step-1"
    assert kept.read_text() == "mine"  # it got as far as to have something to be read
    words = (str(service.state), victim.id, str(service.server.pid))
    job = client.submit(name="hostile", command=(sys.executable, str(WORKERS / "hostile.py"), *words))
    ended(client, job.id)
    found = next(line for line in client.log(job.id).splitlines() if line.startswith("got "))
    got: dict[str, Any] = json.loads(found[4:])
    return got | {"id": job.id}


def test_hostile_job_gets_nothing_of_the_service_and_of_others(a_service: Started, command: tuple[str, ...]) -> None:
    service = a_service("--cluster", "v100:1", "--isolate", "on", command=command)
    got = harm(service, service.up())
    assert (got["state"], got["jobs"]) == (["jobs"], [got["id"]])
    for way in ("files", "elsewhere", "another self", "uncovered", "server", "runner"):
        assert not got[way], way
    assert {"lease.json", "order.json", "runner.json"} <= set(got["own"])
    assert got["processes"] == 2  # itself, and the first process of its namespace
    assert service.server.poll() is None


def test_without_isolation_it_gets_everything_which_is_what_the_test_above_would_see(a_service: Started) -> None:
    service = a_service("--cluster", "v100:1", "--isolate", "off")
    got = harm(service, service.up())
    assert len(got["files"]) == 5
    assert got["server"]
    assert got["runner"]


@pytest.mark.parametrize("how", ["finishes", "loses its runner", "is cancelled"])
def test_daemon_that_nothing_connects_with_its_job_does_not_outlive_the_run(
    a_service: Started, command: tuple[str, ...], how: str
) -> None:
    service = a_service("--cluster", "v100:1", "--isolate", "on", command=command)
    client = service.up()
    lock = service.locks / "daemon"
    job = client.submit(command=(sys.executable, str(WORKERS / "daemon.py"), str(lock)), retry={"on_errors": 0})
    until(lambda: "left it behind" in client.log(job.id), "it left nothing behind")
    assert is_held(lock)
    if how == "finishes":
        for each in service.replicas(job.id):
            each.kill()
    elif how == "loses its runner":
        next(each for each in service.processes() if each.kind is Kind.RUNNER).kill()
    else:
        client.cancel(job.id)
    until(lambda: client.show(job.id).runs[0].how is not None, "the run is not over")
    client.cancel(job.id)
    until(lambda: not is_held(lock), "what it left behind lives")
    until(lambda: not service.processes(), "something is left")


def is_held(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_ranks_of_an_isolated_run_see_each_other(a_service: Started, command: tuple[str, ...]) -> None:
    """They share memory and the network, and one pid namespace."""
    text = (
        "import os, socket, time\n"
        "rank, address = int(os.environ['RANK']), (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "name = '/dev/shm/poise-test-' + os.environ['POISE_RUN'].replace('/', '-') + os.environ['MASTER_PORT']\n"
        "if rank == 0:\n"
        "    server = socket.create_server(address); open(name, 'w').write(str(os.getpid()))\n"
        "    server.accept()[0].recv(1); os.unlink(name)\n"
        "else:\n"
        "    while not (os.path.exists(name) and open(name).read()): time.sleep(0.01)\n"
        "    os.kill(int(open(name).read()), 0); socket.create_connection(address).send(b'x'); print('met', flush=True)\n"
    )
    service = a_service("--cluster", "v100:2", "--isolate", "on", command=command)
    client = service.up()
    job = client.submit(command=(sys.executable, "-c", text), gpus=2, replicas="gpu")
    ended(client, job.id)
    assert "met" in client.log(job.id, replica=1)


def test_working_directory_in_the_state_directory_is_refused(a_service: Started, command: tuple[str, ...]) -> None:
    from poise.scheduler.model.errors import RequestError

    service = a_service("--cluster", "v100:1", "--isolate", "on", command=command)
    client = service.up()
    for place in (service.state, service.state / "jobs"):
        with pytest.raises(RequestError, match=r"cwd: .* lies in the state directory of the service, which jobs do not see"):
            client.submit(command=("true",), cwd=str(place))
    job = client.submit(command=("pwd",), cwd=str(service.state.parent))
    ended(client, job.id)
    assert client.log(job.id).splitlines()[-1] == str(service.state.parent)


def test_job_is_adopted_isolated_and_keeps_its_signals_and_exit_codes(a_service: Started, command: tuple[str, ...]) -> None:
    service = a_service("--cluster", "v100:1", "--isolate", "on", command=command)
    client = service.up()
    text = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(1000)"
    )
    job = client.submit(command=(sys.executable, "-c", text), preemption="restart")
    until(lambda: "ready" in client.log(job.id), "it has not begun")
    service.kill()
    client = service.up()
    replica = service.run_file(job.id, 1, "runner.json")["replicas"][0]["pid"]
    assert replica in [each.pid for each in service.replicas(job.id)]
    client.hold(job.id)
    until(lambda: client.show(job.id).job.state is JobState.PAUSED, "it has not left")
    assert client.show(job.id).runs[0].codes == (7,)
    assert "ended by TERM" in (client.show(job.id).runs[0].cause or "")


def test_first_process_that_dies_takes_the_run_with_it_and_the_run_is_begun_again(a_service: Started) -> None:
    service = a_service("--cluster", "v100:1", "--isolate", "on")
    client = service.up()
    service.let(10)
    job = client.submit(command=service.held(20, 0.01, "a"), checkpoint={"every": 0.05, "deadline": 1.0})
    until(lambda: (client.show(job.id).checkpoint_steps or 0) >= 5, "it has not got that far")
    first = next(each for each in service.processes() if each.kind is Kind.FIRST)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: len(client.show(job.id).runs) == 2, "it is not begun again")
    service.let(20)
    assert [run.cause for run in ended(client, job.id).runs] == ["killed", None]
    assert not service.violations


def test_machine_that_does_not_allow_it_is_told_apart(a_service: Started, tmp_path: Path) -> None:
    """`jobs` is a link, so that other jobs would be seen where it leads to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    service = a_service("--cluster", "v100:1", "--isolate", "on")
    service.state.mkdir(mode=0o700)
    (service.state / "jobs").symlink_to(elsewhere)
    service.start()
    assert service.server.wait(60) == 2
    said = service.log.splitlines()[-1]
    assert "--isolate on" in said
    assert "is a symbolic link; use --isolate auto" in said
    service.options = ("--cluster", "v100:1")
    client = service.up()
    assert "level=none" in service.log
    assert any("is a symbolic link" in each for each in client.service().warnings)


def test_service_of_root_says_what_that_means_unless_it_was_allowed(a_service: Started) -> None:
    if os.geteuid() != 0:
        pytest.skip("the tests do not run as root")
    service = a_service("--cluster", "v100:1")
    client = service.up()
    until(lambda: "poise: WARNING: this service runs as root" in service.log, "nothing was said")
    assert any(" warning running-as-root" in line for line in service.log.splitlines())
    assert any("runs as root" in each for each in client.service().warnings)
    service.stop()
    before = len(service.log)
    service.options = (*service.options, "--allow-root")
    assert not service.up().service().warnings
    assert "as root" not in service.log[before:]
