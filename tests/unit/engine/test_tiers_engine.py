"""KV offload seen from the engine: whatever moves up and down, late, failing or never, outputs equal the oracle's."""

import random
from typing import Any

import pytest
from builders import Harness, assert_as_expected, expected, harness, request
from fake_tiers import TierPlan, sometimes, up_to
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.sequence import SequenceStatus
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.request import Abort, GenerationRequest
from tandem.workers.messages.transfer import CopyKV
from tests.support.engine_invariants import check_invariants

MODES = [
    pytest.param({"asynchronous": False}, id="depth1"),
    pytest.param({"asynchronous": True}, id="async"),
    pytest.param({"stages": 2}, id="pp2"),
    pytest.param({"stages": 4}, id="pp4"),
    pytest.param({"drafts": 3}, id="drafts"),
    pytest.param({"drafts": 5, "asynchronous": True}, id="async drafts"),
]
PATIENCE = 60
"""Steps that a sequence may wait for a copy before it is given up (0.5 s of the fake clock, 10 ms a step)."""


def of_kind(*kinds: str) -> Any:
    """A hook: places of these tickets fail on the last rank."""
    return lambda transfer, rank, place: transfer.kind in kinds and rank == 1


def beside(h: Harness) -> None:
    """Another request runs: nobody's step may be held up by a load now, so the next one waits for it in the queue."""
    h.add(request("beside", 2, 10))
    while SequenceStatus.RUNNING not in h.states("beside"):
        h.step()


def step_until_loading(h: Harness, name: str) -> None:
    while Blocker.KV not in h.states(name):
        h.step()


def turned_over(h: Harness, prompt: int = 24) -> GenerationRequest:
    """A request whose prompt lies on the host and no more on the device: others have run over it since."""
    first = request("first", prompt, 2)
    h.add(first)
    h.run()
    h.add(*(request(f"over{i}", 24, 2) for i in range(4)))
    h.run()
    return first


def on_twelve_blocks(**plan: Any) -> Harness:
    return harness(num_blocks=12, patience=PATIENCE, tiers=TierPlan(**{"host_slots": 64, **plan}), max_num_seqs=2)


# ---- what comes back is what went down ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_second_turn_is_loaded_from_the_host(mode, num_ranks):
    h = harness(**mode, num_blocks=12, tiers=TierPlan(host_slots=64, num_ranks=num_ranks), patience=PATIENCE)
    first = turned_over(h)
    assert h.tiers.kinds()["load"] == 0
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    h.add(again)
    h.run()
    assert_as_expected(h, again)
    assert h.tiers.kinds()["load"] == 6, "six whole blocks of the prompt"
    assert h.sink.ends["again"].usage.cached_tokens == 24


@pytest.mark.parametrize("disk", [{}, {"disk_keys": 200}], ids=["host", "disk"])
@pytest.mark.parametrize("runs", [False, True])
def test_after_a_reset_no_tier_has_the_prefix(runs, disk):
    h = on_twelve_blocks(host_slots=64, **disk)
    first = turned_over(h)
    if runs:
        h.add(request("beside", 12, 10))
        while SequenceStatus.RUNNING not in h.states("beside"):
            h.step()
        h.step()
        h.step()
    assert h.engine.reset_prefix_cache() is not runs, "what runs keeps its blocks"
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    h.add(again)
    h.run()
    assert_as_expected(h, again)
    check_invariants(h.engine)
    assert h.tiers.kinds()["load"] == h.sink.ends["again"].usage.cached_tokens == 0


@pytest.mark.parametrize(("before", "loaded"), [(3, 6), (31, 0)])
def test_a_load_begins_in_the_queue_if_the_next_step_has_tokens_for_its_request(before, loaded):
    """Two others have the rows; the load begins without waiting for one of them to end."""
    h = on_twelve_blocks()
    first = turned_over(h)
    beside(h)
    h.add(request("before", before, 10))
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    h.add(again)
    for _ in range(3):
        h.step()
    assert sum(1 for _ in h.engine.requests) == 3
    assert h.tiers.kinds()["load"] == loaded
    h.run()
    assert_as_expected(h, again)
    assert h.tiers.kinds()["load"] == 6 and h.sink.ends["again"].usage.cached_tokens == 24


