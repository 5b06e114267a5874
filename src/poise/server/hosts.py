"""Which names a server answers to: what keeps a web page from reaching it by a name of its own (DNS rebinding)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address

from poise.model.errors import RequestError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]{2,45}\]|[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?)(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names in lower case, without ports: the loopback ones, and those that were configured."""

    names: frozenset[str] = LOOPBACK

    @classmethod
    def of(cls, names: Iterable[str]) -> "Hosts":
        """The loopback names and these; raises RequestError for what is no name of a host."""
        return cls(LOOPBACK | {_checked(each) for each in names})

    def allows(self, authority: str) -> bool:
        """A Host header that names this server, with any port."""
        match = _AUTHORITY.fullmatch(authority.lower())
        return match is not None and match["name"] in self.names

    def is_own(self, origin: str, authority: str) -> bool:
        """An Origin header that is of a page from this very server: same name, same port."""
        scheme, separator, rest = origin.lower().partition("://")
        return separator != "" and scheme in {"http", "https"} and rest == authority.lower() and self.allows(authority)


def _checked(name: str) -> str:
    bracketed = f"[{_address(name)}]" if ":" in name else name.lower()
    match = _AUTHORITY.fullmatch(bracketed)
    if match is None or match["name"] != bracketed:
        raise RequestError(f"--host-name {name!r}: expected the name or address of a host, without a port")
    return match["name"]


def _address(name: str) -> str:
    """What has a colon in it must be an address of IPv6; `beef:8642` is a name with a port."""
    try:
        return str(IPv6Address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return ""
