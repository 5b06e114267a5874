"""The driver as a child process: started, listened to, and started again when it dies or falls silent."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import IO

from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.ray.messages import DriverOrder, DriverReport

LOG_FILE = "ray.log"  # in the state directory: what Ray says, since the driver was last started
FIRST_SECONDS = 60.0  # for the first report
SILENT_SECONDS = 15.0  # after which a driver hangs: Ray waits for a control store that is gone
AGAIN_SECONDS = 2.0  # until the next start
WRONG_TOKEN = b"InvalidAuthToken"
NOT_INSTALLED = 'Ray is not installed here; pip install "poise[ray]"'
WRONG_TOKEN_TEXT = (
    "the Ray cluster refuses the token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, as it was"
    " started with"
)

OnReport = Callable[[DriverReport], None]


class DriverProcess:
    """One driver at a time, from the constructor to `close`.

    on_report    called in a thread of its own, for every report. One with a refusal is the last; one with a problem means
                 that another driver is started in a moment.
    """

    def __init__(self, order: DriverOrder, state: Path, on_report: OnReport) -> None:
        if find_spec("ray") is None:
            raise RequestError(NOT_INSTALLED)
        self._order, self._log, self._on_report = order, state / LOG_FILE, on_report
        self._environ = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        self._is_closed = threading.Event()
        self._lock = threading.Lock()  # around the child: it is ended by one thread while another may start it
        self._child: subprocess.Popen[str] | None = None
        self._first: DriverReport | None = None
        self._has_first = threading.Event()
        self._last = monotonic()
        self._thread = threading.Thread(target=self._run, name="ray-driver", daemon=True)

        self._last = monotonic()
        self._thread.start()
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()

    def first(self) -> DriverReport:
        """Wait for its first report."""
        self._has_first.wait()
        if self._first is None:
            raise PoiseError("the Ray driver was closed before it had started")
        return self._first

    def close(self) -> None:
        """End it; what it has set up in the cluster stays."""
        self._is_closed.set()
        self._kill()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                report = self._listen()
            except OSError as error:  # as where no file or process can be had
                report = DriverReport(problem=f"the Ray driver cannot be started: {error}")
                self._tell(report)
            if report.refusal is not None:
                return
            self._is_closed.wait(AGAIN_SECONDS)
        self._has_first.set()

    def _listen(self) -> DriverReport:
        """Run one driver to its end, and return its last report, which says why it ended."""
        argv = [sys.executable, "-m", "poise.service.backends.ray.driver"]
        with open(self._log, "wb", opener=_private) as log:
            with self._lock:
                if self._is_closed.is_set():
                    return DriverReport(refusal="closed")
                child = self._child = subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environ,
                    start_new_session=True,  # Ctrl-C is for the server
                )  # fmt: skip
            self._last = monotonic()
            report = self._converse(child)
        if report is None:
            report = (
                DriverReport(refusal=WRONG_TOKEN_TEXT) if self._is_token_wrong() else DriverReport(problem=self._death())
            )
        if not self._is_closed.is_set():
            self._tell(report)
        return report

    def _converse(self, child: subprocess.Popen[str]) -> DriverReport | None:
        """Hand over the order and pass reports on; return the last if it says why, else None."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(self._order.model_dump_json() + "\n")
                child.stdin.flush()
            return self._pass_on(child.stdout)
        finally:
            child.kill()
            child.wait()
            with suppress(BrokenPipeError):
                child.stdin.close()
            child.stdout.close()

    def _pass_on(self, lines: IO[str]) -> DriverReport | None:
        for line in lines:
            try:
                report = DriverReport.model_validate_json(line)
            except ValueError:  # it was killed while it wrote
                return None
            self._last = monotonic()
            if report.refusal is not None or report.problem is not None:
                return report
            self._tell(report)
        return None

    def _tell(self, report: DriverReport) -> None:
        if not self._has_first.is_set():
            self._first = report
            self._has_first.set()
        self._on_report(report)

    def _watch(self) -> None:
        """End a driver that hangs. Ray repeats a refused token for long before it gives up: that ends at once too."""
        while not self._is_closed.wait(0.25):
            patience = SILENT_SECONDS if self._has_first.is_set() else FIRST_SECONDS
            if monotonic() - self._last > patience or (not self._has_first.is_set() and self._is_token_wrong()):
                self._kill()

    def _kill(self) -> None:
        with self._lock:
            if self._child is not None and self._child.returncode is None:
                self._child.kill()

    def _is_token_wrong(self) -> bool:
        with suppress(OSError):
            return WRONG_TOKEN in self._log.read_bytes()
        return False

    def _death(self) -> str:
        """Say what is known of a driver that ended without a word."""
        if monotonic() - self._last > SILENT_SECONDS / 2:
            return f"Ray has not answered for {monotonic() - self._last:.0f} s"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the connection to Ray has ended: {lines[-1][:300]}" if lines else "the connection to Ray has ended"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
