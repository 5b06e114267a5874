"""Successive halving inside an app (Hyperband, Li et al., JMLR'18): the app's own scheduler, which kills the hopeless early.

n jobs of an app, η = 2. K = ⌈log_η n⌉ rungs; rung k is at η^(k−1−K) of a job's work, so the last one is halfway:

    when every live job has reached rung k, the ⌈n / η^k⌉ of least loss go on and the others are given up

At n = 8: an eighth of the work for all eight, a quarter for the best four, a half for the best two, all of it for the best.
The loss of a job at a rung is the first one that it reports there. Jobs that report no loss are never given up, nor is an
app judged before all its live jobs have reported. A report is no event to a policy: the app looks when it expects one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite, log

from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import JobEnding
from poise.scheduler.policies.themis.bidders import AppRegistry

PATIENCE = 60.0
"""Seconds after which to look again for a report that is overdue."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Halving:
    """Keeps one in `eta` jobs at each rung; with an eta of 1 it gives up none."""

    eta: float = 2.0

    def endings(self, snapshot: Snapshot, registry: AppRegistry) -> tuple[JobEnding, ...]:
        """Jobs that their apps give up now."""
        if self.eta <= 1 or not snapshot.losses:
            return ()
        apps = dict.fromkeys(snapshot.columns.app[row] for row in snapshot.losses if row in snapshot.placement.holdings)
        return tuple(ending for app in apps if app in registry.sweeps for ending in self._judged(app, snapshot, registry))

    def ahead(self, snapshot: Snapshot, registry: AppRegistry) -> frozenset[int]:
        """Jobs that have reached a rung at which they have to wait for siblings: they make way for them."""
        if self.eta <= 1 or not snapshot.losses:
            return frozenset()
        reached: set[int] = set()
        for app in {snapshot.columns.app[row] for row in snapshot.losses}:
            if app in registry.sweeps:
                jobs, live = len(registry.sweeps[app]), registry.live(app, snapshot)
                part = self.part(jobs, self.rung(jobs, len(live)))
                losses = {row: _loss_at(part * snapshot.columns.steps[row], snapshot.losses.get(row, ())) for row in live}
                reached.update(row for row, loss in losses.items() if isfinite(loss))
        return frozenset(reached)

    def next_look(self, snapshot: Snapshot, registry: AppRegistry) -> float:
        """When some app may have reached its next rung."""
        columns = snapshot.columns
        apps = {columns.app[row] for row in snapshot.active if columns.apps[row] is not None} if self.eta > 1 else ()
        return min((self._expected(app, snapshot, registry) for app in apps), default=inf)

    def _expected(self, app: int, snapshot: Snapshot, registry: AppRegistry) -> float:
        """When the last job of an app is expected at its rung, if those that wait began now.

        For late reports it looks again soon; if no job has ever reported, once the app is twice as old.
        """
        jobs, live = len(registry.sweeps[app]), registry.live(app, snapshot)
        part = self.part(jobs, self.rung(jobs, len(live)))
        if len(live) < 2:
            return inf
        columns = snapshot.columns
        last = -inf
        for row in live:  # a running job goes on as it does, a waiting one from now on at its best
            left = part * columns.steps[row] - columns.steps_done[row]
            if columns.rate[row] > 0:
                last = max(last, columns.progress_from[row] + left / columns.rate[row])
            else:
                last = max(last, snapshot.now + max(left, 0.0) / columns.best[row])
        if last > snapshot.now:
            return last
        reports = any(row in snapshot.losses for row in live)
        return snapshot.now + (PATIENCE if reports else max(PATIENCE, snapshot.now - registry.begun[app][0]))

    def _judged(self, app: int, snapshot: Snapshot, registry: AppRegistry) -> list[JobEnding]:
        """One rung after the other, as far as all that are left have reported."""
        jobs, live = len(registry.sweeps[app]), registry.live(app, snapshot)
        ends: list[JobEnding] = []
        while len(live) > 1:
            rung = self.rung(jobs, len(live))
            part = self.part(jobs, rung)
            losses = {row: _loss_at(part * snapshot.columns.steps[row], snapshot.losses.get(row, ())) for row in live}
            if not all(map(isfinite, losses.values())):
                break
            ranked = sorted(live, key=lambda row: (losses[row], row))
            live, worst = ranked[: self.kept(jobs, rung)], ranked[self.kept(jobs, rung) :]
            why = f"loss among the worst {len(worst)} of {len(ranked)} after {part:.3g} of the work"
            ends += [JobEnding(row, why) for row in sorted(worst)]
        return ends

    def kept(self, jobs: int, rung: int) -> int:
        """How many of an app's `jobs` go on beyond a rung."""
        return max(1, ceil(jobs / self.eta**rung - _ROUNDING))

    def rung(self, jobs: int, live: int) -> int:
        """The next rung of an app of `jobs` jobs, of which `live` are left."""
        rung = 1
        while self.kept(jobs, rung) >= live > 1:
            rung += 1
        return rung

    def part(self, jobs: int, rung: int) -> float:
        """The part of a job's work at which a rung is."""
        rungs = max(1, ceil(log(jobs) / log(self.eta) - _ROUNDING)) if jobs > 1 else 1
        return min(1.0, self.eta ** (rung - 1 - rungs))


def _loss_at(steps: float, reports: Sequence[tuple[float, float]]) -> float:
    """The first loss reported at `steps` or beyond; inf if there is none yet."""
    return next((loss for at, loss in reports if at >= steps * (1 - _ROUNDING)), inf)
