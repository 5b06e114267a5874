"""Become a container's process: with mounts and a host name of its own, otherwise a process of this machine as any other.

    python -I -S tests/kube/container.py spec.json

    {"argv", "environment", "cwd", "hostname", "uid", "gid", "groups", "scratch", "error",
     "mounts": [{"source", "target", "read_only"}], "kept": [directories that stay where they are if a mount covers them]}

Root only. It is a process of its own before it is the container's, so that the mounts are seen by nothing else. It needs
nothing but the standard library, and starts in some 50 ms. What stands in the way of starting is written to `error`, in the
words of a container runtime, and the exit code is 128.
"""

import ctypes
import json
import os
import stat
import sys
import tempfile

CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """The container cannot be started."""


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def _mount(source: str, target: str, flags: int, kind: str = "none") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)


def _bind(source: str, target: str) -> None:
    _mount(source, target, MS_BIND | MS_REC)


def _fill(old: str, new: str) -> None:
    """Make an empty directory look like another: links are copied, all else is bound."""
    for name in os.listdir(old):
        source, target = f"{old}/{name}", f"{new}/{name}"
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), target)
            continue
        if stat.S_ISDIR(mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        _bind(source, target)


class Mounts:
    """The file system as the container sees it: that of this machine, with volumes in it.

    A mount point that this machine lacks is made without a trace: the directory in which it would be is covered by one in
    memory that has the same entries.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._ours: list[str] = []  # directories in memory
        self._volumes = [os.path.realpath(tempfile.gettempdir())]  # where mount points may be made in earnest
        _call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
        _mount("none", "/", MS_REC | MS_PRIVATE)

    def add(self, source: int, target: str, *, read_only: bool) -> None:
        """Bind what a descriptor stands for."""
        is_folder = stat.S_ISDIR(os.fstat(source).st_mode)
        where = self.point(target, is_folder=is_folder)
        _bind(f"/proc/self/fd/{source}", where)
        self._volumes.append(where)
        if read_only:
            _mount("none", where, MS_REMOUNT | MS_BIND | MS_RDONLY)

    def point(self, target: str, *, is_folder: bool) -> str:
        """Find or make a mount point."""
        where = os.path.realpath(target)
        if os.path.exists(where):
            return where
        parent = os.path.dirname(where)
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        is_free = any(f"{parent}/".startswith(f"{each}/") for each in self._volumes)
        if not is_free and parent not in self._ours:
            self._cover(parent)
        if is_folder:
            os.makedirs(where)
        else:
            os.makedirs(os.path.dirname(where), exist_ok=True)
            os.close(os.open(where, os.O_CREAT | os.O_WRONLY, 0o666))
        made = os.path.dirname(where)
        while not is_free and made != parent:
            self._ours.append(made)
            made = os.path.dirname(made)
        return where

    def _cover(self, folder: str) -> None:
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if folder == "/":
            _mount("tmpfs", self._scratch, 0, "tmpfs")
            _fill("/", self._scratch)
            os.chdir(self._scratch)
            _mount(".", "/", MS_MOVE)
            os.chroot(".")
            os.chdir("/")
        else:
            old = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            _mount("tmpfs", folder, 0, "tmpfs")
            _fill(f"/proc/self/fd/{old}", folder)
            os.close(old)
        os.chmod(folder, mode)
        self._ours.append(folder)


def _program(name: str, path: str) -> str:
    """Find what to execute, or say in a runtime's words why it cannot be."""
    if "/" in name:
        if not os.path.exists(name):
            raise StartError(f'exec: "{name}": stat {name}: no such file or directory')
        if not os.path.isfile(name) or not os.access(name, os.X_OK):
            raise StartError(f'exec: "{name}": permission denied')
        return name
    for folder in path.split(os.pathsep):
        found = f"{folder}/{name}"
        if folder and os.path.isfile(found) and os.access(found, os.X_OK):
            return found
    raise StartError(f'exec: "{name}": executable file not found in $PATH')


def main() -> None:
    """Arrange the mounts, then be the container's program."""
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    error = os.open(spec["error"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        mounts = Mounts(spec["scratch"])
        wanted = sorted(spec["mounts"], key=lambda each: str(each["target"]))
        sources = [os.open(each["source"], os.O_PATH | os.O_CLOEXEC) for each in wanted]  # before anything covers them
        kept = [(os.open(each, os.O_PATH | os.O_CLOEXEC), each) for each in spec["kept"]]
        for each, source in zip(wanted, sources, strict=True):
            mounts.add(source, each["target"], read_only=each["read_only"])
        for source, path in kept:
            if not os.path.isdir(path) or not os.path.samestat(os.stat(path), os.fstat(source)):
                mounts.add(source, path, read_only=False)
        hostname = spec["hostname"].encode()
        _call("sethostname", hostname, len(hostname))
        os.chdir(mounts.point(spec["cwd"], is_folder=True))
        if spec["uid"] is not None:
            os.setgroups(spec["groups"])
            os.setgid(spec["gid"])
            os.setuid(spec["uid"])
        program = _program(spec["argv"][0], spec["environment"].get("PATH", ""))
        os.execve(program, spec["argv"], spec["environment"])
    except (OSError, StartError) as reason:
        os.write(error, str(reason).encode())
        os._exit(128)


if __name__ == "__main__":
    main()
