"""The vocabulary of results: one `Case` per measurement, one `Finding` per property."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite
from typing import Any

ROUNDING = 1e-9
"""How much a measurement may exceed its bound: the last bits of a sum."""
TOO_SHORT = 0.5
"""Largest bound on a gain, as a fraction of a slice, a life or a speed. Where more would be allowed, times are so short that
turns decide, and there is nothing to measure."""


class Property(StrEnum):
    """What is measured of a policy; the keys of `--json`."""

    SHARING_INCENTIVE = "sharing_incentive"
    SHARING_INCENTIVE_OF_GANGS = "sharing_incentive_of_gangs"
    ENVY_FREENESS = "envy_freeness"
    PARETO_EFFICIENCY = "pareto_efficiency"
    STRATEGY_PROOFNESS = "strategy_proofness"
    STARVATION_FREEDOM = "starvation_freedom"


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: within its bound, or a counterexample.

    text   the case in a sentence
    data   the same for programs: who, what they got, what they would have had
    """

    measured: float
    bound: float
    text: str
    data: Mapping[str, Any]

    @property
    def excess(self) -> float:
        """How far it is beyond its bound; negative if it is not."""
        return self.measured - self.bound

    @property
    def holds(self) -> bool:
        """Whether it is within its bound."""
        return self.excess <= ROUNDING


@dataclass(frozen=True, slots=True)
class Finding:
    """What the cases of one property say together.

    worst   the case that goes furthest beyond its bound, or comes nearest to it; None if there was none to measure
    cases   how many were measured
    parts   the same of some of the cases, by kind; `worst` and `cases` are of all of them
    """

    worst: Case | None
    cases: int
    parts: Mapping[str, "Finding"] = field(default_factory=dict)

    @staticmethod
    def of(cases: Iterable[Case], parts: Mapping[str, Sequence[Case]] | None = None) -> "Finding":
        """Sum up cases; of several that are equally bad, the first is the worst."""
        found = list(cases)
        worst = max(found, key=lambda case: case.excess, default=None)
        return Finding(worst, len(found), {name: Finding.of(each) for name, each in (parts or {}).items()})

    @property
    def holds(self) -> bool | None:
        """Whether every case is within its bound; None if there was none."""
        return None if self.worst is None else self.worst.holds

    @property
    def counterexample(self) -> Case | None:
        """The worst case, if it is beyond its bound."""
        return None if self.holds is not False else self.worst

    def document(self) -> dict[str, Any]:
        """The finding as JSON; infinities become None."""
        case = self.counterexample
        worst, bound = (inf, inf) if self.worst is None else (self.worst.measured, self.worst.bound)
        return {
            "holds": self.holds,
            "worst": worst if isfinite(worst) else None,
            "bound": bound if isfinite(bound) else None,
            "cases": self.cases,
            "counterexample": None if case is None else {**case.data, "text": case.text},
            **{name: part.document() for name, part in self.parts.items()},
        }
