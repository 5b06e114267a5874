"""The driver: a process of its own that is connected to the Ray cluster, and keeps it as Poise wants to have it.

    python -m poise.service.backends.ray.driver < order > reports        (messages.py)

Why a process: where a Ray node or the control store dies, Ray ends the processes that are connected to it, from C++. The
server must not die of that; the driver may, and the next one takes up where it was, since all that matters lives in the
cluster under fixed names. Each second it compares what there is with what there should be:

    poise-owner             actor: whose cluster it is (`owner.py`)
    poise-gpu-<node>-<i>    placement group of one GPU: held for Poise. One that others use stays pending until it is free,
                            and is then held without further ado.
    poise-agent-<node>      actor on exactly that node (`node_agent.py`)

All names are in the namespace `poise`; <node> is Ray's id, which is another one after each start of a node.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from poise import __version__
from poise.scheduler.model.units import counted
from poise.service.backends.ray.discovery import RayNode, gpu_nodes, namesakes
from poise.service.backends.ray.messages import DEFAULT_ADDRESS, AgentTerms, DriverOrder, DriverReport, RayNodeReport
from poise.service.backends.ray.node_agent import STARTING, AgentStatus, NodeAgent
from poise.service.backends.ray.owner import NAME, NAMESPACE, RECENT_SECONDS, OwnerState, RayOwner
from poise.service.wire.agent_messages import NodeSpec

EVERY = 1.0  # seconds between two looks
SEVERAL_BEATS = 4.0  # in which a server that runs is heard of
ANSWER_SECONDS = 20.0  # for one call of the owner
PLACED_SECONDS = 30.0  # after which an actor that has not answered since it was asked for is reported
AGAIN_SECONDS = 60.0  # after which it is given up, and another one is asked for
SETTLE_SECONDS = 3.0  # for which a new node's GPUs are waited for: those that are free are held by then
QUICK_SECONDS = 0.02  # in which a worker that is there already answers
PROBE_SECONDS = 5.0
RELEASE_SECONDS = 120.0  # without an answer of an agent, after which letting go is given up: Ray may be starting it again
GPU, AGENT = "poise-gpu-", "poise-agent-"
OUTLIVED = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Of an agent: when Ray ends a worker, or a worker finds its raylet dead, all that it has started would be killed, too."""
CREATED, REMOVED = "CREATED", "REMOVED"
WORST_LENGTH = 600  # characters of an error of Ray that are passed on

NO_TOKENS = (
    "this Ray cluster has no token authentication: whoever reaches one of its ports can run anything on its nodes; start it"
    " with RAY_AUTH_MODE=token"
)


class RayRefusalError(Exception):
    """This service must not or cannot drive the cluster, and trying again would not help."""


class RayTroubleError(Exception):
    """There is no connection to the cluster at the moment."""


def connect(address: str) -> Any:  # noqa: ANN401 - Ray has no types of its own worth the name
    """Connect to the cluster; return the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address != DEFAULT_ADDRESS:
        _probe(address)
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.CRITICAL, log_to_driver=False)
    except ray.exceptions.AuthenticationError as error:
        raise RayRefusalError(f"Ray: {first_line(error)}") from None
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if "ersion mismatch" in text:
            raise RayRefusalError(f"{text}; install the same versions of Ray and Python here as in the cluster") from None
        raise RayTroubleError(text[:WORST_LENGTH]) from None
    except (ConnectionError, ValueError) as error:
        raise RayTroubleError(first_line(error)) from None
    return ray


def _probe(address: str) -> None:
    """Find out in seconds whether anything listens there; Ray takes minutes for that."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise RayRefusalError(f"--address {address!r}: expected HOST:PORT of the head node")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise RayTroubleError(f"nothing answers at {address} ({error.strerror or error})") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the error's kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:WORST_LENGTH]


