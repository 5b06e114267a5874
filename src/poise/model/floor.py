"""Where things are at one moment: which GPUs are free, and who holds which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poise.model.cluster import Holding
from poise.model.topology import Topology


@dataclass(frozen=True, slots=True)
class Floor:
    """A view of the core's own tables: not to be changed, and true only until the plan is handed in.

    masks      free slots by node; none of a lost node
    alive      whether a node is there
    holdings   the GPUs of each running job, by row
    partner    jobs that share their GPUs, both ways
    """

    topology: Topology
    masks: Sequence[int]
    alive: Sequence[bool]
    holdings: Mapping[int, Holding]
    partner: Mapping[int, int]

    def free(self) -> list[int]:
        """How many GPUs are free on each node."""
        return [mask.bit_count() for mask in self.masks]
