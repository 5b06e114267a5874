"""Which server to talk to, and with which token.

In this order: POISE_URL and POISE_TOKEN; the server that runs on this machine, which leaves its address and its
first token in STATE; `url`, `token` and `ca` in ~/.config/poise/client.toml. POISE_TOKEN and POISE_CA go with any of
these addresses.

A server of this machine that is away is worth waiting for if it seems to come back (`is_restarting`).
"""

import json
import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.lease_files import now
from poise.service.backends.local.processes import start_of

NOTHING = "no server is known; start one with `poise serve`, or set POISE_URL and POISE_TOKEN"
_ANOTHER = "set POISE_TOKEN, or make another token with `poise serve --new-admin-token`"
_SERVER, _LOCK, _FIRST_TOKEN = "server.json", "lock", "admin.token"  # files of a state directory
_TOKEN = "POISE_TOKEN"
_KEYS = ("url", "token", "ca")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
RECENT = 10.0  # seconds after a stop during which another start is expected
FIRST_LOOKS, BETWEEN_LOOKS = 1.0, 0.2
"""Seconds before the user is told that a server is waited for, and between two looks for it."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine; `born`: its start time, because pids are reused (None: not known)."""

    pid: int
    born: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            pass  # it is there, and another user's
        except (OSError, OverflowError):
            return False
        return self.pid > 0 and self.born in (None, start_of(self.pid))


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server: its URL, a token that is never shown, and the file of certificates that it is checked against.

    process   of a server of this machine. Once that has ended, anyone may listen in its place: no token goes there
    home      of a server of this machine: its state directory, to which it returns, perhaps under another URL
    """

    url: str
    token: str = field(repr=False)
    ca: Path | None = None
    process: Process | None = None
    token_in: str | None = field(default=None, compare=False)  # the variable or the file that the token comes from
    home: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, text in (("url", self.url), ("token", self.token)):
            if not isinstance(text, str):
                raise RequestError(f"{name}: expected text, got {type(text).__name__}")
        try:
            parts = urlsplit(self.url)
            is_plain = self.url.isascii() and self.url.isprintable() and not set(" @?#") & set(self.url)
            is_url = is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise RequestError(f"{self.url!r} is no address of a server; expected e.g. http://127.0.0.1:8642")
        if not self.token.isascii() or not self.token.isprintable() or not self.token or " " in self.token:
            raise RequestError(f"the token for {self.url} is empty or has characters that no token has")

    @property
    def is_gone(self) -> bool:
        """Whether the server has ended: whoever listens there now is another program."""
        return self.process is not None and not self.process.is_alive

    @property
    def is_here(self) -> bool:
        """Whether the server is on this machine, so that paths mean the same to both."""
        return self.home is not None or urlsplit(self.url).hostname in _LOOPBACK

    @property
    def is_restarting(self) -> bool:
        """Whether it has ended, and its successor is there or expected."""
        if not self.is_gone or self.home is None:
            return False
        successor = _announced_process(self.home)
        return (successor is not None and successor.is_alive) or is_restarting(self.home)

    def is_same(self, other: "ServerAddress") -> bool:
        """Whether it is the same server (of the same state directory or URL), with the same token and no less protection."""
        is_there = self.url == other.url if self.home is None else urlsplit(self.url).scheme == urlsplit(other.url).scheme
        return self.home == other.home and self.token == other.token and is_there


def find_server(environ: Mapping[str, str]) -> ServerAddress:
    """The server that a command talks to; RequestError if none is known."""
    token = environ.get(_TOKEN)
    if url := environ.get("POISE_URL"):
        if not token:
            raise RequestError(f"POISE_URL is {url}, and POISE_TOKEN is not set; set both")
        found: ServerAddress | None = ServerAddress(url, token.strip(), token_in=_TOKEN)
    else:
        state, config = _state(environ), _under(environ, "XDG_CONFIG_HOME", ".config", "poise/client.toml")
        found = None if state is None else _local(state, token)
        configured = None if config is None else _configured(config)
        if configured is not None and (found is None or found.is_gone):
            found = configured  # what a server that has ended left behind counts only if nothing else is known
    if found is None:
        state = state_folder(environ)
        announced = _announced(state)
        if announced is None or not announced[1].is_alive:
            raise RequestError(NOTHING)
        raise RequestError(f"a server runs at {announced[0]}, and {state / _FIRST_TOKEN} is not there; {_ANOTHER}")
    found = replace(found, token=token.strip(), token_in=_TOKEN) if token else found
    return replace(found, ca=Path(environ["POISE_CA"])) if environ.get("POISE_CA") else found


def await_server(environ: Mapping[str, str], patience: float, on_wait: Callable[[str], None] | None) -> ServerAddress:
    """The same. A server of this machine that has just stopped, or is starting, is waited for, up to `patience` seconds.

    on_wait   is called once with the reason
    """
    begun = monotonic()
    while True:
        try:
            return find_server(environ)
        except RequestError:
            state = None if environ.get("POISE_URL") else _state(environ)
            if state is None or monotonic() - begun > patience or not is_restarting(state):
                raise
        if on_wait is not None and monotonic() - begun > FIRST_LOOKS:
            on_wait(f"the server of {state} is not there at the moment")
            on_wait = None
        sleep(BETWEEN_LOOKS)


def is_restarting(state: Path) -> bool:
    """Whether the server of a state directory is away, and there is reason to think that it comes back.

    That is so if it was killed since the machine was started (its server.json is there, its process is not), if a process
    holds the lock of its state directory (it starts, or stops), or if it has just stopped (its server.json was removed a
    few seconds ago).
    """
    announced = _announced_process(state)
    if announced is not None:
        try:
            booted = now() - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            booted = 0.0
        return not announced.is_alive and _modified(state / _SERVER) > booted
    return _is_locked(state / _LOCK) or ((state / _FIRST_TOKEN).exists() and now() - _modified(state) < RECENT)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock. Trying to take it, however briefly, could keep a server from starting."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    return any(f":{inode} " in line and " FLOCK " in line for line in lines)


def state_folder(environ: Mapping[str, str]) -> Path:
    """The state directory of this user's service; RequestError if the user has no home."""
    found = _state(environ)
    if found is None:
        raise RequestError(
            f"HOME is not set, and user {os.getuid()} has no name here; set HOME, or POISE_STATE to a directory"
        )
    return found


