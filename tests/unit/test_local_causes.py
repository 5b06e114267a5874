"""What a replica died of: the table, line by line."""

import signal

import pytest

from poise.scheduler.model.failures import Verdict, category_of, verdict
from poise.service.backends.local.lease_files import LOST
from poise.service.backends.local.runner.causes import CODES, EXCEPTIONS, MESSAGES, SIGNALS, cause_of


def traceback(last: str, *notes: str) -> str:
    frames = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'
    return "\n".join(["step 1", frames + last, *notes, ""])


CASES = {
    "a module that is not there": (1, traceback("ModuleNotFoundError: No module named 'torch'"), "import-error"),
    "a name that a module lacks": (1, traceback("ImportError: cannot import name 'x'"), "import-error"),
    "a program that cannot be parsed": (
        1,
        '  File "train.py", line 1\n    x = = 1\nSyntaxError: invalid syntax\n',
        "syntax-error",
    ),
    "a wrong value": (1, traceback("ValueError: bad learning rate"), "semantic-error"),
    "a file that is not there": (1, traceback("FileNotFoundError: [Errno 2] 'data'"), "incorrect-inputs"),
    "a file that may not be read": (1, traceback("PermissionError: [Errno 13] 'data'"), "permission-error"),
    "no memory for Python": (1, traceback("MemoryError"), "cpu-out-of-memory"),
    "a peer that refuses": (1, traceback("ConnectionRefusedError: [Errno 111]"), "network-error"),
    "a name that cannot be resolved": (1, traceback("socket.gaierror: [Errno -2]"), "network-error"),
    "no memory on the GPU": (
        1,
        traceback("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried ..."),
        "gpu-out-of-memory",
    ),
    "no memory on the GPU, newer": (1, traceback("torch.OutOfMemoryError: HIP ran out"), "gpu-out-of-memory"),
    "NCCL": (1, traceback("RuntimeError: NCCL error in: ../x.cpp:825, unhandled system error"), "mpi-error"),
    "NCCL's watchdog": (-6, "[E ProcessGroupNCCL.cpp:828] Watchdog caught collective operation timeout\n", "mpi-error"),
    "a device assertion": (1, traceback("RuntimeError: CUDA error: device-side assert triggered"), "cuda-failure"),
    "ECC": (1, traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "gpu-ecc-error"),
    "a driver that is too old": (
        1,
        "CUDA driver version is insufficient for CUDA runtime version\n",
        "cuda-version-mismatch",
    ),
    "a loss that is none": (1, "step 7\nloss is nan, stopping\n", "model-diverged"),
    "no room": (1, traceback("OSError: [Errno 28] No space left on device: 'ckpt'"), "storage-full"),
    "some other exception": (1, traceback("my.own.Trouble: what a pity"), "traceback-from-crash"),
    "an exception without words": (1, traceback("AssertionError"), "traceback-from-crash"),
    "an exception of many lines": (1, traceback("KeyError: 'a'", "more", "and more"), "semantic-error"),
    "the last of several": (1, traceback("KeyError: 'a'") + traceback("ImportError: b"), "import-error"),
    "usage": (2, "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x\n", "incorrect-inputs"),
    "not found, says a shell": (127, "sh: 1: nosuch: not found\n", "incorrect-inputs"),
    "not a program, says a shell": (126, "", "incorrect-inputs"),
    "a checkpoint that could not be written": (73, "", "model-checkpoint-error"),
    "nothing at all": (1, "", "no-signature"),
    "a segmentation fault": (-signal.SIGSEGV, "", "invalid-memory-access"),
    "a segmentation fault, says a shell": (139, "", "invalid-memory-access"),
    "an abort": (-signal.SIGABRT, "", "core-dump"),
    "KILL": (-signal.SIGKILL, "", "killed"),
    "KILL, says a shell": (137, "", "killed"),
    "KILL after some talk": (-signal.SIGKILL, traceback("KeyError: 'a'"), "killed"),
    "TERM": (-signal.SIGTERM, "", "killed"),
    "too much CPU time": (-signal.SIGXCPU, "", "cpu-seconds"),
    "an exit code that is no signal": (255, "", "no-signature"),
    "bytes that are no text": (1, "\ufffd\ufffd\n", "no-signature"),
}


@pytest.mark.parametrize("name", CASES)
def test_cause_is_found_in_code_and_log(name: str) -> None:
    code, tail, want = CASES[name]
    assert cause_of(code, tail, oom_kills=0) == want


def test_kill_is_taken_for_want_of_memory_only_if_the_kernel_says_so() -> None:
    assert cause_of(-signal.SIGKILL, "", oom_kills=1) == cause_of(137, "", oom_kills=2) == "cpu-out-of-memory"
    assert cause_of(-signal.SIGTERM, "", oom_kills=1) == "killed"


def test_words_of_long_ago_are_not_what_a_replica_died_of() -> None:
    assert cause_of(1, "CUDA out of memory, retrying with less\n" + "step\n" * 100, oom_kills=0) == "no-signature"


def test_causes_are_categories_but_for_those_that_the_paper_does_not_have() -> None:
    causes = {*CODES.values(), *EXCEPTIONS.values(), *SIGNALS.values(), *(cause for cause, _ in MESSAGES), LOST}
    assert {cause for cause in causes if category_of(cause) is None} <= {"storage-full", "cpu-seconds"}


def test_run_that_the_machine_took_away_is_worth_another_one() -> None:
    assert verdict(LOST) is Verdict.TRANSIENT
    assert verdict("killed") is Verdict.UNKNOWN
