"""Requests for embeddings in the engine: beside requests that generate, whatever happens to them on the way."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, assert_embedded, embedding, harness, request
from fake_adapters import AdapterPlan
from fake_tiers import TierPlan
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.messages.errors import ContextLengthExceeded
from tandem.workers.messages.request import Abort
from tests.unit.engine.test_engine_outputs import MODES

KINDS = st.sampled_from(["last", "mean"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_prompts_of_every_length_around_a_step_and_a_block(mode: dict[str, Any], kind: str) -> None:
    h = harness(max_num_batched_tokens=8, num_blocks=128, **mode)
    asked = [embedding(f"{length}", length, kind) for length in range(1, 20)]
    text = request("text", 5, 12)
    h.add(*asked[:9], text, *asked[9:])
    h.run()
    assert_embedded(h, *asked)
    assert_as_expected(h, text)


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_context_and_no_token_more(mode: dict[str, Any]) -> None:
    h = harness(max_model_len=32, num_blocks=16, **mode)
    whole = embedding("whole", 32, "mean")
    h.add(whole)
    with pytest.raises(ContextLengthExceeded, match="at most 32 would fit"):
        h.add(embedding("more", 33))
    with pytest.raises(ContextLengthExceeded, match="at most 31 would fit"):
        h.add(request("text", 32))
    h.run()
    assert_embedded(h, whole)


def test_a_step_after_the_last_chunk_computes_nothing_for_it() -> None:
    """With two plans in flight a row that generates would be in the second one too."""
    h = harness(asynchronous=True, max_num_batched_tokens=8)
    h.add(embedding("e", 9))
    h.run()
    assert [sum(work.num_tokens for work in plan.work) for plan in h.executor.plans] == [8, 1]


def test_the_prefix_is_found_for_a_last_token_only_and_what_is_computed_is_found_by_others() -> None:
    h = harness(max_num_seqs=1)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    asked = [embedding("a", prompt, "mean"), embedding("b", prompt), embedding("c", prompt, "mean")]
    text = request("t", prompt)
    h.add(*asked, text)
    h.run()
    assert_embedded(h, *asked)
    assert_as_expected(h, text)
    assert [h.sink.begun[name] for name in "abct"] == [0, 8, 0, 8]


def test_an_abort_in_the_middle_of_the_prompt_frees_its_row() -> None:
    h = harness(max_num_batched_tokens=8, max_num_seqs=1)
    waiting = embedding("after", 6)
    h.add(embedding("e", 30, "mean"), waiting)
    h.step()
    h.engine.abort(Abort(request_id="e", attempt=0))
    h.run()
    assert h.sink.ends["e"].finish_reasons == ["abort"] and "e" not in h.sink.embeddings
    assert h.sink.ends["e"].usage.prompt_tokens == 30, "it was begun"
    assert_embedded(h, waiting)


def test_one_that_waits_beyond_its_deadline_gets_503() -> None:
    h = harness(max_num_seqs=1)
    text = request("text", 4, 40)
    h.add(text, embedding("late", 4, deadline_s=0.1))
    h.run()
    assert h.sink.ends["late"].refused is not None and h.sink.ends["late"].refused[0] == 503
    assert_as_expected(h, text)


def test_a_failed_row_is_its_requests_error_and_its_blocks_are_forgotten() -> None:
    bad = embedding("bad", 9)
    h = harness(fail_at=frozenset({(bad.sampling.seed, 0, 0)}))
    good = embedding("good", 9)
    h.add(bad, good)
    h.run()
    assert h.sink.reasons["bad", 0] == "error" and "bad" not in h.sink.embeddings
    assert_embedded(h, good)


def test_a_suspect_has_a_step_to_itself() -> None:
    h = harness()
    suspect = embedding("suspect", 6, attempt=1, suspect=True)
    text = request("text", 4, 6)
    h.add(text, suspect)
    h.run()
    assert_embedded(h, suspect)
    assert_as_expected(h, text)
    of_suspect = [plan for plan in h.executor.plans if any(init.pool for init in plan.new_rows)]
    assert [len(plan.work) for plan in of_suspect] == [1]


def test_an_older_attempt_gives_way_to_a_newer_one() -> None:
    h = harness(max_num_batched_tokens=8)
    h.add(embedding("e", 30))
    h.step()
    newer = embedding("e", 30, attempt=1, begun=True)
    h.sink.begun.clear()
    h.engine.add_request(newer)
    assert h.sink.ends.pop("e").finish_reasons == ["abort"]
    h.sink.reasons.clear()
    h.sink.tokens.clear()
    h.run()
    assert_embedded(h, newer)


def test_adapters_keep_embeddings_apart() -> None:
    h = harness(adapters=AdapterPlan(num_pages=4, max_loras=2), patience=100)
    prompt = [5, 6, 7, 8, 9, 10]
    asked = [embedding(name, prompt, kind, adapter=name[0]) for name, kind in
             (("ax", "last"), ("bx", "mean"), ("ay", "mean"), ("by", "last"))]  # fmt: skip
    h.add(*asked)
    h.run()
    assert_embedded(h, *asked)
    assert len(set(h.sink.embeddings.values())) == 4


def mixed(h: Harness, lengths: list[tuple[int, str | None]]) -> None:
    """Prompts that share a beginning; None as kind: a text."""
    shared = list(range(3, 60))
    asked = []
    for i, (length, kind) in enumerate(lengths):
        name, prompt = f"r{i}", [*shared[: length // 2], *(60 + (i * 7 + k) % 30 for k in range(length - length // 2))]
        asked.append(request(name, prompt, 1 + length % 7) if kind is None else embedding(name, prompt, kind))
    h.add(*asked)
    h.run()
    assert_embedded(h, *(one for one in asked if one.pool is not None))
    assert_as_expected(h, *(one for one in asked if one.pool is None))


ASKED = st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), KINDS)), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(
    ASKED,
    st.sampled_from([{"asynchronous": False}, {"asynchronous": True}, {"stages": 2}, {"stages": 3}]),
    st.integers(11, 40),
    st.integers(8, 20),
    st.integers(0, 2),
    st.lists(st.integers(0, 12), max_size=8),
)
def test_any_mix_with_preemption_and_steps_without_memory(
    lengths: list[tuple[int, str | None]], mode: dict[str, Any], blocks: int, budget: int, stalls: int, rooms: list[int]
) -> None:
    def room(step_id: int) -> float:
        return max(1, rooms[step_id]) if step_id < len(rooms) else float("inf")

    mixed(harness(num_blocks=blocks, max_num_batched_tokens=budget, stalls=stalls, room=room, **mode), lengths)


@settings(max_examples=40, deadline=None)
@given(ASKED, st.sampled_from([{"asynchronous": True}, {"stages": 2}]), st.integers(12, 30), st.integers(0, 3))
def test_any_mix_over_lower_tiers(
    lengths: list[tuple[int, str | None]], mode: dict[str, Any], blocks: int, seed: int
) -> None:
    def fails(transfer: Any, rank: int, place: int) -> bool:
        return (place + seed) % 5 == 0 and transfer.kind == "load"

    plan = TierPlan(num_ranks=2, fails=fails)
    mixed(harness(num_blocks=blocks, tiers=plan, patience=80, max_num_batched_tokens=12, **mode), lengths)
