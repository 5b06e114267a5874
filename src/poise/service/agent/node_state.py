"""What a node remembers: who it is, whose runs it has, and until when it may run anything.

STATE/node.json   {"identity", "service"}
STATE/over.json   {"code", "run"} of a node that was there for one run, which is over: with which exit code, and where it was
STATE/lease       until when, and since when without a gap, in seconds since boot (runner/fence.py)
STATE/jobs/       as on the machine of a service (backends/local/state_dir.py)
"""

import json
import os
import secrets
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from poise.durable import make_folders, replace_file
from poise.scheduler.model.errors import RequestError
from poise.service.backends.local import processes
from poise.service.backends.local.lease_files import take_lock
from poise.service.backends.local.runner.fence import LeaseTimes, read_lease, since_boot, write_lease
from poise.service.backends.local.state_dir import JOBS

NODE, OVER, LEASE = "node.json", "over.json", "lease"
RENEWED_PART = 0.02  # of a lease: renewals that are closer together are not written


class NodeStateDir:
    """The state directory of an agent, which one agent at a time has.

    A second agent would carry out every order a second time, so the directory is locked until the process ends.
    """

    def __init__(self, path: Path) -> None:
        make_folders(path)
        self.path = path.resolve()
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._lock = take_lock(folder)
        os.close(folder)
        if self._lock is None:
            raise RequestError(f"{path}: another agent works there; stop that one, or name another directory")
        self.identity, self.service = self._read()
        self._lease = 0.0  # seconds
        self._times = read_lease(self.lease_file) or LeaseTimes(0.0, 0.0)
        if self.identity == "":
            self.identity = secrets.token_hex(16)
            try:
                self._write()
            except OSError:
                self.close()
                raise

    @property
    def lease_file(self) -> str:
        """The file that says until when the node may run anything."""
        return str(self.path / LEASE)

    def close(self) -> None:
        """Let another agent have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def has_runs(self) -> bool:
        """Whether processes of any run live on this node."""
        below = os.fsencode(self.path / JOBS) + b"/"
        return any(value.startswith(below) for value in processes.environment_values(b"POISE_RUN_DIR"))

    def belong_to(self, service: str) -> bool:
        """Remember the service, and say whether it is another one.

        Jobs of the one before are put aside: their numbers mean other jobs now.
        """
        if service == self.service:
            return False
        if self.service is not None:
            aside = f"{JOBS}-of-{self.service}"
            names = chain((aside,), (f"{aside}-{number}" for number in count(2)))
            with suppress(FileNotFoundError):
                os.rename(self.path / JOBS, next(path for name in names if not (path := self.path / name).exists()))
        self.service = service
        self._write()
        return True

    def has_run_out(self) -> bool:
        """Whether nothing may run here: there was no answer of the server for longer than a lease, or never one."""
        return self._times.until <= since_boot()

    def out_for(self) -> float:
        """Seconds since the lease has ended; 0: it has not, or there never was one."""
        return max(0.0, since_boot() - self._times.until) if self._times.until > 0 else 0.0

    def note_over(self, code: int, run: str | None) -> None:
        """Remember that the only run of this node is over: the next agent has nothing left to do but to say so."""
        replace_file(self.path / OVER, json.dumps({"code": code, "run": run}) + "\n")

    def over(self) -> tuple[int, str | None] | None:
        """Return what was remembered; None: it is not over."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads((self.path / OVER).read_text())
            return int(found["code"]), found["run"]
        return None

    @property
    def leased_since(self) -> float:
        """Since when the node has had a lease without a gap, in seconds since boot."""
        return self._times.since

    def check(self) -> None:
        """Raise OSError if the lease could not be renewed: then the server must not believe that it is."""
        write_lease(self.lease_file, self._times)

    def renew(self, sent: float, lease: float) -> None:
        """The server has answered a request that was sent at `sent`, in seconds since boot."""
        until = sent + lease
        # Leases of another length are of another server, which counts on it that a longer one was cut short.
        is_other = lease != self._lease
        if is_other or until > self._times.until + RENEWED_PART * lease or self.has_run_out():
            # As it will be read: runners compare it.
            since = round(since_boot(), 3) if self.has_run_out() else self._times.since
            times = LeaseTimes(until, since)
            write_lease(self.lease_file, times)
            self._times, self._lease = times, lease

    def _read(self) -> tuple[str, str | None]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads((self.path / NODE).read_text())
            return str(found["identity"]), found["service"]
        return "", None

    def _write(self) -> None:
        replace_file(self.path / NODE, json.dumps({"identity": self.identity, "service": self.service}) + "\n")
