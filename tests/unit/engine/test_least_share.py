"""A tenant gets the rows, and blocks, of its share from one whose long answers have them all."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, harness, request
from test_engine_outputs import MODES

from tandem.workers.engine import running_rows
from tandem.workers.messages.request import GenerationRequest

ROWS, SOON = 4, 12
"""Rows of the engine; steps within which a row is there, whatever is in flight."""


def engine(mode: dict[str, Any], **more: Any) -> Harness:
    return harness(**mode, **{"num_blocks": 200, "max_num_seqs": ROWS, "max_num_batched_tokens": 64, **more})


def flood(h: Harness, tenant: str = "loud", rows: int = ROWS + 2) -> list[GenerationRequest]:
    """Long answers that have all rows, and more that wait."""
    requests = [request(f"{tenant}{i}", 8, 100, tenant=tenant) for i in range(rows)]
    h.add(*requests)
    for _ in range(8):
        h.step()
    return requests


def running(h: Harness) -> list[str]:
    return sorted(seq.tenant for seq in h.engine.scheduler.rows.sequences)


def steps_to_first_token(h: Harness, name: str, most: int) -> int:
    for number in range(1, most + 1):
        h.step()
        if h.sink.tokens.get((name, 0)):
            return number
    raise AssertionError(f"no token in {most} steps")


@pytest.mark.parametrize("mode", MODES)
def test_a_newcomer_waits_for_no_long_answer_and_all_are_as_alone(mode: dict[str, Any]) -> None:
    h = engine(mode)
    requests = [*flood(h), request("quiet", 9, 3, tenant="quiet")]
    h.add(requests[-1])
    steps_to_first_token(h, "quiet", SOON)
    assert h.engine.stats().preemptions == 1
    h.run()
    assert_as_expected(h, *requests)
    assert h.engine.stats().preemptions == 1, "nobody else gave way"


@pytest.mark.parametrize("mode", MODES)
def test_long_contexts_give_up_blocks_too(mode: dict[str, Any]) -> None:
    """Rows are free, blocks are not: as many give way as the newcomer's prompt needs."""
    h = engine(mode, num_blocks=60, max_num_seqs=8, caching=False)
    requests = [request(f"loud{i}", 40, 100, tenant="loud") for i in range(5)]
    h.add(*requests)
    for _ in range(12):
        h.step()
    assert len(running(h)) < 8 and h.engine.manager.pool.num_allocatable < 20, "rows are free, blocks are not"
    requests.append(request("quiet", 78, 4, tenant="quiet"))
    h.add(requests[-1])
    before = h.engine.stats().preemptions
    steps_to_first_token(h, "quiet", 4 * SOON)
    most = 2 if mode.get("stages") == 4 else 3  # blocks that several plans in flight still name are waited for
    assert h.engine.stats().preemptions - before <= most
    h.run()
    assert_as_expected(h, *requests)


def test_without_it_the_newcomer_waits_until_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_rows, "gives_way", lambda *_: None)
    h = engine({})
    flood(h)
    h.add(request("quiet", 9, 3, tenant="quiet"))
    with pytest.raises(AssertionError, match="no token"):
        steps_to_first_token(h, "quiet", 80)


def test_each_of_too_many_tenants_keeps_its_only_row() -> None:
    h = engine({})
    names = [f"t{i}" for i in range(ROWS + 2)]
    h.add(*(request(f"{name}-r", 8, 60, tenant=name) for name in names))
    h.run()
    assert h.engine.stats().preemptions == 0


@pytest.mark.parametrize(("weight", "rows"), [(1.0, 2), (3.0, 3), (0.1, 1)])
def test_a_tenant_takes_its_share_at_once_and_no_more(weight: float, rows: int) -> None:
    h = engine({})
    h.engine.set_weights({"quiet": weight})
    flood(h)
    h.add(*(request(f"q{i}", 8, 40, tenant="quiet") for i in range(rows)))
    h.step()
    assert running(h) == ["loud"] * (ROWS - rows) + ["quiet"] * rows
    h.add(request("more", 8, 40, tenant="quiet"))
    for _ in range(10):
        h.step()
    assert running(h).count("quiet") == rows


def test_one_tenant_alone_is_never_preempted_for_its_own() -> None:
    h = engine({})
    flood(h, rows=3 * ROWS)
    h.run()
    assert h.engine.stats().preemptions == 0


def test_the_tenant_served_most_gives_way_its_latest() -> None:
    """By the tokens that each was charged: loud has run longer than other, and each has two rows."""
    h = engine({})
    flood(h, "loud", rows=2)
    h.add(*(request(f"other{i}", 8, 100, tenant="other") for i in range(2)))
    for _ in range(4):
        h.step()
    latest = max((seq for seq in h.engine.scheduler.rows.sequences if seq.tenant == "loud"), key=lambda seq: seq.order)
    h.add(request("quiet", 9, 3, tenant="quiet"))
    steps_to_first_token(h, "quiet", SOON)
    assert latest not in h.engine.scheduler.rows.sequences
    assert running(h).count("other") == 2


def test_who_was_served_as_little_gives_way_to_nobody() -> None:
    h = engine({})
    flood(h)
    h.engine.scheduler.charge_running()
    running, tenants = h.engine.scheduler.rows.sequences, h.engine.scheduler.waiting.tenants
    h.add(*(request(f"quiet{i}", 9, 3, tenant="quiet") for i in range(3)))  # more than its share of 2
    [(quiet, lacking)] = tenants.lacking()
    assert (quiet.name, lacking) == ("quiet", 2)
    assert running_rows.gives_way(quiet, running, tenants.shares) is None, "it was lifted to the other's counter"
    tenants.charge(running[0], output_tokens=1)
    assert running_rows.gives_way(quiet, running, tenants.shares) is running[-1]


def test_batches_are_not_broken_up() -> None:
    h = engine({}, batching_policy="static")
    flood(h, rows=ROWS)
    h.add(request("quiet", 9, 3, tenant="quiet"))
    h.run()
    assert h.engine.stats().preemptions == 0


def test_nobody_gives_way_while_steps_are_short_of_memory() -> None:
    """A row given up would be computed again, in steps that are too small as they are."""
    h = engine({}, room=lambda step_id: 3 if step_id == 9 else 99)
    flood(h)
    h.step()
    h.add(request("quiet", 9, 3, tenant="quiet"))
    reduced = 0
    while h.engine.scheduler._limit.is_reduced:
        reduced += 1
        h.step()
        assert h.engine.stats().preemptions == 0
    assert reduced > SOON
    h.run()
