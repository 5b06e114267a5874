"""States of live services as text, one of each version of what is stored: `tests/data/states/VERSION[-COMMIT].sql`.

python tests/states.py FILE makes one with the Poise that can be imported, by a real service with real jobs: jobs that have
ended in every way, that were preempted, are held, wait and run, an array, another policy and another weight. Then the
service is killed. With PYTHONPATH it is the Poise of another commit: this file imports nothing of it.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).resolve().parents[1]
STATES = ROOT / "tests" / "data" / "states"
POISE = (sys.executable, "-c", "import sys; from poise.cli.app import main; sys.argv[0] = '/poise'; sys.exit(main())")
"""Called as from elsewhere: jobs are then submitted without this virtual environment, whose path would be stored."""
PATIENCE = 120.0
COUNTS = """
import json, os, sys, time
run, kept = os.environ["POISE_RUN_DIR"], os.environ["POISE_CHECKPOINT_DIR"]
steps = max((int(name[5:]) for name in os.listdir(kept) if name[5:].isdigit()), default=0)
def replace(path, text):
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)
while json.load(open(run + "/lease.json"))["ends"] is None:
    steps += 1
    replace(run + "/progress.json", json.dumps({"version": 1, "steps": steps, "total": 10**6, "checkpoint": steps - 1,
        "throughput": 20.0, "loss": 0.5, "first": 1.0, "at": time.time()}))
    time.sleep(0.05)
replace(kept + f"/step-{steps}", "")
sys.exit(75)
"""
"""A training that speaks the lease protocol and imports nothing, so that no path of this machine is in what is stored."""


def load(file: Path, state: Path) -> None:
    """Make the state directory that a dump was made of."""
    state.mkdir(0o700, parents=True, exist_ok=True)
    (state / "journal.db").touch(mode=0o600)
    with closing(sqlite3.connect(state / "journal.db")) as db:
        db.executescript(file.read_text(encoding="utf-8"))


def dump(state: Path) -> str:
    """A state as SQL."""
    with closing(sqlite3.connect(state / "journal.db")) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        text = "\n".join((f"PRAGMA user_version = {version};", *db.iterdump()))
    return text + "\n"


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < deadline, what
        sleep(0.05)


class _Maker:
    """A service that makes a state."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self._environ = {**os.environ, "POISE_STATE": str(self.state)}
        out = (folder / "out").open("wb")
        options = ("--cluster", "v100:2", "--listen", "127.0.0.1:0", "--round", "1s", "--policy", "las", "--json", "--quiet")
        self._server = subprocess.Popen([*POISE, "serve", *options], stdout=out, env=self._environ, cwd="/")
        _until(lambda: (folder / "out").stat().st_size > 0, "the service has not started")

    def poise(self, *words: object) -> dict[str, object]:
        said = subprocess.run(
            [*POISE, *map(str, words)], check=True, stdout=subprocess.PIPE, env=self._environ, cwd="/", text=True
        ).stdout
        found = json.loads(said)
        return found if isinstance(found, dict) else {"all": found}

    def submit(self, *words: object) -> str:
        """The first of its jobs."""
        jobs = self.poise("submit", "--json", *words)["jobs"]
        assert isinstance(jobs, list)
        return str(jobs[0])

    def job(self, job: str) -> dict[str, object]:
        return self.poise("show", "--json", job)

    def is_in(self, job: str, *states: str) -> bool:
        return any(f'"state": "{state}"' in json.dumps(self.job(job)) for state in states)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        mark = b"POISE_RUN_DIR=" + os.fsencode(self.state)
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with suppress(OSError):
                if any(each.startswith(mark) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    os.kill(pid, signal.SIGKILL)


def make(folder: Path) -> str:
    """The dump of a state that this Poise has just made."""
    maker = _Maker(folder)
    try:
        done = maker.submit("-n", "done", "--", "/bin/true")
        failed = maker.submit("-n", "failed", "--retries", 0, "--", "/bin/false")
        _until(lambda: maker.is_in(done, "SUCCEEDED") and maker.is_in(failed, "FAILED"), "they have not ended")
        maker.submit("--array", 2, "-n", "array", "--", "sleep", "0.1")
        maker.submit("-n", "held", "--hold", "--model", "ResNet-18", "--batch-size", 32, "--", "sleep", "1")
        gone = maker.submit("-n", "gone", "--tenant", "speech", "--", "sleep", "1000")
        _until(lambda: maker.is_in(gone, "RUNNING"), "it does not run")
        maker.poise("cancel", "--json", gone)
        first = maker.submit("-n", "counts", "-g", 2, "--checkpoint-every", "1s", "--", "python3", "-I", "-c", COUNTS)
        maker.submit("-n", "restarts", "-g", 2, "--preemption", "restart", "--tenant", "speech", "--", "sleep", "1000")
        _until(lambda: '"preemptions": 0' not in json.dumps(maker.job(first)), "it is not preempted")
        _until(lambda: '"epoch": 2' in json.dumps(maker.job(first)), "it does not come back")
        maker.poise("shares", "--json", "--set", "speech=2")
        maker.poise("use", "--json", "fifo")
        stays = maker.submit("-n", "stays", "--preemption", "never", "--", "sleep", "1000")
        maker.poise("hold", "--json", stays)
        maker.poise("release", "--json", stays)
        maker.poise("drain", "--json", "--no-wait", "--reason", "a new driver", "v100-0")
    finally:
        maker.close()
    return dump(maker.state)


def main() -> None:
    """Make a state, and write it to the file that is named."""
    with tempfile.TemporaryDirectory() as folder:
        Path(sys.argv[1]).write_text(make(Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
