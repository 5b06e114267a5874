"""Which server to talk to, and with which token.

In this order: POISE_URL and POISE_TOKEN; the server that runs on this machine, which leaves its address and its
first token in STATE; `url`, `token` and `ca` in ~/.config/poise/client.toml. POISE_TOKEN and POISE_CA go with any of
these addresses.
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

# Whether a server of this machine that is away seems to come back: then it is worth waiting for.
#
# It does if it was killed since the machine was started (its server.json is there, its process is not), if a process holds
# the lock of its state directory (it starts, or stops), or if it stopped a moment ago (its server.json has just been
# removed).

RECENT = 10.0
"""Seconds after a stop during which another start is expected."""
_SERVER, _LOCK, _START_TOKEN = "server.json", "lock", "admin.token"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine; `born`: its start, as a pid alone is used again (None: not known)."""

    pid: int
    born: int | None = None

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            pass  # somebody else's
        except (OSError, OverflowError):
            return False
        return self.pid > 0 and self.born in (None, start_of(self.pid))


def seems_to_restart(state: Path, said: Process | None) -> bool:
    """Of a state directory and the process that its server.json names; None: it is not there."""
    if said is not None:
        return not said.is_alive and _time_of(state / _SERVER) > _booted()
    return _is_locked(state / _LOCK) or ((state / _START_TOKEN).exists() and now() - _time_of(state) < RECENT)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _booted() -> float:
    """The moment at which this machine was started; 0: not known."""
    try:
        return now() - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def _is_locked(path: Path) -> bool:
    """A process holds it. To try to take it, be it for an instant, could keep a server from starting."""
    try:
        file = path.stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    return any(f":{file} " in line and " FLOCK " in line for line in lines)


NOTHING = "no server is known; start one with `poise serve`, or set POISE_URL and POISE_TOKEN"
_ANOTHER = "set POISE_TOKEN, or make another token with `poise serve --new-admin-token`"
_SECRET = "admin.token"
_TOKEN = "POISE_TOKEN"
_KEYS = ("url", "token", "ca")
FIRST_LOOKS, BETWEEN_LOOKS = 1.0, 0.2
"""Seconds before the user is told that a server is waited for, and between two looks for it."""
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server: its URL, a token that is never shown, and the file of certificates that it is checked against.

    process   of a server of this machine. Once that has ended, anybody may listen in its place: no token goes there.
    token_in  the variable or the file that the token is from
    home      of a server of this machine: its state directory, which it comes back to, perhaps under another URL
    """

    url: str
    token: str = field(repr=False)
    ca: Path | None = None
    process: Process | None = None
    token_in: str | None = field(default=None, compare=False)
    home: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise RequestError(f"{self.url!r} is no address of a server; expected e.g. http://127.0.0.1:8642")
        if not self.token.isascii() or not self.token.isprintable() or not self.token or " " in self.token:
            raise RequestError(f"the token for {self.url} is empty or has characters that no token has")

    @property
    def is_gone(self) -> bool:
        """Whoever listens there now, it is not the server that was."""
        return self.process is not None and not self.process.is_alive

    @property
    def is_restarting(self) -> bool:
        """It is gone, and another one is there in its place, or there is reason to think that one will be."""
        return self.is_gone and self.home is not None and (_is_up(self.home) or is_restarting(self.home))

    def is_same(self, other: "ServerAddress") -> bool:
        """It is the same server, with the same token and no less protection: of the same state directory or URL."""
        is_there = self.url == other.url if self.home is None else _scheme(self.url) == _scheme(other.url)
        return self.home == other.home and self.token == other.token and is_there


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = url.isascii() and url.isprintable() and not set(" @?#") & set(url)
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def find_server(environ: Mapping[str, str]) -> ServerAddress:
    """The server that a command talks to; RequestError if none is known."""
    token = environ.get(_TOKEN)
    if url := environ.get("POISE_URL"):
        if not token:
            raise RequestError(f"POISE_URL is {url}, and POISE_TOKEN is not set; set both")
        found: ServerAddress | None = ServerAddress(url, token.strip(), token_in=_TOKEN)
    else:
        state, config = _state(environ), _config_file(environ)
        local = None if state is None else _local(state, token)
        found = _chosen(local, None if config is None else _configured(config))
    if found is None:
        raise RequestError(_nothing(state_folder(environ)))
    found = replace(found, token=token.strip(), token_in=_TOKEN) if token else found
    return replace(found, ca=Path(environ["POISE_CA"])) if environ.get("POISE_CA") else found


def awaited_server(environ: Mapping[str, str], patience: float, waiting: Callable[[str], None] | None) -> ServerAddress:
    """The same. One of this machine that has just stopped, or is starting, is waited for, for so many seconds.

    waiting   is told why, once
    """
    begun = monotonic()
    while True:
        try:
            return find_server(environ)
        except RequestError:
            state = None if environ.get("POISE_URL") else _state(environ)
            if state is None or monotonic() - begun > patience or not is_restarting(state):
                raise
        if waiting is not None and monotonic() - begun > FIRST_LOOKS:
            waiting(f"the server of {state} is not there at the moment")
            waiting = None
        sleep(BETWEEN_LOOKS)


def is_restarting(state: Path) -> bool:
    """The server of a state directory is away, and there is reason to think that it comes back."""
    return seems_to_restart(state, _process(state))


def _is_up(state: Path) -> bool:
    process = _process(state)
    return process is not None and process.is_alive


def _process(state: Path) -> Process | None:
    """The server of a state directory, as it says itself; None: it says nothing that can be read."""
    try:
        said = _announced(state)
    except RequestError:
        return None
    return None if said is None else said[1]


def state_folder(environ: Mapping[str, str]) -> Path:
    """Where the service of this user keeps everything; RequestError if the user has no home."""
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


def _chosen(local: ServerAddress | None, configured: ServerAddress | None) -> ServerAddress | None:
    """What a server left behind that is gone by now counts only where nothing else is known."""
    return configured if local is None or (local.is_gone and configured is not None) else local


def _local(state: Path, token: str | None) -> ServerAddress | None:
    """The server of this machine. Its first token is its owner's alone: others bring their own."""
    said = _announced(state)
    found = token or (None if said is None else _first_token(state))
    if said is None or found is None:
        return None
    url, process = said
    return ServerAddress(url, found, process=process, token_in=str(state / _SECRET), home=state)


