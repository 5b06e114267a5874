"""Who gives way where connections are too many, for any order of comings, requests and goings."""

import socket

from hypothesis import given
from hypothesis import strategies as st

from poise.service.server.http.listener import ConnectionLimits, ConnectionTable, CountedSocket, neighbourhood
from poise.service.wire.views import Account, Role

ROOM = ConnectionLimits(strangers=4, known=5, each=3, grace=2.0)
ACCOUNTS = [
    Account(name=name, tenant="t", role=role) for name, role in (("a", Role.USER), ("b", Role.USER), ("o", Role.OPERATOR))
]


class Wire:
    """A transport that notes that it was hung up."""

    def __init__(self) -> None:
        self.is_closed = False

    def abort(self) -> None:
        self.is_closed = True


class World:
    """Connections, and what became of them, kept the long way."""

    def __init__(self) -> None:
        self.guests = ConnectionTable(ROOM)
        self.now = 0.0
        self.there: dict[CountedSocket, Account | None] = {}
        self.busy: set[CountedSocket] = set()
        self._socket = socket.socket()

    def close(self) -> None:
        self._socket.close()

    def wait(self, tenths: int) -> None:
        self.now += tenths / 10

    def come(self, peer: int) -> None:
        """As the acceptor does it: first there is room, or it has to wait."""
        before = [link for link, account in self.there.items() if account is None]
        dropped, wait = self.guests.trim(self.now, is_short=False)
        if dropped is not None:
            assert len(before) > ROOM.strangers
            assert self.now - dropped.since >= ROOM.grace
            of = [sum(each.address == address for each in before) for address in {each.address for each in before}]
            mine = [each for each in before if each.address == dropped.address]
            assert len(mine) == max(of)
            assert dropped is mine[0]
        self._look()
        if wait:
            assert dropped is None
            assert len(before) > ROOM.strangers
            return
        link = CountedSocket(self._socket, f"10.0.0.{peer}", self.now)
        link.transport = Wire()
        self.guests.enter(link)
        self.there[link] = None

    def begin(self, which: int, who: int) -> None:
        free = [each for each in self.there if each not in self.busy]
        if not free:
            return
        link, account = free[which % len(free)], ACCOUNTS[who]
        busy = sum(self.there[each] is not None for each in self.busy)
        if busy >= ROOM.known - 1:  # requests are bounded, below connections
            return
        if sum(self.there[each] == account for each in self.busy) >= ROOM.each - 1:
            return
        self.there[link] = account
        self.busy.add(link)
        self.guests.begin(link, account)
        self._look()
        assert link in self.there, "whoever has just brought a token stays"
        self._check()

    def end(self, which: int) -> None:
        if self.busy:
            link = sorted(self.busy, key=list(self.there).index)[which % len(self.busy)]
            self.busy.discard(link)
            self.guests.end(link)

    def leave(self, which: int) -> None:
        if self.there:
            link = list(self.there)[which % len(self.there)]
            self.guests.leave(link)
            self.guests.leave(link)  # it is told twice where it was hung up on
            self.there.pop(link)
            self.busy.discard(link)

    def _look(self) -> None:
        """Forget those that were hung up on."""
        for link in [each for each in self.there if isinstance(each.transport, Wire) and each.transport.is_closed]:
            assert link not in self.busy, "nobody is hung up on who waits for an answer"
            del self.there[link]

    def _check(self) -> None:
        known = [account for account in self.there.values() if account is not None]
        assert len(known) <= ROOM.known
        for account in ACCOUNTS[:2]:
            assert known.count(account) <= ROOM.each

    def count(self) -> None:
        assert len(self.guests) == len(self.there)
        assert sum(account is None for account in self.there.values()) <= ROOM.strangers + 1


STEPS = st.one_of(
    st.tuples(st.just("come"), st.integers(0, 2)),
    st.tuples(st.just("begin"), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(0, 30)),
)


@given(st.lists(STEPS, max_size=60))
def test_newcomers_are_taken_and_only_the_idle_or_the_oldest_stranger_give_way(
    steps: list[tuple[str, *tuple[int, ...]]],
) -> None:
    world = World()
    try:
        for name, *given_ in steps:
            getattr(world, name)(*given_)
            world.count()
    finally:
        world.close()


def test_operators_give_way_only_where_no_other_is_idle() -> None:
    world = World()
    for _ in range(ROOM.known):
        world.come(0)
        world.begin(len(world.there) - 1, 2)
        world.end(0)
    world.come(1)
    world.begin(len(world.there) - 1, 0)
    names = [account.name for account in world.there.values() if account is not None]
    assert sorted(names) == ["a", "o", "o", "o", "o"]
    world.end(0)
    world.come(1)
    world.begin(len(world.there) - 1, 2)
    assert [account.name for account in world.there.values() if account is not None] == ["o"] * 5
    world.close()


def test_peer_is_an_address_or_a_network_that_one_has_all_of() -> None:
    assert neighbourhood("192.0.2.7") == "192.0.2.7"
    assert neighbourhood("::ffff:192.0.2.7") == "192.0.2.7"
    assert neighbourhood("2001:db8:1:2:3:4:5:6") == neighbourhood("2001:db8:1:2::1%eth0") == "2001:db8:1:2::/64"
    assert neighbourhood("2001:db8:1:3::1") != neighbourhood("2001:db8:1:2::1")
