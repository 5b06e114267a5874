"""The HTTP API: the endpoints, behind the guard, with a description of themselves.

Everything is JSON of `poise.service.wire`; every answer that is not 2xx is a Problem. The interactive pages that
FastAPI offers are
left out: they load scripts from elsewhere.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response

from poise import __version__
from poise.service.server.accounts import TokenStore
from poise.service.server.engine_api import EngineApi
from poise.service.server.http.endpoint import Endpoint, UnfitTypeError, at_least, check_query, problems
from poise.service.server.http.guard import Bounds, Gate, Hosts, RequestGuard
from poise.service.server.http.problems import HANDLERS, JSON, reply
from poise.service.server.http.routes import JobRoutes, ServiceRoutes, TokenRoutes
from poise.service.server.logs import Logbook
from poise.service.server.metrics import Metrics
from poise.service.wire.views import Role

_ABOUT = """Submit training jobs to Poise and see what becomes of them.

Every request needs a token: `Authorization: Bearer TOKEN`. Every answer that is not 2xx is a Problem. Times are seconds:
moments since 1970 (UTC), spans as they are."""
_REFERENCE = "#/components/schemas/{model}"
_READERS = [Depends(at_least(Role.READER)), Depends(check_query)]
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What an API has beside engine and accounts; the defaults do for loopback."""

    hosts: Hosts = field(default_factory=Hosts)
    bounds: Bounds = field(default_factory=Bounds)
    metrics: Metrics = field(default_factory=Metrics)
    log: Logbook = field(default_factory=Logbook)


def create_app(engine: EngineApi, accounts: TokenStore, conditions: ApiOptions | None = None) -> FastAPI:
    """The application over an engine. Every path and method of it needs a token of these accounts."""
    given = conditions or ApiOptions()
    given.metrics.watch(engine)
    app = FastAPI(
        title="Poise", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    whole = ServiceRoutes(engine, given.metrics)
    endpoints = (*JobRoutes(engine).endpoints(), *whole.endpoints(), *TokenRoutes(accounts, given.log).endpoints())
    for each in endpoints:
        each.add_to(app)
    _add_metrics(app, whole)
    _add_description(app, endpoints)
    for kind, handler in HANDLERS:
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(UnfitTypeError, lambda _, error: reply(415, "wrong-type", str(error)))
    app.add_middleware(RequestGuard, gate=Gate(accounts, given.hosts, given.bounds), metrics=given.metrics, log=given.log)
    return app


def _add_metrics(app: FastAPI, whole: ServiceRoutes) -> None:
    app.add_api_route(
        "/metrics",
        whole.metrics,
        methods=["GET"],
        operation_id="metrics",
        response_class=Response,
        responses={200: {"content": _TEXT}, **problems(400, 401, 403, 408, 413, 414, 429, 431, 500, 503)},
        dependencies=_READERS,
    )


def _add_description(app: FastAPI, endpoints: Sequence[Endpoint]) -> None:
    """The description is made once, when it is first wanted; it is not part of itself."""
    text = cache(lambda: json.dumps(described(app, endpoints)))

    def description() -> Response:
        return Response(text(), media_type=JSON)

    app.add_api_route("/openapi.json", description, methods=["GET"], dependencies=_READERS, include_in_schema=False)


def described(app: FastAPI, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI description: all endpoints, the bodies that they take, and that all of them need a bearer token."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=_ABOUT)
    components = document["components"]
    for each in endpoints:
        if each.takes is not None:
            schema = each.takes.model_json_schema(ref_template=_REFERENCE)
            components["schemas"] |= schema.pop("$defs", {}) | {each.takes.__name__: schema}
    components["schemas"].pop("HTTPValidationError", None)
    components["schemas"].pop("ValidationError", None)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # it comes as a Problem with status 400
    return document
