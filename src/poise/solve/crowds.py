"""Rows of one kind taken together as a crowd: what a crowd's time can give its rows, and how it is divided among them.

A crowd has time Y_w in each way w to run (alone on a column, or beside another crowd there), at speed s_w. Each row m stands
for n_m alike members; a member runs for at most 1 and wants throughput r_m. Let F(k) be what the fastest k units of time
give (no more than Y_w of each way; what is missing is idle). Then time can be divided so that all get what they want

    if and only if    Σ of the k largest wants <= F(k)   for all k.                                                   (*)

Needed: k members have k units of time at most. Enough: lay all time (idle at last) in a line, fastest first. In order of
decreasing wants, a row takes a stretch of length n_m that gives just n_m r_m, or the slowest stretch if that gives more, and
what is left is closed up; (*) then holds for the others: stretches before it are faster than anything that is wanted, and
those that reach past it lost just what was taken. F is concave and the wants of one row are equal, so k need only run over
whole rows.

Because F(k) = min over λ >= 0 of kλ + Σ_w (s_w - λ)⁺ Y_w, each k in (*) is linear in Y once its λ is known: a `Cut`.
"""

from dataclasses import dataclass

import numpy as np

from poise.model.arrays import Floats, Ints


@dataclass(frozen=True)
class Cut:
    """Σ_w (speed_w - over)⁺ Y_w + people · over >= what `members` (indices of rows) want together."""

    crowd: int
    over: float
    members: Ints
    people: float


def missing(crowd: int, rows: Ints, ways: tuple[Floats, Floats], wants: Floats, count: Floats, least: float) -> Cut | None:
    """The line of (*) that is broken most, None if none is by `least` a member. `ways` is speeds and times."""
    order = np.argsort(-wants, kind="stable")
    order = order[wants[order] > 0]
    if not len(order):
        return None
    people = np.cumsum(count[order])
    asked = np.cumsum(wants[order] * count[order])
    speed, reach, given = _line(*ways)
    short = (asked - np.interp(people, reach, given)) / people
    worst = int(short.argmax())
    if short[worst] <= least:
        return None
    segment = int(np.searchsorted(reach, people[worst], side="left"))
    over = float(speed[segment - 1]) if segment <= len(speed) else 0.0
    return Cut(crowd, over, np.sort(rows[order[: worst + 1]]), float(people[worst]))


def divided(speed: Floats, time: Floats, wants: Floats, count: Floats) -> Floats:
    """(rows, ways): the time of each row, so that all of it is given out and all wants are met if (*) holds."""
    order = np.argsort(-speed, kind="stable")
    left = [*time[order].tolist(), max(float(count.sum() - time.sum()), 0.0)]
    rate = [*speed[order].tolist(), 0.0]
    parts = np.empty((len(wants), len(left)))
    for row in np.argsort(-wants, kind="stable").tolist():
        part = _stretch(left, rate, float(count[row]), float(count[row] * wants[row]))
        left = [max(have - take, 0.0) for have, take in zip(left, part, strict=True)]
        parts[row] = part
    parts[wants.argmin()] += left  # what rounding left over
    answer = np.empty((len(wants), len(time)))
    answer[:, order] = parts[:, :-1]
    return answer


def in_proportion(time: Floats, wants: Floats, count: Floats) -> Floats:
    """(rows, ways): every way divided as wants are."""
    weight = wants * count if (wants > 0).any() else count
    return np.outer(weight / weight.sum(), time)


def crossed(left: Floats, right: Floats) -> tuple[Ints, Ints, Floats]:
    """Pairs (i, j, time) in which each i spends left_i and each j right_j of equal totals; as few as can be, in order."""
    ends_left, ends_right = np.cumsum(left), np.cumsum(right)
    total = min(ends_left[-1], ends_right[-1])
    ends = np.unique(np.minimum(np.concatenate([ends_left, ends_right]), total))
    starts = np.concatenate([[0.0], ends[:-1]])
    middle = (starts + ends) / 2.0
    i = np.minimum(np.searchsorted(ends_left, middle), len(left) - 1)
    j = np.minimum(np.searchsorted(ends_right, middle), len(right) - 1)
    return i, j, ends - starts


def folded(time: Floats) -> tuple[Ints, Ints, Floats]:
    """Pairs (i, j, time) of one crowd in which each i spends time_i; no i is beside itself if it has at most half of all."""
    ends = np.cumsum(time)
    half = ends[-1] / 2.0
    first = np.diff(np.minimum(ends, half), prepend=0.0)
    return crossed(first, time - first)


def _line(speed: Floats, time: Floats) -> tuple[Floats, Floats, Floats]:
    """Speeds in descending order, and where F bends: the points and its values there."""
    order = np.argsort(-speed, kind="stable")
    speed, time = speed[order], time[order]
    reach = np.concatenate([[0.0], np.cumsum(time)])
    return speed, reach, np.concatenate([[0.0], np.cumsum(speed * time)])


def _stretch(left: list[float], rate: list[float], length: float, want: float) -> list[float]:
    """The time of each segment in the slowest stretch of this length that gives what is wanted, the fastest if none does.

    It begins as the fastest, and moves on: what it leaves behind at its tail it takes up at its head.
    """
    part = _fastest(left, length)
    spare = sum(have * speed for have, speed in zip(part, rate, strict=True)) - want
    tail, head = 0, 0
    while head < len(left) and spare > 0:
        if part[tail] <= 0:
            tail += 1
            head = max(head, tail)
        elif head == tail or part[head] >= left[head]:
            head += 1
        else:
            loss = rate[tail] - rate[head]
            room = min(part[tail], left[head] - part[head])
            step = min(room, spare / loss) if loss > 0 else room
            part[tail] = 0.0 if step >= part[tail] else part[tail] - step
            part[head] = left[head] if step >= left[head] - part[head] else part[head] + step
            spare = 0.0 if step < room else spare - step * loss
    return part


def _fastest(left: list[float], length: float) -> list[float]:
    """As much time as this, from the first segments."""
    part = []
    for have in left:
        part.append(min(have, length))
        length -= part[-1]
    return part
