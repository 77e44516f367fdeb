"""What an aborted request held is free after at most as many further steps as plans may be in flight."""

import pytest
from builders import Harness, assert_as_expected, harness, request

from tandem.workers.messages.request import Abort

MODES = [
    pytest.param({"asynchronous": False}, 1, id="depth1"),
    pytest.param({"asynchronous": True}, 2, id="async"),
    pytest.param({"stages": 2}, 2, id="pp2"),
    pytest.param({"drafts": 3, "asynchronous": True}, 2, id="async drafts"),
]
BLOCK = 4


def used(h: Harness) -> int:
    return h.engine.stats().used_blocks


def steps_until_free(h: Harness, name: str, keep: int = 0) -> int:
    """Aborts `name`; how many steps it takes until no more than `keep` blocks are used."""
    h.engine.abort(Abort(request_id=name, attempt=0))
    assert h.sink.ends[name].finish_reasons == ["abort"] * len(h.sink.ends[name].finish_reasons), "it ends at once"
    steps = 0
    while used(h) > keep:
        assert h.engine.has_work(), "blocks are held, but no step is due"
        h.step()
        steps += 1
    return steps


@pytest.mark.parametrize(("mode", "depth"), MODES)
@pytest.mark.parametrize("choices", [1, 3])
def test_while_decoding(mode, depth, choices):
    h = harness(**mode)
    h.add(request("a", 9, 200, n=choices))
    for _ in range(8):
        h.step()
    assert len(h.sink.tokens["a", choices - 1]) > 1 and used(h) > 0
    assert steps_until_free(h, "a") <= depth
    h.run()


@pytest.mark.parametrize(("mode", "depth"), MODES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_in_the_middle_of_a_chunked_prefill(mode, depth, steps):
    h = harness(**mode, max_num_batched_tokens=8)
    h.add(request("a", 100, 5))
    for _ in range(steps):
        h.step()
    assert ("a", 0) not in h.sink.tokens and h.engine.stats().reserved_blocks > 0
    assert used(h) + h.engine.stats().reserved_blocks == 100 // BLOCK, "what its chunks have taken, and the rest"
    assert steps_until_free(h, "a") <= depth and h.engine.stats().reserved_blocks == 0
    h.run()
    assert sum(work.num_tokens for plan in h.executor.plans for work in plan.work) <= 8 * (steps + depth), (
        "no chunk is planned after the abort"
    )


@pytest.mark.parametrize(("mode", "depth"), MODES)
def test_while_waiting_it_holds_nothing(mode, depth):
    h = harness(**mode, max_num_seqs=1)
    other = request("b", 9, 20)
    h.add(other, request("a", 9, 20))
    for _ in range(4):
        h.step()
    stats = h.engine.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    held = stats.used_blocks
    assert steps_until_free(h, "a", keep=held) == 0
    assert h.engine.stats().waiting == 0
    h.run()
    assert_as_expected(h, other)


@pytest.mark.parametrize(("mode", "depth"), MODES)
def test_before_the_first_step(mode, depth):
    h = harness(**mode)
    h.add(request("a", 9, 20))
    assert steps_until_free(h, "a") == 0
    h.run()
    assert not h.executor.plans


@pytest.mark.parametrize(("mode", "depth"), MODES)
def test_the_blocks_go_to_who_waits_for_them(mode, depth):
    """A request that fills the pool is aborted: the next in the queue has its first token within its own latency."""
    h = harness(**mode, num_blocks=16, caching=False, max_num_batched_tokens=64)
    waiting = request("b", 50, 3)
    h.add(request("a", 50, 14), waiting)
    for _ in range(4):
        h.step()
    assert h.engine.stats().waiting == 1 and ("a", 0) in h.sink.tokens
    h.engine.abort(Abort(request_id="a", attempt=0))
    for _ in range(2 * depth + 1):
        h.step()
    assert h.sink.tokens["b", 0], "depth steps to free the blocks, depth to come through, one to be planned"
    h.run()
    assert_as_expected(h, waiting)
