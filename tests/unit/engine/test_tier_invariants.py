"""The invariants of KV on all tiers hold over random histories on two ranks; each seeded defect breaks them."""

from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tier_machine import machine

from tandem.offload.kv.disk_tier import DiskTier
from tandem.offload.kv.host_tier import HostTier
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.blocks.block_pool import BlockPool
from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.messages.transfer import CopyKV, TransferResult

TestTierInvariants = machine().TestCase
TestTierInvariants.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

HUNT = settings(
    max_examples=4000, stateful_step_count=50, deadline=None, derandomize=True, phases=[Phase.generate], database=None
)


def assert_caught(because: str = "", **defect: type[Any]) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError), match=because or None):
        run_state_machine_as_test(machine(**defect), settings=HUNT)


def manager_over(pool_class: type[BlockPool]) -> type[BlockManager]:
    class Defect(BlockManager):
        def __init__(self, num_blocks: int, block_size: int, **names: str) -> None:
            super().__init__(num_blocks, block_size, **names)
            self.pool = pool_class(num_blocks)

    return Defect


def test_a_skipped_unhold_is_caught():
    class SkippedUnhold(BlockPool):
        def unhold(self, block_ids: list[int]) -> None:
            super().unhold(block_ids[1:])

    assert_caught(manager_class=manager_over(SkippedUnhold))


def test_a_block_reused_while_a_store_reads_it_is_caught():
    class NoHolds(BlockPool):
        def hold(self, block_ids: list[int]) -> None:
            pass

        def unhold(self, block_ids: list[int]) -> None:
            pass

        def check_invariants(self, uses: dict[int, int], holds: dict[int, int] | None = None) -> None:
            super().check_invariants(uses)

    assert_caught("store", manager_class=manager_over(NoHolds))


def test_a_load_into_blocks_that_are_given_out_is_caught():
    class EarlyRelease(KVOffload):
        def _start(self, move: Any, kept: list[int] | None = None) -> Any:
            if move.kind == "load":
                self._manager.pool.release(move.block_ids, 0)
            return super()._start(move, kept)

    assert_caught(offload_class=EarlyRelease)


def test_a_host_slot_reused_while_a_load_reads_it_is_caught():
    class NoPins(HostTier):
        def prepare_load(self, key: bytes) -> bool:
            return self.has(key)

        def complete_load(self, key: bytes) -> None:
            pass

        def fail_load(self, key: bytes) -> None:
            pass

    assert_caught(host_class=NoPins)


def test_eviction_of_a_pinned_slot_is_caught():
    class PinnedStaysEvictable(HostTier):
        def prepare_load(self, key: bytes) -> bool:
            there = super().prepare_load(key)
            if there and self._pins[key] == 1:
                self._policy.add(key, 1.0)
            return there

        def complete_load(self, key: bytes) -> None:
            if self._pins.get(key) == 1 and key in self._slots:
                self._policy.remove(key)
            super().complete_load(key)

        def check_invariants(self) -> None:
            pass

    assert_caught(host_class=PinnedStaysEvictable)


def test_a_host_key_findable_before_its_bytes_are_there_is_caught():
    class EarlyKey(HostTier):
        def has(self, key: bytes) -> bool:
            return super().has(key) or key in self._writing

        def slot(self, key: bytes) -> int:
            return self._slots[key] if key in self._slots else self._writing[key]

    assert_caught("host slot", host_class=EarlyKey)


def test_a_failed_store_that_is_found_is_caught():
    class FailIsDone(HostTier):
        def fail_store(self, key: bytes) -> None:
            self.complete_store(key)

    assert_caught("host slot", host_class=FailIsDone)


@pytest.mark.chaos  # found after thousands of histories
def test_a_load_published_though_a_rank_failed_is_caught():
    class OneRankCounts(TransferManager):
        def take(self, result: TransferResult) -> None:
            op = self._open[result.ticket].outcome.op
            if isinstance(op, CopyKV) and op.kind == "load" and result.rank:
                result = msgspec.structs.replace(result, failed=[])
            super().take(result)

    assert_caught("other content", transfers_class=OneRankCounts)


def test_a_ticket_completed_after_the_first_ranks_answer_is_caught():
    class FirstAnswerCounts(TransferManager):
        def take(self, result: TransferResult) -> None:
            opened = self._open.get(result.ticket)
            if opened is not None:
                opened.awaiting.intersection_update({result.rank})
                super().take(result)

    assert_caught(transfers_class=FirstAnswerCounts)


def test_a_missing_salt_is_caught_across_tiers():
    class MissingSalt(BlockManager):
        def new_table(self, adapter_digest: str | None, salt: str) -> BlockTable:
            return super().new_table(adapter_digest, "")

    assert_caught("one key for two contents", manager_class=MissingSalt)


def test_a_missing_adapter_digest_is_caught_across_tiers():
    class MissingAdapter(BlockManager):
        def new_table(self, adapter_digest: str | None, salt: str) -> BlockTable:
            return super().new_table(None, salt)

    assert_caught("one key for two contents", manager_class=MissingAdapter)


@pytest.mark.chaos
def test_a_stale_disk_key_after_a_failed_read_is_caught():
    class StaleKey(DiskTier):
        def fail_load(self, key: bytes) -> None:
            self.complete_load(key)

    assert_caught(disk_class=StaleKey)


def test_a_disk_key_findable_before_every_rank_has_written_is_caught():
    class EarlyFile(DiskTier):
        def has(self, key: bytes) -> bool:
            return super().has(key) or key in self._writing

    assert_caught("disk: other content", disk_class=EarlyFile)


def test_blocks_of_a_failed_request_that_are_found_again_are_caught():
    class Remembers(KVOffload):
        def forget(self, table: BlockTable) -> None:
            pass

    assert_caught("found again", offload_class=Remembers)
