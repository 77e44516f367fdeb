"""The ranks' movers without bytes: a fake host and a fake disk per rank, late answers, failures; strict about who may
touch what while a transfer is under way.

Each rank takes transfers in the order in which they were sent and answers for itself; ranks are not in step. A place
that fails leaves garbage where its bytes should have gone, as a half-finished copy does. A ticket counts as under way
from its sending until the engine has taken the last rank's answer.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.disk_tier import DiskTier
from offload.eviction import Policy, make_policy
from offload.host_tier import HostTier
from offload.tiered_store import TieredStore
from workers.messages import Transfer, TransferDone

Slot = tuple[int, int]
Block = list[Slot | None]
GARBAGE = (-1, -1)


def no_failure(transfer: Transfer, rank: int, place: int) -> bool:
    del transfer, rank, place
    return False


def at_once(transfer: Transfer, rank: int) -> int | None:
    del transfer, rank
    return 0


@dataclass(frozen=True)
class TierPlan:
    """What stands below the fake device. fails: whether a place goes wrong on a rank. delay: how often a rank is looked
    at before it carries a ticket out (None: it never answers). disk_ends_after: spills that the disk has room for.
    """

    host_slots: int = 8
    disk_keys: int = 0
    num_ranks: int = 1
    policy: Policy = "lru"
    fails: Callable[[Transfer, int, int], bool] = no_failure
    delay: Callable[[Transfer, int], int | None] = at_once
    disk_ends_after: int | None = None


class FakeTiers:
    """What all ranks' movers do, over `pools`: by rank, the slots of each device block."""

    def __init__(self, plan: TierPlan, pools: list[list[Block]]) -> None:
        self.plan, self.pools = plan, pools
        disk = DiskTier(Path("nowhere"), plan.disk_keys, 1) if plan.disk_keys else None
        self.store = TieredStore(HostTier(plan.host_slots, make_policy(plan.policy)), disk)
        ranks = range(plan.num_ranks)
        self.host: list[list[Block | None]] = [[None] * plan.host_slots for _ in ranks]
        self.disk: list[dict[bytes, Block]] = [{} for _ in ranks]
        self.sent: list[Transfer] = []
        self.under_way: dict[int, Transfer] = {}
        self.most_under_way = 0
        self.num_failed = 0
        self._awaiting: dict[int, set[int]] = {}
        self._queues: list[deque[Transfer]] = [deque() for _ in ranks]
        self._looked = [0 for _ in ranks]
        self._spilled = 0
        self._done: list[TransferDone] = []

    # ---- the executor's side ----

    def send(self, transfer: Transfer, named: set[int], written: set[int]) -> None:
        """named, written: blocks that plans in flight use at all, and those that they write."""
        self._check(transfer, named, written)
        self.sent.append(transfer)
        self.under_way[transfer.ticket] = transfer
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        self._awaiting[transfer.ticket] = set(range(self.plan.num_ranks))
        for waiting in self._queues:
            waiting.append(transfer)

    def pump(self) -> None:
        """Every rank is looked at once."""
        for rank, waiting in enumerate(self._queues):
            while waiting:
                delay = self.plan.delay(waiting[0], rank)
                if delay is None:
                    waiting.popleft()
                    continue
                if self._looked[rank] < delay:
                    self._looked[rank] += 1
                    break
                self._looked[rank] = 0
                self._done.append(self._move(waiting.popleft(), rank))

    def take(self) -> list[TransferDone]:
        done, self._done = self._done, []
        for message in done:
            self._awaiting[message.ticket].remove(message.rank)
            if not self._awaiting[message.ticket]:
                del self._awaiting[message.ticket], self.under_way[message.ticket]
        return done

    def check_plan(self, named: set[int], written: set[int]) -> None:
        """A plan leaves alone what a transfer reads or writes."""
        for transfer in self.under_way.values():
            blocks = set(transfer.block_ids)
            if transfer.kind == "load":
                assert not named & blocks, f"a plan names block(s) {named & blocks} while a load writes them"
            elif transfer.kind == "store":
                assert not written & blocks, f"a plan writes block(s) {written & blocks} while a store reads them"

    # ---- laws of a transfer ----

    def _check(self, transfer: Transfer, named: set[int], written: set[int]) -> None:
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

    # ---- a rank's mover ----

    def _move(self, transfer: Transfer, rank: int) -> TransferDone:
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
                pool[transfer.block_ids[place]][:] = self._garbage() if fails else self._whole(host[slot])
            elif transfer.kind == "fetch":
                host[slot] = self._garbage() if fails else list(disk[transfer.keys[place]])
                if fails:
                    disk.pop(transfer.keys[place], None)
            elif not fails:
                disk[transfer.keys[place]] = self._whole(host[slot])
        self.num_failed += len(failed)
        error = "a hook says so" if failed else None
        return TransferDone(rank=rank, ticket=transfer.ticket, failed=failed, error=error, disk_error=disk_error)

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


def sometimes(rng: Any, one_in: int) -> Callable[[Transfer, int, int], bool]:
    """Places fail at random."""
    return lambda transfer, rank, place: rng.randrange(one_in) == 0


def up_to(rng: Any, most: int) -> Callable[[Transfer, int], int | None]:
    """Each rank takes its own time for each ticket."""
    chosen: dict[tuple[int, int], int] = {}
    return lambda transfer, rank: chosen.setdefault((transfer.ticket, rank), rng.randint(0, most))
