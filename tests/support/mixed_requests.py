"""32 requests of mixed length with shared prefixes, asked at once through the official client in each way that it has,
and what the offline engine answers to them: for tests of a running service of the demo model."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import AsyncOpenAI, OpenAI

from tandem import LLM
from tandem.workers.messages.request import SamplingParams

PREFIX = "Once upon a time there was a little girl who lived near a forest. "
ENDS = ("She had a dog", "Her name was", "One day", "The sun", "A bird", "Every morning", "In the river", "Her mother")
PROMPTS = [(PREFIX * (1 + i % 4) if i % 3 else "") + ENDS[i % len(ENDS)] + " and" * (i // len(ENDS)) for i in range(32)]
LENGTHS = [8 + (7 * i) % 40 for i in range(32)]


def greedy(offline: LLM, prompts: Sequence[str] = PROMPTS, lengths: Sequence[int] = LENGTHS) -> list[str]:
    """The offline engine's texts."""
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    return [output.text for output in offline.generate(list(prompts), params, use_tqdm=False)]


async def answers(url: str) -> list[str]:
    """The service's texts, all asked at once: of each four one whole and one streamed by the sync client, one whole and
    one streamed by the async one."""
    options: dict[str, Any] = {"base_url": url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 120}
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(PROMPTS) // 2) as pool, OpenAI(**options) as client:
        async with AsyncOpenAI(**options) as other:
            asked = [
                loop.run_in_executor(pool, _ask, client, i) if i % 4 < 2 else _ask_async(other, i)
                for i in range(len(PROMPTS))
            ]
            return list(await asyncio.gather(*asked))


def _ask(client: OpenAI, i: int) -> str:
    if i % 2:
        return str(client.completions.create(**_body(i)).choices[0].text)
    stream = client.completions.create(**_body(i), stream=True)
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


async def _ask_async(client: AsyncOpenAI, i: int) -> str:
    if i % 2:
        return str((await client.completions.create(**_body(i))).choices[0].text)
    stream = await client.completions.create(**_body(i), stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


def _body(i: int) -> dict[str, Any]:
    body = {"model": "demo", "prompt": PROMPTS[i], "max_tokens": LENGTHS[i], "temperature": 0}
    return {**body, "extra_body": {"ignore_eos": True}}
