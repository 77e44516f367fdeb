"""Requests of the Responses API and of Anthropic's are served, limited and billed as those of chat are."""

import asyncio
from typing import Any

import pytest

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation, Tenancy
from tests.support.resuming_backend import ResumingBackend
from tests.unit.gateway import test_messages, test_responses
from tests.unit.gateway.rig import CHAT, MODEL, USER, Rig, error_of, gateway
from tests.unit.gateway.test_messages import message_of, refusal_of, tooled
from tests.unit.gateway.test_responses import WEATHER
from tests.unit.gateway.test_tool_calls import CALL, saying

RESPONSES, MESSAGES = test_responses.PATH, test_messages.PATH
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 7, "user": "u"},
    RESPONSES: {"input": "hi", "max_output_tokens": 7, "user": "u"},
    MESSAGES: {"messages": USER, "max_tokens": 7, "metadata": {"user_id": "u"}},
}
APIS = (RESPONSES, MESSAGES)


class Limited(Tenancy):
    """Notes what is asked for, and refuses it when told to."""

    def __init__(self) -> None:
        self.admitted: list[tuple[str, int, int, bool]] = []
        self.refuses = False

    async def admit(
        self, tenant: str, prompt_tokens: int, output_tokens: int, *, is_open_ended: bool = False
    ) -> Reservation:
        if self.refuses:
            raise OverLimit("Too many.", reason="requests", retry_after_s=7.2, code="rate_limit_exceeded")
        self.admitted.append((tenant, prompt_tokens, output_tokens, is_open_ended))
        return await super().admit(tenant, prompt_tokens, output_tokens, is_open_ended=is_open_ended)


async def test_quotas_and_bills_are_those_of_chat() -> None:
    tenancy = Limited()
    async with gateway(tenancy=tenancy) as rig:
        for path, body in BODIES.items():
            answer = await rig.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert rig.ledger.opened[-1].id == answer.json()["id"]
        await rig.settle()
        assert len(tenancy.admitted) == 3 and len(set(tenancy.admitted)) == 1
        bills = {(row.tenant, row.terminal, row.prompt_tokens, row.completion_tokens) for row in rig.ledger.rows}
        assert len(rig.ledger.rows) == 3 and len(bills) == 1
        first, *others = rig.backend.requests
        for other in others:
            assert other.prompt_token_ids == first.prompt_token_ids
            assert (other.tenant, other.priority, other.cache_salt) == (first.tenant, first.priority, first.cache_salt)
        tenancy.refuses = True
        refused = await rig.client.post(RESPONSES, json=BODIES[RESPONSES])
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "8"
        refused = await rig.client.post(MESSAGES, json=BODIES[MESSAGES])
        assert refusal_of(refused) == {"type": "rate_limit_error", "message": "Too many. Try again in 8 s."}
        assert refused.headers["retry-after"] == "8"


async def test_adapters_are_those_of_chat() -> None:
    adapters = AdapterService(AdapterList(None, MODEL), lambda source: "ab" * 32, (MODEL,))
    adapters.adapters.keep(AdapterEntry(name="pirate", digest="1" * 64, source="/a/one"))
    adapters.adapters.keep(AdapterEntry(name="theirs", digest="2" * 64, source="/a/two", tenant="rival"))
    async with gateway(adapters=adapters) as rig:
        for path in APIS:
            answer = await rig.client.post(path, json={**BODIES[path], "model": "pirate"})
            assert answer.json()["model"] == "pirate"
            adapter = rig.backend.requests[-1].adapter
            assert adapter is not None and adapter.name == "pirate"
            for name in ("theirs", "nobodys"):
                refused = await rig.client.post(path, json={**BODIES[path], "model": name})
                assert refused.status_code == 404 and name in refused.json()["error"]["message"]
    adapters.close()


async def stream(rig: Rig, path: str) -> list[tuple[str, str]]:
    """Name and arguments of the calls of a stream."""
    tool = WEATHER if path == RESPONSES else test_messages.TOOL
    limit = {"max_output_tokens": 100} if path == RESPONSES else {"max_tokens": 100}
    body = {**BODIES[path], **limit, "tools": [tool], "stream": True}
    text = (await rig.client.post(path, json=body)).text
    if path == RESPONSES:
        final = test_responses.sse(text)[-1]["response"]
        return [(item["name"], item["arguments"]) for item in final["output"]]
    return [(block["name"], block["input"]) for block in message_of(test_messages.sse(text))["content"]]


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_goes_on_in_another_group(path: str) -> None:
    backend = saying(CALL, kind=ResumingBackend, step_s=0.002)
    assert isinstance(backend, ResumingBackend)

    async def lose() -> None:
        while not backend.streams or next(iter(backend.streams.values())).choices[0].position < 15:
            await asyncio.sleep(0)
        backend.lose_all()

    async with tooled(backend) as rig:
        losing = asyncio.create_task(lose())
        calls = await stream(rig, path)
        await losing
        assert len(rig.backend.requests) == 2 and rig.backend.requests[1].resume_token_ids[0]
        city: Any = '{"city": "Löw"}' if path == RESPONSES else {"city": "Löw"}
        assert calls == [("weather", city)]


@pytest.mark.parametrize("path", APIS)
async def test_a_client_that_leaves_ends_its_request(path: str) -> None:
    async with gateway() as rig:
        rig.backend.manual = True
        asking = asyncio.create_task(rig.client.post(path, json={**BODIES[path], "stream": True}))
        await rig.backend.submitted.wait()
        rig.backend.step()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await rig.settle()
        assert [row.terminal for row in rig.ledger.rows] == ["abort"]
