"""Lines that others can cause: however many there are, few are written, and none goes uncounted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from poise.service.server.logs import LINES, MOST, OTHERS, SPAN, Damper

COMINGS = st.lists(st.tuples(st.integers(0, 2 * MOST), st.integers(1, 30), st.floats(0.0, SPAN / 2)), max_size=300)


@given(COMINGS)
def test_every_line_is_written_or_counted(comings: list[tuple[int, int, float]]) -> None:
    damper, now = Damper(), 0.0
    written, left_out, asked = Counter[str](), Counter[str](), 0
    for who, lines, later in comings:
        now += later
        left_out.update(damper.over(now))
        for _ in range(lines):
            asked += 1
            written[str(who)] += damper.passes(str(who), now)
    left_out.update(damper.over(now + SPAN))
    assert damper.over(now + 2 * SPAN) == {}
    assert written.total() + left_out.total() == asked


@given(st.integers(0, 5 * LINES), st.integers(0, 5 * LINES))
def test_each_who_causes_lines_has_a_bound_of_its_own(mine: int, others: int) -> None:
    damper = Damper()
    assert sum(damper.passes("a", 0.0) for _ in range(mine)) == min(mine, LINES)
    assert sum(damper.passes("b", SPAN / 2) for _ in range(others)) == min(others, LINES)
    assert damper.over(SPAN / 2) == {}
    expected = {"a": mine - LINES, "b": others - LINES}
    assert damper.over(SPAN if mine else 1.5 * SPAN) == {who: count for who, count in expected.items() if count > 0}


def test_very_many_who_cause_lines_share_a_bound() -> None:
    damper = Damper()
    written = sum(damper.passes(str(who), 0.0) for who in range(100 * MOST) for _ in range(2))
    assert written == 2 * MOST + LINES
    assert damper.over(SPAN) == {OTHERS: 2 * 99 * MOST - LINES}
