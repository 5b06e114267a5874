"""What a cause of failure says about trying again (Philly, ATC'19; ALGORITHMS §6.4 and guideline 3 of §6.5).

Philly retries every failed run a fixed number of times, whatever it died of; its authors advise to stop retrying what
cannot heal and to keep on with what is transient. The categories are theirs, the verdicts follow their advice where they
gave one (wrong inputs, syntax, permission, import; network, ECC, preemption) and are our reading of the category elsewhere.

A cause is recognised by its words, whatever their case, order, punctuation and number; words that only say that something
went wrong (error, failure, ...) do not count. `CUDA ver. mismatch`, `cuda_version_mismatch` and `Mismatch of CUDA
versions` are one cause.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """Whether a run that died of some cause is worth another one.

    HOPELESS    it will die again of the same: no retry
    TRANSIENT   the cause is outside the job and passes: retry after a back-off that grows
    UNKNOWN     nobody can tell: a fixed number of retries
    """

    HOPELESS = "hopeless"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"


class Category(NamedTuple):
    """A category of causes: its name as traces write it, the verdict, and other names under which it is met."""

    name: str
    verdict: Verdict
    aliases: tuple[str, ...] = ()


CATEGORIES = (
    Category(
        "incorrect-inputs",
        Verdict.HOPELESS,
        ("wrong input", "bad input", "invalid input", "no such file", "file not found", "virtual environment gone"),
    ),
    Category("syntax-error", Verdict.HOPELESS, ("indentation error", "name error")),
    Category("semantic-error", Verdict.HOPELESS, ("type error", "value error", "attribute error", "key error")),
    Category("permission-error", Verdict.HOPELESS, ("permission denied", "access denied")),
    Category(
        "import-error", Verdict.HOPELESS, ("module not found", "no module named", "cannot load libs", "library not found")
    ),
    Category("gpu-out-of-memory", Verdict.HOPELESS, ("cuda out of memory",)),
    Category("cuda-version-mismatch", Verdict.HOPELESS),
    Category("output-node-error", Verdict.HOPELESS),
    Category("max-duration", Verdict.HOPELESS, ("out of its time",)),
    Category("cpu-seconds", Verdict.HOPELESS, ("cpu time limit",)),
    Category("storage-full", Verdict.TRANSIENT, ("no space left on device", "disk full")),
    Category("job-preempted", Verdict.TRANSIENT, ("preempted",)),
    Category("gpu-ecc-error", Verdict.TRANSIENT, ("ecc error", "uncorrectable ecc error")),
    Category("mpi-error", Verdict.TRANSIENT, ("nccl error",)),
    Category("mpi-runtime-failure", Verdict.TRANSIENT),
    Category("model-checkpoint-error", Verdict.TRANSIENT, ("checkpoint error",)),
    Category("cuda-init-failed", Verdict.TRANSIENT, ("cuda initialisation error",)),
    Category(
        "network-error", Verdict.TRANSIENT, ("connection reset", "connection refused", "connection timeout", "timeout")
    ),
    Category("node-exhausted", Verdict.TRANSIENT, ("resource temporarily unavailable",)),
    Category("node-lost", Verdict.TRANSIENT, ("lost node", "node failure", "node down", "machine failure")),
    Category("cpu-out-of-memory", Verdict.UNKNOWN, ("out of memory", "host out of memory", "killed out of memory")),
    Category("core-dump", Verdict.UNKNOWN, ("core dumped",)),
    Category("invalid-memory-access", Verdict.UNKNOWN, ("segmentation fault", "illegal memory access")),
    Category("traceback-from-crash", Verdict.UNKNOWN, ("crash", "crashed")),
    Category("cuda-failure", Verdict.UNKNOWN),
    Category("model-diverged", Verdict.UNKNOWN, ("diverged", "loss is nan")),
    Category("no-signature", Verdict.UNKNOWN, ("unknown", "unknown cause")),
)
"""Philly's 21 categories, and six that are met elsewhere (network, lost or crowded node, limits of time, a full disk).

Memory of a node is shared with whoever else is there, memory of a GPU is not: that is why running out of the first may
pass, and running out of the second will not. Checkpoint errors were those of Philly's distributed file system.
"""

_SAYS_NOTHING = {
    "error",
    "failure",
    "failed",
    "fault",
    "exception",
    "the",
    "a",
    "an",
    "of",
    "in",
    "from",
    "to",
    "with",
    "is",
}
_SPELLINGS = {
    "oom": "out memory",
    "mem": "memory",
    "ver": "version",
    "ckpt": "checkpoint",
    "chkpt": "checkpoint",
    "init": "initialisation",
    "initialization": "initialisation",
    "lib": "library",
    "librarie": "library",
    "err": "error",
    "timed": "timeout",
    "segfault": "segmentation",
    "sigsegv": "segmentation",
}
_JOINED = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"[a-z0-9]+")


def _words(cause: str) -> frozenset[str]:
    """What a cause says, as a set of words."""
    spaced = _JOINED.sub(" ", cause).lower()
    spelt = " ".join(_SPELLINGS.get(word, word) for word in map(_singular, _WORD.findall(spaced)))
    return frozenset(spelt.split()) - _SAYS_NOTHING


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


_BY_WORDS = {_words(name): each for each in CATEGORIES for name in (each.name, *each.aliases)}


def category_of(cause: str) -> Category | None:
    """The category that a cause belongs to; None if it is none of those that are known."""
    return _BY_WORDS.get(_words(cause))


def verdict(cause: str) -> Verdict:
    """Whether to try again after a run that died of this; `UNKNOWN` for causes that nobody has heard of."""
    category = category_of(cause)
    return Verdict.UNKNOWN if category is None else category.verdict
