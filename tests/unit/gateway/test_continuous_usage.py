"""stream_options.continuous_usage_stats: usage in every chunk, of the chunk's choice, as in vLLM."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tandem.configs.schema import GatewaySettings
from tests.support.fake_backend import fixed_script
from tests.support.resuming_backend import ResumingBackend
from tests.unit.gateway.rig import BOS, EOS, error_of, events, gateway

ALWAYS = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
TEXTS = ("naïve 日本 😀 one STOP two", "no stop here ß", "STOP")


def backend(*texts: str, **more: Any) -> ResumingBackend:
    script = fixed_script(*([*text.encode(), EOS] for text in texts))
    return ResumingBackend(script=script, eos_token_ids=frozenset({EOS}), **more)


def completed(chunks: list[Any]) -> dict[int, list[int]]:
    """By choice, completion_tokens of its chunks in order; totals are checked."""
    counts: dict[int, list[int]] = defaultdict(list)
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        (choice,) = chunk["choices"]
        counts[choice["index"]].append(usage["completion_tokens"])
    return counts


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": None}], ids=str)
@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"stop": ["STOP"]}, {"logprobs": True}], ids=str)
async def test_every_chunk_counts_its_choice_and_the_last_one_all(
    kind: str, more: dict[str, Any], options: dict[str, Any]
) -> None:
    if kind == "complete" and "logprobs" in more:
        more = {"logprobs": 1}
    async with gateway(backend(*TEXTS)) as rig:
        body = {"stream": True, "stream_options": {"continuous_usage_stats": True, **options}}
        answer = await getattr(rig, kind)(n=3, max_tokens=60, **body, **more)
        *chunks, bill, done = events(answer.text)
        assert done == "[DONE]" and bill["choices"] == []
        counts = completed(chunks)
        assert set(counts) == {0, 1, 2}
        for of_choice in counts.values():
            assert of_choice == sorted(of_choice)
        lasts = [counts[index][-1] for index in range(3)]
        assert sum(lasts) == bill["usage"]["completion_tokens"]
        if "stop" not in more:
            assert lasts == [len(text.encode()) + 1 for text in TEXTS]
        if kind == "chat":
            assert [of_choice[0] for of_choice in counts.values()] == [0, 0, 0], "the role's chunk"
        prompt = len(rig.backend.requests[0].prompt_token_ids)
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt}
        assert bill["usage"]["prompt_tokens"] == prompt


async def test_a_chunk_counts_the_prompt_of_its_choice() -> None:
    async with gateway(backend("ab", "c")) as rig:
        answer = await rig.complete(prompt=[[BOS, 7], [BOS, 7, 8, 9]], n=2, **ALWAYS)
        *chunks, bill, _ = events(answer.text)
        prompts = {chunk["choices"][0]["index"]: chunk["usage"]["prompt_tokens"] for chunk in chunks}
        assert prompts == {0: 2, 1: 2, 2: 4, 3: 4}
        assert (bill["usage"]["prompt_tokens"], bill["usage"]["completion_tokens"]) == (6, 10)


async def test_the_counts_go_on_in_another_group() -> None:
    group = backend("abcdefghij", "klmnopqrst", manual=True)
    async with gateway(group) as rig:
        asking = asyncio.create_task(rig.complete(n=2, **ALWAYS))
        async with asyncio.timeout(30):
            await group.submitted.wait()
            group.step(3)
            group.lose_all()
            while len(group.requests) < 2:
                await asyncio.sleep(0.01)
            assert group.requests[1].resume_token_ids == [[*b"abc"], [*b"klm"]]
            group.step(20)
            answer = await asking
        *chunks, bill, _ = events(answer.text)
        assert completed(chunks) == {0: list(range(1, 12)), 1: list(range(1, 12))}
        assert bill["usage"]["completion_tokens"] == 22


async def test_it_does_not_go_without_the_bill_nor_without_a_stream() -> None:
    async with gateway(backend("x")) as rig:
        options = {"continuous_usage_stats": True, "include_usage": False}
        error = error_of(await rig.chat(stream=True, stream_options=options))
        assert (error["param"], error["code"]) == ("stream_options.continuous_usage_stats", "invalid_value")
        whole = await rig.chat(stream_options={"continuous_usage_stats": True})
        assert whole.status_code == 200 and whole.headers["x-tandem-ignored"] == "stream_options"
        error = error_of(await rig.chat(stream=True, stream_options={"continuous_usage_stats": 1}))
        assert error["param"] == "stream_options.continuous_usage_stats"
        off = {"continuous_usage_stats": False, "include_usage": True}
        chunks = events((await rig.chat(stream=True, stream_options=off)).text)
        assert all(chunk["usage"] is None for chunk in chunks[:-2])


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_every_stream_may_be_made_to_end_with_its_usage(kind: str) -> None:
    """Asked for or not; whole answers and counts of each chunk stay as they are."""
    texts = {}
    for forced in (False, True):
        settings = GatewaySettings(enable_force_include_usage=forced)
        async with gateway(backend(*[TEXTS[1]] * 6), settings=settings) as rig:
            for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
                answer = await getattr(rig, kind)(stream=True, max_tokens=60, stream_options=options)
                *chunks, done = events(answer.text)
                asked = forced or bool(options and options.get("include_usage"))
                assert done == "[DONE]" and (chunks[-1]["choices"] == []) == asked
                assert not asked or chunks[-1]["usage"]["completion_tokens"] == len(TEXTS[1].encode()) + 1
                assert all(not chunk.get("usage") for chunk in chunks[: -1 if asked else None])
            whole = (await getattr(rig, kind)(max_tokens=60)).json()
            texts[forced] = whole["choices"], whole["usage"]
    assert texts[False] == texts[True]
