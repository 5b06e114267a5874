"""What a run died of: from the exit code and the last lines of the log, in the words of model/failures.py.

The order of looking: a signal that leaves no words behind (KILL, TERM); words of GPU and communication libraries, which say
more than the signal or exception that follows them; other signals; the exception that ended a Python program; exit codes
that mean something by convention. What shows none of these has `no-signature`.
"""

import re
import signal

from poise.backends.local.records import CHECKPOINT_FAILED, STORAGE

LAST_LINES = 40
"""Of a log: what a program says long before its end is not what it died of."""

KILLED = "killed"
"""Somebody outside sent a signal. Whether it will happen again, nobody can tell."""
HOST_MEMORY = "cpu-out-of-memory"
UNEXPLAINED = "no-signature"

SAYINGS = (
    ("gpu-out-of-memory", r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"),
    ("gpu-ecc-error", r"uncorrectable ECC error"),
    ("cuda-version-mismatch", r"CUDA driver version is insufficient|no kernel image is available|non supported HW"),
    ("cuda-init-failed", r"CUDA error: initialization error|CUDA initialization:|No CUDA GPUs are available"),
    (
        "mpi-error",
        r"\bNCCL error\b|\bnccl[A-Z]\w*Error\b|\bNCCL WARN\b.*\berror\b|DistBackendError|ProcessGroupNCCL.*\btime",
    ),
    ("mpi-runtime-failure", r"\bMPI_ABORT\b|\bMPI_ERR\w*|\bPMIX? ERROR\b"),
    ("invalid-memory-access", r"illegal memory access|CUDA error: misaligned address"),
    ("cuda-failure", r"CUDA error:|CUDNN_STATUS_(?!SUCCESS)|CUBLAS_STATUS_(?!SUCCESS)"),
    ("model-diverged", r"(?i)\bloss (?:is|was|became|=|:)\s*(?:nan|inf)\b"),
    (STORAGE, r"No space left on device|Disk quota exceeded"),
)
"""Words of libraries, the most telling first."""

EXCEPTIONS = {
    "ModuleNotFoundError": "import-error",
    "ImportError": "import-error",
    "SyntaxError": "syntax-error",
    "IndentationError": "syntax-error",
    "TabError": "syntax-error",
    "NameError": "syntax-error",
    "UnboundLocalError": "syntax-error",
    "TypeError": "semantic-error",
    "ValueError": "semantic-error",
    "AttributeError": "semantic-error",
    "KeyError": "semantic-error",
    "FileNotFoundError": "incorrect-inputs",
    "IsADirectoryError": "incorrect-inputs",
    "NotADirectoryError": "incorrect-inputs",
    "PermissionError": "permission-error",
    "MemoryError": HOST_MEMORY,
    "ConnectionError": "network-error",
    "ConnectionRefusedError": "network-error",
    "ConnectionResetError": "network-error",
    "ConnectionAbortedError": "network-error",
    "BrokenPipeError": "network-error",
    "TimeoutError": "network-error",
    "gaierror": "network-error",
    "URLError": "network-error",
}
"""Python's exceptions; any other is a `traceback-from-crash`."""

SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "invalid-memory-access",
    signal.SIGBUS: "invalid-memory-access",
    signal.SIGABRT: "core-dump",
    signal.SIGILL: "core-dump",
    signal.SIGFPE: "core-dump",
    signal.SIGTRAP: "core-dump",
    signal.SIGSYS: "core-dump",
    signal.SIGQUIT: "core-dump",
    signal.SIGXCPU: "cpu-seconds",
}

CODES = {126: "incorrect-inputs", 127: "incorrect-inputs", CHECKPOINT_FAILED: "model-checkpoint-error"}
"""By convention: found and not a program; not found; the worker library's own."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAYINGS = tuple((cause, re.compile(words)) for cause, words in SAYINGS)
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::.*)?$")
_USAGE = re.compile(r"^usage: ", re.MULTILINE)


def cause_of(code: int, tail: str, oom_kills: int) -> str:
    """What a replica died of.

    code        its exit code; a signal counts negative, or as a shell reports it (128 + signal)
    tail        the end of its log
    oom_kills   processes that the kernel killed for want of memory while it ran
    """
    number = -code if code < 0 else code - 128 if 128 < code < 128 + 65 else 0
    if number in _FROM_OUTSIDE:
        return HOST_MEMORY if number == signal.SIGKILL and oom_kills else KILLED
    lines = tail.splitlines()[-LAST_LINES:]
    text = "\n".join(lines)
    for cause, words in _SAYINGS:
        if words.search(text):
            return cause
    return (
        SIGNALS.get(number)
        or _exception(lines)
        or CODES.get(code)
        or ("incorrect-inputs" if _USAGE.search(text) else UNEXPLAINED)
    )


def _exception(lines: list[str]) -> str | None:
    """The cause by the last exception that was printed; None: there was no traceback."""
    frames = [number for number, line in enumerate(lines) if line.startswith(("Traceback (most recent", '  File "'))]
    if not frames:
        return None
    for line in lines[frames[-1] + 1 :]:
        raised = _RAISED.match(line)
        if raised:
            return EXCEPTIONS.get(raised[1], "traceback-from-crash")
    return "traceback-from-crash"
