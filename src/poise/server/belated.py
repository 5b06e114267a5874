"""News that comes late: of runs that ended while nobody looked."""

from collections.abc import Iterable, Sequence

from poise.engine.live import News, RunEnded


def told_late(news: Sequence[News], since: float) -> tuple[list[list[News]], list[News]]:
    """Runs that ended before `since`, in the order of their ends, each with all that is told of it; and the rest."""
    late = sorted((each for each in news if isinstance(each, RunEnded) and each.at < since), key=lambda each: each.at)
    runs = {(each.job, each.epoch) for each in late}
    before = _by_run(each for each in news if not isinstance(each, RunEnded))
    whole = [[*before.get((each.job, each.epoch), ()), each] for each in late]
    return whole, [each for each in news if (each.job, each.epoch) not in runs]


def _by_run(news: Iterable[News]) -> dict[tuple[str, int], list[News]]:
    found: dict[tuple[str, int], list[News]] = {}
    for each in news:
        found.setdefault((each.job, each.epoch), []).append(each)
    return found
