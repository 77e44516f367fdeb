"""Whatever the schedule, each request's output equals the oracle's: depth 1, two steps in flight, and pipelines."""

import pytest
from builders import EOS, assert_as_expected, harness, request
from hypothesis import given, settings
from hypothesis import strategies as st

MODES = [
    pytest.param({"asynchronous": False}, id="depth1"),
    pytest.param({"asynchronous": True}, id="async"),
    pytest.param({"stages": 2}, id="pp2"),
    pytest.param({"stages": 4}, id="pp4"),
    pytest.param({"drafts": 3}, id="drafts"),
    pytest.param({"drafts": 5, "asynchronous": True}, id="async drafts"),
    pytest.param({"stages": 2, "drafts": 3}, id="pp2 drafts"),
]
ONE_TOKEN_MODES = [mode for mode in MODES if "drafts" not in mode.values[0]]
"""In which a step gives a sequence one token."""


@pytest.mark.parametrize("mode", MODES)
def test_one_request(mode):
    h = harness(**mode)
    req = request("a", 5, 7)
    h.add(req)
    h.run()
    assert_as_expected(h, req)


@pytest.mark.parametrize("mode", MODES)
def test_many_requests_of_all_lengths(mode):
    h = harness(**mode, num_blocks=200)
    requests = [request(f"r{i}", 1 + (i * 7) % 50, 1 + (i * 5) % 23) for i in range(40)]
    h.add(*requests)
    h.run()
    assert_as_expected(h, *requests)
    depth = mode.get("stages", 2 if mode.get("asynchronous") else 1)
    assert h.executor.most_in_flight == depth


@pytest.mark.parametrize("mode", MODES)
def test_kv_01_fifty_growing_requests_on_32_blocks(mode):
    requests = [request(f"g{i}", 3 + i % 9, 40 + i % 20) for i in range(50)]
    small = harness(**mode, num_blocks=32, max_num_seqs=16)
    small.add(*requests)
    small.run()
    assert small.engine.stats().preemptions > 0
    large = harness(num_blocks=2000, max_num_seqs=64)
    large.add(*requests)
    large.run()
    assert large.engine.stats().preemptions == 0
    assert small.sink.tokens == large.sink.tokens
    assert_as_expected(small, *requests)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 41])
@pytest.mark.parametrize("caching", [True, False])
def test_choices_fork_the_prompt(mode, prompt_len, caching):
    h = harness(**mode, caching=caching)
    req = request("n", prompt_len, 9, n=5)
    h.add(req)
    h.run()
    assert_as_expected(h, req)
    computed = sum(work.num_tokens for plan in h.executor.plans for work in plan.work) + h.executor.num_accepted
    assert computed == prompt_len + 4 + 5 * 8, "the prompt is computed once, each other choice computes one token of it"


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_workloads_equal_the_oracle(mode, data):
    draw = data.draw
    h = harness(
        **mode,
        num_blocks=draw(st.integers(12, 60)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_seqs=draw(st.integers(1, 9)),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        max_model_len=draw(st.integers(20, 200)),
        caching=draw(st.booleans()),
        stalls=draw(st.integers(0, 2)),
    )
    fits = min(h.facts.max_model_len - 1, h.executor.num_blocks * h.executor.block_size)
    requests = []
    for i in range(draw(st.integers(1, 12))):
        shared = draw(st.integers(0, 3)) * 4
        length = min(shared + draw(st.integers(1, 30)), fits)
        prompt = [2 + (7 * j) % 90 if j < shared else draw(st.integers(0, 96)) for j in range(length)]
        n = draw(st.sampled_from([1, 1, 1, 2, 4]))
        resume = None
        if draw(st.integers(0, 4)) == 0:
            resume = [[2] * draw(st.integers(0, 6)) for _ in range(n)]
        requests.append(
            request(
                f"r{i}",
                prompt,
                draw(st.integers(1, 40)),
                n=n,
                ignore_eos=draw(st.booleans()),
                min_tokens=draw(st.sampled_from([0, 0, 3])),
                stop_token_ids=draw(st.sampled_from([(), (5, 6, 7, 8, 9)])),
                resume=resume,
                priority=draw(st.sampled_from([0, 0, 1, -1])),
            )
        )
    for req in requests:
        h.add(req)
        for _ in range(draw(st.integers(0, 3))):
            h.step()
    h.run()
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("mode", MODES)
def test_stop_by_eos_and_by_stop_id(mode):
    h = harness(**mode, num_blocks=500)
    requests = [request(f"s{i}", 6, 200, ignore_eos=False, stop_token_ids=(7, 9)) for i in range(30)]
    h.add(*requests)
    h.run()
    assert_as_expected(h, *requests)
    for req in requests:
        last = h.sink.tokens[req.request_id, 0][-1]
        assert h.sink.reasons[req.request_id, 0] == "stop"
        assert h.sink.stop_reasons[req.request_id, 0] == (None if last == EOS else last)
