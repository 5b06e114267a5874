"""Who may speak for which node: by the token that an agent shows with each request.

The agents of machines, and those that Ray starts, share one token: they are all the operator's. A pod runs what a user has
brought along, so its agent has a token that is good for its own node and for no other.
"""

from secrets import compare_digest
from typing import Protocol

ANY_NODE = "*"
"""For whom a token speaks that is not bound to one node. No node can have this name."""


class AuthorityAwayError(Exception):
    """Whose token it is cannot be found out at the moment. The agent is told to try again."""


class AgentAuthority(Protocol):
    """Knows the tokens of agents."""

    async def node_of(self, token: str) -> str | None:
        """Return the only node for which a token speaks, ANY_NODE if it speaks for all, or None if it is good for nothing.

        Called for each request, in the loop that renews leases: answers have to be remembered for a while.
        AuthorityAwayError if there is no answer now. A session goes on meanwhile, as long as its agent shows the token that
        it has shown before.
        """
        ...


class SharedToken:
    """One token for all agents, which is kept in the state directory of the service."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def node_of(self, token: str) -> str | None:
        """Return ANY_NODE if it is the token."""
        return ANY_NODE if compare_digest(token.encode(errors="replace"), self._token) else None
