"""Planners for tests: one without sense, which uses everything that a plan may say, and one that follows a script."""

from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import Any

from poise.scheduler.model.action import Entitled, Remark
from poise.scheduler.model.cluster import Site
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import (
    Claim,
    Grain,
    JobEnding,
    Plan,
    Policy,
    PreemptionRule,
    StopMode,
    Unfitting,
)
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.placement_draft import PlacementDraft

WHIMS = tuple(f"whim:{seed}" for seed in range(9))
GIVEN_UP = "wanted no more"


@dataclass(frozen=True)
class Whim:
    """Claims any job that waits, for numbers, places and types at will; stops, moves, resizes and gives up a few."""

    seed: int

    def start(self) -> int:
        return 0

    def plan(self, snapshot: Snapshot, memory: int) -> tuple[Plan, int]:
        chance = Random(1000 * self.seed + memory)
        waiting = [row for row in snapshot.active if row not in snapshot.placement.holdings]
        running = [row for row in snapshot.active if row in snapshot.placement.holdings]
        chance.shuffle(waiting)
        ends = tuple(JobEnding(row, GIVEN_UP) for row in snapshot.active if chance.random() < 0.02)
        ended = {row for row, _ in ends}
        held = tuple(row for row in snapshot.active if chance.random() < 0.1)
        claimed = [row for row in waiting if row not in {*held, *ended}]
        begun = {row for row in running if 0 < snapshot.columns.ready[row] < snapshot.columns.tasks[row]}
        changed = [row for row in running if row not in ended and chance.random() < (0.6 if row in begun else 0.15)]
        wanted = (a_claim(row, snapshot, chance) for row in (*claimed, *changed))
        claims = tuple(claim for claim in wanted if claim is not None)
        return (
            Plan(
                claims,
                chance.choice((Unfitting.SKIPPED, Unfitting.SKIPPED, Unfitting.BLOCKS)),
                chance.choice((PreemptionRule.NEVER, PreemptionRule.NEVER, PreemptionRule.BY_RANK)),
                wake=snapshot.now + chance.choice((1.0, 2.5, 0.75)),
                stops=tuple(row for row in snapshot.active if chance.random() < 0.1),
                stopping=chance.choice((StopMode.FOR_OTHERS, StopMode.FIRM)),
                ends=ends,
                over_share=held,
                notes=(Remark("on a whim"), Entitled("nobody", (0.5,))) if chance.random() < 0.1 else (),
            ),
            memory + 1,
        )


def a_claim(row: int, snapshot: Snapshot, chance: Random) -> Claim | None:
    """For the gang, for another number, for one type, or for just some place where it would fit now.

    Where rounds divide, also for a mix, or for some tasks of the current round; for these only, once they have begun.
    """
    columns = snapshot.columns
    is_tasked = columns.ready[row] < columns.tasks[row]
    if columns.tasks[row] and (is_tasked or chance.random() < 0.7):
        may_task = is_tasked or row not in snapshot.placement.holdings
        return a_mix(row, snapshot, chance, Grain.TASK if may_task and (is_tasked or chance.random() < 0.6) else Grain.LEASE)
    rates = snapshot.estimate(row)
    least, most = snapshot.columns.least[row], snapshot.columns.most[row]
    gpus = chance.randint(least, max(least, min(most, snapshot.gpus)))
    able = tuple(index for index, speeds in enumerate(rates.at(gpus)) if speeds[Locality.PACKED] > 0)
    match chance.randrange(5):
        case 0:
            return Claim(row)
        case 1:
            return Claim(row, chance.choice(tuple(Locality)), gpus=gpus)
        case 2 if able:
            return Claim(row, chance.choice(tuple(Locality)), types=(chance.choice(able),), gpus=gpus)
        case 3 if able:
            return Claim(row, gpus=gpus, site=a_site(snapshot, chance.choice(able), gpus))
        case _:
            return Claim(row, gpus=snapshot.columns.gpus[row] or None)


def a_mix(row: int, snapshot: Snapshot, chance: Random, grain: Grain) -> Claim | None:
    """For any numbers of GPUs of the types that the job can use, most of them free now; None if that comes to nothing."""
    tasks, columns = snapshot.estimate(row).tasks, snapshot.columns
    left = columns.ready[row] if grain is Grain.TASK else columns.tasks[row]
    mix = [0] * len(snapshot.idle)
    for kind in tasks.types if tasks else ():
        mix[kind] = chance.randint(0, min(left, snapshot.idle[kind] + chance.choice((0, 0, 1))))
        left -= mix[kind]
    return Claim(row, mix=tuple(mix), grain=grain) if any(mix) else None


def a_site(snapshot: Snapshot, gpu_type: int, gpus: int) -> Site | None:
    return PlacementDraft(snapshot.placement).tightest(gpu_type, gpus)


def whim(spec: str) -> Policy:
    """The policy of a specification such as `whim:3`."""
    return Policy(spec, Whim(int(spec.partition(":")[2])))


@dataclass(frozen=True)
class Script:
    """Plans by moment; at other moments everybody goes on and nobody is claimed for."""

    plans: tuple[tuple[float, Plan], ...]

    def start(self) -> None:
        return None

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        now = snapshot.now
        found = next((plan for moment, plan in self.plans if moment == now), NOTHING)
        wake = min((moment for moment, _ in self.plans if moment > now), default=inf)
        return replace(found, wake=wake), memory


def a_plan(*claims: Claim, stops: tuple[int, ...] = (), **fields: Any) -> Plan:
    """A plan that stops nobody but those it names; stops that nobody needed are undone."""
    usual: dict[str, Any] = {"stopping": StopMode.FOR_OTHERS, "stops": stops}
    return Plan(claims, Unfitting.SKIPPED, PreemptionRule.NEVER, **(usual | fields))


NOTHING = a_plan()


def scripted(plans: dict[float, Plan]) -> Policy:
    """A policy that answers with these plans at these moments."""
    return Policy("script", Script(tuple(sorted(plans.items(), key=lambda each: each[0]))))