def _state(environ: Mapping[str, str]) -> Path | None:
    if given := environ.get("POISE_STATE"):
        return Path(given)
    return _under(environ, "XDG_STATE_HOME", ".local/state", "poise")


def _under(environ: Mapping[str, str], name: str, otherwise: str, path: str) -> Path | None:
    """A path in a folder that a variable names, or in one of the user's home; None: there is neither."""
    given = environ.get(name, "")
    try:
        return (Path(given) if given.startswith("/") else Path.home() / otherwise) / path
    except RuntimeError:  # HOME is not set, and the user has no name
        return None


def _local(state: Path, token: str | None) -> ServerAddress | None:
    """The server of this machine. Its first token is readable by its owner alone: others bring their own."""
    announced = _announced(state)
    if announced is None:
        return None
    path = state / _FIRST_TOKEN
    try:
        found = token or path.read_text(encoding="ascii").strip()
    except FileNotFoundError:  # its owner deleted it
        return None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; {_ANOTHER}") from None
    except ValueError:
        raise RequestError(f"{path}: damaged; {_ANOTHER}") from None
    url, process = announced
    return ServerAddress(url, found, process=process, token_in=str(path), home=state)


def _announced(state: Path) -> tuple[str, Process] | None:
    """URL and process of the server of a state directory, as it announced them; None: there is no announcement."""
    path = state / _SERVER
    try:
        # Whoever could write to the folder or the file could have a token sent elsewhere.
        _check_own(state, state.stat())
        with path.open("rb") as stream:
            _check_own(path, os.fstat(stream.fileno()))
            said: Any = json.loads(stream.read())
        return str(said["url"]), Process(int(said["pid"]), said.get("born"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{error.filename}: {error.strerror}; set POISE_URL and POISE_TOKEN") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{path}: damaged; restart `poise serve`, or set POISE_URL and POISE_TOKEN") from None


def _announced_process(state: Path) -> Process | None:
    try:
        announced = _announced(state)
    except RequestError:
        return None
    return None if announced is None else announced[1]


def _check_own(path: Path, found: os.stat_result) -> None:
    """Raise RequestError for what others own or may write."""
    if found.st_uid != os.geteuid():
        text = "belongs to another user, who could have your token sent elsewhere"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        text = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}), and could have your token sent elsewhere"
    else:
        return
    raise RequestError(f"{path}: {text}; set POISE_URL and POISE_TOKEN")


def _configured(path: Path) -> ServerAddress | None:
    """The server of client.toml; None: there is no such file."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path}: not UTF-8 text") from None
    except ValueError as error:
        raise RequestError(f"{path}: {' '.join(str(error).split())}") from None
    wrong = next((key for key, value in said.items() if key not in _KEYS or not isinstance(value, str)), None)
    if wrong is not None or not {"url", "token"} <= said.keys():
        problem = f"{wrong!r} is not expected" if wrong is not None else "something is missing"
        raise RequestError(f"{path}: {problem}; it has url and token, and may have ca, each a text")
    ca = Path(os.path.expanduser(said["ca"])) if "ca" in said else None
    return ServerAddress(said["url"], said["token"], ca, token_in=str(path))
