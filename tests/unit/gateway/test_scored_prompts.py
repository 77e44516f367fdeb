"""prompt_logprobs, and echo with logprobs: vLLM's and OpenAI's shapes, what harnesses send, limits, failover."""

from typing import Any

import pytest

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import (
    Ended,
    GenerationRequest,
    PromptLogprobs,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from tandem.workers.text.choice_text import ChoiceText
from tests.support.fake_backend import logprob_of
from tests.unit.gateway.rig import error_of, gateway

IDS = [104, 101, 108, 108, 111]


async def test_the_shape_is_vllms_in_chat_and_completions() -> None:
    async with gateway() as rig:
        answer = (await rig.complete(prompt=IDS, prompt_logprobs=2, max_tokens=2, n=2)).json()
        assert len(answer["choices"]) == 2
        for choice in answer["choices"]:
            first, *others = choice["prompt_logprobs"]
            assert first is None and len(others) == 4
            assert others[0] == {
                "101": {"logprob": logprob_of(1), "rank": 1, "decoded_token": "e"},
                "102": {"logprob": logprob_of(1) - 1, "rank": 2, "decoded_token": "f"},
            }
            assert choice["logprobs"] is None
        assert "prompt_logprobs" not in (await rig.complete(prompt=IDS)).json()["choices"][0]
        chat = (await rig.chat(prompt_logprobs=0, max_tokens=1)).json()
        first, *others = chat["prompt_logprobs"]
        assert first is None and len(others) == chat["usage"]["prompt_tokens"] - 1
        assert all(len(one) == 1 for one in others)
        assert "prompt_logprobs" not in (await rig.chat(max_tokens=1)).json()


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_what_lm_eval_sends_for_loglikelihood(max_tokens: int) -> None:
    """Its local-completions model: lists of ids, and the lists of tokens and log probabilities read side by side."""
    asked = {"temperature": 0, "logprobs": 1, "echo": True, "seed": 1234, "max_tokens": max_tokens}
    for prompt in (IDS, [IDS, IDS[:1], IDS[::-1]]):
        async with gateway() as rig:
            answer = (await rig.complete(prompt=prompt, **asked)).json()
            prompts = prompt if isinstance(prompt[0], list) else [prompt]
            assert len(answer["choices"]) == len(prompts)
            for ids, choice in zip(prompts, answer["choices"], strict=True):
                logprobs = choice["logprobs"]
                size = len(ids) + max_tokens
                assert {len(column) for column in logprobs.values()} == {size}
                assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
                assert logprobs["token_logprobs"][1 : len(ids)] == [logprob_of(i) for i in range(1, len(ids))]
                assert "".join(logprobs["tokens"]) == choice["text"]
                assert logprobs["text_offset"] == list(range(size))
                for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]:
                    assert max(top, key=top.__getitem__) == token
                assert choice["finish_reason"] == "length" and "prompt_logprobs" not in choice
            usage = answer["usage"]
            assert usage["completion_tokens"] == max_tokens * len(prompts)
            assert usage["prompt_tokens"] == sum(map(len, prompts))
            (request, *_) = rig.backend.requests
            assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (max_tokens, 1)


async def test_echo_without_logprobs_and_without_tokens() -> None:
    async with gateway() as rig:
        answer = (await rig.complete(prompt=IDS, echo=True, max_tokens=0)).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("hello", None)
        assert rig.backend.requests[0].sampling.prompt_logprobs is None
        refused = await rig.complete(max_tokens=0)
        assert error_of(refused)["param"] == "max_tokens"


async def test_they_count_for_the_bytes_of_an_answer() -> None:
    async with gateway(settings=GatewaySettings(max_answer_bytes=60_000)) as rig:
        assert (await rig.complete(prompt=IDS * 5, prompt_logprobs=10, max_tokens=1)).status_code == 200
        refused = await rig.complete(prompt=IDS * 12, prompt_logprobs=10, max_tokens=1)
        assert (refused.status_code, error_of(refused)["code"]) == (413, "content_too_large")


# ---- failover ----


def part(n: int = 1, length: int = 5) -> tuple[RequestPart, list[TokenDelta]]:
    """A part that wants them, and what its reader gets."""
    request = GenerationRequest(
        request_id="r", prompt_token_ids=[7] * length, sampling=SamplingParams(prompt_logprobs=0, n=n)
    )
    choices = [ChoiceText(Silent(), request.sampling, include_stop=False, eos_token_ids=frozenset()) for _ in range(n)]
    made = RequestPart(request=request, choices=choices, first_choice=0)
    read: list[TokenDelta] = []
    made.on_step = read.extend
    return made, read


class Silent:
    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def scores(first: int, last: int, **more: Any) -> TokenDelta:
    entries = [TokenLogprobs(7, -float(i)) for i in range(first, last + 1)]
    given = {"choice": 0, "first_position": 0, "token_ids": [], **more}
    return TokenDelta(request_id="r", attempt=0, prompt_logprobs=PromptLogprobs(first, entries), **given)


def delivered(read: list[TokenDelta]) -> list[float]:
    return [entry.logprob for delta in read if delta.prompt_logprobs for entry in delta.prompt_logprobs.entries]


def test_the_next_group_sends_them_anew_and_the_reader_gets_each_once() -> None:
    made, read = part()
    made.begin_attempt()
    assert made.take([scores(1, 2)])
    made.next_request(None, is_suspect=False)
    assert made.request.sampling.prompt_logprobs == 0, "not all have come"
    made.begin_attempt()
    assert made.take([scores(1, 1)]) and made.take([scores(2, 4)])
    assert delivered(read) == [-1.0, -2.0, -3.0, -4.0]
    made.next_request(None, is_suspect=False)
    assert made.request.sampling.prompt_logprobs is None, "they are not computed again"


def test_a_gap_is_not_taken() -> None:
    made, read = part()
    made.begin_attempt()
    assert made.take([scores(1, 1)])
    assert not made.take([scores(3, 4)])
    assert delivered(read) == [-1.0]


def test_an_end_that_overtakes_them_waits_for_them() -> None:
    made, _ = part()
    made.begin_attempt()
    ended = Ended(request_id="r", attempt=0, positions=[0], finish_reasons=["length"], usage=Usage(5, 0))
    assert not made.has_all(ended)
    assert made.take([scores(1, 4)])
    assert made.has_all(ended)
