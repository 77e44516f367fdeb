"""PromptOverlaps: long prompts are hashed on threads, a busy thread holds no request up, and no error fails one."""

import asyncio
import threading
from typing import Any

import pytest

from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.http.text_workers import INLINE_BYTES, TextWorkers
from tandem.cluster.gateway.services.prompt_overlaps import INLINE_TOKENS, PromptOverlaps
from tandem.cluster.routing import told_prefixes
from tandem.cluster.routing.told_prefixes import ToldPrefixes, prompt_heads
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.request import Abort, GenerationRequest, SamplingParams
from tests.support.fake_backend import FakeBackend
from tests.support.plain_generation import PlainChoice
from tests.unit.gateway.rig import gateway

FACTS = KvFacts("", "revision", "float32", 16, 8)


def request(length: int) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_token_ids=list(range(length)), sampling=SamplingParams())


@pytest.fixture
def prefixes() -> ToldPrefixes:
    told = ToldPrefixes()
    told.take("g", 1, FACTS, 0.0)
    told.take("g", 1, KvEvents("", 1, stored=list(prompt_heads(request(5000), FACTS)), is_snapshot=True), 0.0)
    return told


@pytest.fixture
def hashing_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads on which keys were made, one entry for each key."""
    threads: list[str] = []
    block_key = told_prefixes.block_key

    def noted(*args: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return block_key(*args)

    monkeypatch.setattr(told_prefixes, "block_key", noted)
    return threads


@pytest.mark.parametrize("length", [129, INLINE_TOKENS, INLINE_TOKENS + 1, 5000])
async def test_the_event_loop_hashes_short_prompts(
    prefixes: ToldPrefixes, hashing_threads: list[str], length: int
) -> None:
    workers = TextWorkers()
    one = request(length)
    assert await PromptOverlaps(prefixes, workers, 60.0).find(one) == {"g": ((length - 1) // 128 * 128, 0)}
    assert {name.startswith("tandem-text") for name in hashing_threads} == {length > INLINE_TOKENS}
    prefixes.sent("r", "g", 0.0)
    assert not prefixes.found("r", "g", 0, 0.0) and prefixes._prompts == {}, "it was noted for the router"
    workers.close()


@pytest.mark.parametrize("length", [1, 128])
async def test_short_prompts_are_not_looked_at(prefixes: ToldPrefixes, hashing_threads: list[str], length: int) -> None:
    assert await PromptOverlaps(prefixes, TextWorkers()).find(request(length)) == {}
    assert await PromptOverlaps(ToldPrefixes(), TextWorkers()).find(request(5000)) == {}, "nobody has told anything"
    assert hashing_threads == [] and prefixes._prompts == {}


async def test_a_cold_prompt_costs_eight_hashes(prefixes: ToldPrefixes, hashing_threads: list[str]) -> None:
    workers = TextWorkers()
    cold = GenerationRequest(request_id="r", prompt_token_ids=[7] * 100_000, sampling=SamplingParams())
    assert await PromptOverlaps(prefixes, workers, 60.0).find(cold) == {}
    assert len(hashing_threads) == FACTS.index_blocks
    workers.close()


async def test_a_request_goes_without_when_no_thread_is_free(prefixes: ToldPrefixes) -> None:
    workers, free = TextWorkers(threads=1), threading.Event()
    busy = asyncio.ensure_future(workers.run("t", INLINE_BYTES, free.wait, 60))
    await asyncio.sleep(0)
    assert await PromptOverlaps(prefixes, workers, 0.01).find(request(5000)) == {}
    assert workers.num_waiting == 0, "nobody waits for it"
    free.set()
    await busy
    workers.close()
    assert await PromptOverlaps(prefixes, workers).find(request(5000)) == {}, "the gateway is shutting down"


@pytest.mark.parametrize("broken", ["overlaps", "expect_sent"])
async def test_an_error_fails_no_request(prefixes: ToldPrefixes, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    workers = TextWorkers()
    monkeypatch.setattr(prefixes, broken, lambda *args: 1 / 0)
    assert await PromptOverlaps(prefixes, workers, 60.0).find(request(5000)) == {}
    workers.close()


async def test_the_router_gets_what_was_found_with_each_request() -> None:
    asked: list[GenerationRequest] = []

    async def find(request: GenerationRequest) -> dict[str, tuple[int, int]]:
        asked.append(request)
        return {"g": (128, 0)}

    async with gateway(FakeBackend()) as rig:
        assert (await rig.chat(max_tokens=2)).status_code == 200
        rig.context.find_overlaps = find
        assert (await rig.chat(max_tokens=2)).status_code == 200
        assert [hint.overlaps for hint in rig.backend.hints] == [{}, {"g": (128, 0)}]
        assert [one.request_id for one in asked] == [rig.backend.hints[1].request_id]


@pytest.mark.parametrize("ended", [[], [0], [0, 1]])
async def test_what_ends_while_a_prompt_is_looked_at_is_not_computed(ended: list[int]) -> None:
    """The client leaves, or a stop string is found in what a lost group has sent."""
    two = GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(n=2, max_tokens=3))
    choices: Any = [PlainChoice(), PlainChoice()]
    part = RequestPart(request=two, choices=choices, first_choice=0)
    async with gateway(FakeBackend(manual=True)) as rig:
        generation = Generation(rig.context, [part], tenant="t", model="m", began_s=0.0)
        looked = asyncio.Event()

        async def find(request: GenerationRequest) -> dict[str, tuple[int, int]]:
            for choice in ended:
                choices[choice].finished = "stop"
                generation.stop_choice(part, choice, 0)
            if not ended:
                generation.close()
            looked.set()
            return {}

        rig.context.find_overlaps = find
        generation.start()
        await asyncio.wait_for(looked.wait(), 30)
        if ended == [0]:
            await asyncio.wait_for(rig.backend.aborted.wait(), 30)
            assert rig.backend.aborts == [Abort(request_id="r", attempt=0, choice=0, keep_positions=0)]
        generation.close()
        assert await rig.context.tasks.wait_idle(30)
        assert len(rig.backend.requests) == (ended == [0])
