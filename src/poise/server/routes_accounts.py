"""Who one is, and the tokens of others."""

from http import HTTPStatus

from fastapi import Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from poise.server.accounts import Accounts
from poise.server.endpoint import Caller, Endpoint, NamePart, answer, body_of, caller_of
from poise.server.logs import Logbook
from poise.wire.views import Account, MadeToken, NewToken, Role
from poise.wire.views import Accounts as Listing


class Tokens:
    """The endpoints of accounts. Only admins make tokens, so none can be made that may do more than its maker."""

    def __init__(self, accounts: Accounts, log: Logbook) -> None:
        self._accounts = accounts
        self._log = log

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        return (
            Endpoint("GET", "/v1/me", Role.READER, self.me, Account),
            Endpoint("GET", "/v1/tokens", Role.ADMIN, self.tokens, Listing),
            Endpoint("POST", "/v1/tokens", Role.ADMIN, self.make_token, MadeToken, NewToken, HTTPStatus.CREATED, (409,)),
            Endpoint("DELETE", "/v1/tokens/{name}", Role.ADMIN, self.revoke_token, Account, faults=(404, 409)),
        )

    async def me(self, request: Request) -> Response:
        """Say whom the token stands for."""
        return answer(caller_of(request))

    def tokens(self) -> Response:
        """List all tokens, without the tokens."""
        return answer(Listing(accounts=self._accounts.all()))

    async def make_token(self, request: Request) -> Response:
        """Make a token. This answer is the only place where it is shown."""
        by = caller_of(request)
        wanted = await body_of(request, NewToken)
        made = await run_in_threadpool(self._accounts.make, wanted)
        account = made.account
        self._log.info("token-made", name=account.name, tenant=account.tenant, role=account.role.value, by=by.name)
        return answer(made, HTTPStatus.CREATED)

    def revoke_token(self, by: Caller, name: NamePart) -> Response:
        """Make a token worthless from now on."""
        gone = self._accounts.revoke(name)
        self._log.info("token-revoked", name=gone.name, by=by.name)
        return answer(gone)
