"""Runs programs on behalf of a test run, and kills all that they started once the test run is gone, however it ended.

    python tests/orphanage.py       one JSON object a line on stdin: {"argv", "environment"}; on stdout, in the order
                                    in which they end: {"code", "output"}

Daemons that a program leaves behind become children of this process (PR_SET_CHILD_SUBREAPER), whatever session they are in,
so that all of them can be found without knowing their names. End of stdin is the end: a test run that is killed closes it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
_LOCK = threading.Lock()  # around stdout, and around starting a process and noting its number
_OWN: set[int] = set()  # processes that are waited for by a thread


def _run(order: dict[str, object], folder: str) -> None:
    with open(f"{folder}/{threading.get_ident()}", "w+b") as output:  # daemons keep it open: a pipe would never end
        argv, environment = order["argv"], order["environment"]
        with _LOCK:
            process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # type: ignore[call-overload]
            _OWN.add(process.pid)
        code = process.wait()
        _OWN.discard(process.pid)
        output.seek(0)
        answer = {"code": code, "output": output.read().decode(errors="replace")}
    with _LOCK:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def descendants(of: int) -> list[int]:
    """All processes below one, children first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = [of]
    for each in found:
        found += children.get(each, ())
    return found[1:]


def _reap() -> None:
    """Wait for daemons that have ended, as init does: to others, one that nobody waits for seems to live."""
    while True:
        time.sleep(0.1)
        with _LOCK, suppress(OSError):
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                children = {int(each) for each in file.read().split()}
            for pid in children - _OWN:
                os.waitpid(pid, os.WNOHANG)


def main() -> None:
    """Serve until stdin ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # Ctrl-C is for the test run; this process ends after it
    folder = sys.argv[1]
    threading.Thread(target=_reap, daemon=True).start()
    for line in sys.stdin:
        threading.Thread(target=_run, args=(json.loads(line), folder), daemon=True).start()
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


if __name__ == "__main__":
    main()
