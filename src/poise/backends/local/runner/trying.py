"""Whether this machine lets a run be enclosed: a process is, by the very code that encloses runs, and looks around."""

import os
import signal
import sys
from contextlib import suppress

from poise.backends.local.runner.enclosure import enclose

UNENTERED, SHOWN = 2, 3
SAYINGS = {UNENTERED: "a process could not enter it", SHOWN: "it shows what it should hide"}
FULL = "full"


def try_out(state: str, job: str, level: str) -> int:
    """Exit code 0 if a process is enclosed; otherwise a line on standard output says at which stage that failed, and why."""
    try:
        enclosure = enclose(state, job, processes=level == FULL)
    except OSError as error:
        sys.stdout.write(f"{error.filename or 'enclosure'}: {error.strerror}\n")
        return 1
    child = os.fork()
    if child == 0:
        code = UNENTERED
        with suppress(OSError):
            enclosure.enter()
            is_hidden = os.listdir(state) == [os.path.relpath(job, state).split("/")[0]]
            others = [each for each in os.listdir("/proc") if each.isdigit() and each not in ("1", str(os.getpid()))]
            code = 0 if is_hidden and (level != FULL or not others) else SHOWN
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if enclosure.first:
        os.kill(enclosure.first, signal.SIGKILL)
        os.waitpid(enclosure.first, 0)
    if code:
        sys.stdout.write(SAYINGS.get(code, f"exit code {code}") + "\n")
    return code