def test_a_second_turn_is_loaded_from_disk_when_the_host_has_lost_it():
    h = on_twelve_blocks(host_slots=8, disk_keys=200)
    first = turned_over(h)
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    h.add(again)
    h.run()
    assert_as_expected(h, again)
    assert h.tiers.kinds()["fetch"] and h.tiers.kinds()["spill"] and h.sink.ends["again"].usage.cached_tokens == 24


@pytest.mark.parametrize("below", [{"host_slots": 200}, {"host_slots": 8, "disk_keys": 400}], ids=["host", "disk"])
def test_requests_that_share_a_prefix_load_it_once(below):
    h = harness(num_blocks=40, tiers=TierPlan(**below), patience=PATIENCE, max_num_seqs=4)
    first = request("first", 24, 2)
    for req in (first, *(request(f"over{i}", 40, 2) for i in range(8))):
        h.add(req)
        h.run()
    again = [request(f"again{i}", [*first.prompt_token_ids, 5 + i, 6], 4) for i in range(4)]
    h.add(*again)
    h.run()
    for req in again:
        assert_as_expected(h, req)
        assert h.sink.ends[req.request_id].usage.cached_tokens == 24
    assert h.tiers.kinds()["load"] == 6 and h.tiers.kinds()["fetch"] in (0, 6)


def test_another_salt_and_another_adapter_find_nothing_below_the_device():
    prompt = [3 + i for i in range(24)]
    one, two = request("one", prompt, 2, salt="s1"), request("two", prompt, 2, salt="s2")
    roots = {one.sampling.seed: "s1", two.sampling.seed: "s2"}
    h = harness(num_blocks=12, tiers=TierPlan(host_slots=64), patience=PATIENCE, roots=roots)
    for req in (one, *(request(f"over{i}", 24, 2) for i in range(4)), two):
        h.add(req)
        h.run()
    assert h.tiers.kinds()["load"] == 0
    assert_as_expected(h, one, root="s1")
    assert_as_expected(h, two, root="s2")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("num_ranks", "disk_keys"),
    [(1, 0), (2, 24), *(pytest.param(*both, marks=pytest.mark.chaos) for both in ((1, 24), (2, 0)))],
)
def test_kv_01_fifty_growing_requests_on_32_blocks(mode, num_ranks, disk_keys):
    """All finish, preempted ones come back by swap, and nobody can tell."""
    rng = random.Random(7)
    plan = TierPlan(host_slots=24, disk_keys=disk_keys, num_ranks=num_ranks, delay=up_to(rng, 4))
    requests = [request(f"g{i}", 3 + i % 9, 40 + i % 20) for i in range(50)]
    h = harness(**mode, num_blocks=32, max_num_seqs=16, tiers=plan, patience=PATIENCE)
    h.add(*requests)
    h.run()
    stats = h.engine.stats()
    assert stats.preemptions > 0 and stats.offload is not None
    assert stats.offload.swapped_out > 0 and stats.offload.blocks["load"] > 0
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_is_preempted_whole_and_its_choices_share_again(mode):
    """The prompt's blocks go down once, and choices continue behind what they had said, not behind the prompt."""
    four_len = 17
    early, four = [request(f"early{i}", 8 + i, 60) for i in range(3)], request("four", four_len, 24, n=4)
    went, known, lost, behind_prompt = [], 0, 0, 0
    for num_blocks in range(36, 44):
        h = harness(**mode, num_blocks=num_blocks, tiers=TierPlan(host_slots=200, num_ranks=2), patience=PATIENCE)
        h.add(*early, four)
        while "four" not in h.sink.ends:
            before, running = h.engine.stats().preemptions, h.states("four").count(SequenceStatus.RUNNING)
            h.step()
            if (gave := h.engine.stats().preemptions - before) > 1 and running > 1:
                went.append(gave)
                assert SequenceStatus.RUNNING not in h.states("four")
        h.run()
        assert_as_expected(h, *early, four)
        offload = h.engine.stats().offload
        assert offload is not None and offload.swapped_out == h.engine.stats().preemptions
        assert offload.blocks["store"] == h.tiers.kinds()["store"] == offload.host_blocks, "no block twice"
        for row in (row for plan in h.executor.plans for row in plan.new_rows if len(row.token_ids) > row.prompt_len):
            known += len(row.token_ids)
            lost += (len(row.token_ids) - 1) // 4 * 4 - row.num_computed
            behind_prompt += row.num_computed == four_len and len(row.token_ids) > four_len + 7
    assert 4 in went
    part = 4 if "drafts" in mode else 10  # others' next tokens come faster, while the copies take as long
    assert lost < known / part, "blocks that were loaded are evicted again now and then, not as a rule"
    assert behind_prompt <= 1 or "drafts" in mode, "choices took over another's prompt though they had more"