def _announced(state: Path) -> tuple[str, Process] | None:
    """Where the server of this machine is, as it says itself."""
    path = state / "server.json"
    try:
        said: Any = json.loads(_own(state, path))
        return str(said["url"]), Process(int(said["pid"]), said.get("born"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{error.filename}: {error.strerror}; set POISE_URL and POISE_TOKEN") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{path}: damaged; restart `poise serve`, or set POISE_URL and POISE_TOKEN") from None


def _first_token(state: Path) -> str | None:
    """The token that the server made when it was first started; None: it was deleted."""
    path = state / _SECRET
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; {_ANOTHER}") from None
    except ValueError:
        raise RequestError(f"{path}: damaged; {_ANOTHER}") from None


def _nothing(state: Path) -> str:
    """What to do where no server is known, or one whose token is not."""
    said = _announced(state)
    if said is None or not said[1].is_alive:
        return NOTHING
    return f"a server runs at {said[0]}, and {state / _SECRET} is not there; {_ANOTHER}"


def _own(folder: Path, path: Path) -> bytes:
    """A file of a folder, if both are this user's: whoever could write there could have a token sent elsewhere."""
    _check_own(folder, folder.stat())
    with path.open("rb") as stream:
        _check_own(path, os.fstat(stream.fileno()))
        return stream.read()


def _check_own(path: Path, found: os.stat_result) -> None:
    """Raise RequestError for what others own or may write."""
    if found.st_uid != os.geteuid():
        text = "belongs to somebody else, who could have your token sent elsewhere"
    elif found.st_mode & _WRITABLE:
        text = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}), and could have your token sent elsewhere"
    else:
        return
    raise RequestError(f"{path}: {text}; set POISE_URL and POISE_TOKEN")


def _configured(path: Path) -> ServerAddress | None:
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


def _config_file(environ: Mapping[str, str]) -> Path | None:
    return _under(environ, "XDG_CONFIG_HOME", ".config", "poise/client.toml")


def _under(environ: Mapping[str, str], name: str, otherwise: str, path: str) -> Path | None:
    """A path in a folder that a variable names, or in one of the user's home; None: there is neither."""
    given = environ.get(name, "")
    try:
        return (Path(given) if given.startswith("/") else Path.home() / otherwise) / path
    except RuntimeError:  # HOME is not set, and the user has no name
        return None