class NodeKeeper:
    """Keeps one Ray node as it should be: its GPUs held, and its agent told what to do."""

    def __init__(self, ray: Any, node: RayNode, terms: AgentTerms) -> None:  # noqa: ANN401
        self._ray, self._node, self._terms = ray, node, terms
        self._since = monotonic()
        self._groups: dict[str, str] = {}  # what Ray calls the GPU of a placement group, by its name
        self._asking: tuple[str, Any, float] | None = (
            None  # which group's GPU is asked for, where the answer comes, since when
        )
        self._actor: Any = None
        self._asked_at = monotonic()
        self._telling: Any = None
        self.problem: str | None = STARTING

    def look(self, groups: dict[str, dict[str, Any]]) -> None:
        """Ask for what is missing, and see what has come of what was asked for. Never waits."""
        self._hold(groups)
        self._learn_ids(groups)
        if self._actor is None:
            self._actor, self._asked_at = self._ask_for_actor(), monotonic()
        is_all_known = len(self._groups) == self._node.gpus
        if self._asking is None:
            is_settled = monotonic() - self._since > SETTLE_SECONDS
        else:  # an agent that waits to be started does not wait for ever for a task that Ray does not start
            is_settled = monotonic() - self._asking[2] > PLACED_SECONDS and self.problem == STARTING
        if is_all_known or is_settled:
            self._keep_agent(tuple(sorted(self._groups.values())))
        else:
            self._keep_agent(None)  # one that is there already hears at once where the server is

    def _hold(self, groups: dict[str, dict[str, Any]]) -> None:
        from ray.util.placement_group import placement_group

        for place in range(self._node.gpus):
            name = f"{GPU}{self._node.key}-{place}"
            if name not in groups:
                self._groups.pop(name, None)
                here = [{"ray.io/node-id": self._node.key}]
                placement_group([{"GPU": 1}], name=name, lifetime="detached", bundle_label_selector=here)

    def _learn_ids(self, groups: dict[str, dict[str, Any]]) -> None:
        """Find out which GPU each group has, one after the other: a task in the group tells, and one worker serves all."""
        ray = self._ray
        while self._asking is not None:
            name, answer, _ = self._asking
            if not ray.wait([answer], timeout=QUICK_SECONDS)[0]:
                return
            self._asking = None
            with suppress(ray.exceptions.RayError):
                self._groups[name] = ray.get(answer)
                self._ask_next(groups)
        self._ask_next(groups)

    def _ask_next(self, groups: dict[str, dict[str, Any]]) -> None:
        ray = self._ray
        for place in range(self._node.gpus):
            name = f"{GPU}{self._node.key}-{place}"
            if name not in self._groups and groups.get(name, {}).get("state") == CREATED:
                from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

                group = ray.util.get_placement_group(name)
                # Without max_calls Ray starts a worker for each task that has a GPU.
                task = ray.remote(num_cpus=0, num_gpus=1, max_calls=0)(own_gpu)
                answer = task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)).remote()
                self._asking = name, answer, monotonic()
                return

    def _keep_agent(self, held: tuple[str, ...] | None) -> None:
        if self._telling is not None:
            if self._ray.wait([self._telling], timeout=0)[0]:
                self._take_answer()
            elif monotonic() - self._asked_at > AGAIN_SECONDS:
                self._give_up()
                return
            elif monotonic() - self._asked_at > PLACED_SECONDS:
                self.problem = f"Ray has not started its agent for {PLACED_SECONDS:.0f} s, and does not say why"
        if self._telling is None and self._actor is not None:
            self._telling = self._actor.tell.remote(self._terms.model_dump_json(), self._spec().model_dump_json(), held)

    def _ask_for_actor(self) -> Any:  # noqa: ANN401
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._node.key, soft=False)
        options = self._ray.remote(NodeAgent).options(
            name=f"{AGENT}{self._node.key}", lifetime="detached", get_if_exists=True, max_restarts=-1, num_cpus=0,
            scheduling_strategy=here, runtime_env={"env_vars": OUTLIVED},
        )  # fmt: skip
        return options.remote()

    def _take_answer(self) -> None:
        telling, self._telling = self._telling, None
        try:
            status = AgentStatus(*self._ray.get(telling))
        except self._ray.exceptions.ActorUnavailableError:
            self.problem = "its agent is being restarted by Ray"
        except self._ray.exceptions.RayActorError as error:
            self.problem = f"its agent cannot be started: {last_line(error)}"
            self._give_up(self.problem)
        except self._ray.exceptions.RayError as error:
            self.problem = f"its agent has failed: {last_line(error)}"
        else:
            self.problem = status.problem
            if status.version == __version__:
                self._asked_at = monotonic()
            else:
                self.problem = f"Poise {status.version} is installed there, and {__version__} here; install the same on both"
                self._give_up(self.problem)  # an actor keeps the version with which it was started

    def _give_up(self, problem: str | None = None) -> None:
        """End the actor; the next look asks for another one. Runs go on."""
        if problem is not None and monotonic() - self._asked_at < PLACED_SECONDS:
            return
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)
        self._actor = self._telling = None

    def _spec(self) -> NodeSpec:
        node = self._node
        return NodeSpec(name=node.name, gpu_type=node.gpu_type, gpus=node.gpus, rack=node.rack, address=node.address)


