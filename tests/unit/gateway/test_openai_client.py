"""The official client, sync and async, over a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import QueueFull
from tests.support.fake_backend import FakeBackend, fixed_script
from tests.unit.gateway.rig import EOS, MODEL, Rig, gateway, served

TEXT = "Grüße 😀, one two"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    backend = FakeBackend(script=fixed_script([*TEXT.encode(), EOS]), eos_token_ids=frozenset({EOS}), cached_tokens=4)
    async with gateway(backend, settings=GatewaySettings(api_keys=("sk-x",))) as rig:
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(rig.app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-x", max_retries=0) as client:
            yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], n=2, logprobs=True, top_logprobs=2, seed=1
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer._request_id


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, finishes = "", None, []
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes.append(choice.finish_reason)
    assert text == TEXT
    assert [reason for reason in finishes if reason] == ["stop"]
    assert usage is not None and usage.completion_tokens == len(TEXT.encode()) + 1


async def test_the_streaming_helper(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    async with client.chat.completions.stream(model=MODEL, messages=messages, logprobs=True) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].logprobs is not None


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=50, logprobs=1)
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert answer.choices[0].logprobs is not None
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, "alias/echo"]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


async def test_errors_become_the_clients_own(rig: Rig, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-y").models.list()
    rig.backend.refuse = QueueFull("full")
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model=MODEL, prompt="a", stream=True)


async def test_an_error_in_the_stream_raises(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.backend.lose_at_position = 3
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_leaving_a_stream_aborts_it(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.backend.script = lambda request, choice: [97] * 400
    rig.backend.step_s = 0.001
    stream = await client.completions.create(model=MODEL, prompt="a", max_tokens=400, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await asyncio.wait_for(rig.backend.aborted.wait(), 30)


async def test_the_sync_client(rig: Rig) -> None:
    def talk(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-x", max_retries=0) as client:
            messages = [{"role": "user", "content": "x"}]
            whole = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[call-overload]
            stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)  # type: ignore[call-overload]
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    async with served(rig.app) as url:
        assert await asyncio.to_thread(talk, url) == (TEXT, TEXT)


async def test_many_streams_at_once_do_not_mix(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.backend.script = lambda request, choice: request.prompt_token_ids[1:]

    async def ask(number: int) -> str:
        prompt = f"only {number} " * 5
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=100, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == prompt
        return text

    assert len(set(await asyncio.gather(*(ask(i) for i in range(32))))) == 32
