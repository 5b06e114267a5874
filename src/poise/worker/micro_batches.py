"""The micro-batches of a step: how many there are, which of them each rank computes, and which samples are in each.

Shares are ranges of consecutive numbers in order of rank: disjoint, complete, and the same on whichever rank they are
computed. The slowest rank is done as early as possible. With equal ranks: floor(n / ranks) each, and one more for the first
n mod ranks.
"""

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

from poise.worker.protocol import WorkerEnv, WorkerError

if TYPE_CHECKING:  # imports torch, which takes seconds
    from poise.worker.accumulation import Accumulation


class MicroBatches(int):
    """The number of micro-batches per step. Called with a batch and a model, this rank's parts of that batch.

    A number that can be called, since scripts have used `lease.micro_batches` as a number from the first: it divides,
    counts and is printed like one. What it does when it is called is about the very same micro-batches.
    """

    _env: WorkerEnv
    _report: Callable[[float], object]
    _found: dict[int, list[range]]  # micro-batches of each rank, by how many there are in all
    _step: int
    _uses: int  # in this step
    _is_open: bool  # it was called, and the loop over the parts has not come to its end

    def __new__(cls, env: WorkerEnv, report: Callable[[float], object]) -> Self:
        """Make it from the environment. `report` is called with the loss of each whole batch."""
        made = super().__new__(cls, env.micro_batches or env.world_size)
        made._env, made._report, made._found = env, report, {}
        made._step, made._uses, made._is_open = 0, 0, False
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # copied into a checkpoint or another process it is the number alone

    def __call__(
        self,
        batch: Any,  # noqa: ANN401  tensors, arrays, sequences
        *models: Any,  # noqa: ANN401  torch.nn.Module
        parts: int | None = None,
        seed: int | str | None = 0,
        scaler: Any = None,  # noqa: ANN401  torch.amp.GradScaler
    ) -> "Accumulation":
        """Return this rank's parts of a batch, for one loop. After the loop the gradient is that of the whole batch.

            for part in lease.micro_batches(rows, model):
                part.backward(loss_of(model(inputs[part.batch]), wanted[part.batch]))
            optimizer.step()

        batch     the whole batch, the same on all ranks: a tensor or array, a tuple, list or dict of such, a sequence of
                  samples, or the number of samples
        models    whose gradients are computed: plain modules, or wrapped in DistributedDataParallel
        parts     number of micro-batches; None: of the job, or one per rank where the job has none
        seed      of the random numbers of each part, the same on any rank; None: each rank draws from its own generators
        scaler    a torch.amp.GradScaler that scales the losses
        """
        from poise.worker.accumulation import Accumulation, BatchShares

        count = int(self) if parts is None else _parts(parts)
        self.require_complete()
        given = BatchShares(self._env, self._by_rank(count), self._complete)
        place = None if seed is None else f"{seed}/{self._step}/{self._uses}"
        made = Accumulation(batch, models, given, seed=place, scaler=scaler)
        self._uses, self._is_open = self._uses + 1, True
        return made

    def share(self, parts: int | None = None) -> range:
        """Return this rank's share of that many micro-batches; None: of the job's."""
        return self._by_rank(int(self) if parts is None else _parts(parts))[self._env.rank]

    def begin_step(self, step: int) -> None:
        """Note which step comes next: random numbers of its parts follow from it."""
        self.require_complete()
        self._step, self._uses = step, 0

    def require_complete(self) -> None:
        """Refuse to go on after a loop over parts that was not gone through: its gradients were never added."""
        if self._is_open:
            raise WorkerError(
                f"micro_batches: the loop over the parts of step {self._step} was not gone through to its end, so "
                "gradients of the ranks were not added; compute every part"
            )

    def _by_rank(self, parts: int) -> list[range]:
        if parts not in self._found:  # exact arithmetic, which takes milliseconds with many ranks
            self._found[parts] = shares(parts, self._env.rank_speeds or (1.0,) * self._env.world_size)
        return self._found[parts]

    def _complete(self, loss: float) -> None:
        self._is_open = False
        self._report(loss)


def share(parts: int, rank: int, speeds: Sequence[float]) -> range:
    """Return one rank's micro-batches out of 0 .. parts - 1."""
    return shares(parts, speeds)[rank]


def shares(parts: int, speeds: Sequence[float]) -> list[range]:
    """Return the micro-batches of each rank out of 0 .. parts - 1."""
    given = counts(parts, speeds)
    ends = accumulate(given)
    return [range(end - count, end) for end, count in zip(ends, given, strict=True)]


def counts(parts: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of `parts` each rank gets, by their relative speeds. Exact: no rounding error decides.

    No split is done before the fluid one, so a rank gets whatever it can do until then. Each of the few that are left goes
    to the rank that would be done with it first; among equals, to the lowest rank.
    """
    exact = [Fraction(speed) for speed in speeds]
    fluid = parts / sum(exact)
    given = [int(fluid * speed) for speed in exact]
    done = [((had + 1) / speed, rank) for rank, (had, speed) in enumerate(zip(given, exact, strict=True))]
    heapify(done)
    for _ in range(parts - sum(given)):
        end, rank = done[0]
        given[rank] += 1
        heapreplace(done, (end + 1 / exact[rank], rank))
    return given


def samples_of(part: int, parts: int, samples: int) -> range:
    """Return which of a batch's samples are in a part: consecutive ones, one more in each of the first samples mod parts."""
    each, more = divmod(samples, parts)
    first = part * each + min(part, more)
    return range(first, first + each + (part < more))


def _parts(parts: int) -> int:
    try:
        count = operator.index(parts)
    except TypeError:
        raise WorkerError(f"parts: expected a whole number of micro-batches, got {parts!r}") from None
    if count < 1:
        raise WorkerError(f"parts: expected 1 or more micro-batches, got {count}")
    return count
