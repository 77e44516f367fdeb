"""The ranks' lanes without bytes: a fake host and a fake disk per rank, late answers, failures; strict about who may
touch what while a transfer is under way.

Each rank has two lanes, one for memory and one for files; each takes its transfers in the order in which they were
sent and answers for itself, out of step with all others. A place that fails leaves garbage where its bytes should have
gone, as a half-finished copy does. A ticket counts as under way from its sending until the engine has taken the last
rank's answer. A plan that awaits a load has it carried out first; if that fails, what the plan's rows say is garbage
too, and the engine must not go on with them once it knows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.offload.kv.disk_tier import DiskTier
from tandem.offload.kv.eviction import Policy, make_policy
from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.tiered_store import TieredStore
from tandem.workers.messages.transfer import CopyKV, Failure, TransferResult

Slot = tuple[int, int]
Block = list[Slot | None]
GARBAGE = (-1, -1)


def no_failure(transfer: CopyKV, rank: int, place: int) -> bool:
    del transfer, rank, place
    return False


def at_once(transfer: CopyKV, rank: int) -> int | None:
    del transfer, rank
    return 0


@dataclass(frozen=True)
class TierPlan:
    """What stands below the fake device. fails: whether a place goes wrong on a rank. delay: how often a rank is looked
    at before it carries a ticket out (None: it never answers). disk_ends_after: spills that the disk has room for.
    block_bytes: what the engine is told of a block on all ranks together.
    """

    host_slots: int = 8
    disk_keys: int = 0
    num_ranks: int = 1
    policy: Policy = "lru"
    fails: Callable[[CopyKV, int, int], bool] = no_failure
    delay: Callable[[CopyKV, int], int | None] = at_once
    disk_ends_after: int | None = None
    block_bytes: int = 0


class FakeTiers:
    """What all ranks' lanes do, over `pools`: by rank, the slots of each device block."""

    def __init__(self, plan: TierPlan, pools: list[list[Block]]) -> None:
        self.plan, self.pools = plan, pools
        disk = DiskTier(Path("nowhere"), plan.disk_keys, 1) if plan.disk_keys else None
        self.store = TieredStore(HostTier(plan.host_slots, make_policy(plan.policy)), disk)
        ranks = range(plan.num_ranks)
        self.host: list[list[Block | None]] = [[None] * plan.host_slots for _ in ranks]
        self.disk: list[dict[bytes, Block]] = [{} for _ in ranks]
        self.sent: list[CopyKV] = []
        self.under_way: dict[int, CopyKV] = {}
        self.most_under_way = 0
        self.num_failed = 0
        self._awaiting: dict[int, set[int]] = {}
        self.overlapped: set[int] = set()
        self.num_failed_loads = 0
        self._lanes = [(rank, kinds) for rank in ranks for kinds in (("store", "load"), ("spill", "fetch"))]
        self._queues: list[deque[CopyKV]] = [deque() for _ in self._lanes]
        self._looked = [0 for _ in self._lanes]
        self._late: dict[tuple[int, int], TransferResult] = {}
        self._spoiled: dict[int, int] = {}
        self._spilled = 0

    # ---- the executor's side ----

    def send(self, transfer: CopyKV, named: set[int], written: set[int]) -> None:
        """named, written: blocks that plans in flight use at all, and those that they write."""
        self._check(transfer, named, written)
        self.sent.append(transfer)
        self.under_way[transfer.ticket] = transfer
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        self._awaiting[transfer.ticket] = set(range(self.plan.num_ranks))
        for (_, kinds), waiting in zip(self._lanes, self._queues, strict=True):
            if transfer.kind in kinds:
                waiting.append(transfer)

    def bring(self, tickets: list[int]) -> None:
        """A plan waits for these loads: every rank carries them out before it goes on; answers may still be late."""
        for ticket in tickets:
            assert self.under_way[ticket].kind == "load", "a plan awaits what is not a load under way"
            self.overlapped.add(ticket)
            for (rank, kinds), waiting in zip(self._lanes, self._queues, strict=True):
                if "load" not in kinds:
                    continue
                for transfer in waiting:
                    if (transfer.ticket, rank) not in self._late:
                        assert self.plan.delay(transfer, rank) is not None, "this plan would never end"
                        self._late[transfer.ticket, rank] = self._move(transfer, rank)
                    if transfer.ticket == ticket:
                        break

    def pump(self) -> list[TransferResult]:
        """Every rank is looked at once; returns their answers."""
        done: list[TransferResult] = []
        for lane, waiting in enumerate(self._queues):
            rank = self._lanes[lane][0]
            while waiting:
                delay = self.plan.delay(waiting[0], rank)
                if delay is None:
                    waiting.popleft()
                    continue
                if self._looked[lane] < delay:
                    self._looked[lane] += 1
                    break
                self._looked[lane] = 0
                transfer = waiting.popleft()
                answer = self._late.pop((transfer.ticket, rank), None)
                done.append(answer or self._move(transfer, rank))
        return done

    def taken(self, result: TransferResult) -> None:
        """The engine has taken an answer."""
        self._awaiting[result.ticket].remove(result.rank)
        if not self._awaiting[result.ticket]:
            del self._awaiting[result.ticket], self.under_way[result.ticket]
            self._spoiled = {block: ticket for block, ticket in self._spoiled.items() if ticket != result.ticket}

    def spoiled_by(self, block_id: int) -> int | None:
        """The load under way that a plan awaited and that left garbage in this block."""
        return self._spoiled.get(block_id)

    def check_plan(self, named: set[int], written: set[int]) -> None:
        """A plan leaves alone what a transfer reads or writes."""
        for transfer in self.under_way.values():
            blocks = set(transfer.block_ids)
            if transfer.kind == "load" and transfer.ticket in self.overlapped:
                assert not written & blocks, f"a plan writes block(s) {written & blocks} of a load"
            elif transfer.kind == "load":
                assert not named & blocks, f"a plan names block(s) {named & blocks} while a load writes them"
            elif transfer.kind == "store":
                assert not written & blocks, f"a plan writes block(s) {written & blocks} while a store reads them"

    # ---- checks of a transfer ----

    def _check(self, transfer: CopyKV, named: set[int], written: set[int]) -> None:
        kind, slots, blocks = transfer.kind, set(transfer.slots), set(transfer.block_ids)
        assert transfer.ticket not in self.under_way and transfer.ticket > 0
        assert transfer.slots and len(slots) == len(transfer.slots), "a slot twice in one ticket"
        assert len(blocks) == len(transfer.block_ids) == (len(slots) if kind in ("store", "load") else 0)
        assert len(transfer.keys) == (len(slots) if kind in ("spill", "fetch") else 0)
        fills_slots = kind in ("store", "fetch")
        for other in self.under_way.values():
            shared = slots & set(other.slots)
            fills = fills_slots or other.kind in ("store", "fetch")
            assert not (shared and fills), f"slot(s) {shared} written by a {kind} or {other.kind} beside another ticket"
            if kind == "load" or other.kind == "load":
                shared = blocks & set(other.block_ids)
                assert not shared, f"block(s) {shared} of a load named by another ticket"
        if kind == "load":
            assert not named & blocks, f"block(s) {named & blocks} of a load named by a plan in flight"
        elif kind == "store":
            assert not written & blocks, f"block(s) {written & blocks} of a store written by a plan in flight"

    # ---- a rank's lane ----

    def _move(self, transfer: CopyKV, rank: int) -> TransferResult:
        pool, host, disk = self.pools[rank], self.host[rank], self.disk[rank]
        if transfer.kind == "spill":
            self._spilled += rank == 0
            for key in transfer.dropped:
                disk.pop(key, None)
        disk_error = self._disk_ended and transfer.kind == "spill"
        failed = []
        for place, slot in enumerate(transfer.slots):
            fails = disk_error or self.plan.fails(transfer, rank, place)
            if fails:
                failed.append(place)
            if transfer.kind == "store":
                block = pool[transfer.block_ids[place]]
                assert None not in block and GARBAGE not in block, (
                    f"a store of block {transfer.block_ids[place]}: {block}"
                )
                host[slot] = self._garbage() if fails else list(block)
            elif transfer.kind == "load":
                if fails and transfer.ticket in self.overlapped:
                    self._spoiled[transfer.block_ids[place]] = transfer.ticket
                pool[transfer.block_ids[place]][:] = self._garbage() if fails else self._whole(host[slot])
            elif transfer.kind == "fetch":
                host[slot] = self._garbage() if fails else list(disk[transfer.keys[place]])
                if fails:
                    disk.pop(transfer.keys[place], None)
            elif not fails:
                disk[transfer.keys[place]] = self._whole(host[slot])
        self.num_failed += len(failed)
        failure = Failure("disk" if disk_error else "internal", "a hook says so") if failed else None
        return TransferResult(rank=rank, ticket=transfer.ticket, failed=failed, failure=failure)

    @property
    def _disk_ended(self) -> bool:
        return self.plan.disk_ends_after is not None and self._spilled > self.plan.disk_ends_after

    def _garbage(self) -> Block:
        return [GARBAGE] * len(self.pools[0][0])

    @staticmethod
    def _whole(block: Block | None) -> Block:
        assert block is not None and GARBAGE not in block, "a slot without a whole block is read"
        return list(block)

    # ---- for tests ----

    def kinds(self) -> dict[str, int]:
        """Blocks sent by kind of ticket."""
        counts = dict.fromkeys(("store", "load", "spill", "fetch"), 0)
        for transfer in self.sent:
            counts[transfer.kind] += len(transfer.slots)
        return counts


def sometimes(rng: Any, one_in: int) -> Callable[[CopyKV, int, int], bool]:
    """Places fail at random."""
    return lambda transfer, rank, place: rng.randrange(one_in) == 0


def up_to(rng: Any, most: int) -> Callable[[CopyKV, int], int | None]:
    """Each rank takes its own time for each ticket."""
    chosen: dict[tuple[int, int], int] = {}
    return lambda transfer, rank: chosen.setdefault((transfer.ticket, rank), rng.randint(0, most))
