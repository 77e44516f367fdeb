"""Blocks of layers with windows: invariants over random histories, seeded defects, and what KVGroups counts."""

import random
from typing import Any

import pytest
from builders import assert_as_expected, harness, request
from fake_tiers import TierPlan
from group_machine import machine
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tandem.offload.kv.kv_groups import UNLIMITED, KVGroups
from tandem.workers.engine.blocks.block_manager import NO_BLOCK, BlockManager, BlockTable

TestGroupInvariants = machine(BlockManager).TestCase
TestGroupInvariants.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
HUNT = settings(
    max_examples=2000, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate], database=None
)


class OnePlaceEarly(KVGroups):
    """Gives back a block that the next token sees."""

    def first_seen(self, group: int, num_full: int) -> int:
        return min(num_full, super().first_seen(group, num_full) + (self.windows[group] is not None))


MODES: list[dict[str, Any]] = [
    {"windows": (None, 9, 9), "num_blocks": 75},
    {"windows": (None, 9), "num_blocks": 50, "asynchronous": True, "drafts": 3},
    {"windows": (11,), "num_blocks": 21, "asynchronous": True, "caching": False},
    {"windows": (5, None), "num_blocks": 60, "stages": 2, "tiers": TierPlan(host_slots=80)},
    {"num_blocks": 40, "stages": 3, "drafts": 4},
]


@pytest.mark.parametrize("mode", MODES, ids=["sync", "drafts", "all", "pp2-tiers", "pp3-drafts"])
def test_answers_are_right_whatever_happens(mode: dict[str, Any]) -> None:
    """Prompts of many chunks that begin alike, several choices of some, in pools that hold few of them; now and then a
    step fails for lack of memory. Each token is compared with the KV that it sees (fake_executor.py)."""
    rng = random.Random(5)
    h = harness(
        **mode, max_num_batched_tokens=16, max_num_seqs=6, patience=40, room=lambda step: 5 if step % 41 == 0 else 99
    )
    text = [rng.randrange(2, 90) for _ in range(60)]
    for number in range(12):
        asked = []
        for place in range(6):
            prompt = [*text[: rng.choice([0, 30, 60])], *(rng.randrange(2, 90) for _ in range(rng.randint(1, 60)))]
            asked.append(request(f"{number}-{place}", prompt, rng.randint(1, 40), n=rng.choice([1, 1, 2])))
        h.add(*asked)
        h.run(4000)
        assert_as_expected(h, *asked)
    stats = h.engine.stats()
    assert h.executor.failures and stats.preemptions, "nothing went wrong"
    assert stats.prefix_cache_hits or not mode.get("caching", True), "nothing was found again"


