"""Which server to talk to, and with which token.

In this order: POISE_URL and POISE_TOKEN; the server that runs on this machine, which leaves its address and its
first token in STATE; `url`, `token` and `ca` in ~/.config/poise/client.toml. POISE_TOKEN and POISE_CA go with any of
these addresses.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from poise.model.errors import RequestError

NOTHING = "no server is known; start one with `poise serve`, or set POISE_URL and POISE_TOKEN"
_KEYS = ("url", "token", "ca")


@dataclass(frozen=True, slots=True)
class Address:
    """A server: its URL, a token that is never shown, and the file of certificates that it is checked against."""

    url: str
    token: str = field(repr=False)
    ca: Path | None = None

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise RequestError(f"{self.url!r} is no address of a server; expected e.g. http://127.0.0.1:8642")
        if not self.token.isascii() or not self.token.isprintable() or not self.token or " " in self.token:
            raise RequestError(f"the token for {self.url} is empty or has characters that no token has")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def find_server(environ: Mapping[str, str]) -> Address:
    """The server that a command talks to; RequestError if none is known."""
    token = environ.get("POISE_TOKEN")
    if url := environ.get("POISE_URL"):
        if not token:
            raise RequestError(f"POISE_URL is {url}, and POISE_TOKEN is not set; set both")
        found: Address | None = Address(url, token.strip())
    else:
        found = _chosen(_local(state_folder(environ), token), _configured(_config_file(environ)))
    if found is None:
        raise RequestError(NOTHING)
    found = replace(found, token=token.strip()) if token else found
    return replace(found, ca=Path(environ["POISE_CA"])) if environ.get("POISE_CA") else found


def state_folder(environ: Mapping[str, str]) -> Path:
    """Where the service of this user keeps everything."""
    if given := environ.get("POISE_STATE"):
        return Path(given)
    return _home(environ, "XDG_STATE_HOME", ".local/state") / "poise"


@dataclass(frozen=True, slots=True)
class _Local:
    address: Address
    is_alive: bool


def _chosen(local: _Local | None, configured: Address | None) -> Address | None:
    """What a server left behind that is gone by now counts only where nothing else is known."""
    if local is not None and (local.is_alive or configured is None):
        return local.address
    return configured


def _local(state: Path, token: str | None) -> _Local | None:
    """The server of this machine. Its first token is its owner's alone: others bring their own."""
    path = state / "server.json"
    try:
        said: Any = json.loads(path.read_bytes())
        url, pid = str(said["url"]), int(said["pid"])
        found = token or (state / "admin.token").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{error.filename}: {error.strerror}; set POISE_TOKEN") from None
    except (ValueError, LookupError, TypeError):
        raise RequestError(f"{path}: damaged; restart `poise serve`, or set POISE_URL and POISE_TOKEN") from None
    return _Local(Address(url, found), _is_alive(pid))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # somebody else's
    except (OSError, OverflowError):
        return False
    return pid > 0


def _configured(path: Path) -> Address | None:
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise RequestError(f"{path}: {' '.join(str(error).split())}") from None
    wrong = next((key for key, value in said.items() if key not in _KEYS or not isinstance(value, str)), None)
    if wrong is not None or not {"url", "token"} <= said.keys():
        problem = f"{wrong!r} is not expected" if wrong is not None else "something is missing"
        raise RequestError(f"{path}: {problem}; it has url and token, and may have ca, each a text")
    return Address(said["url"], said["token"], Path(said["ca"]).expanduser() if "ca" in said else None)


def _config_file(environ: Mapping[str, str]) -> Path:
    return _home(environ, "XDG_CONFIG_HOME", ".config") / "poise" / "client.toml"


def _home(environ: Mapping[str, str], name: str, otherwise: str) -> Path:
    given = environ.get(name, "")
    return Path(given) if given.startswith("/") else Path.home() / otherwise
