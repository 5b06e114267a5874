"""What goes wrong with machines and networks, each with the outcome that docs/how-to/machine-failures.md states."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from uuid import uuid4

import pytest
from tests.e2e.crashing import PEER_GONE, chain, joint_chain
from tests.e2e.machines import Machine, Machines, Network, check_epochs
from tests.e2e.proxy import Proxy
from tests.e2e.service import WORKERS, ended, until
from tests.shell import COMMAND, poise

from poise.service.client import Client, UnavailableError
from poise.service.wire.views import JobDetail, NodeCondition

pytestmark = pytest.mark.slow
Made = Callable[..., Machines]
ONE, TWO = {"v100-0": "v100:1"}, {"v100-0": "v100:1", "v100-1": "v100:1"}
FENCE = 8.0
"""Seconds of a lease. Long enough that a machine with other things to do answers in time, as most tests need it to."""
LONG = 120.0
"""Of tests in which no lease ends."""
OFTEN = {"every": 0.1, "deadline": 5.0}
STEPS = 200


class Held:
    """A job that is held at half of its steps, so that it is there for as long as a test needs it."""

    def __init__(self, machines: Machines, client: Client, seed: str = "held") -> None:
        self._machines, self._client, self._seed = machines, client, seed
        machines.let(STEPS // 2)
        self.id = client.submit(command=machines.held(STEPS, 0.01, seed), checkpoint=OFTEN).id
        until(lambda: (client.show(self.id).checkpoint_steps or 0) > 0, "it has saved nothing")

    @property
    def pids(self) -> set[int]:
        """Its processes."""
        return {each.pid for each in self._machines.replicas(self.id)}

    @property
    def node(self) -> str:
        """Where it runs."""
        [node] = self._machines.where(self.id)
        return node

    def finish(self) -> JobDetail:
        """Let it go on to its end: it has done every step once, and no two runs of it lived at once."""
        self._machines.let(STEPS)
        detail = ended(self._client, self.id)
        assert self._client.log(self.id).splitlines()[-1] == chain(self._seed, STEPS)
        reached = 0.0
        for run in detail.runs:
            assert run.begun == reached, detail
            reached = reached if run.kept is None else run.kept
        check_epochs(self._machines.stamps)
        assert self._machines.violations == ""
        return detail


def said(machine: Machine, text: str) -> None:
    """Wait until the agent of a node has said so."""
    until(lambda: re.search(text, machine.log), f"{machine.name} does not say {text!r}:\n{machine.log}")


# Agents that are refused


def test_agent_with_a_wrong_token_is_refused_and_says_so(a_cluster: Made, tmp_path: Path) -> None:
    machines = a_cluster(nodes=ONE, network=None)
    client = super(Machines, machines).up()
    wrong = tmp_path / "wrong.token"
    wrong.write_text("poise_agents_of_somebody_else\n")
    machine = machines.machines["v100-0"]
    machine.start(machines.url, wrong)
    said(machine, "unauthorized: the agents' token is wrong")
    assert machine.agent.poll() is None  # it goes on trying
    assert not client.nodes().nodes
    machine.kill()
    machines.start_agents()
    machines.joined(client, "v100-0")


def test_agent_of_another_version_is_refused_and_the_node_is_lost_for_that_reason(a_cluster: Made) -> None:
    machines = a_cluster(nodes=TWO, fence=FENCE, network=None)
    client = machines.up()
    job = Held(machines, client)
    name = job.node
    machine = machines.machines[name]
    machine.kill()
    machines.start_agents(name, command=(sys.executable, str(WORKERS / "other_protocol.py")))
    said(machine, "agent-version: .* speaks protocol 99")
    until(lambda: machines.state_of(client, name) is NodeCondition.LOST, "it is not lost")
    assert "speaks protocol 99" in machines.evidence_of(client, name)
    assert "speaks protocol 99" in poise("nodes").out
    until(lambda: job.pids and job.node != name, "its job does not go on elsewhere")
    machine.kill()
    machines.start_agents(name)  # upgraded
    machines.joined(client, name)
    assert len(job.finish().runs) == 2


def test_second_node_of_the_same_name_is_refused_and_disturbs_nothing(a_cluster: Made, tmp_path: Path) -> None:
    machines = a_cluster(nodes=ONE, fence=LONG, network=None)
    client = machines.up()
    job = Held(machines, client)
    before = job.pids
    (tmp_path / "other").mkdir()
    second = Machine(tmp_path / "other", "v100-0", "v100:1")
    second.start(machines.url, machines.token)
    try:
        said(second, "name-taken: another node is called v100-0")
        assert job.pids == before
        assert machines.state_of(client, "v100-0") is NodeCondition.UP
        assert len(job.finish().runs) == 1
    finally:
        second.kill()


def test_second_agent_on_a_state_directory_exits_at_once(a_cluster: Made) -> None:
    machines = a_cluster(nodes=ONE, fence=LONG, network=None)
    client = machines.up()
    machine = machines.machines["v100-0"]
    words = [
        COMMAND,
        "agent",
        "--server",
        machines.url,
        "--token-file",
        machines.token,
        "--node",
        "other",
        "--gpus",
        "v100:1",
    ]
    second = subprocess.run(
        [*map(str, words), "--state", str(machine.state)], check=False, capture_output=True, text=True, timeout=120
    )
    assert (second.returncode, second.stdout) == (2, "")
    assert "another agent works there" in second.stderr.splitlines()[-1]
    assert machines.state_of(client, "v100-0") is NodeCondition.UP


def test_node_with_runs_of_one_service_refuses_another(a_cluster: Made, tmp_path: Path) -> None:
    machines = a_cluster(nodes=ONE, fence=LONG, network=None)
    client = machines.up()
    job = Held(machines, client)
    before = job.pids
    assert machines.stop() == 0
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    (foreign / machines.token.name).write_bytes(machines.token.read_bytes())  # the agent is let in by its token
    words = ["serve", "--state", foreign, "--listen", "127.0.0.1:0", "--backend", "remote", "--agents", machines.url[7:]]
    other = subprocess.Popen(
        [COMMAND, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        said(machines.machines["v100-0"], "foreign-service: .* has runs of another service")
        assert job.pids == before
    finally:
        other.kill()
        other.wait()
    machines.start()
    machines.ready()
    machines.joined(client, "v100-0")
    assert job.pids == before
    assert len(job.finish().runs) == 1


# Away for shorter and longer than a lease


def test_agent_that_is_away_for_less_than_a_lease_costs_nothing(a_cluster: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = a_cluster(nodes=ONE, fence=LONG, network=None)
    client = machines.up()
    monkeypatch.setenv("OF_THE_SHELL", "comes along")
    for export, printed in (("all", "comes along"), ("none", "absent")):
        echo = client.submit(command=("sh", "-c", "echo ${OF_THE_SHELL:-absent}"), export=export).id
        ended(client, echo)
        assert client.log(echo).splitlines()[-1] == printed
    job = Held(machines, client)
    before = job.pids
    for end in ("kill", "stop"):
        getattr(machines.machines["v100-0"], end)()
        assert job.pids == before
        machines.start_agents()
        until(lambda: "serves" in machines.machines["v100-0"].log, "no agent")
        machines.joined(client, "v100-0")
    assert job.pids == before
    detail = job.finish()
    assert (len(detail.runs), detail.lost_gpu_seconds) == (1, 0)


@pytest.mark.parametrize("how", ["agent-killed", "stopped", "cable"])
def test_node_that_is_away_for_longer_has_ended_its_runs_and_they_go_on_elsewhere(
    how: str, a_cluster: Made, network: Network | None
) -> None:
    if how == "cable" and network is None:
        pytest.skip("no network namespaces")
    machines = a_cluster(nodes=TWO, fence=FENCE, network=network if how == "cable" else None)
    client = machines.up()
    job = Held(machines, client)
    name = job.node
    machine, before = machines.machines[name], job.pids
    cut = monotonic()
    if how == "agent-killed":
        machine.kill()
    else:
        machines.cut(name)
    until(lambda: machines.state_of(client, name) is NodeCondition.LOST, "it is not lost")
    assert monotonic() - cut > FENCE * 0.7  # counted from the last answer
    assert not before & job.pids
    assert "its lease of 8 s has ended" in machines.evidence_of(client, name)
    until(lambda: job.pids and job.node != name, "its job does not go on elsewhere")
    second = job.pids
    if how == "agent-killed":
        machines.start_agents(name)
    else:
        machines.heal(name)
    machines.joined(client, name)
    assert job.pids == second
    detail = job.finish()
    assert [(run.how, run.cause) for run in detail.runs] == [("failed", "node-lost"), ("finished", None)]


def test_network_that_is_cut_for_less_than_a_lease_costs_nothing(a_cluster: Made, network: Network | None) -> None:
    if network is None:
        pytest.skip("no network namespaces")
    machines = a_cluster(nodes=TWO, fence=LONG, network=network)
    client = machines.up()
    job = Held(machines, client)
    before = job.pids
    with machines.without(job.node):
        cut = monotonic()
        until(lambda: monotonic() > cut + 3.0, "")  # the cut is what is tested: a tenth of what the job may take
        machines.let(STEPS // 2 + 10)
    detail = job.finish()
    assert before and (len(detail.runs), detail.lost_gpu_seconds) == (1, 0)  # noqa: PT018


def test_server_that_is_away_for_longer_than_a_lease_costs_a_checkpoint_and_a_restart(a_cluster: Made) -> None:
    machines = a_cluster(nodes=TWO, fence=FENCE, network=None)
    client = machines.up()
    job = Held(machines, client)
    machines.kill()
    until(lambda: not job.pids, "it runs without a lease", 10 * FENCE)
    machines.start()
    machines.ready()
    detail = job.finish()
    assert len(detail.runs) >= 2
    assert (detail.runs[0].kept or 0) > 0


def test_node_that_is_rebooted_reports_its_runs_as_lost(a_cluster: Made) -> None:
    machines = a_cluster(nodes=ONE, fence=LONG, network=None)
    client = machines.up()
    job = Held(machines, client)
    machine = machines.machines["v100-0"]
    machine.pause()
    for each in machine.runs():
        each.kill()
    machine.kill()
    until(lambda: not machine.runs(), "something is left")
    boot, other = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(uuid4())
    for file in (machine.state / "lease", *machine.state.glob("jobs/*/runs/*/runner.json")):
        file.write_text(file.read_text().replace(boot, other))
    machines.start_agents()
    detail = job.finish()
    assert [(run.how, run.cause) for run in detail.runs] == [("failed", "node-lost"), ("finished", None)]


# Clocks


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_clocks_of_nodes_that_are_minutes_apart_change_nothing(shift: float, a_cluster: Made, tmp_path: Path) -> None:
    machines = a_cluster("--round", "1s", nodes=ONE, fence=FENCE, network=None)
    folder = tmp_path / "far"
    folder.mkdir()
    (folder / "shift").write_text(str(shift))
    machines.machines = {"v100-0": Machine(folder, "v100-0", "v100:1")}
    client = super(Machines, machines).up()
    machines.start_agents(command=(sys.executable, str(WORKERS / "skewed.py"), str(folder)))
    machines.joined(client, "v100-0")
    began = monotonic()
    seeds = ("a", "b")
    jobs = [client.submit(command=machines.counting(STEPS, 0.02, seed), checkpoint=OFTEN).id for seed in seeds]
    details = [ended(client, job) for job in jobs]
    elapsed = monotonic() - began
    for detail, seed in zip(details, seeds, strict=True):
        assert client.log(detail.job.id).splitlines()[-1] == chain(seed, STEPS)
        assert detail.job.finished is not None
        assert 0 < detail.job.ran <= detail.job.finished - detail.job.submitted <= elapsed
        for run in detail.runs:
            assert run.ended is not None
            assert detail.job.submitted <= run.started <= run.ended <= detail.job.finished
    assert sum(detail.preemptions for detail in details) > 0
    check_epochs(machines.stamps)


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Mounts a file system of 8 MB at a path; the file that fills it to the brim."""
    mounted: list[Path] = []

    def mount(path: Path) -> Path:
        path.mkdir(mode=0o700)
        words = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(path)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path / "filler"

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(file: Path) -> None:
    """Leave no room on a disk."""
    with file.open("wb", buffering=0) as out, suppress(OSError):
        while out.write(b"x" * 4096):
            pass


