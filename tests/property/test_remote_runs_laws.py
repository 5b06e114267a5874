"""Runs over nodes, with messages lost and repeated, and crashes of server and agents between any two of them."""

from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.nodes_model import LEASE, ModelCluster, ModelNode

NAMES = st.integers(0, 2)
BOOL = st.booleans()


class RemoteMachine(RuleBasedStateMachine):
    """Three nodes. What must hold is checked where it could be broken (`ModelCluster`), and all of it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.world: ModelCluster | None = None

    @initialize(
        sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)), errors=st.sampled_from([0.0, -300.0, 1e6])
    )
    def set_up(self, sizes: tuple[int, int, int], errors: float) -> None:
        self.world = ModelCluster(sizes, (0.0, errors))
        if sizes[0] == 1:  # else they join in any order, and late
            for node in self.world.nodes.values():
                self.world.hello(node)
                self.world.ask(node)
                self.world.tell(node)

    @property
    def w(self) -> ModelCluster:
        assert self.world is not None
        return self.world

    def node(self, number: int) -> ModelNode:
        return [*self.w.nodes.values()][number]

    def part(self, number: int, which: int) -> tuple[ModelNode, tuple[str, int]] | None:
        node = self.node(number)
        return (node, [*node.parts][which % len(node.parts)]) if node.parts else None

    # The engine

    @rule(job=st.sampled_from("ab"), data=st.data())
    def launch(self, job: str, data: Any) -> None:
        free = self.w.free()
        if free:
            gpus = data.draw(st.lists(st.sampled_from(free), min_size=1, max_size=4, unique=True))
            self.w.launch(job, gpus)

    @rule(which=st.integers(0, 9), kill=BOOL)
    def end_run(self, which: int, kill: bool) -> None:
        if self.w.journal:
            key = [*self.w.journal][which % len(self.w.journal)]
            (self.w.kill if kill else self.w.stop)(key)

    @rule()
    def journal(self) -> None:
        self.w.keep()

    @rule(lease=st.sampled_from([LEASE, LEASE / 4]))
    def crash(self, lease: float) -> None:
        self.w.crash(lease)

    # Messages

    @rule(number=NAMES, lost=BOOL)
    def hello(self, number: int, lost: bool) -> None:
        self.w.hello(self.node(number), lost=lost)

    @rule(number=NAMES, lost=BOOL)
    def ask(self, number: int, lost: bool) -> None:
        self.w.ask(self.node(number), lost=lost)

    @rule(number=NAMES, lost=BOOL, most=st.integers(1, 3))
    def tell(self, number: int, lost: bool, most: int) -> None:
        self.w.tell(self.node(number), lost=lost, most=most)

    @rule(numbers=st.lists(NAMES, min_size=1, max_size=3), begin=BOOL, keep=BOOL)
    def go_on(self, numbers: list[int], begin: bool, keep: bool) -> None:
        """What happens most of the time, so that runs get somewhere."""
        for node in map(self.node, numbers):
            if node.session is None:
                self.w.hello(node)
            self.w.ask(node)
            for key in [*node.parts] if begin else ():
                self.w.begin(node, key)
            self.w.tell(node)
        if keep:
            self.w.keep()

    @rule(numbers=st.lists(NAMES, min_size=1, max_size=3))
    def go_on_beginning(self, numbers: list[int]) -> None:
        self.go_on(numbers, begin=True, keep=True)

    @rule(job=st.sampled_from("ab"), which=st.integers(0, 9), data=st.data())
    def move(self, job: str, which: int, data: Any) -> None:
        """Have a run leave, and start the next one of its job elsewhere."""
        mine = [key for key in self.w.journal if key[0] == job]
        if mine:
            self.w.stop(mine[-1])
        self.launch(job, data)

    # Nodes

    @rule(number=NAMES, which=st.integers(0, 9))
    def begin(self, number: int, which: int) -> None:
        if found := self.part(number, which):
            self.w.begin(*found)

    @rule(number=NAMES, which=st.integers(0, 9), how=st.sampled_from(["finished", "yielded", "failed"]))
    def end(self, number: int, which: int, how: Literal["finished", "yielded", "failed"]) -> None:
        if found := self.part(number, which):
            self.w.end(*found, how)

    @rule(number=NAMES)
    def lose_agent(self, number: int) -> None:
        self.w.lose_agent(self.node(number))

    @rule(number=NAMES)
    def reboot(self, number: int) -> None:
        self.w.reboot(self.node(number))

    @rule(seconds=st.sampled_from([0.01, LEASE / 4, LEASE / 2, LEASE]))
    def wait(self, seconds: float) -> None:
        self.w.wait(seconds)

    @invariant()
    def leases_hold(self) -> None:
        if self.world is not None:
            for node in self.world.nodes.values():
                assert not node.alive() or node.until > self.world.clock.now, f"{node} lives past its lease"

    def teardown(self) -> None:
        if self.world is not None:
            try:
                self.world.settle()
            finally:
                self.world.close()


TestRemoteRuns = RemoteMachine.TestCase
