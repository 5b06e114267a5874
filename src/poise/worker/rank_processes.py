"""The ranks of one run as processes, for tests of training scripts: started together, and none of them left behind."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from poise.worker.protocol import YIELDED

GRACE = 5.0  # seconds that the others have to end by themselves after one has failed
_POLL_SECONDS = 0.005


class RankProcesses:
    """Processes that run one command, each with variables of its own. What they print goes to files of a directory."""

    def __init__(self, command: Sequence[str], variables: Sequence[Mapping[str, str]], folder: str) -> None:
        self._command, self._folder = list(command), Path(folder)
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, own in enumerate(variables):
                with self._file(rank, "out").open("wb") as out, self._file(rank, "err").open("wb") as err:
                    # A session of its own: workers of its data loaders end with it.
                    process = subprocess.Popen(self._command, env=dict(own), stdout=out, stderr=err, start_new_session=True)
                self._started.append(process)
        except BaseException:
            self._kill()
            raise

    def ended(self, timeout: float) -> "list[subprocess.CompletedProcess[str]]":
        """Wait until all have ended, and return them by rank. Once one has failed, the others have a moment to end as well.

        Ranks that run for longer than `timeout` seconds are killed, and a TimeoutError names them.
        """
        deadline, is_failed = monotonic() + timeout, False
        try:
            while None in (codes := self._codes()):
                if not is_failed and not codes <= {None, 0, YIELDED}:
                    is_failed, deadline = True, min(deadline, monotonic() + GRACE)
                if monotonic() >= deadline:
                    break
                sleep(_POLL_SECONDS)
            hanging = [rank for rank, process in enumerate(self._started) if process.returncode is None]
        finally:
            self._kill()
        if hanging and not is_failed:
            raise TimeoutError(self._complaint(hanging, timeout))
        return [self._completed(rank) for rank in range(len(self._started))]

    def _codes(self) -> set[int | None]:
        """Return the exit codes so far; None: some have not ended."""
        for process in self._started:
            # Looked at without being reaped, so that its number is still its own when its group is killed.
            if process.returncode is None and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _end(process)
        return {process.returncode for process in self._started}

    def _kill(self) -> None:
        for process in self._started:
            if process.returncode is None:
                _end(process)

    def _complaint(self, hanging: Sequence[int], timeout: float) -> str:
        first = hanging[0]
        lines = (self._text(first, "out") + self._text(first, "err")).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        over = [
            f"rank {rank} ended with exit code {each.returncode}"
            for rank, each in enumerate(self._started)
            if rank not in hanging
        ]
        who = f"rank {', '.join(map(str, hanging))} of {len(self._started)}"
        others = f" ({', '.join(over)})" if over else ""
        return f"{who} did not end within {timeout:g} s{others}; rank {first} printed last: {last}"

    def _completed(self, rank: int) -> "subprocess.CompletedProcess[str]":
        out, err = self._text(rank, "out"), self._text(rank, "err")
        return subprocess.CompletedProcess(self._command, self._started[rank].returncode, out, err)

    def _file(self, rank: int, stream: str) -> Path:
        return self._folder / f"{rank}.{stream}"

    def _text(self, rank: int, stream: str) -> str:
        return self._file(rank, stream).read_text(encoding="utf-8", errors="replace")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
