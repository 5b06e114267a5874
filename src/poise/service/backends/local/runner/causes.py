"""What a run died of, from a replica's exit code and the end of its log.

Causes are the signatures of scheduler/model/failures.py. They are looked for in this order:

1. signals that leave no message behind (KILL, TERM);
2. messages of GPU and communication libraries, which say more than the signal or exception that follows them;
3. other signals;
4. the exception that ended a Python program;
5. exit codes with a conventional meaning.

What matches none of these is `no-signature`. Imported only once a run has failed: compiling the patterns takes time that
the start of a runner does not have.
"""

import re
import signal

from poise.service.backends.local.lease_files import CHECKPOINT_FAILED, STORAGE

LAST_LINES = 40  # of the log: what a program says long before its end is not what it died of

KILLED = "killed"  # A signal came from outside the run. Whether that will happen again is unknown.
HOST_MEMORY = "cpu-out-of-memory"
UNEXPLAINED = "no-signature"

MESSAGES = (
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
"""Messages of libraries, the most specific first."""

EXCEPTIONS = {
    name: cause
    for cause, names in (
        ("import-error", "ModuleNotFoundError ImportError"),
        ("syntax-error", "SyntaxError IndentationError TabError NameError UnboundLocalError"),
        ("semantic-error", "TypeError ValueError AttributeError KeyError"),
        ("incorrect-inputs", "FileNotFoundError IsADirectoryError NotADirectoryError"),
        ("permission-error", "PermissionError"),
        (HOST_MEMORY, "MemoryError"),
        ("network-error", "ConnectionError ConnectionRefusedError ConnectionResetError ConnectionAbortedError"),
        ("network-error", "BrokenPipeError TimeoutError gaierror URLError"),
    )
    for name in names.split()
}
"""Exceptions of Python; any other is a `traceback-from-crash`."""

_CORE_DUMPS = (signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS, signal.SIGQUIT)
SIGNALS: dict[int, str] = {
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS), "invalid-memory-access"),
    **dict.fromkeys(_CORE_DUMPS, "core-dump"),
    signal.SIGXCPU: "cpu-seconds",
}

CODES = {126: "incorrect-inputs", 127: "incorrect-inputs", CHECKPOINT_FAILED: "model-checkpoint-error"}
"""Of shells: found but not executable, not found; and the exit code of the worker library."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PATTERNS = tuple((cause, re.compile(pattern)) for cause, pattern in MESSAGES)
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::.*)?$")
_USAGE = re.compile(r"^usage: ", re.MULTILINE)


def cause_of(code: int, tail: str, oom_kills: int) -> str:
    """Find what a replica died of.

    code        its exit code; a signal is negative, or as a shell reports it (128 + signal)
    tail        the end of its log
    oom_kills   processes that the kernel killed for want of memory while the run lasted
    """
    number = -code if code < 0 else code - 128 if 128 < code < 128 + 65 else 0
    if number in _FROM_OUTSIDE:
        return HOST_MEMORY if number == signal.SIGKILL and oom_kills else KILLED
    lines = tail.splitlines()[-LAST_LINES:]
    text = "\n".join(lines)
    for cause, pattern in _PATTERNS:
        if pattern.search(text):
            return cause
    return (
        SIGNALS.get(number)
        or _exception(lines)
        or CODES.get(code)
        or ("incorrect-inputs" if _USAGE.search(text) else UNEXPLAINED)
    )


def _exception(lines: list[str]) -> str | None:
    """Find the cause by the last exception that was printed; None: there was no traceback."""
    frames = [number for number, line in enumerate(lines) if line.startswith(("Traceback (most recent", '  File "'))]
    if not frames:
        return None
    for line in lines[frames[-1] + 1 :]:
        raised = _RAISED.match(line)
        if raised:
            return EXCEPTIONS.get(raised[1], "traceback-from-crash")
    return "traceback-from-crash"
