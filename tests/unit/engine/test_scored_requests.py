"""Requests with prompt_logprobs in the engine: once per request and without gaps, whatever happens on the way."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, harness, request
from fake_executor import fake_prompt_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.messages.request import Abort, GenerationRequest
from tests.unit.engine.test_engine_outputs import MODES


def assert_scored(h: Harness, *requests: GenerationRequest) -> None:
    """They have the oracle's log probabilities, tokens and bills."""
    for req in requests:
        wanted = fake_prompt_logprobs("", req.prompt_token_ids) if req.sampling.prompt_logprobs is not None else []
        assert h.sink.prompt_logprobs.get(req.request_id, []) == wanted, req.request_id
    assert_as_expected(h, *requests)


def num_scored(h: Harness) -> int:
    return sum(work.num_scored for plan in h.executor.plans for work in plan.work)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_every_length_around_a_step_and_a_block(mode: dict[str, Any]) -> None:
    h = harness(max_num_batched_tokens=8, num_blocks=128, **mode)
    asked = [request(f"{length}", length, length % 4, prompt_logprobs=1, n=1 + length % 2) for length in range(1, 20)]
    text = request("text", 5, 12)
    h.add(*asked[:9], text, *asked[9:])
    h.run()
    assert_scored(h, *asked, text)
    assert num_scored(h) == sum(len(req.prompt_token_ids) - 1 for req in asked), "once for all choices"
    h.assert_empty()


def test_what_the_cache_has_is_computed_again_and_others_find_it() -> None:
    h = harness()
    prompt = list(range(2, 42))
    asked = [request("a", prompt, 2), request("b", prompt, 2, prompt_logprobs=0), request("c", prompt, 2)]
    for req in asked:
        h.add(req)
        h.run()
    assert_scored(h, *asked)
    assert [h.sink.ends[name].usage.cached_tokens for name in "abc"] == [0, 0, 36]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", range(6))
def test_another_choice_takes_over_when_the_first_is_aborted(mode: dict[str, Any], steps: int) -> None:
    h = harness(max_num_batched_tokens=8, **mode)
    req = request("a", 40, 3, n=3, prompt_logprobs=2)
    h.add(req)
    for _ in range(steps):
        h.step()
    h.engine.abort(Abort(request_id="a", attempt=0, choice=0))
    h.run()
    assert h.sink.prompt_logprobs["a"] == fake_prompt_logprobs("", req.prompt_token_ids)
    assert h.sink.ends["a"].finish_reasons == ["abort", "length", "length"]
    h.assert_empty()


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from([mode.values[0] for mode in MODES]),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12), st.integers(1, 2), st.booleans()), max_size=7),
    num_blocks=st.integers(13, 24),
    fails=st.sets(st.integers(1, 40), max_size=6),
)
def test_preemption_and_lost_steps_repeat_nothing(
    mode: dict[str, Any], lengths: list[tuple[int, int, int, bool]], num_blocks: int, fails: set[int]
) -> None:
    def room(step_id: int) -> float:
        return 3 if step_id in fails else float("inf")

    h = harness(max_num_batched_tokens=8, num_blocks=num_blocks, room=room, **mode)
    asked = [
        request(f"r{i}", length, max_tokens, n=n, prompt_logprobs=1 if scored else None)
        for i, (length, max_tokens, n, scored) in enumerate(lengths)
    ]
    h.add(*asked)
    h.run()
    assert_scored(h, *asked)
    h.assert_empty()
