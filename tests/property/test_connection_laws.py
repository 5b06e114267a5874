"""Which connection is closed when there are too many, for any order of arrivals, requests and departures."""

import asyncio
import socket
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from poise.service.server.http.connections import ClientConnection, ConnectionLimits, ConnectionTable, peer_of
from poise.service.server.logs import Level, Logbook
from poise.service.wire.views import Account, Role

LIMITS = ConnectionLimits(anonymous=4, authenticated=5, per_token=3, grace=2.0)
ACCOUNTS = [
    Account(name=name, tenant="t", role=role) for name, role in (("a", Role.USER), ("b", Role.USER), ("o", Role.OPERATOR))
]


class FakeTransport(asyncio.Transport):
    """A transport that notes that it was aborted."""

    is_closed = False

    def abort(self) -> None:
        self.is_closed = True


class World:
    """Connections, and what became of them, kept the long way."""

    def __init__(self) -> None:
        self.table = ConnectionTable(LIMITS, Logbook(least=Level.ERROR))
        self.now = 0.0
        self.there: dict[ClientConnection, Account | None] = {}
        self.busy: set[ClientConnection] = set()
        self._socket = socket.socket()

    def close(self) -> None:
        self._socket.close()

    def wait(self, tenths: int) -> None:
        self.now += tenths / 10

    def come(self, peer: int) -> None:
        """As `accept` does it: make room first, or wait."""
        before = [each for each, account in self.there.items() if account is None]
        wait = self.table.make_room(self.now, is_short=False)
        self._look()
        for dropped in [each for each in before if each not in self.there]:
            assert len(before) > LIMITS.anonymous
            assert self.now - dropped.accepted >= LIMITS.grace
            addresses = Counter(each.address for each in before)
            assert addresses[dropped.address] == max(addresses.values())
            assert dropped is next(each for each in before if each.address == dropped.address)
        if wait:
            assert all(each in self.there for each in before)
            assert len(before) > LIMITS.anonymous
            return
        link = ClientConnection(self.table, self._socket, f"10.0.0.{peer}", self.now)
        link.transport = FakeTransport()
        self.table.enter(link)
        self.there[link] = None

    def begin(self, which: int, who: int) -> None:
        free = [each for each in self.there if each not in self.busy]
        if not free:
            return
        link, account = free[which % len(free)], ACCOUNTS[who]
        busy = sum(self.there[each] is not None for each in self.busy)
        if busy >= LIMITS.authenticated - 1:  # requests are bounded, below connections
            return
        if sum(self.there[each] == account for each in self.busy) >= LIMITS.per_token - 1:
            return
        self.there[link] = account
        self.busy.add(link)
        self.table.begin(link, account)
        self._look()
        assert link in self.there, "a connection that has just brought a token stays"
        self._check()

    def end(self, which: int) -> None:
        if self.busy:
            link = sorted(self.busy, key=list(self.there).index)[which % len(self.busy)]
            self.busy.discard(link)
            self.table.end(link)

    def leave(self, which: int) -> None:
        if self.there:
            link = list(self.there)[which % len(self.there)]
            self.table.leave(link)
            self.table.leave(link)  # it is removed twice after it was closed here
            self.there.pop(link)
            self.busy.discard(link)

    def _look(self) -> None:
        """Forget those that were closed."""
        for link in [each for each in self.there if isinstance(each.transport, FakeTransport) and each.transport.is_closed]:
            assert link not in self.busy, "no connection with a request under way is closed"
            del self.there[link]

    def _check(self) -> None:
        known = [account for account in self.there.values() if account is not None]
        assert len(known) <= LIMITS.authenticated
        for account in ACCOUNTS[:2]:
            assert known.count(account) <= LIMITS.per_token

    def count(self) -> None:
        assert len(self.table) == len(self.there)
        assert sum(account is None for account in self.there.values()) <= LIMITS.anonymous + 1


STEPS = st.one_of(
    st.tuples(st.just("come"), st.integers(0, 2)),
    st.tuples(st.just("begin"), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(0, 30)),
)


@given(st.lists(STEPS, max_size=60))
def test_new_connections_are_accepted_and_only_idle_or_the_oldest_anonymous_ones_are_closed(
    steps: list[tuple[str, *tuple[int, ...]]],
) -> None:
    world = World()
    try:
        for name, *given_ in steps:
            getattr(world, name)(*given_)
            world.count()
    finally:
        world.close()


def test_connections_of_operators_are_closed_only_if_no_other_is_idle() -> None:
    world = World()
    for _ in range(LIMITS.authenticated):
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


def test_connection_that_is_closed_before_its_request_is_looked_at_stays_forgotten() -> None:
    table = ConnectionTable(LIMITS, Logbook(least=Level.ERROR))
    with socket.socket() as accepted:
        connection = ClientConnection(table, accepted, "10.0.0.1", 0.0)
        table.enter(connection)
        connection.closed()
        connection.request_started()
        connection.authenticated(ACCOUNTS[0])
        connection.request_finished()
    assert len(table) == 0


def test_peer_is_an_ipv4_address_or_an_ipv6_network() -> None:
    assert peer_of("192.0.2.7") == "192.0.2.7"
    assert peer_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert peer_of("2001:db8:1:2:3:4:5:6") == peer_of("2001:db8:1:2::1%eth0") == "2001:db8:1:2::/64"
    assert peer_of("2001:db8:1:3::1") != peer_of("2001:db8:1:2::1")
