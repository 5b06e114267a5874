"""Counts steps on several ranks, none of which completes a step without the others: `python ranks.py STEPS SECONDS SEED`.

The state is a chain of hashes, s(k+1) = sha256(s(k), k, what each rank has drawn): it depends on every step, and on the
random generator of every rank. All ranks print the step that they begin with, and the last hash.
"""

import hashlib
import os
import random
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from poise.worker import attach

PEER_GONE = 70
steps, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
chain, done = hashlib.sha256(seed.encode()).hexdigest(), 0


def save(path: str) -> None:
    Path(path).write_text(f"{done} {chain}", encoding="ascii")


def load(path: str) -> None:
    global chain, done
    text, chain = Path(path).read_text(encoding="ascii").split()
    done = int(text)


def met(rank: int, size: int) -> list[socket.socket]:
    """Connections of rank 0 to all others by rank, or the one to rank 0."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        while True:
            with suppress(OSError):
                line = socket.create_connection(place, timeout=1.0)
                line.settimeout(None)
                break
            time.sleep(0.01)
        line.sendall(f"{rank}\n".encode())
        return [line]
    with socket.create_server(place, backlog=size) as door:
        lines = [door.accept()[0] for _ in range(size - 1)]
    return sorted(lines, key=lambda line: int(heard(line)))


def heard(line: socket.socket) -> str:
    """A line of text; the process ends where its peer has."""
    text = b""
    while not text.endswith(b"\n"):
        try:
            got = line.recv(1)
        except ConnectionError:
            got = b""
        if not got:
            sys.exit(PEER_GONE)
        text += got
    return text.decode().strip()


def tell(line: socket.socket, text: str) -> None:
    try:
        line.sendall(f"{text}\n".encode())
    except ConnectionError:
        sys.exit(PEER_GONE)


def together(lines: list[socket.socket], rank: int, own: str) -> str:
    """What all ranks say, by rank. Each says which step it is at first, and it must be the same one."""
    if rank:
        tell(lines[0], own)
        return heard(lines[0])
    said = [own, *map(heard, lines)]
    assert len({each.split()[0] for each in said}) == 1, f"ranks are at different steps: {said}"
    for line in lines:
        tell(line, " ".join(said))
    return " ".join(said)


lease = attach(save=save, load=load)
random.seed(f"{seed}/{lease.rank}")
connections = met(lease.rank, lease.world_size)
begun = False
for step in lease.steps(steps):
    if not begun:
        begun = True
        print(f"begins at step {step}")  # noqa: T201  what the test compares
    assert step == done, f"step {step} comes after {done} steps"
    time.sleep(seconds)
    all_drawn = together(connections, lease.rank, f"{step} {random.getrandbits(32)}")
    chain, done = hashlib.sha256(f"{chain} {all_drawn}".encode()).hexdigest(), step + 1
print(chain)  # noqa: T201  what the test compares
