"""The starter: starts runners in a user's container for the agent, which is in another container of the same pod.

    container of Poise                    container of the user's image
    agent ─ LocalBackend ── socket ─────▶ starter ─ runner ─ replicas

Both containers share a directory, the process namespace and the user. So what the local back end does with a runner, by
files and by signals, it does here as on any machine. It only cannot fork one, since a run has to see the user's files: it
asks the starter, over a socket in a directory that both have. A request is one message, and so is its answer:

    {"start": RUN_DIRECTORY, "marks": {…}}, a pipe    {"pid": …}, a pidfd;  or {"errno": …}
    {"done": EXIT_CODE, "run": RUN_DIRECTORY}         {}, and the starter ends

The runner gets the environment of the starter, which is that of the container. TERM, which a container gets when its pod is
deleted, is passed on: the runner has its job save. Then the starter ends once no runner is left, without being told.

Imported by the starter: standard library only.
"""

import errno
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep

from poise.service.backends.local import lease_files, processes
from poise.service.backends.local.lease_files import Fields
from poise.service.backends.local.runner.isolation import PR_SET_CHILD_SUBREAPER, libc

SOCKET = "socket"
TERMINATION_LOG = "/dev/termination-log"
MOST_LOGGED = 4096  # bytes that the kubelet reads of it
MOST_MESSAGE = 64 << 10
MOST_CONNECTIONS = 64  # above it the oldest is closed
SWEEP_SECONDS = 5.0  # for what is left of runs to die, before the starter ends and the container with it
OVER = errno.ESHUTDOWN  # error of a starter that was sent TERM
FAILED = 1  # exit code of a run that failed, and of which no replica has one
SECRETS = frozenset({"POISE_AGENTS_TOKEN"})
SECRET_PREFIX = "POISE_AGENT_"  # options of the agent, if a container has them by mistake
_PEER = struct.Struct("iII")  # pid, uid, gid, as SO_PEERCRED has them


def main(folder: str, log: str = TERMINATION_LOG) -> int:
    """Serve until told to end, or until TERM; return the exit code."""
    return Starter(folder, log, os.environ).serve()


def exit_code(how: object, codes: Sequence[object]) -> int:
    """Return the exit code of a container whose run ended like this: 0 finished, 75 left, else that of what failed."""
    if how == "finished":
        return 0
    if how == "yielded":
        return lease_files.YIELDED
    given = [code for code in codes if isinstance(code, int) and code]
    # Replicas that were ended because of another one have died of signals, and say less.
    code = next((each for each in given if each > 0), given[0] if given else FAILED)
    return min(code, 255) if code > 0 else min(128 - code, 255)


def exit_code_of(fields: Fields | None) -> int:
    """Return the same for what exit.json says; None: there is none."""
    given = (fields or {}).get("replicas")
    replicas = given if isinstance(given, list) else []
    return exit_code((fields or {}).get("how"), [each.get("code") for each in replicas if isinstance(each, dict)])


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what runs get of a container's environment: all but the secrets of Poise."""
    return {name: value for name, value in environ.items() if name not in SECRETS and not name.startswith(SECRET_PREFIX)}