def last_line(error: BaseException) -> str:
    """The last line of an error's text: of a traceback, the one that says what it is."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:WORST_LENGTH]


def own_gpu() -> str:
    """Name the GPU of this task. Runs on a node."""
    import ray

    return str(ray.get_gpu_ids()[0])


class RayDriver:
    """The cluster as a whole: whose it is, and its nodes."""

    def __init__(self, ray: Any, order: DriverOrder) -> None:  # noqa: ANN401
        self._ray, self._order = ray, order
        server = reachable(order.terms.server, str(ray.util.get_node_ip_address()))
        self._terms = order.terms.model_copy(update={"server": server})
        self._keepers: dict[str, NodeKeeper] = {}
        self._seen: dict[str, RayNode] = {}  # by name; a dead one is remembered for its reason
        owner = ray.remote(RayOwner).options(
            name=NAME, lifetime="detached", get_if_exists=True, max_restarts=-1, num_cpus=0
        )  # fmt: skip
        self._owner = owner.remote(self._terms.service, server)
        self._check(self._ask_owner(self._owner.claim.remote(self._terms.service, order.holder, server)))

    def look(self) -> DriverReport:
        """Compare once, and report."""
        ray = self._ray
        self._check(self._ask_owner(self._owner.beat.remote(self._terms.service, self._order.holder)))
        found = ray.nodes()
        nodes = gpu_nodes(found)
        living = {node.key for node in nodes if node.death is None}
        groups = held_groups(ray)
        self._tidy(groups, living)
        for node in nodes:
            if node.death is None:
                keeper = self._keepers.setdefault(node.key, NodeKeeper(ray, node, self._terms))
                keeper.look(groups)
        warnings = [] if os.environ.get("RAY_AUTH_MODE") == "token" else [NO_TOKENS]
        warnings += [f"several Ray nodes are called {name}; one of them is used" for name in namesakes(found)]
        return DriverReport(nodes=tuple(self._reports(nodes)), warnings=tuple(warnings))

    def _reports(self, nodes: Iterable[RayNode]) -> Iterable[RayNodeReport]:
        for node in nodes:
            before = self._seen.get(node.name)
            if node.death is None:
                self._seen[node.name] = node
            else:
                self._seen[node.name] = (before or node)._replace(death=node.death)
        for node in self._seen.values():
            keeper = self._keepers.get(node.key)
            problem = None if keeper is None else keeper.problem
            if node.death is not None:
                problem = f"Ray says that the node is dead: {node.death}"
            yield RayNodeReport(
                name=node.name, gpu_type=node.gpu_type, gpus=node.gpus, rack=node.rack,
                is_alive=node.death is None, problem=problem,
            )  # fmt: skip

    def _tidy(self, groups: dict[str, dict[str, Any]], living: set[str]) -> None:
        """Remove what belongs to nodes that are dead: Ray would wait for them for ever."""
        ray = self._ray
        for key in set(self._keepers) - living:
            del self._keepers[key]
        for name in [*groups]:
            if name.removeprefix(GPU).rpartition("-")[0] not in living:
                remove_group(ray, name)
                del groups[name]
        for name in ray.util.list_named_actors():
            if name.startswith(AGENT) and name.removeprefix(AGENT) not in living:
                kill_actor(ray, name)

    def _ask_owner(self, answer: Any) -> OwnerState:  # noqa: ANN401
        try:
            return OwnerState(*self._ray.get(answer, timeout=ANSWER_SECONDS))
        except self._ray.exceptions.RayError as error:
            raise RayTroubleError(f"{NAME} does not answer: {first_line(error)}") from None

    def _check(self, owned: OwnerState) -> None:
        if owned.service != self._terms.service:
            age = "" if owned.age is None else f", last heard of {owned.age:.0f} s ago"
            raise RayRefusalError(
                f"another Poise service ({owned.service[:8]}, {owned.server}{age}) drives this Ray cluster;"
                " stop that one, then let go of the cluster with `poise ray release`"
            )
        if not owned.is_holder:
            raise RayRefusalError("another server of this service has taken over the Ray cluster")


def reachable(url: str, address: str) -> str:
    """Replace the host of a URL by this address if it stands for all addresses of this machine."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    host = f"[{address}]" if ":" in address else address
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def held_groups(ray: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401
    """The placement groups that hold GPUs for Poise, by name."""
    found = ray.util.placement_group_table().values()
    return {each["name"]: each for each in found if each["name"].startswith(GPU) and each["state"] != REMOVED}


def remove_group(ray: Any, name: str) -> None:  # noqa: ANN401
    """Give a GPU back to Ray."""
    with suppress(ValueError):  # it is gone
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def kill_actor(ray: Any, name: str) -> None:  # noqa: ANN401
    """End an actor for good. Runs that it has started go on."""
    with suppress(ValueError, ray.exceptions.RayError):  # it is gone
        ray.kill(ray.get_actor(name))


def release(ray: Any, say: Callable[[str], None], sleep: Callable[[float], None] = sleep) -> None:  # noqa: ANN401
    """Let go of the cluster: end all runs by letting their leases end, then agents, held GPUs, and the owner."""
    try:
        _release(ray, say, sleep)
    except ray.exceptions.RayError as error:
        raise RayTroubleError(f"Ray does not answer: {first_line(error)}") from None


def _release(ray: Any, say: Callable[[str], None], sleep: Callable[[float], None]) -> None:  # noqa: ANN401
    try:
        owner = ray.get_actor(NAME)
    except ValueError:
        say("no Poise service holds anything of this cluster")
        return
    owned = OwnerState(*ray.get(owner.look.remote(), timeout=ANSWER_SECONDS))
    if owned.age is not None and owned.age < RECENT_SECONDS:
        sleep(SEVERAL_BEATS)
        later = OwnerState(*ray.get(owner.look.remote(), timeout=ANSWER_SECONDS))
        if later.age is not None and later.age < owned.age + SEVERAL_BEATS / 2:
            raise RayRefusalError(f"the service at {owned.server} is running; stop it first")
    _end_runs(ray, owned.service, say, sleep)
    for name in _agents(ray):
        kill_actor(ray, name)
    for name in held_groups(ray):
        remove_group(ray, name)
    kill_actor(ray, NAME)
    say("nothing of this cluster is held any more")


def _agents(ray: Any) -> list[str]:  # noqa: ANN401
    return [name for name in ray.util.list_named_actors() if name.startswith(AGENT)]


def _end_runs(ray: Any, service: str, say: Callable[[str], None], sleep: Callable[[float], None]) -> None:  # noqa: ANN401
    """Stop all agents, and wait until the leases of their nodes have ended all runs.

    A node that is dead for Ray is not waited for: its agent cannot be asked, and its runs end by their lease as well.
    """
    waiting, is_first = set(_agents(ray)), True
    heard = dict.fromkeys(waiting, monotonic())
    while True:
        waiting &= {f"{AGENT}{each['NodeID']}" for each in ray.nodes() if each["Alive"]}
        asked = {ray.get_actor(name).release.remote(service): name for name in waiting}
        answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_SECONDS) if asked else ([], [])
        for each in answered:
            with suppress(ray.exceptions.RayError):  # it is being restarted, or stands still: it is asked again
                has_runs, heard[asked[each]] = ray.get(each), monotonic()
                if not has_runs:
                    waiting.discard(asked[each])
        if not waiting:
            return
        silent = [name for name in waiting if monotonic() - heard[name] > RELEASE_SECONDS]
        if silent:
            raise RayTroubleError(f"no answer from agents on {counted(len(silent), 'node')}; nothing was given back")
        if is_first:
            say(f"runs on {counted(len(waiting), 'node')} save their work and end, within the time that --fence gave them")
            is_first = False
        sleep(EVERY)


def main() -> None:
    """Serve until stdin ends."""
    # Ray and its C++ part write to stdout and stderr as they like: reports go to a copy of stdout, all else to stderr.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = DriverOrder.model_validate_json(sys.stdin.readline())

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)  # Ray's own way out may wait for a cluster that is gone

    threading.Thread(target=end_with_parent, daemon=True).start()

    def say(report: DriverReport) -> None:
        reports.write(report.model_dump_json() + "\n")
        reports.flush()

    try:
        driver = RayDriver(connect(order.address), order)
        while True:
            started = monotonic()
            say(driver.look())
            sleep(max(0.0, started + EVERY - monotonic()))
    except RayRefusalError as error:
        say(DriverReport(refusal=str(error)))
    except RayTroubleError as error:
        say(DriverReport(problem=str(error)))
    os._exit(1)


if __name__ == "__main__":
    main()
