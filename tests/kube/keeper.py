"""Start processes on behalf of a test run, tell how they end, and kill all of them once the test run is gone.

    python -m tests.kube.keeper     one JSON object a line on stdin: {"id", "argv", "environment", "log", "cwd"}; on stdout
                                    {"id", "pid"} or {"id", "error"}, and {"id", "code"} when it has ended

As `tests/orphanage.py`, but for processes that are signalled and waited for one by one. What a process leaves behind becomes
a child of the keeper, whatever session it is in. End of stdin is the end: a test run that is killed closes it.
"""

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.orphanage import PR_SET_CHILD_SUBREAPER, descendants

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0


class Kept:
    """A process that was started by a keeper."""

    def __init__(self, ended: Callable[[], None] | None = None) -> None:
        self.pid = 0
        self.code: int | None = None
        """What it ended with, minus the signal if there was one; None: it runs."""
        self.error = ""
        self._ended = ended
        self._started = threading.Event()
        self._done = threading.Event()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for its end; return its code, or None if it still runs."""
        self._done.wait(seconds)
        return self.code

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def told(self, word: Mapping[str, Any]) -> None:
        """Take what the keeper says of it."""
        if "pid" in word:
            self.pid = int(word["pid"])
        else:
            self.error, self.code = str(word.get("error", "")), int(word.get("code", 127))
            self._done.set()
        self._started.set()
        if self.code is not None and self._ended is not None:
            self._ended()

    def started(self) -> None:
        """Wait until it runs, or could not be started."""
        if not self._started.wait(START_SECONDS):
            raise TimeoutError("the keeper of the processes does not answer")


class Keeper:
    """Starts processes that do not outlive it."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "tests.kube.keeper"]
        self._process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._kept: dict[int, Kept] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cwd: str = "/",
        ended: Callable[[], None] | None = None,
    ) -> Kept:
        """Start a process in a session of its own, its output appended to a file; `ended` is called in another thread."""
        kept = Kept(ended)
        with self._lock:
            number = next(self._ids)
            self._kept[number] = kept
            order = {"id": number, "argv": list(argv), "environment": dict(environment), "log": str(log), "cwd": cwd}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        kept.started()
        return kept

    def processes(self) -> list[int]:
        """Return all processes below the keeper, whoever started them."""
        return descendants(self._process.pid)

    def close(self) -> None:
        """Kill everything that was started, and what that started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.close()
        self._process.wait(60)
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word = json.loads(line)
            self._kept[word["id"]].told(word)
            if "pid" not in word:
                del self._kept[word["id"]]


_LOCK = threading.Lock()  # around stdout, and around starting a process and noting its number
_RUNNING: dict[int, tuple[int, "subprocess.Popen[bytes]"]] = {}


def _say(**word: object) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def _start(order: dict[str, Any]) -> None:
    with _LOCK, open(order["log"], "ab") as log:
        try:
            process = subprocess.Popen(
                order["argv"],
                env=order["environment"],
                cwd=order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            _say(id=order["id"], error=str(error))
            return
        _RUNNING[process.pid] = order["id"], process
        _say(id=order["id"], pid=process.pid)


def _reap() -> None:
    """Wait for whatever ends, orphans too: to others, one that nobody waits for seems to live."""
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.01)
            continue
        with _LOCK:
            if pid in _RUNNING:
                number, process = _RUNNING.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                with suppress(OSError):  # nobody listens any more
                    _say(id=number, code=process.returncode)


def main() -> None:
    """Serve until stdin ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: None)  # Ctrl-C is for the test run; not SIG_IGN, which what is started would inherit
    threading.Thread(target=_reap, daemon=True).start()
    for line in sys.stdin:
        _start(json.loads(line))
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
