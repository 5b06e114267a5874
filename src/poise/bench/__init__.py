"""What one answer of a policy costs."""

from poise.bench.drawing import (
    CLASSES_OF_PAIRS,
    MOST_KINDS_OF_PAIRS,
    Draw,
    drawn,
    drawn_apps,
    drawn_for,
    drawn_works,
    settled,
)
from poise.bench.timing import Figures, allocator_of, measured, time_allocation, time_auction, time_plan

__all__ = [
    "CLASSES_OF_PAIRS",
    "MOST_KINDS_OF_PAIRS",
    "Draw",
    "Figures",
    "allocator_of",
    "drawn",
    "drawn_apps",
    "drawn_for",
    "drawn_works",
    "measured",
    "settled",
    "time_allocation",
    "time_auction",
    "time_plan",
]
