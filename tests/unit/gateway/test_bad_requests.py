"""Requests that do not fit the OpenAPI document, through a real listener: none hurts, and the gateway serves on."""

from pathlib import Path

import httpx
import pytest

from tests.support.bad_requests import send_bad_requests
from tests.unit.gateway.listener import (
    ADMIN_HEADERS,
    KNOWN_ANSWER,
    USER_HEADERS,
    full_gateway,
    known_tokens,
    listening,
)

NOBODY = {"authorization": "Bearer sk-of-nobody"}
KEYS = [ADMIN_HEADERS] * 6 + [USER_HEADERS] * 2 + [NOBODY, {}]


@pytest.mark.hypothesis
def test_bad_requests_get_the_contracts_refusals_and_leave_the_gateway_alive(tmp_path: Path) -> None:
    with listening(lambda: full_gateway(tmp_path)) as listener:
        document = httpx.get(f"{listener.url}/openapi.json").json()
        assert known_tokens(listener.url) == KNOWN_ANSWER
        seen, broken = send_bad_requests(listener.url, document, KEYS, 500)
        assert known_tokens(listener.url) == KNOWN_ANSWER
    assert not broken, "\n".join(broken)
    assert sum(seen.values()) >= 500
    reached = {place.rpartition(" ")[0] for place in seen}
    assert reached == {f"{m.upper()} {path}" for path, by in document["paths"].items() for m in by}, "every route"
    refused = {place.rpartition(" ")[2] for place in seen}
    assert {"400", "401", "403", "404"} <= refused, seen
    print("\n".join(f"{place}: {count}" for place, count in sorted(seen.items())))
