"""use_beam_search over a fake model: answers are those of the search by itself, whatever happens to its requests."""

import asyncio
import json
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.cluster.gateway.app.wiring import build_metrics, build_text_services
from tandem.cluster.gateway.serving.sampling_fields import WITHOUT_EFFECT
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.load import build_settings
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import QueueFull
from tandem.workers.messages.request import GenerationRequest, TokenLogprobs
from tandem.workers.text.beam_search import Beam, BeamSearch, BeamSearchParams
from tests.support.resuming_backend import ResumingBackend
from tests.unit.gateway.rig import BOS, EOS, error_of, gateway

LETTERS = [*b"abcdefgh", EOS]
HELLO = [BOS, *b"hello"]
BEAMS = {"use_beam_search": True, "temperature": 0}


def row(context: list[int]) -> list[tuple[int, float]]:
    """The fake model: log probabilities of all letters behind these tokens, best first."""
    draw = random.Random(json.dumps(context))
    logits = [(letter, draw.gauss(0, 1.5)) for letter in LETTERS]
    total = math.log(sum(math.exp(logit) for _, logit in logits))
    return sorted(((letter, logit - total) for letter, logit in logits), key=lambda pair: -pair[1])


def context_of(request: GenerationRequest) -> list[int]:
    return [*request.prompt_token_ids, *(request.resume_token_ids or [[]])[0]]


def script(request: GenerationRequest, choice: int) -> list[int]:
    """What a request for one token more says: the best token there."""
    resumed = (request.resume_token_ids or [[]])[0]
    return [*resumed, row(context_of(request))[0][0]]


@dataclass
class Letters(ResumingBackend):
    """A backend over the fake model."""

    def _logprobs(
        self, request: GenerationRequest, choice: int, ids: list[int], first: int
    ) -> list[TokenLogprobs] | None:
        if not ids:
            return []
        assert request.sampling.logprobs is not None and request.sampling.temperature == 0.0
        best = row(context_of(request))[: request.sampling.logprobs]
        return [TokenLogprobs(*best[0], best)]


def backend(**more: Any) -> Letters:
    return Letters(script=script, **more)


def wanted(
    prompt: list[int], width: int, max_tokens: int, penalty: float = 1.0, ignore_eos: bool = False
) -> list[Beam]:
    """The search by itself."""
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, length_penalty=penalty, ignore_eos=ignore_eos)
    search = BeamSearch(params, {EOS}, max_tokens)
    while not search.is_over:
        rows = [row([*prompt, *beam.token_ids])[: search.num_logprobs] for beam in search.live]
        search.advance([TokenLogprobs(*best[0], best) for best in rows])
    return search.best()


def text_of(beam: Beam) -> str:
    return bytes(token for token in beam.token_ids if token < 256).decode()


@pytest.mark.parametrize("policy", ["static", "dynamic"])
async def test_whole_batches_refuse_it(policy: str) -> None:
    """Each token of each beam would wait for the next batch."""
    async with gateway(backend(), text={"batching_policy": policy}) as rig:
        for answer in (await rig.complete(n=2, **BEAMS), await rig.chat(n=2, **BEAMS)):
            error = error_of(answer)
            assert (answer.status_code, error["param"]) == (400, "use_beam_search")
            assert error["message"] == f"Beam search is not served with --batching-policy {policy}."
        assert not rig.backend.requests
        assert (await rig.complete(max_tokens=1, temperature=0, logprobs=1)).status_code == 200


def test_a_service_knows_its_batching_policy() -> None:
    settings = build_settings(str(DEMO_MODEL), {"batching_policy": "dynamic"})
    text = build_text_services(settings, build_metrics(settings))
    text.workers.close()
    assert text.batching_policy == "dynamic"


@pytest.mark.parametrize("penalty", [None, 0.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 4])
async def test_the_answers_are_the_best_beams(width: int, penalty: float | None) -> None:
    async with gateway(backend()) as rig:
        more = {} if penalty is None else {"length_penalty": penalty}
        answer = (await rig.complete(n=width, max_tokens=6, **BEAMS, **more)).json()
        beams = wanted(HELLO, width, 6, 1.0 if penalty is None else penalty)
        assert [choice["text"] for choice in answer["choices"]] == [text_of(beam) for beam in beams]
        assert [choice["finish_reason"] for choice in answer["choices"]] == [beam.finish_reason for beam in beams]
        output = sum(len(beam.token_ids) for beam in beams)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(HELLO), output)
        await rig.settle()
        (bill,) = rig.ledger.rows
        assert (bill.usage.prompt_tokens, bill.usage.completion_tokens) == (len(HELLO), output)
        assert len(rig.backend.requests) > 1, "every token of every beam is a request"
        assert all(request.begun for request in rig.backend.requests[1:]), "the prompt counts once"