def test_node_whose_disk_is_full_keeps_its_lease_and_its_runs(
    a_cluster: Made, tmp_path: Path, small_disk: Callable[[Path], Path]
) -> None:
    filler = small_disk(tmp_path / "v100-0")
    machines = a_cluster(nodes=ONE, fence=FENCE, network=None)
    client = machines.up()
    job = Held(machines, client)
    before = job.pids
    fill(filler)
    machines.let(STEPS * 3 // 4)  # it goes on, and cannot save
    filled = monotonic()
    until(lambda: monotonic() > filled + 1.5 * FENCE, "")  # longer than a lease: it must have been renewed meanwhile
    assert machines.state_of(client, "v100-0") is NodeCondition.UP
    assert job.pids == before
    filler.unlink()
    detail = job.finish()
    assert (len(detail.runs), detail.lost_gpu_seconds) == (1, 0)


def test_full_disk_of_the_server_delays_logs_and_checkpoints_and_loses_nothing(
    a_cluster: Made, tmp_path: Path, small_disk: Callable[[Path], Path]
) -> None:
    filler = small_disk(tmp_path / "state")
    machines = a_cluster(nodes=ONE, fence=FENCE, network=None)
    client = machines.up()
    job = Held(machines, client)
    before = job.pids
    fill(filler)
    machines.let(STEPS * 3 // 4)
    with pytest.raises(UnavailableError, match=r"the disk is full|nothing can be kept at the moment"):
        client.submit(command=machines.counting(1, 0.0, "refused"))
    filled = monotonic()
    until(lambda: monotonic() > filled + 1.5 * FENCE, "")
    assert job.pids == before  # answers still renew leases
    filler.unlink()
    until(lambda: client.service().ready, "it does not get over it")
    detail = job.finish()
    assert (len(detail.runs), detail.lost_gpu_seconds) == (1, 0)


# Connections


@pytest.fixture
def a_proxy() -> Iterator[Callable[[Machines], Proxy]]:
    """Puts a proxy between the server and its agents."""
    made: list[Proxy] = []

    def make(machines: Machines) -> Proxy:
        proxy = Proxy(machines.host, machines.port)
        made.append(proxy)
        machines.url = proxy.url
        return proxy

    yield make
    for proxy in made:
        proxy.close()


def test_slow_connections_and_those_that_lead_nowhere_for_a_while_cost_nothing(
    a_cluster: Made, a_proxy: Callable[[Machines], Proxy]
) -> None:
    machines = a_cluster(nodes=ONE, fence=FENCE * 2, network=None)
    proxy = a_proxy(machines)
    client = machines.up()
    job = Held(machines, client)
    before = job.pids
    proxy.delay = 0.3
    machines.let(STEPS // 2 + 20)
    until(lambda: client.show(job.id).steps >= STEPS // 2 + 10, "its news do not arrive")
    proxy.is_held = True
    held = monotonic()
    until(lambda: monotonic() > held + FENCE * 0.3, "")
    proxy.is_held, proxy.delay = False, 0.0
    machines.let(STEPS // 2 + 40)
    until(lambda: client.show(job.id).steps >= STEPS // 2 + 30, "its news do not arrive any more")
    assert job.pids == before
    assert len(job.finish().runs) == 1


def test_runner_that_is_stopped_with_its_agent_still_ends_on_time(a_cluster: Made) -> None:
    """The kernel kills it: no process of the node has to do anything."""
    machines = a_cluster(nodes=ONE, fence=FENCE, network=None)
    client = machines.up()
    job = Held(machines, client)
    machine = machines.machines["v100-0"]
    machine.pause()
    stopped = monotonic()
    until(lambda: not job.pids, "it is still there", 3 * FENCE)
    assert monotonic() - stopped <= FENCE + 1.0
    os.kill(machine.agent.pid, signal.SIGCONT)
    assert len(job.finish().runs) == 2


def test_orders_and_news_whose_answers_are_lost_take_effect_once(
    a_cluster: Made, a_proxy: Callable[[Machines], Proxy]
) -> None:
    machines = a_cluster("--round", "1s", nodes=TWO, fence=LONG, network=None)
    proxy = a_proxy(machines)
    client = machines.up()
    proxy.breaks_after = 8
    seeds = {client.submit(command=machines.counting(100, 0.02, seed), checkpoint=OFTEN).id: seed for seed in "ab"}
    retry = {"exit_codes": [PEER_GONE]}
    gang = client.submit(command=machines.ranks(100, 0.02, "g"), checkpoint=OFTEN, gpus=2, replicas="gpu", retry=retry).id
    details = {job: ended(client, job) for job in (*seeds, gang)}
    proxy.breaks_after = 0
    assert proxy.broken > 5
    for job, seed in seeds.items():
        assert client.log(job).splitlines()[-1] == chain(seed, 100)
    assert client.log(gang, replica=1).splitlines()[-1] == joint_chain("g", 100, 2)
    for detail in details.values():
        assert {run.how for run in detail.runs} <= {"yielded", "finished"}, detail
        assert [run.epoch for run in detail.runs] == list(range(1, len(detail.runs) + 1))
    check_epochs(machines.stamps)
    assert machines.violations == ""
