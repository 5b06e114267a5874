"""The API against requests made from its own description, with every role and with none (schemathesis).

One check of schemathesis is left out: that whatever fits the description is taken. A policy that does not exist, or a gang
below its own minimum, fits and is refused all the same.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.fake_engine import an_api

from poise.service.server.http.guard import ApiOptions
from poise.service.server.logs import Level, Logbook
from poise.service.wire.views import ProblemView, Role

EXAMPLES = 8
"""Of each endpoint, of requests that fit the description and of requests that do not."""
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    allow_header_conformance,
]
ADMINS_ALONE = {"PUT /v1/policy", "PUT /v1/shares/{tenant}", "GET /v1/tokens", "POST /v1/tokens", "DELETE /v1/tokens/{name}"}


@pytest.mark.slow
def test_request_made_from_the_description_is_answered_as_described_and_only_as_its_role_allows(tmp_path: Path) -> None:
    api = an_api(tmp_path, ApiOptions(log=Logbook(least=Level.ERROR)))
    description = api.call("reader", "GET", "/openapi.json").json
    schema = schemathesis.openapi.from_dict(description)
    schema.app = api.app
    schema.config.update(base_url="http://localhost")
    taken = 0
    for case in _cases(schema):
        assert case.call().status_code == 401
        for role in Role:
            headers = {"authorization": f"Bearer {api.tokens[role]}"}
            response = case.call(headers=headers)
            case.validate_response(response, checks=CHECKS, headers=headers)
            if response.status_code >= 300:
                ProblemView.model_validate_json(response.content)
            else:
                taken += 1
                assert _may(role, case.operation.label), (role, case.operation.label)
    assert taken > 200  # it does get beyond the door


def _may(role: Role, endpoint: str) -> bool:
    if endpoint in ADMINS_ALONE:
        return role is Role.ADMIN
    return role is not Role.READER or endpoint.startswith("GET ")


def _cases(schema: BaseSchema) -> Iterator[Case[Any]]:
    """Requests to every endpoint, the same ones every time."""
    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        for mode in GenerationMode:
            yield from _drawn(result.ok().as_strategy(generation_mode=mode))


def _drawn(cases: SearchStrategy[Case[Any]]) -> list[Case[Any]]:
    found: list[Case[Any]] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(case=cases)
    def collect(case: Case[Any]) -> None:
        found.append(case)

    collect()
    return found
