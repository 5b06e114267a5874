"""Poise shares a cluster of mixed GPUs among people who train deep-learning models.

    import poise

    comparison = poise.compare("synthetic:jobs=200,seed=1", cluster="v100:8,k80:16", policies=["fifo", "srtf", "max-min"])
    comparison.summaries.to_pandas()

`simulate`, `compare` and `sweep` are the library for studies (docs/reference/python.md), `Client` talks to a service. One
deterministic scheduler core (`poise.scheduler.core`) runs in several worlds (`poise.service.backends`); see ARCHITECTURE.md.
"""

TYPE_CHECKING = False  # as in `typing`, which takes time to import: runners and training scripts import this package too
if TYPE_CHECKING:
    from poise.client import Client as Client
    from poise.lab.clusters import cluster as cluster
    from poise.lab.columns import Table as Table
    from poise.lab.library.results import ComparisonResult as ComparisonResult
    from poise.lab.library.results import SimulationResult as SimulationResult
    from poise.lab.library.results import SweepResult as SweepResult
    from poise.lab.library.runs import compare as compare
    from poise.lab.library.runs import simulate as simulate
    from poise.lab.library.runs import sweep as sweep
    from poise.lab.library.values import read_trace as read_trace
    from poise.lab.library.values import synthetic as synthetic
    from poise.lab.traces.schema import Trace as Trace
    from poise.lab.traces.schema import TraceJob as TraceJob
    from poise.scheduler.model.cluster import Cluster as Cluster
    from poise.scheduler.model.cluster import Node as Node
    from poise.scheduler.model.errors import PoiseError as PoiseError
    from poise.scheduler.model.errors import RequestError as RequestError
    from poise.scheduler.model.job import Job as Job

__version__ = "0.1.0"
__all__ = [
    "Client",
    "Cluster",
    "ComparisonResult",
    "Job",
    "Node",
    "PoiseError",
    "RequestError",
    "SimulationResult",
    "SweepResult",
    "Table",
    "Trace",
    "TraceJob",
    "__version__",
    "cluster",
    "compare",
    "read_trace",
    "simulate",
    "sweep",
    "synthetic",
]
_HOMES = {
    "Client": "poise.client",
    "Cluster": "poise.scheduler.model.cluster",
    "ComparisonResult": "poise.lab.library.results",
    "Job": "poise.scheduler.model.job",
    "Node": "poise.scheduler.model.cluster",
    "PoiseError": "poise.scheduler.model.errors",
    "RequestError": "poise.scheduler.model.errors",
    "SimulationResult": "poise.lab.library.results",
    "SweepResult": "poise.lab.library.results",
    "Table": "poise.lab.columns",
    "Trace": "poise.lab.traces.schema",
    "TraceJob": "poise.lab.traces.schema",
    "cluster": "poise.lab.clusters",
    "compare": "poise.lab.library.runs",
    "read_trace": "poise.lab.library.values",
    "simulate": "poise.lab.library.runs",
    "sweep": "poise.lab.library.runs",
    "synthetic": "poise.lab.library.values",
}
"""The module that each name comes from. It is imported when the name is first used: importing Poise costs nothing."""


def __getattr__(name: str) -> object:
    """Bring in a name where it is wanted."""
    if name not in _HOMES:
        raise AttributeError(f"module 'poise' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """All that there is, also what is not brought in yet."""
    return sorted({*globals(), *__all__})
