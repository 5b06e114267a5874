"""Which of several values are the best, to a reader who sees them as they are written."""

from collections.abc import Sequence
from math import isfinite
from typing import Literal

Kind = Literal["lowest", "highest"]


def best_places(values: Sequence[float | None], written: Sequence[str], kind: Kind) -> list[int]:
    """Places of the best value and of all that are written as it is: a reader could not say why one is marked alone.

    None where fewer than two are known, or where all known ones are written the same: then there is nothing to choose.
    """
    known = {place: value for place, value in enumerate(values) if value is not None and isfinite(value)}
    if len({written[place] for place in known}) < 2:
        return []
    best = (min if kind == "lowest" else max)(known, key=lambda place: known[place])
    return [place for place in known if written[place] == written[best]]
