"""Causes of failure, and whether a run that died of one is worth a retry (Philly, ATC'19; docs/algorithms/philly.md).

Philly retries every failed run a fixed number of times, whatever the cause. Its authors advise to stop retrying what cannot
heal and to go on with what is transient. The categories are theirs. The verdicts follow their advice where they gave one
(wrong inputs, syntax, permission, import; network, ECC, preemption) and are our reading of the category elsewhere.

A cause is recognised by its words, regardless of case, order, punctuation and plural. Words that only say that something
went wrong (error, failure, ...) do not count: `CUDA ver. mismatch`, `cuda_version_mismatch` and `Mismatch of CUDA versions`
are one cause.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """Whether to retry a run that died of some cause.

    HOPELESS    it will die of the same again: no retry
    TRANSIENT   the cause is outside the job and passes: retry after a growing back-off
    UNKNOWN     could be either: a fixed number of retries
    """

    HOPELESS = "hopeless"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"


class Category(NamedTuple):
    """A category of causes: its name as traces write it, the verdict, and other names for it."""

    name: str
    verdict: Verdict
    aliases: tuple[str, ...] = ()


CATEGORIES = (
    Category(
        "incorrect-inputs",
        Verdict.HOPELESS,
        (
            "wrong input",
            "bad input",
            "invalid input",
            "no such file",
            "file not found",
            "virtual environment gone",
            "working directory missing",
            "program missing",
            "image missing",
            "shipped files missing",
            "checkpoint too large",
            "checkpoint place unusable",
        ),
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
    Category("model-checkpoint-error", Verdict.TRANSIENT, ("checkpoint error", "checkpoint not kept")),
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
"""Philly's 21 categories, and six from other clusters (network, lost or crowded node, time limits, a full disk).

Running out of a node's memory may pass, because other jobs use it too; running out of a GPU's memory will not. Checkpoint
errors were those of Philly's distributed file system, hence transient.
"""

_STOP_WORDS = {
    "error", "failure", "failed", "fault", "exception", "the", "a", "an", "of", "in", "from", "to", "with", "is"
}  # fmt: skip
_SPELLINGS = {
    "oom": "out memory", "mem": "memory", "ver": "version", "ckpt": "checkpoint", "chkpt": "checkpoint",
    "init": "initialisation", "initialization": "initialisation", "lib": "library", "librarie": "library", "err": "error",
    "timed": "timeout", "segfault": "segmentation", "sigsegv": "segmentation",
}  # fmt: skip
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"[a-z0-9]+")


def _words(cause: str) -> frozenset[str]:
    """The words of a cause that tell it apart, in the singular and in one spelling."""
    words: set[str] = set()
    for word in _WORD.findall(_CAMEL_CASE.sub(" ", cause).lower()):
        singular = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
        words.update(_SPELLINGS.get(singular, singular).split())
    return frozenset(words - _STOP_WORDS)


_BY_WORDS = {_words(name): each for each in CATEGORIES for name in (each.name, *each.aliases)}


def category_of(cause: str) -> Category | None:
    """The category of a cause; None if it is not a known one."""
    return _BY_WORDS.get(_words(cause))


def verdict(cause: str) -> Verdict:
    """Whether to retry after this cause; `UNKNOWN` if it is not a known one."""
    category = category_of(cause)
    return Verdict.UNKNOWN if category is None else category.verdict
