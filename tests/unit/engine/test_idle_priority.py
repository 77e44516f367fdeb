"""Work for idle rows gives way to everybody else's, of whatever tenant, and its text is as if it had not."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, harness, request
from test_engine_outputs import MODES

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
