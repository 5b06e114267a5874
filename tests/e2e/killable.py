"""A `poise serve` that is back at once after it was killed, and that can be told to die at a certain write to Kubernetes.

Most of what a start takes is importing. So a process imports everything once, and each server is a fork of it, which then
does what the command does, from its first line on. This file is that process when it is run.
"""

import asyncio
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tests.e2e.service import ISOLATE, PATIENCE, ROOT, Service, until
from tests.kube.faults import trouble

from poise.service.backends.kubernetes.client import KubeClient

OTHER_WRITES = ("reviews", "/leases", "/events", "/status")
"""What is asked by a write, and what changes nothing about where pods are: a server does not die of these."""
SENT_SECONDS = 0.002
"""From the moment at which a request is being sent to the death of who sends it."""


@dataclass(frozen=True)
class Death:
    """When a server kills itself: at which of its writes that create, bind, suspend, evict or delete something, from 1.

    when   before: it is not sent;  sent: it is on its way;  after: it was answered, and nobody has heard of the answer
    """

    number: int
    when: Literal["before", "sent", "after"]


class KillableService(Service):
    """A service whose servers are forks of one process.

    codes     with which servers may end; negative: a signal
    trouble   seed of faults of the API server that each server meets (tests/kube/faults.py); None: none
    """

    codes: Collection[int] = (-signal.SIGKILL,)
    trouble: int | None = None

    def __init__(self, folder: Path, *options: object) -> None:
        super().__init__(folder, *options)
        self._template = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.killable"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        self._pid: int | None = None

    def start(self, death: Death | None = None) -> None:
        """Start the server, and do not wait for it."""
        assert self._pid is None
        self.starts += 1
        where = ("--state", self.state, "--listen", "127.0.0.1:0", "--isolate", ISOLATE)
        words = [str(word) for word in ("serve", *where, "--json", *self.options)]
        given = {"words": words, "out": str(self._announcement), "log": str(self._log)}
        self._announcement.touch()
        trouble = None if self.trouble is None else self.trouble + self.starts
        self._say(json.dumps({**given, "death": None if death is None else asdict(death), "trouble": trouble}))
        self._pid = int(self._said())

    def is_ready(self) -> bool:
        """It answers; an AssertionError if it never will."""
        assert self.is_alive(), f"the server has ended:\n{self.log[-4000:]}"
        return self.has_answered

    @property
    def has_answered(self) -> bool:
        """Whether the latest server has come so far as to answer."""
        return self._announcement.stat().st_size > 0

    def is_alive(self) -> bool:
        """Whether it still runs; an AssertionError if it has ended in a way in which it may not."""
        assert self._template.stdout is not None
        if self._pid is not None and select.select([self._template.stdout.fileno()], [], [], 0.0)[0]:
            self._pid, code = None, int(self._said())
            self._say("")
            assert code in self.codes, f"the server ended with exit code {code}:\n{self.log[-4000:]}"
        return self._pid is not None

    def kill(self) -> None:
        """SIGKILL to the server, unless it has killed itself."""
        if self.is_alive():
            assert self._pid is not None
            os.kill(self._pid, signal.SIGKILL)  # who is not waited for keeps its number
            until(lambda: not self.is_alive(), "the server does not die")

    def close(self) -> None:
        """End everything that was started here."""
        with suppress(AssertionError):
            self.kill()
        super().close()
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        self._template.stdin.close()
        self._template.wait(PATIENCE)
        self._template.stdout.close()

    def _say(self, line: str) -> None:
        assert self._template.stdin is not None
        self._template.stdin.write(line + "\n")
        self._template.stdin.flush()

    def _said(self) -> str:
        assert self._template.stdout is not None
        return self._template.stdout.readline().strip()


def _serve_again_and_again() -> None:
    """Fork a server for each line of stdin; say its number, and later its exit code, negative if it was a signal."""
    die_with_parent()
    while line := sys.stdin.readline():
        given = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _serve(given)
        print(pid, flush=True)  # noqa: T201
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        print(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status, flush=True)  # noqa: T201
        sys.stdin.readline()  # it has been heard: until then nobody else gets the number of the process
        os.waitpid(pid, 0)


def _serve(given: Mapping[str, Any]) -> None:
    die_with_parent()
    os.setsid()
    for path, number in ((os.devnull, 0), (given["out"], 1), (given["log"], 2)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND | os.O_CREAT
        os.dup2(os.open(path, flags | os.O_CLOEXEC), number)
    if given["death"] is not None:
        die_at(Death(**given["death"]))
    if given["trouble"] is not None:
        trouble(given["trouble"])
    sys.argv = ["poise", *given["words"]]
    from poise.cli.app import main

    main()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that has started it is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def die_at(death: Death) -> None:
    """Have this process kill itself at a certain write to Kubernetes."""
    numbers, ask = count(1), KubeClient._ask

    async def watched(self: KubeClient, verb: str, method: str, path: str, *more: Any) -> Any:
        if method == "GET" or any(each in path for each in OTHER_WRITES) or next(numbers) != death.number:
            return await ask(self, verb, method, path, *more)
        if death.when != "before":
            asking = asyncio.ensure_future(ask(self, verb, method, path, *more))
            await asyncio.wait([asking], timeout=SENT_SECONDS if death.when == "sent" else None)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("this process is dead")

    KubeClient._ask = watched  # type: ignore[assignment]


if __name__ == "__main__":
    import poise.cli.serve
    import poise.service.server.startup  # noqa: F401 - what a server imports when it starts

    _serve_again_and_again()