async def test_chat_logprobs_and_token_ids() -> None:
    async with gateway(backend()) as rig:
        asked = {"n": 3, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        answer = (await rig.chat(**asked, **BEAMS, ignore_eos=True)).json()
        beams = wanted(rig.backend.requests[0].prompt_token_ids, 3, 5, ignore_eos=True)
        for choice, beam in zip(answer["choices"], beams, strict=True):
            assert choice["token_ids"] == beam.token_ids
            content = choice["logprobs"]["content"]
            assert [item["logprob"] for item in content] == [entry.logprob for entry in beam.logprobs]
            assert all(len(item["top_logprobs"]) == 2 for item in content)
        plain = (await rig.chat(n=3, max_tokens=5, **BEAMS, ignore_eos=True)).json()
        assert [choice["logprobs"] for choice in plain["choices"]] == [None] * 3


async def test_several_prompts_have_their_own_searches() -> None:
    async with gateway(backend()) as rig:
        answer = (await rig.complete(prompt=[[BOS, 97], [BOS, 98, 99]], n=2, max_tokens=5, **BEAMS)).json()
        texts = [text_of(beam) for ids in ([BOS, 97], [BOS, 98, 99]) for beam in wanted(ids, 2, 5)]
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert answer["usage"]["prompt_tokens"] == 5


async def test_a_lost_group_costs_nothing() -> None:
    """Every third step the group is lost with all its requests; each goes on in the next."""
    group = backend(manual=True)
    async with gateway(group) as rig:
        asking = asyncio.create_task(rig.complete(n=3, max_tokens=5, **BEAMS))
        turn = lost = 0
        async with asyncio.timeout(60):
            while not asking.done():
                await asyncio.sleep(0.002)
                if group.streams:
                    turn += 1
                    if turn % 3 == 0:
                        group.lose_all()
                        lost += 1
                    else:
                        group.step()
        answer = (await asking).json()
        beams = wanted(HELLO, 3, 5)
        assert lost > 1
        assert [choice["text"] for choice in answer["choices"]] == [text_of(beam) for beam in beams]
        assert answer["usage"]["prompt_tokens"] == len(HELLO)


async def test_a_client_that_leaves_ends_all_beams_and_pays_for_the_best_so_far() -> None:
    group = backend(manual=True)
    async with gateway(group) as rig:
        asking = asyncio.create_task(rig.complete(n=3, max_tokens=50, ignore_eos=True, **BEAMS))
        async with asyncio.timeout(60):
            for beams in (1, 3, 3):
                while len(group.streams) < beams:
                    await asyncio.sleep(0.002)
                group.step()
            while len(group.streams) < 3:
                await asyncio.sleep(0.002)
            group.begin()
            asking.cancel()
            while group.streams:
                await asyncio.sleep(0.002)
        assert len(group.aborts) == 3, "each beam's request"
        await rig.settle()
        (bill,) = rig.ledger.rows
        assert bill.terminal == "abort"
        assert (bill.usage.prompt_tokens, bill.usage.completion_tokens) == (len(HELLO), 3 * 3)


async def test_a_client_that_leaves_the_queue_pays_nothing() -> None:
    group = backend(manual=True)
    async with gateway(group) as rig:
        asking = asyncio.create_task(rig.complete(n=3, max_tokens=50, **BEAMS))
        async with asyncio.timeout(60):
            await group.submitted.wait()
            asking.cancel()
            while group.streams:
                await asyncio.sleep(0.002)
        await rig.settle()
        (bill,) = rig.ledger.rows
        assert (bill.terminal, bill.usage.prompt_tokens, bill.usage.completion_tokens) == ("abort", 0, 0)


async def test_what_the_group_refuses_is_the_answer() -> None:
    async with gateway(backend(refuse=QueueFull("the queue is full"))) as rig:
        answer = await rig.complete(n=2, **BEAMS)
        assert (answer.status_code, error_of(answer)["code"]) == (429, "slow_down")
    async with gateway(backend(fail_at_position=0)) as rig:
        answer = await rig.complete(n=2, **BEAMS)
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")


async def test_a_pool_that_is_full_ends_the_search_as_length() -> None:
    class Small(Letters):
        """A group whose KV pool holds two tokens behind the prompt."""

        def send(self, part: Any, hint: Any) -> None:
            super().send(part, hint)
            if len((part.request.resume_token_ids or [[]])[0]) >= 2:
                choice = self.streams[part.request.request_id].choices[0]
                choice.script = choice.script[:2]

    async with gateway(Small(script=script)) as rig:
        answer = (await rig.complete(n=2, max_tokens=9, ignore_eos=True, **BEAMS)).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [{"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_it_is_not_streamed(stream: dict[str, Any]) -> None:
    async with gateway(backend()) as rig:
        for ask in (rig.chat, rig.complete):
            error = error_of(await ask(n=2, **BEAMS, **stream))
            assert (error["param"], error["code"]) == ("stream", "unsupported_parameter")
        assert not rig.backend.requests


BAD: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "stop": ["x"], "stop_token_ids": [5], "min_tokens": 2,
    "best_of": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_what_it_does_not_honour_is_refused_by_name(name: str) -> None:
    async with gateway(backend()) as rig:
        answer = await rig.complete(**{"n": 2, **BEAMS, name: BAD[name]})
        assert (answer.status_code, error_of(answer)["param"]) == (400, name)
        assert not rig.backend.requests
        allowed = WITHOUT_EFFECT.get(name, (2,))[-1]
        assert (await rig.complete(**{"n": 2, "max_tokens": 2, **BEAMS, name: allowed})).status_code == 200


async def test_more_beams_than_half_of_the_log_probabilities_are_refused() -> None:
    async with gateway(backend()) as rig:
        error = error_of(await rig.complete(n=11, **BEAMS))
        assert (error["param"], error["message"]) == ("n", "n: 11 beams exceed the limit of 10.")
        assert (await rig.complete(n=10, max_tokens=2, **BEAMS)).status_code == 200


async def test_a_length_penalty_belongs_to_a_beam_search() -> None:
    async with gateway(backend(), settings=GatewaySettings(strict_fields=True)) as rig:
        error = error_of(await rig.complete(length_penalty=0.5))
        assert (error["param"], error["code"]) == ("length_penalty", "unsupported_parameter")
        error = error_of(await rig.complete(**BEAMS, length_penalty=11))
        assert error["param"] == "length_penalty"
        error = error_of(await rig.complete(use_beam_search="yes"))
        assert error["param"] == "use_beam_search"