def assert_caught(defect: type[BlockManager], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_state_machine_as_test(machine(defect), settings=HUNT)


def test_a_block_given_back_too_early_is_caught():
    class Early(BlockManager):
        def __init__(self, num_blocks: int, block_size: int, *, groups: KVGroups, **names: str) -> None:
            early = OnePlaceEarly(groups.block_size, groups.windows, groups.most_in_flight)
            super().__init__(num_blocks, block_size, groups=early, **names)

    assert_caught(Early, "was given back|not the longest prefix")


def test_one_key_for_all_groups_is_caught():
    class OneKey(BlockManager):
        def _keys(self, table: BlockTable, token_ids: list[int], count: int) -> list[bytes]:
            keys = super()._keys(table, token_ids, count)
            return [key for key in keys[:: self._num_groups] for _ in range(self._num_groups)]

    assert_caught(OneKey, "is lost|twice in one table")


GROUPS = st.builds(
    KVGroups,
    st.sampled_from([1, 2, 4, 16]),
    st.lists(st.sampled_from([None, 1, 3, 16, 40]), min_size=1, max_size=4).map(tuple),
    st.integers(0, 30),
)


@given(GROUPS, st.integers(0, 80), st.integers(1, 300))
def test_the_longest_sequence_of_a_pool(groups: KVGroups, num_blocks: int, num_tokens: int) -> None:
    longest = groups.longest(num_blocks)
    if longest == UNLIMITED:
        assert groups.needed(10**9) <= num_blocks and None not in groups.windows
    else:
        assert groups.needed(longest) <= num_blocks < groups.needed(longest + 1)
    assert groups.held(num_tokens) <= groups.needed(num_tokens), "decoding holds no more than prefill"


def test_a_model_like_gemma_3_holds_five_times_as_many_tokens() -> None:
    """62 layers, 52 of them with a window of 1024, in contexts of 32768: blocks of 10 layers against those of 62."""
    groups, whole = KVGroups(16, (None, *[1024] * 6), 4096), KVGroups(16)
    held = groups.tokens_held(6200, 32768), whole.tokens_held(1000, 32768)
    assert held[1] == 16000 and 5.2 < held[0] / held[1] < 5.3


def test_a_window_keeps_what_its_next_token_sees_and_no_more() -> None:
    """Block by block: a window of 4 in blocks of 2, beside a group that keeps all."""
    manager = BlockManager(20, 2, model_revision="m", kv_dtype="d", groups=KVGroups(2, (None, 4), 4))
    table, tokens = manager.new_table(None, ""), list(range(10))
    assert manager.admit(table, 10) and table.num_reserved == 5 + 5
    for end, kept in ((4, 2), (8, 2), (10, 2)):
        manager.take_reserved(table, end)
        manager.commit(table, tokens, end)
        assert sum(block_id != NO_BLOCK for block_id in table.block_ids[1::2]) == kept
        assert NO_BLOCK not in table.block_ids[::2]
        manager.check_invariants([table])
    manager.release(table, 0)
    again = manager.new_table(None, "")
    hits = manager.match_prefix(again, [*tokens, 10])
    assert [hit == NO_BLOCK for hit in hits] == [False, True] * 3 + [False] * 4
    assert manager.match_prefix(manager.new_table(None, ""), tokens[:7]), "what was given back is found until evicted"
    manager.check_invariants([])


def test_without_the_window_of_a_shorter_prefix_nothing_is_found() -> None:
    """The full group alone is worth nothing: another group's blocks were evicted."""
    manager = BlockManager(20, 2, model_revision="m", kv_dtype="d", groups=KVGroups(2, (None, 4), 4))
    table, tokens = manager.new_table(None, ""), list(range(10))
    assert manager.admit(table, 10)
    manager.take_reserved(table, 10)
    manager.commit(table, tokens, 10)
    for key in table.keys[1:5:2]:
        lost = manager.pool.lookup(key)
        assert lost is not None
        manager.pool.forget(lost)
    manager.release(table, 0)
    assert len(manager.match_prefix(manager.new_table(None, ""), [*tokens, 10])) == 10
    assert manager.match_prefix(manager.new_table(None, ""), tokens[:7]) == []


@pytest.mark.parametrize("priority", [0, -1])
def test_a_prompt_whose_window_others_share_gives_way_or_waits(priority: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the last blocks of one that decodes. When its window has passed them they are not free: no block
    is left for its next chunk. Then it is preempted, or waits for the others if it is the first of all."""
    refused: list[bool] = []

    class Counting(BlockManager):
        def can_take(self, table: BlockTable, num_tokens: int) -> bool:
            refused.append(not super().can_take(table, num_tokens))
            return not refused[-1]

    monkeypatch.setattr("tandem.workers.engine.build_engine.BlockManager", Counting)
    h = harness(windows=(17,), num_blocks=10, max_num_batched_tokens=8)
    text = [2 + (i * 7) % 80 for i in range(100)]
    first, second = request("a", text[:41], 30), request("b", text, 3, priority=priority)
    h.add(first)
    for _ in range(6):
        h.step()
    h.add(second, request("c", [3] * 20, 30))
    h.run(2000)
    assert_as_expected(h, first, second)
    assert any(refused), "every chunk had its blocks"
