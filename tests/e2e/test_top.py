"""`poise top` on a real terminal, with a real service: drawing, keys, another size, a server that goes away, the end."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import pytest
from tests.e2e.service import PATIENCE, Service
from tests.shell import COMMAND, poise, unread

pytestmark = pytest.mark.slow
Started = Callable[..., Service]
IN, OUT = "\x1b[?1049h", "\x1b[?1049l"  # to the alternate screen and back
CURSOR = "\x1b[?25h"


class Terminal:
    """A terminal on which a command runs, and what it has been sent."""

    def __init__(self, pid: int, master: int) -> None:
        self.pid = pid
        self.shown = ""
        self._master = master

    def size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, as it does for a shell."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> str:
        """What is shown from now on until this text is there."""
        before = len(self.shown)
        deadline = monotonic() + PATIENCE
        while text not in self.shown[before:]:
            assert monotonic() < deadline, f"{text!r} is not in {self.shown[before:]!r}"
            if not self._read():
                assert text in self.shown[before:], self.shown[before:]
        return self.shown[before:]

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.1)[0]:
            return True
        try:
            self.shown += os.read(self._master, 65_536).decode(errors="replace")
        except OSError:  # the command has ended
            return False
        return True

    def code(self) -> int:
        """The exit code, once the command has ended."""
        while self._read():
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def terminal(*words: str, rows: int = 24, columns: int = 80) -> Iterator[Terminal]:
    pid, master = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        os.execve(COMMAND, [COMMAND, *words], {**environment, "TERM": "xterm"})
    try:
        yield Terminal(pid, master)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(master)


def test_it_draws_obeys_keys_and_sizes_and_leaves_the_terminal_as_it_was(a_service: Started) -> None:
    service = a_service("--cluster", "v100:2")
    service.up()
    assert poise("submit", "-n", "busy", "--", "sleep", "600").code == 0
    assert poise("submit", "-n", "later", "-g", "2", "--", "true").code == 0
    assert poise("submit", "-n", "over", "--hold", "--", "true").code == 0
    assert poise("cancel", "over").code == 0
    with terminal("top", "--every", "0.5") as screen:
        screen.expect(IN)
        screen.expect("1 of 2 GPUs in use")
        screen.expect("later")
        assert not screen.echoes()
        screen.press("s")
        screen.expect("sort: GPUs")
        screen.press("e")
        screen.expect("CANCELLED")
        screen.size(12, 50)
        shown = screen.expect("q quit")
        assert shown
        service.kill()
        screen.expect("as of ")
        screen.press("s")
        screen.expect("sort: time")
        service.start()
        service.ready()
        screen.expect("poise 0.")
        screen.press("q")
        assert screen.code() == 0
        assert screen.shown.rindex(OUT) > screen.shown.rindex(IN)
        assert CURSOR in screen.shown[screen.shown.rindex("q quit") :]
        assert "Traceback" not in screen.shown


@pytest.mark.parametrize("how", ["keys", "TERM", "HUP"])
def test_whatever_ends_it_the_terminal_is_as_it_was(how: str, a_service: Started) -> None:
    a_service("--cluster", "gpu:1").up()
    with terminal("top") as screen:
        screen.expect("q quit")
        if how == "keys":
            screen.press("\x03")
        else:
            os.kill(screen.pid, {"TERM": signal.SIGTERM, "HUP": signal.SIGHUP}[how])
        assert screen.code() == 130
        assert OUT in screen.shown
        assert "Traceback" not in screen.shown


def test_without_a_terminal_it_prints_once(a_service: Started) -> None:
    a_service("--cluster", "v100:2").up()
    assert poise("submit", "-n", "busy", "--", "sleep", "600").code == 0
    for words in (("top",), ("top", "--once")):
        said = poise(*words)
        assert (said.code, said.err) == (0, "")
        assert "v100  [" in said.out
        assert "busy" in said.out
        assert "\x1b" not in said.out
    found = poise("top", "--json").json
    assert {*found} == {"service", "nodes", "shares", "running", "waiting", "counts"}
    assert [row["name"] for row in found["running"] + found["waiting"]] == ["busy"]
    assert unread("top") == (141, "")
    for wrong in ("--every 0", "--every often", "x", "--ones"):
        assert poise("top", *wrong.split()).refusal


def test_without_a_service_it_says_so_in_one_line(own_settings: pytest.MonkeyPatch, tmp_path: object) -> None:
    own_settings.setenv("POISE_STATE", str(tmp_path))
    assert "no server is known" in poise("top").refusal
