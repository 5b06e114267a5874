"""Counts steps as a worker that is at odds with its lease: `python odd.py STEPS SECONDS [HOW AFTER]`.

In its first run, once AFTER steps are done,

    deaf      it hears neither the end of its lease nor TERM, and does nothing any more
    unsaved   it can write no checkpoint any more, and goes on
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

from poise.worker import attach

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
how, after = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("", 0)
is_odd = os.environ["POISE_EPOCH"] == "1"
chain = [hashlib.sha256(b"odd").hexdigest()]
"""The hash after each step since the last start."""
begun = 0


def save(path: str) -> None:
    done = begun + len(chain) - 1
    if is_odd and how == "unsaved" and done > after:
        raise OSError(28, "No space left on device")
    Path(path).write_text(f"{done} {chain[-1]}", encoding="ascii")


def load(path: str) -> None:
    global begun
    done, last = Path(path).read_text(encoding="ascii").split()
    begun, chain[:] = int(done), [last]


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)  # noqa: T201  the test waits for it
    while True:
        time.sleep(1)


for step in attach(save=save, load=load).steps(steps):
    if is_odd and how == "deaf" and step == after:
        hang()
    time.sleep(seconds)
    chain.append(hashlib.sha256(f"{chain[-1]} {step}".encode()).hexdigest())
print(chain[-1])  # noqa: T201  what the test compares
