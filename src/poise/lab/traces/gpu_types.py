"""Names of GPU types as clusters write them, and what the throughput table calls them.

Slurm and Kubernetes call a GPU by what its driver says (`nvidia_a100-sxm4-80gb`, `NVIDIA-A100-SXM4-80GB`) or by whatever the
site has chosen (`a100`, `A100_80`). The table has short names: `a100`, `a100-pcie`, `rtx3090`.
"""

import re
from functools import cache

from poise.scheduler.throughput.table import shipped

_WORDS = re.compile(r"[a-z0-9]+")
_RTX = re.compile(r"(?<![a-z0-9])rtx[ _-](?=\d)")
"""`rtx 3090` is one word in the table."""
_SLICE = re.compile(r"\b\d+g[._-]\d+gb\b")
_UNFIT = re.compile(r"[^\w.-]", re.ASCII)


def gpu_type_of(name: str) -> str:
    """Return the type of the throughput table whose words are all in this name, the one with most words; else the name.

    The name is then in lower case, and fit for `--cluster`.
    """
    lower = name.lower()
    words = set(_WORDS.findall(_RTX.sub("rtx", lower)))
    known = [(len(parts), each) for each, parts in _table_types().items() if parts <= words]
    if known:
        return max(known)[1]
    fit = _UNFIT.sub("-", lower)
    return fit if fit[:1].isalpha() else f"gpu-{fit}"


def is_table_type(name: str) -> bool:
    """Return whether the throughput table that comes with Poise has a GPU type of this name."""
    return name in _table_types()


def is_slice(name: str) -> bool:
    """Return whether this is a part of a GPU that has been divided into instances: `a100_1g.5gb`."""
    return _SLICE.search(name.lower().replace("_", "-")) is not None


@cache
def _table_types() -> dict[str, frozenset[str]]:
    """Return the words of each type of the table that comes with Poise."""
    return {each: frozenset(_WORDS.findall(each)) for each in shipped().gpu_types}
