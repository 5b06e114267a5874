"""Whether a server of this machine that is away seems to come back: then it is worth waiting for.

It does if it was killed since the machine was started (its server.json is there, its process is not), if a process holds
the lock of its state directory (it starts, or stops), or if it stopped a moment ago (its server.json has just been removed).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from poise.backends.local.processes import start_of
from poise.backends.local.records import now

RECENT = 10.0
"""Seconds after a stop during which another start is expected."""
_SERVER, _LOCK, _TOKEN = "server.json", "lock", "admin.token"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine; `born`: its start, as a pid alone is used again (None: not known)."""

    pid: int
    born: int | None = None

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            pass  # somebody else's
        except (OSError, OverflowError):
            return False
        return self.pid > 0 and self.born in (None, start_of(self.pid))


def seems_to_restart(state: Path, said: Process | None) -> bool:
    """Of a state directory and the process that its server.json names; None: it is not there."""
    if said is not None:
        return not said.is_alive and _time_of(state / _SERVER) > _booted()
    return _is_locked(state / _LOCK) or ((state / _TOKEN).exists() and now() - _time_of(state) < RECENT)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _booted() -> float:
    """The moment at which this machine was started; 0: not known."""
    try:
        return now() - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def _is_locked(path: Path) -> bool:
    """A process holds it. To try to take it, be it for an instant, could keep a server from starting."""
    try:
        file = path.stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    return any(f":{file} " in line and " FLOCK " in line for line in lines)
