"""What is believed of all active jobs, laid out as the arrays of a `Workload`."""

import numpy as np

from poise.core.beliefs import within
from poise.model.arrays import Bools, Floats, Ints
from poise.model.columns import Snapshot
from poise.model.speed import Estimate, Locality
from poise.model.topology import Topology
from poise.model.workload import Workload

NO_PRICE = 1.0
"""Of a GPU-hour where the cluster states none."""


class Survey:
    """The estimates by index. Spread columns are there once some kind of job is believed to lose speed by being split."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._types = len(topology.types)
        self._estimates: list[Estimate] = []
        self._rates: list[tuple[float, ...]] = []
        self._is_split_costly = False
        self._table: Floats | None = None
        self._pairs: dict[tuple[int, int], tuple[float, ...]] = {}
        self._beside: Floats | None = None
        prices = topology.cluster.prices
        self._price = np.array([prices.get(name, NO_PRICE) for name in topology.types])

    def learn(self, perceived: Estimate) -> int:
        """Take in an estimate; returns its index."""
        rates = _by_column(perceived)
        self._is_split_costly = self._is_split_costly or rates[: self._types] != rates[self._types :]
        self._estimates.append(perceived)
        self._rates.append(rates)
        self._table = self._beside = None
        return len(self._rates) - 1

    def learn_pair(self, one: int, other: int, rates: tuple[tuple[float, float], ...]) -> None:
        """Take in what two kinds do to each other, by type."""
        self._pairs[one, other] = tuple(mine for mine, _ in rates)
        self._pairs[other, one] = tuple(others for _, others in rates)
        self._beside = None

    def beside(self, one: int, other: int, gpu_type: int) -> float:
        """Steps per second of a kind beside another one; 0 if nothing is known of the two, or they do not fit together."""
        return self._pairs[one, other][gpu_type] if (one, other) in self._pairs else 0.0

    @property
    def knows_pairs(self) -> bool:
        """Whether anything is known of pairs: only where the policy lets jobs share GPUs."""
        return bool(self._pairs)

    def _known_beside(self, columns: int) -> Floats | None:
        """(kinds, kinds, columns); pairs are packed. None if nothing is known of pairs."""
        if not self._pairs:
            return None
        if self._beside is None or self._beside.shape[2] != columns:
            kinds = len(self._rates)
            self._beside = np.zeros((kinds, kinds, columns))
            for (one, other), rates in self._pairs.items():
                self._beside[one, other, : self._types] = rates
        return self._beside

    def column(self, gpu_type: int, locality: Locality) -> int:
        """The column that a run on such GPUs is counted in."""
        return gpu_type if locality is Locality.PACKED else gpu_type + self._types

    def workload(self, live: tuple[int, ...], partner: dict[int, int], snapshot: Snapshot) -> Workload:
        """The jobs of a snapshot, with so many GPUs alive; `partner` says by row who shares GPUs with whom."""
        columns = snapshot.columns
        if self._table is None:
            self._table = np.array(self._rates)
        kind = snapshot.ints(columns.kind)
        gang = snapshot.gang.astype(float)
        gpus = np.array(live, dtype=float)
        held = snapshot.ints(columns.place) - 1
        divides = snapshot.ints(columns.tasks) > 0
        has_divisible = bool(divides.any())
        speed = self._table[kind]
        if has_divisible:
            self._do_with_fewer(divides, kind, gpus, gang, speed)
        if self._is_split_costly:
            speed[gang == 1.0, self._types :] = 0.0  # one GPU is never spread
        else:
            speed = speed[:, : self._types]
            held = np.where(held >= self._types, held - self._types, held)
        column_type = np.arange(speed.shape[1]) % self._types
        speed[gang[:, None] > gpus[column_type]] = 0.0
        return Workload(
            now=snapshot.now,
            rows=snapshot.rows,
            gang=gang,
            weight=snapshot.weight,
            submitted=snapshot.submitted,
            deadline=snapshot.floats(columns.deadline),
            steps_left=snapshot.steps_left,
            tenant=snapshot.ints(columns.tenant),
            speed=speed,
            held=held,
            partner=_places(snapshot.rows, partner),
            gpus=gpus,
            price=self._price,
            column_type=column_type,
            kind=kind,
            known_beside=self._known_beside(speed.shape[1]),
            divides=divides if has_divisible else None,
            part=_part(snapshot, speed, held) if has_divisible else None,
            tenant_weight=np.array(columns.tenant_weights),
            pinned=snapshot.among(snapshot.pinned) if snapshot.pinned else None,
            free=gpus - self._kept(snapshot) if snapshot.pinned else None,
        )

    def _kept(self, snapshot: Snapshot) -> Floats:
        """GPUs of each type that pinned jobs hold."""
        kept = np.zeros(self._types)
        for holding in snapshot.kept().values():
            kept += self._topology.mix(holding)
        return kept

    def _do_with_fewer(self, divides: Bools, kind: Ints, gpus: Floats, gang: Floats, speed: Floats) -> None:
        """Jobs whose rounds divide and whose gang no type has enough live GPUs for are to have what there is."""
        most = np.where(speed[:, : self._types] > 0, gpus, 0.0).max(axis=1)
        for job in np.flatnonzero(divides & (gang > most)).tolist():
            fewer = within(self._estimates[kind[job]], gpus.astype(int).tolist())
            if fewer.tasks is not None:
                gang[job], speed[job] = fewer.tasks.gang, _by_column(fewer)


def _by_column(estimate: Estimate) -> tuple[float, ...]:
    """Rates by type, packed and then spread."""
    packed = [row[Locality.PACKED] for row in estimate.rates]
    return (*packed, *[row[Locality.CLUSTER] for row in estimate.rates])


def _part(snapshot: Snapshot, speed: Floats, held: Ints) -> Floats:
    """Speed now ÷ speed of the whole gang on the column held; 1 of those who wait, or hold what they could not share in."""
    whole = speed[np.arange(len(held)), held]
    known = (held >= 0) & (whole > 0)
    return np.where(known, snapshot.floats(snapshot.columns.rate) / np.where(known, whole, 1.0), 1.0)


def _places(rows: Ints, partner: dict[int, int]) -> Ints:
    """Each job's partner, as a place among the rows; -1 for none."""
    places = np.full(len(rows), -1)
    for row, other in partner.items():
        places[np.searchsorted(rows, row)] = np.searchsorted(rows, other)
    return places
