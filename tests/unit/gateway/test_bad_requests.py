"""Requests that do not fit the OpenAPI document, through a real listener: none hurts, and the gateway serves on."""

from pathlib import Path

import pytest

from tests.support.bad_requests import RIGHT, WRONG, cases, draw, send_bad_requests
from tests.support.plain_http import plain_http
from tests.unit.gateway.listener import (
    ADMIN_HEADERS,
    KNOWN_ANSWER,
    USER_HEADERS,
    full_gateway,
    known_tokens,
    listening,
)

NOBODY = {"authorization": "Bearer sk-of-nobody"}
KEYS = [ADMIN_HEADERS] * 5 + [USER_HEADERS] * 3 + [NOBODY, {}]


@pytest.mark.hypothesis
def test_nearly_all_cases_of_a_route_that_takes_anything_are_wrong() -> None:
    import schemathesis
    from schemathesis import GenerationMode

    body = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    post = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "done"}},
    }
    document = {"openapi": "3.1.0", "info": {"title": "t", "version": "1"}, "paths": {"/a": {"post": post}}}
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    modes: list[GenerationMode] = []
    draw(lambda case: modes.append(case.meta.generation.mode), 100, case=cases(operations))
    wrong = modes.count(GenerationMode.NEGATIVE)
    assert len(modes) == 100
    assert 0.75 * len(modes) < wrong < len(modes), f"{wrong} of {len(modes)}, not about {WRONG} of {WRONG + RIGHT}"


@pytest.mark.hypothesis
@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.chaos)])
def test_bad_requests_get_the_contracts_refusals_and_leave_the_gateway_alive(tmp_path: Path, count: int) -> None:
    with listening(lambda: full_gateway(tmp_path)) as listener:
        document = plain_http.get(f"{listener.url}/openapi.json").json()
        assert known_tokens(listener.url) == KNOWN_ANSWER
        seen, broken = send_bad_requests(listener.url, document, KEYS, count)
        assert known_tokens(listener.url) == KNOWN_ANSWER
    assert not broken, "\n".join(broken)
    assert sum(seen.values()) >= count
    reached = {place.rpartition(" ")[0] for place in seen}
    assert reached == {f"{m.upper()} {path}" for path, by in document["paths"].items() for m in by}, "every route"
    refused = {place.rpartition(" ")[2] for place in seen}
    assert {"400", "401", "403", "404"} <= refused, seen
    print("\n".join(f"{place}: {count}" for place, count in sorted(seen.items())))
