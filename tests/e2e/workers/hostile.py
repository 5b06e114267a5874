"""A job that tries to get at what is not its own: `python hostile.py STATE OTHER SERVER`, and prints what it got as JSON.

STATE is the state directory, OTHER a job, SERVER the pid of the service, as the machine knows them. It changes nothing:
files are read, signals are number 0, and a process that it could trace is not stopped.
"""

import ctypes
import json
import os
import sys

state, other, server = sys.argv[1], sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, MNT_DETACH, CLONE_NEWNS, CLONE_NEWUSER = 0x4206, 2, 0x20000, 0x10000000
WANTED = ("journal.db", "accounts.json", "admin.token", "server.json", f"jobs/{other}/checkpoint/step-1")


def readable(root: str) -> list[str]:
    found = []
    for name in WANTED:
        try:
            with open(root + state + "/" + name, "rb") as file:
                file.read(1)
            found.append(root + name)
        except OSError:
            pass
    return found


def elsewhere() -> list[str]:
    """The same by way of other processes."""
    pids = [each for each in os.listdir("/proc") if each.isdigit() and each != str(os.getpid())]
    return [name for pid in pids for way in ("root", "cwd") for name in readable(f"/proc/{pid}/{way}")]


def uncovered() -> list[str]:
    """The same once whatever covers it is taken away, as far as that can be done."""
    for _ in range(3):
        libc.umount2(os.fsencode(state), MNT_DETACH)
    return readable("")


def uncovered_by_another_self() -> list[str]:
    """The same as root of a namespace of its own, in a child."""
    out, tell = os.pipe()
    if os.fork() == 0:
        libc.unshare(CLONE_NEWUSER | CLONE_NEWNS)
        os.write(tell, json.dumps(uncovered()).encode())
        os._exit(0)
    os.close(tell)
    os.wait()
    with open(out, "rb") as file:
        return list(json.loads(file.read()))


def reached(pid: int) -> list[str]:
    found = []
    try:
        os.kill(pid, 0)
        found.append("signalled")
    except OSError:
        pass
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0:
        found.append("traced")
    return found


with open(os.environ["POISE_RUN_DIR"] + "/runner.json", encoding="utf-8") as file:
    runner = json.load(file)["pid"]
with open(os.environ["POISE_CHECKPOINT_DIR"] + "/step-1", "w", encoding="utf-8") as file:
    file.write("mine")
got = {
    "state": sorted(os.listdir(state)),
    "jobs": sorted(os.listdir(state + "/jobs")),
    "files": readable(""),
    "server": reached(server),
    "runner": reached(runner),
    "elsewhere": elsewhere(),
    "another self": uncovered_by_another_self(),
    "uncovered": uncovered(),
    "own": sorted(os.listdir(os.environ["POISE_RUN_DIR"])),
    "processes": len([each for each in os.listdir("/proc") if each.isdigit()]),
}
os.write(1, f"got {json.dumps(got)}\n".encode())
