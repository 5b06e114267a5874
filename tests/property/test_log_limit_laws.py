"""Log lines that clients can cause at will: few are written, and all others are counted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from poise.service.server.logs import LINES, MOST_SOURCES, OTHERS, SPAN, LineLimiter

COMINGS = st.lists(st.tuples(st.integers(0, 2 * MOST_SOURCES), st.integers(1, 30), st.floats(0.0, SPAN / 2)), max_size=300)


@given(COMINGS)
def test_every_line_is_written_or_counted(comings: list[tuple[int, int, float]]) -> None:
    limiter, now = LineLimiter(), 0.0
    written, left_out, asked = Counter[str](), Counter[str](), 0
    for who, lines, later in comings:
        now += later
        left_out.update(limiter.suppressed(now))
        for _ in range(lines):
            asked += 1
            written[str(who)] += limiter.passes(str(who), now)
    left_out.update(limiter.suppressed(now + SPAN))
    assert limiter.suppressed(now + 2 * SPAN) == {}
    assert written.total() + left_out.total() == asked


@given(st.integers(0, 5 * LINES), st.integers(0, 5 * LINES))
def test_each_source_of_lines_has_a_limit_of_its_own(mine: int, others: int) -> None:
    limiter = LineLimiter()
    assert sum(limiter.passes("a", 0.0) for _ in range(mine)) == min(mine, LINES)
    assert sum(limiter.passes("b", SPAN / 2) for _ in range(others)) == min(others, LINES)
    assert limiter.suppressed(SPAN / 2) == {}
    expected = {"a": mine - LINES, "b": others - LINES}
    assert limiter.suppressed(SPAN if mine else 1.5 * SPAN) == {who: count for who, count in expected.items() if count > 0}


def test_sources_beyond_the_first_ones_share_a_limit() -> None:
    limiter = LineLimiter()
    written = sum(limiter.passes(str(who), 0.0) for who in range(100 * MOST_SOURCES) for _ in range(2))
    assert written == 2 * MOST_SOURCES + LINES
    assert limiter.suppressed(SPAN) == {OTHERS: 2 * 99 * MOST_SOURCES - LINES}
