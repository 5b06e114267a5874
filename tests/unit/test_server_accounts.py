"""Tokens: kept as hashes in a file of their owner's, good until they expire or are revoked."""

import json
import stat
from pathlib import Path

import pytest

from poise.scheduler.model.errors import PoiseError
from poise.service.server import accounts as module
from poise.service.server.accounts import TokenStore, is_at_least
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.wire.views import Account, NewToken, Role


def a_wish(name: str = "ann", role: Role = Role.USER, days: float | None = None) -> NewToken:
    return NewToken(name=name, tenant="vision", role=role, days=days)


def test_token_is_known_after_a_restart_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    made = TokenStore(tmp_path).make(a_wish())
    assert TokenStore(tmp_path).known(made.token) == made.account
    kept = (tmp_path / "accounts.json").read_text()
    assert made.token not in kept
    assert made.token.removeprefix("poise_") not in kept


def test_a_token_is_a_user_s_of_the_tenant_of_its_own_name_unless_another_is_said(tmp_path: Path) -> None:
    account = TokenStore(tmp_path).make(NewToken(name="ann")).account
    assert (account.tenant, account.role) == ("ann", Role.USER)


@pytest.mark.parametrize("name", ["policy", "service", "job", "Policy"])
def test_name_of_an_actor_in_events_is_refused(name: str, tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    line = rf"^name: events call their actors job, policy, service, so that no token can be called '{name}'; take another$"
    with pytest.raises(RequestRefusedError, match=line) as refused:
        accounts.make(a_wish(name))
    assert refused.value.fault is RefusalCode.WRONG
    assert accounts.all() == ()


def test_tokens_are_long_and_never_the_same(tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    tokens = {accounts.make(a_wish(f"t{number}")).token for number in range(20)}
    assert len(tokens) == 20
    assert all(len(token) == len("poise_") + 43 for token in tokens)


@pytest.mark.parametrize("token", ["", "poise_", "x" * 10_000, "poise_é", "\udcff", "admin", "poise_" + "A" * 43])
def test_unknown_token_has_no_account(token: str, tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    accounts.make(a_wish())
    assert accounts.known(token) is None


def test_hash_is_not_a_token(tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    accounts.make(a_wish())
    stored = json.loads((tmp_path / "accounts.json").read_text())["accounts"][0]
    assert accounts.known(stored["hash"]) is None


def test_token_is_good_until_the_moment_it_expires(tmp_path: Path) -> None:
    now = [1000.0]
    accounts = TokenStore(tmp_path, clock=lambda: now[0])
    made = accounts.make(a_wish(days=1))
    assert made.account.expires == 1000.0 + 86_400
    now[0] += 86_399.9
    assert accounts.known(made.token) == made.account
    now[0] += 0.1
    assert accounts.known(made.token) is None
    assert [each.name for each in accounts.all()] == ["ann"]


def test_name_of_an_expired_token_can_be_taken_again(tmp_path: Path) -> None:
    now = [0.0]
    accounts = TokenStore(tmp_path, clock=lambda: now[0])
    old = accounts.make(a_wish(days=1))
    with pytest.raises(RequestRefusedError, match="there is a token 'ann' already"):
        accounts.make(a_wish())
    now[0] = 86_400.0
    new = accounts.make(a_wish())
    assert (accounts.known(old.token), accounts.known(new.token)) == (None, new.account)


def test_revoked_token_is_worthless_at_once_and_after_a_restart(tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    made = accounts.make(a_wish())
    assert accounts.revoke("ann") == made.account
    assert accounts.known(made.token) is None
    assert TokenStore(tmp_path).known(made.token) is None
    with pytest.raises(RequestRefusedError) as refused:
        accounts.revoke("ann")
    assert refused.value.fault is RefusalCode.UNKNOWN


def test_last_admin_cannot_be_revoked(tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    accounts.ensure_admin()
    accounts.make(a_wish("short", Role.ADMIN, days=1e-9))
    with pytest.raises(RequestRefusedError, match="last admin") as refused:
        accounts.revoke("admin")
    assert refused.value.fault is RefusalCode.CONFLICT
    accounts.make(a_wish("other", Role.ADMIN))
    accounts.revoke("admin")


def test_number_of_tokens_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ACCOUNTS", 2)
    accounts = TokenStore(tmp_path)
    accounts.make(a_wish("a"))
    accounts.make(a_wish("b"))
    with pytest.raises(RequestRefusedError) as refused:
        accounts.make(a_wish("c"))
    assert refused.value.fault is RefusalCode.FULL


def test_first_start_writes_a_token_that_only_its_owner_can_read(tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    assert accounts.ensure_admin()
    for name in ("admin.token", "accounts.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    token = (tmp_path / "admin.token").read_text().strip()
    assert accounts.known(token) == Account(name="admin", tenant="default", role=Role.ADMIN)
    again = TokenStore(tmp_path)
    assert not again.ensure_admin()
    assert (tmp_path / "admin.token").read_text().strip() == token


def test_crash_between_the_two_files_of_the_first_start_is_repaired_by_the_next(tmp_path: Path) -> None:
    TokenStore(tmp_path).ensure_admin()
    stale = (tmp_path / "admin.token").read_text().strip()
    (tmp_path / "accounts.json").unlink()
    accounts = TokenStore(tmp_path)
    assert accounts.ensure_admin()
    token = (tmp_path / "admin.token").read_text().strip()
    assert accounts.known(stale) is None
    assert accounts.known(token) is not None


def test_renewed_admin_token_makes_the_old_one_worthless_and_no_other(tmp_path: Path) -> None:
    accounts = TokenStore(tmp_path)
    accounts.ensure_admin()
    old = (tmp_path / "admin.token").read_text().strip()
    other = accounts.make(a_wish()).token
    accounts.ensure_admin(renew=True)
    new = (tmp_path / "admin.token").read_text().strip()
    assert [accounts.known(token) is not None for token in (old, other, new)] == [False, True, True]


def test_admin_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / "admin.token").symlink_to(target)
    TokenStore(tmp_path).ensure_admin()
    assert not target.exists()


def test_damaged_accounts_are_one_line_and_no_lockout(tmp_path: Path) -> None:
    path = tmp_path / "accounts.json"
    path.touch(mode=0o600)
    path.write_text('{"version": 1, "accounts": [{]}')
    with pytest.raises(PoiseError, match="damaged; put a copy back, or remove it"):
        TokenStore(tmp_path)


def test_accounts_that_others_may_read_are_refused(tmp_path: Path) -> None:
    TokenStore(tmp_path).ensure_admin()
    (tmp_path / "accounts.json").chmod(0o644)
    with pytest.raises(PoiseError, match="chmod 600"):
        TokenStore(tmp_path)


def test_accounts_that_are_a_directory_or_a_link_are_named(tmp_path: Path) -> None:
    path = tmp_path / "accounts.json"
    path.mkdir()
    with pytest.raises(PoiseError, match=rf"^{path}: is no file; move it away$"):
        TokenStore(tmp_path)
    path.rmdir()
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(PoiseError, match=rf"^{path}: is a symbolic link; put the file itself in its place$"):
        TokenStore(tmp_path)


def test_token_that_cannot_be_kept_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = TokenStore(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "replace_file", full)
    with pytest.raises(RequestRefusedError, match="No space left") as refused:
        accounts.make(a_wish())
    assert refused.value.fault is RefusalCode.STORAGE
    assert accounts.all() == ()


def test_each_role_may_do_what_those_before_it_may() -> None:
    order = list(Role)
    for have, role in enumerate(order):
        account = Account(name="a", tenant="t", role=role)
        assert [is_at_least(account, wanted) for wanted in order] == [want <= have for want in range(len(order))]
