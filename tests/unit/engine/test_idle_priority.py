"""Work for idle rows gives way to everybody else's, of whatever tenant, and its text is as if it had not."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, harness, request
from test_engine_outputs import MODES

from tandem.workers.engine.base.stats import TTFT_BOUNDS_S, IdleWork
from tandem.workers.messages.errors import QueueFull
from tandem.workers.messages.request import IDLE_PRIORITY, GenerationRequest

ROWS, SOON = 4, 12


def engine(mode: dict[str, Any], **more: Any) -> Harness:
    return harness(**mode, **{"num_blocks": 200, "max_num_seqs": ROWS, "max_num_batched_tokens": 64, **more})


def idle_flood(h: Harness, tenant: str, count: int, prompt: int = 8) -> list[GenerationRequest]:
    """Lines that have all rows, and more that wait."""
    lines = [request(f"line{i}", prompt, 60, tenant=tenant, priority=IDLE_PRIORITY) for i in range(count)]
    h.add(*lines)
    for _ in range(8):
        h.step()
    return lines


def until_token(h: Harness, *names: str) -> None:
    for _ in range(SOON):
        h.step()
        if all(h.sink.tokens.get((name, 0)) for name in names):
            return
    raise AssertionError(f"no token within {SOON} steps")


@pytest.mark.parametrize("tenant", ["default", "other"])
@pytest.mark.parametrize("mode", MODES)
def test_others_have_rows_at_once(mode: dict[str, Any], tenant: str) -> None:
    """Three requests find all rows taken: three lines give way, and no more."""
    h = engine(mode)
    lines = idle_flood(h, tenant, ROWS + 2)
    others = [request(f"quick{i}", 9, 20) for i in range(3)]
    h.add(*others)
    until_token(h, *(one.request_id for one in others))
    assert h.engine.stats().preemptions == 3
    h.run()
    assert_as_expected(h, *lines, *others)
    assert h.engine.stats().preemptions == 3, "no line took a row from anybody"


@pytest.mark.parametrize("tenant", ["default", "other"])
def test_no_line_begins_while_others_wait(tenant: str) -> None:
    """Nor does a tenant that has lines alone claim rows of its share with them."""
    h = engine({})
    others = [request(f"long{i}", 8, 40) for i in range(ROWS)]
    h.add(*others)
    for _ in range(4):
        h.step()
    waiting = [request(f"next{i}", 8, 4) for i in range(2)]
    lines = [request(f"line{i}", 8, 4, tenant=tenant, priority=IDLE_PRIORITY) for i in range(2)]
    h.add(*lines, *waiting)
    while not all(h.sink.ends.get(one.request_id) for one in waiting):
        h.step()
        begun = [one.request_id in h.sink.begun for one in (*waiting, *lines)]
        assert begun == sorted(begun, reverse=True), "lines are behind the others"
    assert h.engine.stats().preemptions == 0
    h.run()
    assert_as_expected(h, *others, *waiting, *lines)


def test_others_have_blocks_too() -> None:
    """Rows are free, blocks are not: as many lines give way as the newcomer's prompt needs."""
    h = engine({}, num_blocks=60, max_num_seqs=8, caching=False)
    lines = [request(f"line{i}", 40, 100, priority=IDLE_PRIORITY) for i in range(5)]
    h.add(*lines)
    for _ in range(12):
        h.step()
    assert len(h.engine.scheduler.rows.sequences) < 8
    other = request("quick", 60, 4)
    h.add(other)
    until_token(h, "quick")
    assert 0 < h.engine.stats().preemptions <= 3
    h.run()
    assert_as_expected(h, *lines, other)


def test_lines_take_no_place_in_the_queue_of_others() -> None:
    """Those that wait have limits of their own: 2 lines wait, and 2 requests beside them."""
    h = engine({}, max_num_queued_reqs=2)

    def add(name: str, **more: Any) -> GenerationRequest:
        h.add(one := request(name, 3, 4, **more))
        return one

    taken = [add(f"line{i}", priority=IDLE_PRIORITY) for i in range(2)]
    with pytest.raises(QueueFull):
        add("line2", priority=IDLE_PRIORITY)
    taken += [add(f"quick{i}") for i in range(2)]
    with pytest.raises(QueueFull):
        add("quick2")
    h.run()
    assert_as_expected(h, *taken)
    assert add("line3", priority=IDLE_PRIORITY) and add("quick3")
    h.run()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_idle_work_is_told_apart(mode: dict[str, Any]) -> None:
    """Blocks that a request shares with lines are not theirs, blocks that lines share among themselves count once."""
    h = engine(mode)
    prompt = list(range(2, 42))
    assert h.engine.stats().idle == IdleWork(first_tokens=[0] * (len(TTFT_BOUNDS_S) + 1))
    h.add(*(request(f"line{i}", prompt, 30, priority=IDLE_PRIORITY) for i in range(ROWS + 1)))
    for _ in range(8):
        h.step()
    stats = h.engine.stats()
    idle = stats.idle
    assert (idle.running, idle.waiting, idle.waiting_tokens) == (stats.running, stats.waiting, stats.waiting_tokens)
    assert (idle.running, idle.waiting) == (ROWS, 1) and idle.waiting_tokens == len(prompt)
    assert idle.prompt_tokens == stats.prompt_tokens == ROWS * len(prompt)
    assert idle.first_tokens == stats.time_to_first_token_s.counts and sum(idle.first_tokens) > 0
    in_tables = {b for state in h.engine.requests for seq in state.sequences for b in seq.table.block_ids}
    assert round(idle.kv_usage * stats.num_blocks) == len(in_tables)
    h.add(other := request("quick", prompt, 20))
    until_token(h, "quick")
    stats, idle = h.engine.stats(), h.engine.stats().idle
    assert stats.running - idle.running == 1 and stats.waiting == idle.waiting
    assert stats.prompt_tokens - idle.prompt_tokens == len(prompt)
    assert stats.time_to_first_token_s.count - sum(idle.first_tokens) == 1
    (quick,) = h.engine.requests.get(other.request_id).sequences
    lines = {
        b for state in h.engine.requests for seq in state.sequences if seq is not quick for b in seq.table.block_ids
    }
    assert round(idle.kv_usage * stats.num_blocks) == len(lines - {*quick.table.block_ids})
    assert lines & {*quick.table.block_ids}, "they share the prompt"
    h.run()
    assert h.engine.stats().idle.running == h.engine.stats().idle.kv_usage == 0
