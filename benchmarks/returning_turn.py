"""One returning turn over HTTP on an idle service: its KV is on the host, the device has lost it.

Called by benchmarks/multiturn.py. A few conversations take turns on a device that holds two of them; between their
turns come new prompts of the same length, the comparison. The split of each time comes from the service's /metrics.
"""

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from tqdm import tqdm

from benchmarks.machine import QUIET, OtherCpu, wait_until_quiet
from benchmarks.service import Service
from benchmarks.tier_arms import GIB
from benchmarks.turns import BLOCK, fresh_tokens

NEW = 16
CONVERSATIONS = 3
PUBLISHED_S = 5.0
COUNTERS = {
    "requests": "e2e_request_latency_seconds_count",
    "queue_s": "request_queue_time_seconds_sum",
    "engine_ttft_s": "time_to_first_token_seconds_sum",
    "step_s": "step_device_seconds_total",
    "copy_s": 'kv_offload_seconds_total{kind="load"}',
    "loaded_tokens": "kv_offload_loaded_tokens_total",
}


@dataclass(frozen=True)
class Answer:
    """One turn, in seconds. http_s: all outside the engine; queue_s: in the engine before the first step, a load
    included; copy_s: bytes moving within that; step_s: on the ranks; rest_s: planning, and the way to and from them."""

    ttft_s: float
    cached_tokens: int
    loaded_tokens: int
    http_s: float
    queue_s: float
    copy_s: float
    step_s: float
    rest_s: float
    other_cpu: float


@dataclass(frozen=True)
class ReturningTurn:
    """`repeats` turns of each kind, and other_cpu over all of it."""

    prefix: int
    returning: list[Answer]
    fresh: list[Answer]
    other_cpu: float

    @property
    def ratio(self) -> float:
        """Of the medians of the times to the first token."""
        return median_of(self.fresh, "ttft_s") / median_of(self.returning, "ttft_s")

    @property
    def quiet_ratio(self) -> float | None:
        """The same over turns during which other processes took next to nothing; None when there are none."""
        fresh, returning = quiet(self.fresh), quiet(self.returning)
        return median_of(fresh, "ttft_s") / median_of(returning, "ttft_s") if fresh and returning else None

    @property
    def least_ratio(self) -> float:
        """Of the least times."""
        return min(a.ttft_s for a in self.fresh) / min(a.ttft_s for a in self.returning)


def median_of(answers: list[Answer], name: str) -> float:
    return statistics.median(getattr(answer, name) for answer in answers)


def quiet(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.other_cpu < QUIET]


def measure_returning_turn(
    folder: Path,
    flags: list[str],
    prefix: int,
    bytes_of_block: int,
    vocab_size: int,
    repeats: int,
    patience_s: float,
    log: Path,
) -> ReturningTurn:
    """Starts a service of its own and stops it. The device holds two prompts: at most half of it is stored at once."""
    blocks = -(-(prefix + NEW + 1) // BLOCK)
    host_blocks = (CONVERSATIONS + 3) * (blocks + 1) + repeats * (blocks + 2)
    sizes = ["--num-gpu-blocks-override", str(2 * (blocks + 1)), "--block-size", str(BLOCK)]
    sizes += ["--kv-offloading-size", f"{host_blocks * bytes_of_block / GIB:.4f}"]
    with Service(str(folder), [*flags, *sizes], log) as service, OtherCpu() as other:
        returning, fresh = asyncio.run(_converse(service, prefix, vocab_size, repeats, patience_s))
    return ReturningTurn(prefix, returning, fresh, other.share)


async def _converse(
    service: Service, prefix: int, vocab_size: int, repeats: int, patience_s: float
) -> tuple[list[Answer], list[Answer]]:
    draw = random.Random(1)
    talks = [fresh_tokens(draw, prefix, vocab_size) for _ in range(CONVERSATIONS)]
    returning: list[Answer] = []
    fresh: list[Answer] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for talk in talks:
            await _turn(session, service, talk, 0.0)
        await _turn(session, service, talks[0] + fresh_tokens(draw, NEW, vocab_size), 0.0)  # the first load of all
        for repeat in tqdm(range(repeats), desc="returning turn", unit="pair", leave=False):
            fresh.append(await _turn(session, service, fresh_tokens(draw, prefix + NEW, vocab_size), patience_s))
            talk = talks[(repeat + 1) % CONVERSATIONS] + fresh_tokens(draw, NEW, vocab_size)
            returning.append(await _turn(session, service, talk, patience_s))
    return returning, fresh


async def _turn(session: aiohttp.ClientSession, service: Service, prompt: list[int], patience_s: float) -> Answer:
    """One token of one prompt, and what the service counted for it."""
    await asyncio.to_thread(wait_until_quiet, patience_s)
    before = await _counters(session, service)
    with OtherCpu() as other:
        ttft_s, cached = await _first_token(session, service, prompt)
    after = await _settled(session, service, before["requests"] + 1)
    grown = {name: after[name] - before[name] for name in COUNTERS}
    return Answer(
        ttft_s=ttft_s,
        cached_tokens=cached,
        loaded_tokens=int(grown["loaded_tokens"]),
        http_s=ttft_s - grown["engine_ttft_s"],
        queue_s=grown["queue_s"],
        copy_s=grown["copy_s"],
        step_s=grown["step_s"],
        rest_s=grown["engine_ttft_s"] - grown["queue_s"] - grown["step_s"],
        other_cpu=other.share,
    )


async def _first_token(session: aiohttp.ClientSession, service: Service, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the prompt tokens that the service says it had."""
    body = {
        "model": service.model_name,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    first_s, cached = None, 0
    start = time.perf_counter()
    async with session.post(f"{service.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if first_s is None and chunk["choices"] and chunk["choices"][0].get("token_ids"):
                first_s = time.perf_counter() - start
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first_s is not None, "no token came"
    return first_s, cached


async def _settled(session: aiohttp.ClientSession, service: Service, requests: float) -> dict[str, float]:
    """The counters once they include `requests` requests (published once a second); stores have time to end."""
    deadline_s = time.perf_counter() + PUBLISHED_S
    while (now := await _counters(session, service))["requests"] < requests:
        if time.perf_counter() > deadline_s:
            raise TimeoutError(f"/metrics did not settle: {now}, {requests} requests awaited")
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)
    return now


async def _counters(session: aiohttp.ClientSession, service: Service) -> dict[str, float]:
    async with session.get(f"{service.url}/metrics") as response:
        text = await response.text()
    return {name: _sum_of(text, family) for name, family in COUNTERS.items()}


def _sum_of(text: str, family: str) -> float:
    """Of a family's samples over all groups; a label in braces must be among theirs."""
    name, _, label = family.partition("{")
    label = label.removesuffix("}")
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"tandem:{name}{{") and label in line
    ]
    return sum(values)