def test_without_tiers_choices_are_preempted_one_by_one():
    """Nothing is kept below: as few tokens as possible are computed again."""
    early, four = [request(f"early{i}", 8 + i, 60) for i in range(3)], request("four", 17, 24, n=4)
    for num_blocks in range(36, 44):
        h = harness(num_blocks=num_blocks)
        h.add(*early, four)
        while not h.engine.stats().preemptions:
            h.step()
        assert h.states("four").count(SequenceStatus.RUNNING) >= 2, "a step may need room twice"
        h.run()
        assert_as_expected(h, *early, four)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_fills_the_pool_by_itself_gives_up_one_choice_at_a_time(mode):
    h = harness(**mode, num_blocks=20, tiers=TierPlan(host_slots=200), patience=PATIENCE)
    four = request("four", 17, 40, n=4)
    h.add(four)
    while not h.engine.stats().preemptions:
        h.step()
    assert h.states("four").count(SequenceStatus.RUNNING) == 3
    h.run()
    assert_as_expected(h, four)


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data(), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_random_workloads_equal_the_oracle(mode, data, seed):
    """Tiny tiers, late and failing copies on one rank or two, shared prefixes, choices, priorities, any step time."""
    draw, rng = data.draw, random.Random(seed)
    one_in = draw(st.sampled_from([None, None, 3, 10]))
    plan = TierPlan(
        host_slots=draw(st.integers(1, 40)),
        disk_keys=draw(st.sampled_from([0, 0, 1, 6, 60])),
        num_ranks=draw(st.integers(1, 2)),
        policy=draw(st.sampled_from(["lru", "cost"])),
        delay=up_to(rng, draw(st.sampled_from([0, 2, 7]))),
        disk_ends_after=draw(st.sampled_from([None, None, 3])),
        **({} if one_in is None else {"fails": sometimes(rng, one_in)}),
    )
    token_s = draw(st.sampled_from([0.0, 1e-6, 1e-3]))
    h = harness(
        **mode,
        num_blocks=draw(st.integers(10, 30)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_num_seqs=draw(st.integers(1, 9)),
        max_num_batched_tokens=draw(st.integers(4, 40)),
        max_model_len=draw(st.integers(20, 100)),
        stalls=draw(st.integers(0, 2)),
        device_s=lambda step: token_s * sum(work.num_tokens for work in step.work),
        tiers=plan,
        patience=PATIENCE,
    )
    fits = min(h.facts.max_model_len - 1, h.executor.num_blocks * h.executor.block_size)
    requests = []
    for i in range(draw(st.integers(1, 14))):
        shared = draw(st.integers(0, 3)) * 6
        length = min(shared + draw(st.integers(1, 20)), fits)
        prompt = [2 + (7 * j) % 90 if j < shared else draw(st.integers(0, 96)) for j in range(length)]
        n = draw(st.sampled_from([1, 1, 1, 3]))
        resume = [[2] * draw(st.integers(0, 6)) for _ in range(n)] if draw(st.integers(0, 4)) == 0 else None
        requests.append(
            request(
                f"r{i}",
                prompt,
                draw(st.integers(1, 30)),
                n=n,
                ignore_eos=draw(st.booleans()),
                stop_token_ids=draw(st.sampled_from([(), (5, 6, 7, 8, 9)])),
                resume=resume,
                priority=draw(st.sampled_from([0, 0, 1, -1])),
            )
        )
    for req in requests:
        h.add(req)
        for _ in range(draw(st.integers(0, 12))):
            h.step()
    h.run()
    assert_as_expected(h, *requests)


# ---- ends while a copy is under way ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [None, 0])
def test_an_abort_while_loading_leaves_nothing(mode, keep):
    h = harness(
        **mode,
        num_blocks=12,
        tiers=TierPlan(host_slots=64, num_ranks=2, delay=lambda t, rank: 5 if t.kind == "load" else 0),
        patience=PATIENCE,
    )
    first = turned_over(h)
    beside(h)
    h.add(request("again", [*first.prompt_token_ids, 5, 6], 4, n=2))
    step_until_loading(h, "again")
    h.engine.abort(Abort(request_id="again", attempt=0, keep_positions=keep))
    check_invariants(h.engine)
    assert set(h.sink.ends["again"].finish_reasons) == {"abort" if keep is None else "stop"}
    assert h.tiers.under_way, "the copy itself goes on"
    h.run()
    last = request("last", [*first.prompt_token_ids, 5, 6], 4)
    h.add(last)
    h.run()
    assert_as_expected(h, last)
    assert h.tiers.kinds()["load"] == 6, "what the abandoned load brought up was found on the device"


def test_one_choice_aborted_while_loading_leaves_the_others_to_finish():
    h = on_twelve_blocks(delay=lambda t, rank: 5 if t.kind == "load" else 0)
    first = turned_over(h)
    beside(h)
    again = request("again", [*first.prompt_token_ids, 5, 6], 4, n=3)
    h.add(again)
    step_until_loading(h, "again")
    h.engine.abort(Abort(request_id="again", attempt=0, choice=0))
    h.run()
    assert h.sink.ends["again"].finish_reasons == ["abort", "length", "length"]
    for choice in (1, 2):
        assert h.sink.tokens["again", choice] == expected(again, choice, 49)[0]


def test_a_deadline_passes_while_loading():
    h = on_twelve_blocks(delay=lambda t, rank: 30 if t.kind == "load" else 0)
    first = turned_over(h)
    beside(h)
    h.add(request("again", [*first.prompt_token_ids, 5, 6], 4, deadline_s=0.1))
    step_until_loading(h, "again")
    h.run()
    ended = h.sink.ends["again"]
    assert ended.refused is not None and ended.refused[:2] == (503, "service_unavailable")


def test_a_newer_attempt_replaces_one_that_is_loading():
    h = on_twelve_blocks(delay=lambda t, rank: 5 if t.kind == "load" else 0)
    first = turned_over(h)
    beside(h)
    prompt = [*first.prompt_token_ids, 5, 6]
    h.add(request("again", prompt, 4))
    step_until_loading(h, "again")
    h.engine.add_request(request("again", prompt, 4, attempt=1))
    assert h.sink.ends.pop("again").finish_reasons == ["abort"]
    h.run()
    assert_as_expected(h, request("again", prompt, 4, attempt=1))


# ---- copies that fail ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kinds", [("store",), ("load",), ("spill",), ("fetch",), ("store", "load", "spill", "fetch")])
def test_copies_that_always_fail_on_one_rank_of_two_cost_only_time(mode, kinds):
    plan = TierPlan(host_slots=10, disk_keys=40, num_ranks=2, fails=of_kind(*kinds))
    h = harness(**mode, num_blocks=16, max_num_seqs=8, tiers=plan, patience=PATIENCE)
    shared = [3 + i for i in range(16)]
    requests = [request(f"g{i}", [*shared, 10 + i], 20) for i in range(12)] + [
        request(f"h{i}", 5 + i, 30) for i in range(12)
    ]
    h.add(*requests)
    h.run()
    assert_as_expected(h, *requests)
    offload = h.engine.stats().offload
    assert offload is not None and (offload.failed_blocks > 0) == (h.tiers.num_failed > 0)
    if "store" in kinds:
        assert h.tiers.num_failed and not h.tiers.kinds()["load"], "nothing ever arrived on both ranks"


def test_a_block_whose_load_failed_is_computed_again_and_its_prefix_kept():
    h = on_twelve_blocks(num_ranks=2, fails=lambda t, rank, place: (t.kind, rank, place) == ("load", 1, 3))
    first = turned_over(h)
    beside(h)
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    h.add(again)
    h.run()
    assert_as_expected(h, again)
    assert h.sink.ends["again"].usage.cached_tokens == 12, "the three blocks before the one that failed"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("place", range(6))
def test_what_was_computed_on_a_load_that_failed_is_rolled_back(mode, late, place):
    """Alone, a request runs while its load comes up; when that fails on one rank nobody sees what it said meanwhile."""
    plan = TierPlan(
        host_slots=64,
        num_ranks=2,
        fails=lambda t, rank, i: (t.kind, rank, i) == ("load", 1, place),
        delay=lambda t, rank: late if t.kind == "load" and rank else 0,
    )
    h = harness(**mode, num_blocks=12, tiers=plan, patience=PATIENCE)
    first = turned_over(h)
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    h.add(again)
    h.run()
    assert h.tiers.num_failed_loads > 0, "it ran on the load"
    assert_as_expected(h, again)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("fails", [True, False])
def test_an_abort_while_running_on_a_load_leaves_nothing(mode, steps, fails):
    plan = TierPlan(
        host_slots=64,
        num_ranks=2,
        fails=lambda t, rank, i: fails and t.kind == "load" and rank == 1 and i == 2,
        delay=lambda t, rank: 3 if t.kind == "load" and rank else 0,
    )
    h = harness(**mode, num_blocks=12, tiers=plan, patience=PATIENCE)
    first = turned_over(h)
    h.add(request("again", [*first.prompt_token_ids, 5, 6], 4))
    for _ in range(steps):
        h.step()
    h.engine.abort(Abort(request_id="again", attempt=0))
    h.run()
    last = request("last", [*first.prompt_token_ids, 5, 6], 4)
    h.add(last)
    h.run()
    assert_as_expected(h, last)


def test_a_full_disk_is_switched_off_and_serving_goes_on(caplog):
    h = on_twelve_blocks(host_slots=8, disk_keys=200, disk_ends_after=2)
    first = turned_over(h)
    spilled = h.tiers.kinds()["spill"]
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    h.add(again)
    h.run()
    assert_as_expected(h, again)
    disk = h.tiers.store.disk
    assert disk is not None and disk.disabled_reason == "a hook says so"
    offload = h.engine.stats().offload
    assert offload is not None and offload.disk_disabled == "a hook says so"
    said = [line for line in caplog.messages if "--kv-disk-path" in line]
    assert said == ["--kv-disk-path nowhere is switched off, serving without the disk tier: a hook says so"]
    assert h.tiers.kinds()["spill"] == spilled and not h.tiers.kinds()["fetch"]


@pytest.mark.parametrize("disk_keys", [0, 60])
@pytest.mark.parametrize("late", [0, 6])
def test_blocks_of_a_failed_request_are_found_no_more_on_any_tier(disk_keys, late):
    """What made its logits go wrong may lie in its KV: nobody loads that again."""
    bad = request("bad", 16, 20)
    first = request("first", bad.prompt_token_ids, 2)
    plan = TierPlan(host_slots=64, disk_keys=disk_keys, delay=lambda t, rank: late if t.kind != "load" else 0)
    h = harness(num_blocks=12, tiers=plan, patience=PATIENCE, fail_at=frozenset({(bad.sampling.seed, 0, 3)}))
    h.add(first)
    while h.engine.requests:
        h.step()
    h.add(bad)
    h.run()
    assert h.sink.ends["bad"].finish_reasons == ["error"]
    h.add(request("again", bad.prompt_token_ids, 2))
    h.run()
    assert h.sink.ends["again"].usage.cached_tokens == 0 and not h.tiers.kinds()["load"]


# ---- copies that never come back ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_never_returns_does_not_hang_its_sequences(mode, rank):
    """They compute instead, at once when the wait is given up; the blocks of the load stay with its ticket."""
    plan = TierPlan(host_slots=64, num_ranks=2, delay=lambda t, r: None if t.kind == "load" and r == rank else 0)
    h = harness(**mode, num_blocks=24, tiers=plan, patience=PATIENCE)
    first = request("first", 24, 2)
    h.add(first)
    h.run()
    h.add(*(request(f"over{i}", 44, 2) for i in range(4)))
    h.run()
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    beside(h)
    h.add(again)
    for _ in range(PATIENCE + 20):
        h.step()
    assert_as_expected(h, again)
    assert [t.kind for t in h.tiers.sent].count("load") == 1, "one that waited in vain does not wait again"
    assert h.engine.stats().used_blocks == 6


def test_a_fetch_that_never_returns_does_not_hang_its_sequences():
    h = on_twelve_blocks(host_slots=14, disk_keys=200, delay=lambda t, rank: None if t.kind == "fetch" else 0)
    first = turned_over(h)
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    beside(h)
    h.add(again)
    for _ in range(PATIENCE + 20):
        h.step()
    assert_as_expected(h, again)
    assert [t.kind for t in h.tiers.sent].count("fetch") == 1
    assert h.engine.stats().used_blocks == 0


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_rank_that_never_copies_ends_the_group(kind):
    """Its blocks could never be used again; a few seconds are no reason."""
    h = harness(
        num_blocks=24,
        tiers=TierPlan(host_slots=64, num_ranks=2, delay=lambda t, rank: None if t.kind == kind and rank else 0),
    )
    h.add(request("first", 24, 2))
    while h.engine.has_work():
        h.step()
    h.add(*(request(f"over{i}", 44, 2) for i in range(4)))
    while h.engine.has_work():
        h.step()
    beside(h)
    h.add(request("again", 24, 2))
    if kind == "load":
        h.add(request("second", request("first", 24).prompt_token_ids, 2))
        step_until_loading(h, "second")
    while h.engine.has_work():
        h.step()
    h.step_s = 0.5
    h.drain_transfers(60)
    with pytest.raises(GroupLost, match=r"rank\(s\) \[1\] have not copied"):
        h.drain_transfers(200)


@pytest.mark.parametrize("kind", ["spill", "fetch"])
def test_a_disk_that_never_answers_is_given_up_and_the_group_serves_on(kind):
    h = on_twelve_blocks(host_slots=8, disk_keys=200, delay=lambda t, rank: None if t.kind == kind else 0)
    first = request("first", 24, 2)
    for req in (first, *(request(f"over{i}", 24, 2) for i in range(4)), request("again", first.prompt_token_ids, 2)):
        h.add(req)
        while h.engine.has_work():
            h.step()
    h.step_s = 0.5
    h.drain_transfers(200)
    disk = h.tiers.store.disk
    assert disk is not None and disk.disabled_reason is not None and kind in disk.disabled_reason
    last = request("last", 20, 4)
    h.add(last)
    while h.engine.has_work():
        h.step()
    assert_as_expected(h, last)
    h.drain_transfers(20)
    assert h.engine.stats().used_blocks == 0


def test_an_answer_that_comes_after_the_wait_was_given_up_still_closes_the_ticket():
    late = {"on": True}

    def delay(transfer: CopyKV, rank: int) -> int | None:
        return (120 if late["on"] else 0) if transfer.kind == "load" else 0

    h = harness(num_blocks=24, tiers=TierPlan(host_slots=64, num_ranks=2, delay=delay), patience=200)
    first = request("first", 24, 2)
    h.add(first)
    h.run()
    h.add(*(request(f"over{i}", 44, 2) for i in range(4)))
    h.run()
    again = request("again", [*first.prompt_token_ids, 5, 6], 4)
    beside(h)
    h.add(again)
    h.run()
    assert_as_expected(h, again)
    late["on"] = False
    more = request("more", [*first.prompt_token_ids, 7], 4)
    h.add(more)
    h.run()
    assert_as_expected(h, more)
