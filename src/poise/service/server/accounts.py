"""Accounts and their tokens: who may do what.

Only hashes of tokens are stored, in a file of the state directory that only its owner can read. A token is 256 random bits,
so its SHA-256 gives nothing away and needs no salt. Nothing here is ever logged.
"""

import hmac
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from secrets import token_urlsafe
from threading import Lock
from time import time  # noqa: TID251 - the server stands at the edge, where the clock is
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from poise.durable import create_file, replace_file, sync_folder
from poise.scheduler.model.errors import PoiseError
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.server.storage.state_dir import open_private
from poise.service.wire.request import Wire
from poise.service.wire.views import Account, Actor, MadeToken, NewToken, Role

FILE = "accounts.json"
ADMIN_FILE = "admin.token"
ADMIN = "admin"
ADMIN_TENANT = "default"  # tenant of jobs that are submitted with the token of the first start
PREFIX = "poise_"
LONGEST_TOKEN = 200
MOST_ACCOUNTS = 10_000
DAY = 86_400.0

_RANK = {role: rank for rank, role in enumerate(Role)}


def is_at_least(account: Account, role: Role) -> bool:
    """Whether the account may do what this role may."""
    return _RANK[account.role] >= _RANK[role]


class _StoredToken(Wire):
    account: Account
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _TokenFile(Wire):
    version: Annotated[int, Field(ge=1, le=1)] = 1
    accounts: Annotated[tuple[_StoredToken, ...], Field(max_length=MOST_ACCOUNTS)] = ()


class TokenStore:
    """All tokens of a service, for any thread. Changes are on disk before a method returns.

    Readers take no lock: a change builds new mappings and then replaces both. Writers hold the lock, so that two of them do
    not overwrite each other's change.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._clock = clock
        self._lock = Lock()
        try:
            with os.fdopen(open_private(self._path, os.O_RDONLY), "rb") as stream:
                self._use(_TokenFile.model_validate_json(stream.read()))
        except FileNotFoundError:
            self._use(_TokenFile())
        except ValidationError:
            text = "damaged; put a copy back, or remove it: then a new admin token is made"
            raise PoiseError(f"{self._path}: {text}") from None

    @property
    def admin_file(self) -> Path:
        """File with the token of the first start."""
        return self._folder / ADMIN_FILE

    def known(self, token: str) -> Account | None:
        """The account of a token; None for one that was never made, was revoked or has expired."""
        digest = _hash(token)
        # Look up by a part of the hash, then compare all of it in constant time.
        stored = self._by_hash.get(digest[:16])
        if stored is None or not hmac.compare_digest(stored.hash, digest):
            return None
        return stored.account if self._is_valid(stored) else None

    def all(self) -> tuple[Account, ...]:
        """All accounts by name, expired ones too."""
        return tuple(self._by_name[name].account for name in sorted(self._by_name))

    def make(self, wanted: NewToken) -> MadeToken:
        """Make a token. Its name must be free, or that of an expired one, which it replaces."""
        if wanted.name.lower() in set(Actor):
            known = ", ".join(Actor)
            text = f"name: events call their actors {known}, so that no token can be called {wanted.name!r}; take another"
            raise RequestRefusedError(RefusalCode.WRONG, text)
        with self._lock:
            taken = self._by_name.get(wanted.name)
            if taken is not None and self._is_valid(taken):
                text = f"there is a token {wanted.name!r} already; revoke it, or take another name"
                raise RequestRefusedError(RefusalCode.CONFLICT, text)
            if len(self._by_name) >= MOST_ACCOUNTS and taken is None:
                raise RequestRefusedError(RefusalCode.FULL, f"there are {MOST_ACCOUNTS:,} tokens; revoke some")
            expires = None if wanted.days is None else self._clock() + wanted.days * DAY
            account = Account(name=wanted.name, tenant=wanted.tenant or wanted.name, role=wanted.role, expires=expires)
            token = PREFIX + token_urlsafe(32)
            self._save(self._by_name | {wanted.name: _StoredToken(account=account, hash=_hash(token))})
            return MadeToken(token=token, account=account)

    def revoke(self, name: str) -> Account:
        """Make a token worthless from now on; the last one of an admin cannot be revoked."""
        with self._lock:
            stored = self._by_name.get(name)
            if stored is None:
                raise RequestRefusedError(RefusalCode.UNKNOWN, f"there is no token {name!r}")
            rest = {key: each for key, each in self._by_name.items() if key != name}
            if not self._has_admin(rest) and self._has_admin(self._by_name):
                text = f"{name!r} is the last admin; make another token of that role first"
                raise RequestRefusedError(RefusalCode.CONFLICT, text)
            self._save(rest)
            return stored.account

    def ensure_admin(self, *, renew: bool = False) -> bool:
        """Make an admin's token and write it to `admin_file`, unless there is a valid one; returns whether it was made.

        renew   make it in any case; the one before in that file is worthless from then on
        """
        with self._lock:
            if self._has_admin(self._by_name) and not renew:
                return False
            # The file first: a crash in between leaves a token that is not valid, and the next start makes another.
            token = PREFIX + token_urlsafe(32)
            self.admin_file.unlink(missing_ok=True)
            create_file(self.admin_file, token + "\n")
            sync_folder(self._folder)
            account = Account(name=ADMIN, tenant=ADMIN_TENANT, role=Role.ADMIN)
            self._save(self._by_name | {ADMIN: _StoredToken(account=account, hash=_hash(token))})
            return True

    def _save(self, tokens: dict[str, _StoredToken]) -> None:
        document = _TokenFile(accounts=tuple(tokens.values()))
        try:
            replace_file(self._path, document.model_dump_json() + "\n")
        except OSError as error:
            text = f"{self._path}: cannot be kept: {error.strerror or error}"
            raise RequestRefusedError(RefusalCode.STORAGE, text) from None
        self._use(document)

    def _use(self, document: _TokenFile) -> None:
        self._by_name = {each.account.name: each for each in document.accounts}
        self._by_hash = {each.hash[:16]: each for each in document.accounts}

    def _is_valid(self, stored: _StoredToken) -> bool:
        return stored.account.expires is None or self._clock() < stored.account.expires

    def _has_admin(self, tokens: dict[str, _StoredToken]) -> bool:
        return any(each.account.role is Role.ADMIN and self._is_valid(each) for each in tokens.values())


def _hash(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
