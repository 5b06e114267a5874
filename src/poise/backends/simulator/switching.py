"""What it costs a GPU to turn to another job (Hare; ALGORITHMS §5.4), for jobs whose rounds divide into tasks.

    the same job ran last        nothing
    its model is still resident  a few milliseconds
    otherwise (cold)             size of the model ÷ bandwidth of the bus

A GPU keeps the models of the jobs that ran on it last, and makes room by giving up the one whose run completed earliest.
Two jobs never have the same weights, and so residency is a matter of jobs, whatever their models are called.
"""

from dataclasses import dataclass, replace
from math import inf, nan

from poise.model.cluster import Holding, bits
from poise.model.errors import InvariantError, RequestError, UnknownNameError
from poise.model.job import Job


@dataclass(frozen=True, slots=True)
class Switching:
    """Costs of turning to another job.

    resident    seconds, if the GPU still keeps the job's model
    bandwidth   bytes a second at which a model comes to a GPU that does not
    size        bytes of a model whose size nobody states
    keep        jobs whose models a GPU keeps, the one that runs included
    """

    resident: float = 0.003
    bandwidth: float = 12e9
    size: float = 500e6
    keep: int = 4

    def cold(self, size: float | None) -> float:
        """Seconds to load a model of so many bytes."""
        return (self.size if size is None else size) / self.bandwidth


FREE = Switching(resident=0.0, bandwidth=inf)
"""As if turning to another job cost nothing."""


def parse_switching(spec: str) -> Switching | None:
    """`naive` (None): every start costs the restart overhead; `free`; or costs: `resident=0.01,bandwidth=6e9,keep=2`."""
    if spec == "naive":
        return None
    if spec == "free":
        return FREE
    given: dict[str, float] = {}
    for part in spec.split(","):
        name, _, value = part.partition("=")
        if name not in _LEAST:
            raise UnknownNameError("cost of switching", name, (*_LEAST, "naive", "free"))
        given[name] = _read(name, value)
    return replace(Switching(**given), keep=int(given.get("keep", Switching().keep)))  # type: ignore[arg-type]


_LEAST = {"resident": 0.0, "bandwidth": 1.0, "size": 0.0, "keep": 1.0}
"""Of each cost."""


def _read(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not _LEAST[name] <= value < inf:
        raise RequestError(f"--switching {name}: expected a number of at least {_LEAST[name]:g}, got {text[:50]!r}")
    if name == "keep" and value != int(value):
        raise RequestError(f"--switching keep: expected a whole number of jobs, got {text[:50]!r}")
    return value


def unknown_size(_job: Job) -> float | None:
    """Nobody states how large models are."""
    return None


class Gpus:
    """Every GPU of the cluster: whether somebody computes on it, and whose models it keeps. All of it O(1) a GPU.

    A GPU is named by its node and its bit in a mask of slots. Runs on a GPU follow one another, so that they complete in the
    order in which they began; jobs that share one count in that order too.
    """

    def __init__(self, nodes: int, keep: int, resident: float) -> None:
        self._keep = keep
        self._resident = resident
        self._busy = [0] * nodes
        self._kept: list[dict[int, dict[str, None]]] = [{} for _ in range(nodes)]

    def take(self, job: str, gpus: Holding) -> None:
        """These compute for a job from now on. Raises InvariantError if one of them does already."""
        busy = self._busy
        for node, mask in gpus:
            if busy[node] & mask:
                raise InvariantError(f"{job} is to run on node {node}, slots {mask:#b}, of which {busy[node]:#b} are busy")
            busy[node] |= mask

    def free(self, gpus: Holding) -> None:
        """These compute no more."""
        for node, mask in gpus:
            self._busy[node] &= ~mask

    def turn(self, job: str, node: int, bit: int, cold: float) -> float:
        """A GPU turns to a job; seconds that it takes, `cold` if it does not keep the job's model."""
        kept = self._kept[node].get(bit)
        if kept is None:
            kept = self._kept[node][bit] = {}
        elif job in kept:
            if next(reversed(kept)) == job:
                return 0.0
            del kept[job]
            kept[job] = None  # the last to have run
            return self._resident
        kept[job] = None
        if len(kept) > self._keep:
            del kept[next(iter(kept))]
        return cold

    def turn_all(self, job: str, gpus: Holding, cold: float) -> float:
        """These GPUs turn to a job; seconds until the last of them has."""
        return max(self.turn(job, node, bit, cold) for node, mask in gpus for bit in bits(mask))

    def forget(self, node: int) -> None:
        """A lost node keeps nothing."""
        self._kept[node].clear()