class Starter:
    """The process. There is one thread, which waits for requests and for signals.

    folder    directory with the socket
    log       file that gets exit.json when the starter ends, if it is there
    environ   what runners get
    """

    def __init__(self, folder: str, log: str, environ: Mapping[str, str]) -> None:
        self._log, self._environment = log, inheritable(environ)
        self._runners: dict[int, str] = {}  # directory of the run by pid
        self._last: str | None = None  # directory of the run that was started last
        self._got_term = False
        self._code: int | None = None  # with which to end
        self._connections: dict[int, socket.socket] = {}  # the oldest first
        self._wake, write_end = os.pipe()
        for handle in (self._wake, write_end):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a runner leaves that was killed is reaped here
        os.makedirs(folder, 0o700, exist_ok=True)
        self._socket = listening(folder)

    def serve(self) -> int:
        """Start what is asked for, until told to end."""
        poll = select.poll()
        for handle in (self._wake, self._socket.fileno()):
            poll.register(handle, select.POLLIN)
        while not self._is_over():
            for handle, _ in poll.poll():
                if handle == self._wake:
                    self._heed_signals()
                elif handle == self._socket.fileno():
                    self._accept(poll)
                elif handle in self._connections:
                    poll.unregister(handle)
                    with suppress(OSError):  # who asked is gone
                        self._answer(self._connections[handle])
                    self._connections.pop(handle).close()
        return self._end()

    def _is_over(self) -> bool:
        return self._code is not None or (self._got_term and not self._runners)

    def _heed_signals(self) -> None:
        """Reap what has ended, and pass TERM on. As children that were not reaped, runners cannot be mistaken."""
        with suppress(BlockingIOError):
            got = os.read(self._wake, 4096)
            self._got_term |= signal.SIGTERM in got or signal.SIGINT in got
            self._reap()
            if signal.SIGTERM in got or signal.SIGINT in got:
                for pid in self._runners:
                    os.kill(pid, signal.SIGTERM)

    def _reap(self) -> bool:
        """Reap; False: there are no children."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._runners.clear()
                return False
            if pid == 0:
                return True
            self._runners.pop(pid, None)

    def _accept(self, poll: select.poll) -> None:
        with suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user not in (0, os.geteuid()):
                connection.close()
                return
            if len(self._connections) >= MOST_CONNECTIONS:
                oldest = next(iter(self._connections))
                poll.unregister(oldest)
                self._connections.pop(oldest).close()
            self._connections[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)

    def _answer(self, connection: socket.socket) -> None:
        text, handles = receive(connection)
        try:
            fields = json.loads(text) if text else {}
            if not isinstance(fields, dict):
                return
            if "start" in fields and handles:
                self._start(connection, str(fields["start"]), dict(fields["marks"]), handles[0])
            elif "done" in fields:
                self._code = int(fields["done"])
                self._last = fields.get("run") or self._last
                send(connection, {})
        except (ValueError, TypeError, KeyError):  # not from the agent
            return
        finally:
            for handle in handles:
                os.close(handle)

    def _start(self, connection: socket.socket, path: str, marks: dict[str, str], write_end: int) -> None:
        """Start a runner, and hand it to who asked. One that they will not hear of must not live."""
        if _has_hung_up(connection):
            return
        if self._got_term:
            send(connection, {"errno": OVER})
            return
        try:
            # TERM waits too: the container may be ended before the runner has a handler for it.
            pid, pidfd = processes.spawn_with(path, {**self._environment, **marks}, write_end, signal.SIGTERM)
        except OSError as error:
            send(connection, {"errno": error.errno or errno.EIO})
            return
        self._runners[pid] = self._last = path
        try:
            send(connection, {"pid": pid}, pidfd)
        except OSError:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            raise
        finally:
            os.close(pidfd)

    def _end(self) -> int:
        """Kill what is left, say how the last run ended, and return the exit code."""
        deadline = monotonic() + SWEEP_SECONDS
        while self._reap() and monotonic() < deadline:
            with suppress(OSError):
                processes.kill_where(lambda pid: (processes.stat_of(pid) or ["", "0"])[1] == str(os.getpid()))
            sleep(0.01)
        fields = _read_exit(self._last)
        self._say(fields)
        if self._code is not None:
            return self._code
        # Sent TERM. A run that never began has lost nothing.
        return lease_files.YIELDED if self._last is None else exit_code_of(fields)

    def _say(self, fields: Fields | None) -> None:
        """Write exit.json where Kubernetes reads it: it says how the run ended even if the network does not work."""
        if fields is None:
            return
        text = json.dumps(fields).encode()
        if len(text) > MOST_LOGGED:
            text = json.dumps({name: value for name, value in fields.items() if name != "replicas"}).encode()
        with suppress(OSError):
            handle = os.open(self._log, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                os.write(handle, text[:MOST_LOGGED])
            finally:
                os.close(handle)


def _read_exit(path: str | None) -> Fields | None:
    with suppress(OSError):
        folder = None if path is None else lease_files.open_run(path)
        if folder is not None:
            try:
                return lease_files.get(folder, lease_files.EXIT)
            finally:
                os.close(folder)
    return None


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


# Messages, and the socket; for both sides


def listening(folder: str) -> socket.socket:
    """Listen in a directory; what an earlier starter has left there is replaced."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, SOCKET))
        _at(folder, found.bind)
        found.listen()
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found


def connected(folder: str) -> socket.socket:
    """Connect to the starter in a directory; OSError: there is none, or not yet."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.setblocking(False)
        _at(folder, found.connect)
    except BaseException:
        found.close()
        raise
    return found


def _at(folder: str, use: Callable[[str], None]) -> None:
    """Use the path of the socket in a directory, which may be longer than the 107 bytes that a socket's path can have."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(f"/proc/self/fd/{handle}/{SOCKET}")
    finally:
        os.close(handle)


def send(connection: socket.socket, fields: Fields, *handles: int) -> None:
    """Send a message, with copies of open files."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(handles)}i", *handles))] if handles else []
    connection.sendmsg([json.dumps(fields).encode()], rights, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message, with the files that came along; empty: the other side has hung up."""
    size = struct.calcsize("i")
    text, extra, _, _ = connection.recvmsg(MOST_MESSAGE, socket.CMSG_SPACE(4 * size), socket.MSG_CMSG_CLOEXEC)
    handles: list[int] = []
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(data) // size
            handles += struct.unpack(f"{count}i", data[: count * size])
    return text, handles
