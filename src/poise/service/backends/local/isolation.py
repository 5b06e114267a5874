"""How much isolation this machine allows for jobs: tried out before the service starts."""

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from poise.durable import make_folders
from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.orders import Isolation
from poise.service.backends.local.processes import MAIN
from poise.service.backends.local.state_dir import JOBS

TRY_SECONDS = 60.0  # after which a machine that does not answer is taken not to allow it
WORDS = {
    Isolation.NONE: "jobs can read and write all of the state directory, and see and signal all processes of its user",
    Isolation.FILES: "jobs see only their own part of the state directory, but can see and signal all processes of its user",
    Isolation.FULL: "jobs see only their own part of the state directory, and only their own processes",
}


class Isolate(StrEnum):
    """What is wanted: as much as the machine allows (AUTO), all of it or no service (ON), or nothing (OFF)."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class IsolationLevel(NamedTuple):
    """What is possible, and why not more; None: it is all there is, or nothing was wanted."""

    level: Isolation
    problem: str | None

    @property
    def text(self) -> str:
        """One line for users."""
        return WORDS[self.level] + ("" if self.problem is None else f"; not more, as {self.problem}")


def isolated(wanted: Isolate, state: Path) -> IsolationLevel:
    """Find the highest level that the machine allows; RequestError if all is wanted and it does not."""
    if wanted is Isolate.OFF:
        return IsolationLevel(Isolation.NONE, None)
    found, problem = Isolation.NONE, None
    for level in (Isolation.FULL, Isolation.FILES):
        refused = _try(state, level)
        if refused is None:
            found = level
            break
        problem = problem or refused
    if wanted is Isolate.ON and found is not Isolation.FULL:
        raise RequestError(f"--isolate on: this machine does not allow it: {problem}; use --isolate auto")
    return IsolationLevel(found, problem)


def _try(state: Path, level: Isolation) -> str | None:
    """Isolate a process by the code that isolates runs (`runner/isolation.py`); return what prevents it, or None."""
    jobs = state.resolve() / JOBS
    make_folders(jobs)
    if jobs.is_symlink():
        return f"{jobs} is a symbolic link"
    argv = [sys.executable, "-I", "-S", "-X", "utf8", MAIN, "--try", str(jobs.parent), str(jobs), level.value]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRY_SECONDS, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be tried: {error}"
    if done.returncode == 0:
        return None
    said = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return f"the kernel refuses it ({said})"
