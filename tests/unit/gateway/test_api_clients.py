"""The official clients of the Responses API and of Anthropic's Messages API, over a real HTTP server."""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tandem.cluster.state.redis_client import BackgroundClient
from tandem.workers.messages.errors import QueueFull
from tests.unit.gateway.rig import MODEL, Rig, gateway, served
from tests.unit.gateway.test_messages import TOOL
from tests.unit.gateway.test_response_store import ByKey, store_of
from tests.unit.gateway.test_responses import FORMATS, SETTINGS, THOUGHT, WEATHER
from tests.unit.gateway.test_tool_calls import CALL, TEMPLATE, saying

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

TEXT = f"{THOUGHT}Look: {CALL}"
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def rig(redis: BackgroundClient) -> AsyncIterator[Rig]:
    backend = saying(TEXT, cached_tokens=4)
    own = {"settings": SETTINGS, "template": TEMPLATE, "text": FORMATS}
    async with gateway(backend, auth=ByKey(), store=store_of(redis), **own) as rig:  # type: ignore[arg-type]
        yield rig


@pytest.fixture
async def url(rig: Rig) -> AsyncIterator[str]:
    async with served(rig.app) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="acme", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(url: str) -> AsyncIterator["AsyncAnthropic"]:
    import anthropic  # takes seconds to load, and one worker alone needs it

    async with anthropic.AsyncAnthropic(base_url=url, api_key="acme", max_retries=0) as client:
        yield client


async def test_a_response_and_the_next(rig: Rig, client: openai.AsyncOpenAI) -> None:
    tools: Any = [WEATHER]
    first = await client.responses.create(model=MODEL, input="hi", tools=tools)
    thought, message, call = first.output
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "Hm, a city."
    assert message.type == "message" and first.output_text == "Look: "
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Löw"}
    assert first.usage is not None and first.usage.input_tokens_details.cached_tokens == 4
    assert first.usage.output_tokens_details.reasoning_tokens == len("Hm, a city.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    await client.responses.create(model=MODEL, input=[result], tools=tools, previous_response_id=first.id)
    stored = rig.backend.requests[-1].prompt_token_ids
    sent: Any = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output), result]
    await client.responses.create(model=MODEL, input=sent, tools=tools, store=False)
    assert rig.backend.requests[-1].prompt_token_ids == stored, "sent back or stored is the same conversation"
    assert (await client.responses.retrieve(first.id)).model_dump() == first.model_dump()
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)


async def test_streamed_responses(client: openai.AsyncOpenAI) -> None:
    tools: Any = [WEATHER]
    stream = await client.responses.create(model=MODEL, input="hi", tools=tools, stream=True)
    kinds = {event.type async for event in stream}
    assert {"response.output_text.delta", "response.reasoning_text.delta", "response.completed"} <= kinds
    async with client.responses.stream(model=MODEL, input="hi", tools=tools) as helper:
        text = ""
        async for event in helper:
            if event.type == "response.output_text.delta":
                text += event.delta
        final = await helper.get_final_response()
    assert text == final.output_text == "Look: "
    call = final.output[-1]
    assert call.type == "function_call" and call.parsed_arguments is None and call.name == "weather"


async def test_a_stream_of_the_background_is_gone_on_with(client: openai.AsyncOpenAI) -> None:
    before, asked = [], {"model": MODEL, "input": "hi", "tools": [WEATHER]}
    async with await client.responses.create(**asked, background=True, stream=True) as stream:  # type: ignore[call-overload]
        async for event in stream:
            before.append(event)
            if event.type == "response.output_text.delta":
                break
    assert before[0].type == "response.created" and before[0].response.status == "queued"
    after = before[-1].sequence_number
    rest = await client.responses.retrieve(before[0].response.id, stream=True, starting_after=after)
    events = [*before, *[event async for event in rest]]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "Look: "
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Look: "


async def test_refused_responses(rig: Rig, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="hi", max_output_tokens=5)
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.retrieve(first.id, stream=True)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "stream")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert unknown.value.code == "previous_response_not_found"
    rig.backend.refuse = QueueFull("full")
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model=MODEL, input="hi", stream=True)


async def test_a_message_and_the_next(claude: "AsyncAnthropic") -> None:
    tools: Any = [TOOL]
    answer = await claude.messages.create(model=MODEL, max_tokens=200, messages=USER, tools=tools, system="Be kind.")
    thought, text, call = answer.content
    assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert call.type == "tool_use" and call.input == {"city": "Löw"}
    assert answer.stop_reason == "tool_use" and answer.usage.cache_read_input_tokens == 4 and answer._request_id
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    turns: Any = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    later = await claude.messages.create(model=MODEL, max_tokens=9, messages=turns, tools=tools, system="Be kind.")
    assert later.stop_reason == "max_tokens"
    counted = await claude.messages.count_tokens(model=MODEL, messages=turns, tools=tools, system="Be kind.")
    assert counted.input_tokens == later.usage.input_tokens + (later.usage.cache_read_input_tokens or 0)


async def test_streamed_messages(rig: Rig, claude: "AsyncAnthropic") -> None:
    import anthropic

    tools: Any = [TOOL]
    async with claude.messages.stream(model=MODEL, max_tokens=200, messages=USER, tools=tools) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    whole = await claude.messages.create(model=MODEL, max_tokens=200, messages=USER, tools=tools)
    assert text == "Look: " and final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].type == "tool_use" and final.content[2].input == {"city": "Löw"}
    assert final.usage.model_dump() == whole.usage.model_dump()
    rig.backend.lose_at_position = 3
    with pytest.raises(anthropic.APIStatusError):
        async with claude.messages.stream(model=MODEL, max_tokens=200, messages=USER) as broken:
            await broken.get_final_message()


async def test_refused_messages(rig: Rig, url: str, claude: "AsyncAnthropic") -> None:
    import anthropic

    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError) as bad:
        await claude.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": [image]}])
    assert "messages[0].content[0]" in bad.value.message
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="nobody", max_tokens=9, messages=USER)
    rig.backend.refuse = QueueFull("full")
    with pytest.raises(anthropic.RateLimitError):
        await claude.messages.create(model=MODEL, max_tokens=9, messages=USER)
    rig.context.draining.begin()
    with pytest.raises(anthropic.APIStatusError) as away:
        await claude.messages.create(model=MODEL, max_tokens=9, messages=USER)
    assert away.value.status_code == 503 and away.value.type == "overloaded_error"
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="acme", max_retries=0) as other:
        counted = other.messages.count_tokens(model=MODEL, messages=USER)
        with pytest.raises(anthropic.APIStatusError):
            await counted
