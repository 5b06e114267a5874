"""The service as a whole: nodes, shares, policy, events, metrics."""

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import Field

from poise.server.endpoint import Caller, Endpoint, NamePart, answer, body_of, caller_of
from poise.server.metrics import CONTENT_TYPE, Metrics
from poise.server.routes_jobs import FARTHEST, MOST_ROWS, granted
from poise.server.seam import Engine
from poise.wire.request import Name, Wire
from poise.wire.views import Events, Nodes, PolicyName, Role, Service, Shares, Weight


class EventsQuery(Wire):
    """What happened after that number of the journal; negative: the last so many."""

    after: Annotated[int, Field(ge=-FARTHEST, le=FARTHEST)] = 0
    job: Name | None = None
    tenant: Name | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 100


class Whole:
    """The endpoints of the service as a whole, over an engine and its metrics."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them that answer in JSON."""
        return (
            Endpoint("GET", "/v1/nodes", Role.READER, self.nodes, Nodes),
            Endpoint("GET", "/v1/shares", Role.READER, self.shares, Shares),
            Endpoint("PUT", "/v1/shares/{tenant}", Role.ADMIN, self.set_weight, Shares, Weight, faults=(404, 409)),
            Endpoint("GET", "/v1/service", Role.READER, self.service, Service),
            Endpoint("GET", "/v1/policy", Role.READER, self.policy, PolicyName),
            Endpoint("PUT", "/v1/policy", Role.ADMIN, self.set_policy, Service, PolicyName, faults=(409,)),
            Endpoint("GET", "/v1/events", Role.READER, self.events, Events, faults=(404,)),
        )

    def nodes(self) -> Response:
        """List nodes and who holds their GPUs."""
        return answer(self._engine.nodes())

    def shares(self) -> Response:
        """List tenants, what they are entitled to and what they hold."""
        return answer(self._engine.shares())

    async def set_weight(self, by: Caller, tenant: NamePart, request: Request) -> Response:
        """Change a tenant's weight."""
        wanted = await body_of(request, Weight)
        return await granted(lambda: self._engine.set_weight(by, tenant, wanted.weight))

    def service(self) -> Response:
        """Say what runs here."""
        return answer(self._engine.service())

    def policy(self) -> Response:
        """Say which policy decides."""
        return answer(PolicyName(policy=self._engine.service().policy))

    async def set_policy(self, request: Request) -> Response:
        """Go on under another policy."""
        by = caller_of(request)
        wanted = await body_of(request, PolicyName)
        return await granted(lambda: self._engine.set_policy(by, wanted.policy))

    def events(self, query: Annotated[EventsQuery, Query()]) -> Response:
        """Read what happened, in order."""
        found = self._engine.events(after=query.after, job=query.job, tenant=query.tenant, limit=query.limit)
        return answer(found)

    def metrics(self) -> Response:
        """Read the metrics, as Prometheus does."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)
