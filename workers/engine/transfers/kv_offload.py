"""KVOffload: loads KV from lower tiers before a sequence runs, and stores KV that sequences leave.

A load fills device blocks that the ticket holds; at its end they are published and become cached blocks, so that the
ordinary prefix match finds them and a waiting sequence never holds a block. A store reads published blocks, which are
held until it ends. Blocks whose bytes did not arrive on every rank are computed again. Owned by the engine's thread;
moves no bytes (TransferManager).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.offload.kv.tiered_store import Kind, TieredStore, TierMove
from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.base.stats import OffloadStats
from tandem.workers.engine.blocks.block_manager import NO_BLOCK, BlockManager, BlockTable
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.engine.transfers.lower_tiers import LowerTiers, OverlappedLoad
from tandem.workers.engine.transfers.transfer_manager import TransferManager, TransferOutcome
from tandem.workers.messages.transfer import CopyKV, Failure

MAX_LOADS = 3
"""A sequence that finds its loaded blocks evicted again and again is admitted with what there is."""
PATIENCE = 4.0
MIN_PATIENCE_S = 0.5
LATE = Failure("internal", "the copy takes far longer than it should")
COST_DEPTH_TOKENS = 4096
"""Attention makes deeper blocks dearer to compute again: about twice as dear at this depth."""


class _Found(NamedTuple):
    """Prefix found over all tiers. run: its entries in order, None where the device lacks a block. on_device: the
    device's blocks. from_host, from_disk: keys of the others by tier. num_tokens: tokens whose KV a load would save."""

    run: list[int | None]
    on_device: list[int]
    from_host: list[bytes]
    from_disk: list[bytes]
    num_tokens: int


@dataclass(slots=True, eq=False)
class _OpenMove:
    """A move in flight. began_step: steps that had ended when it was sent. kept: device blocks of the prefix that it
    holds. failed: failed indices. overlapped: the sequence that runs while it loads."""

    ticket: int
    move: TierMove
    began_step: int
    kept: list[int]
    failed: set[int] = field(default_factory=set)
    overlapped: Sequence | None = None


@dataclass(slots=True, eq=False)
class OffloadCounts:
    """Counted from the start. Blocks by kind of ticket, those that failed, tokens found below the device."""

    blocks: dict[Kind, int] = field(default_factory=lambda: {"store": 0, "load": 0, "spill": 0, "fetch": 0})
    copy_s: dict[Kind, float] = field(default_factory=lambda: {"store": 0.0, "load": 0.0, "spill": 0.0, "fetch": 0.0})
    failed_blocks: int = 0
    swapped_out: int = 0
    recomputed: int = 0
    loaded_tokens: int = 0


class KVOffload(LowerTiers):
    """The host tier, and the disk tier if there is one."""

    def __init__(
        self,
        manager: BlockManager,
        store: TieredStore,
        transfers: TransferManager,
        costs: CopyCosts,
        clock: Callable[[], float],
    ) -> None:
        self.counts = OffloadCounts()
        self._manager = manager
        self._store = store
        self._transfers = transfers
        self._costs = costs
        self._clock = clock
        self._open: dict[int, _OpenMove] = {}
        self._arriving: dict[bytes, _OpenMove] = {}
        self._failed_loads: list[Sequence] = []
        self._events: list[Awaited] = []

    # ---- queries ----

    @property
    def is_busy(self) -> bool:
        """True while tickets are open."""
        return bool(self._open)

    def stats(self, block_bytes: int) -> OffloadStats:
        """A frozen copy of all counts."""
        counts, host, disk = self.counts, self._store.host, self._store.disk
        return OffloadStats(
            block_bytes=block_bytes,
            host_slots=host.num_slots,
            host_blocks=host.num_stored,
            blocks={str(kind): count for kind, count in counts.blocks.items()},
            copy_s={str(kind): seconds for kind, seconds in counts.copy_s.items()},
            failed_blocks=counts.failed_blocks,
            swapped_out=counts.swapped_out,
            recomputed=counts.recomputed,
            loaded_tokens=counts.loaded_tokens,
            disk_disabled=None if disk is None else disk.disabled_reason,
            open_tickets=len(self._open),
            copy_share=self._costs.copy_share(self._manager.block_size),
        )

    def check_invariants(self, awaited: Iterable[object]) -> None:
        """Asserts the host's invariants, and that the tickets for which sequences wait are open."""
        self._store.host.check_invariants()
        assert self._open.keys() >= set(awaited), "a sequence waits for a ticket that is closed"

    # ---- the scheduler's side: LowerTiers ----

    def load(self, seq: Sequence, reserve: int) -> int | None:
        self._manager.withdraw_promise(seq.table)
        if seq.num_loads >= MAX_LOADS:
            return None
        found = self._find(seq)
        if found is None or not self._is_worth(found):
            return None
        opened = self._arriving.get((found.from_disk or found.from_host)[0])
        if opened is None and found.from_disk:
            opened = self._fetch(found.from_disk)
        elif opened is None:
            opened = self._load(seq, found, reserve)
        if opened is None:
            return None
        seq.num_loads += 1
        return opened.ticket

    def forbid_loads(self, seq: Sequence) -> None:
        seq.num_loads = MAX_LOADS

    def load_overlapped(self, seq: Sequence) -> OverlappedLoad | None:
        self._manager.withdraw_promise(seq.table)
        if seq.num_loads >= MAX_LOADS:
            return None
        found = self._find(seq)
        if found is None or found.from_disk or not self._is_worth(found):
            return None
        if found.from_host[0] in self._arriving:
            return None  # load() waits for the copy under way
        opened = self._load(seq, found, reserve=0)
        if opened is None:
            return None
        self._manager.withdraw_promise(seq.table)
        seq.num_loads += 1
        opened.overlapped = seq
        loaded = iter(opened.move.block_ids)
        block_ids = [next(loaded) if block_id is None else block_id for block_id in found.run]
        return OverlappedLoad(opened.ticket, block_ids)

    def drop(self, seq: Sequence) -> None:
        self._manager.withdraw_promise(seq.table)

    def store(self, table: BlockTable) -> None:
        if table.num_committed:
            self._store_blocks(table)

    def swap_out(self, table: BlockTable) -> None:
        if not table.num_committed:
            return
        blocks = self._manager.num_stored(table)
        swap_s = self._costs.copy_s("store", blocks) + self._costs.copy_s("load", blocks)
        if swap_s < self._costs.recompute_s(table.num_committed * self._manager.block_size):
            self.counts.swapped_out += 1
            self._store_blocks(table)
        else:
            self.counts.recomputed += 1

    def forget(self, table: BlockTable) -> None:
        keys = dict.fromkeys(table.keys)  # in order: it is that of the slots which become free
        for opened in self._open.values():
            opened.failed.update(place for place, key in enumerate(opened.move.keys) if key in keys)
        for key in keys:
            self._store.forget(key)

    # ---- the engine's side ----

    def forget_all(self) -> bool:
        """Forgets what the tiers hold, and what is on its way to them; loads for sequences go on. Returns whether none
        is open."""
        for opened in self._open.values():
            if opened.move.kind != "load":
                opened.failed.update(range(len(opened.move.keys)))
        self._store.forget_all()
        return not any(opened.move.kind == "load" for opened in self._open.values())

    def take_events(self, late: Iterable[int]) -> list[Awaited]:
        """Returns the ends of tickets since the last call, and as failures those that take far longer than a copy
        should: who waits for them computes, and they stay open. late: tickets that TransferManager.overdue() named."""
        events, self._events = self._events, []
        return events + [Awaited(Blocker.KV, ticket, LATE) for ticket in late if ticket in self._open]

    def take_failed_loads(self) -> list[Sequence]:
        """Sequences that ran on loads which have failed since the last call."""
        failed_loads, self._failed_loads = self._failed_loads, []
        return failed_loads

    def table_uses(self) -> Iterator[int]:
        """Device blocks that open loads use, one entry per use; for check_invariants()."""
        for opened in self._open.values():
            if opened.move.kind == "load":
                yield from opened.move.block_ids
                yield from opened.kept

    def held(self) -> Iterator[int]:
        """Device blocks that open stores read; for check_invariants()."""
        for opened in self._open.values():
            if opened.move.kind == "store":
                yield from opened.move.block_ids

    # ---- finding and starting ----

    def _find(self, seq: Sequence) -> _Found | None:
        """The longest findable prefix over all tiers; None when nothing of it is missing on the device."""
        manager, pool, store = self._manager, self._manager.pool, self._store
        run: list[int | None] = []
        missing: dict[str, list[bytes]] = {"host": [], "disk": []}
        found = list(
            manager.prefix_keys(
                seq.table, seq.tokens, lambda key: pool.lookup(key) is not None or store.place(key) is not None
            )
        )
        for key in found:
            block_id = NO_BLOCK if key is None else pool.lookup(key)
            run.append(block_id)
            if key is not None and block_id is None:
                place = store.place(key)
                assert place is not None, "found a moment ago"
                missing[place].append(key)
        if not missing["host"] and not missing["disk"]:
            return None
        manager.mark(found, 0, len(found) // manager.groups.count)  # an earlier group may have left them
        on_device = [block_id for block_id in run if block_id is not None and block_id != NO_BLOCK]
        there = len(manager.match_prefix(seq.table, seq.tokens))
        num_tokens = (len(run) - there) // manager.groups.count * manager.block_size
        return _Found(run, on_device, missing["host"], missing["disk"], num_tokens)

    def _is_worth(self, found: _Found) -> bool:
        costs, disk = self._costs, len(found.from_disk)
        copy_s = costs.copy_s("load", len(found.from_host) + disk) + costs.copy_s("fetch", disk)
        return copy_s < costs.recompute_s(found.num_tokens)

    def _fetch(self, keys: list[bytes]) -> _OpenMove | None:
        move = self._store.fetch(keys, [1.0] * len(keys))
        return None if move is None else self._start(move)

    def _load(self, seq: Sequence, found: _Found, reserve: int) -> _OpenMove | None:
        """Starts a load if all of it has room beside the blocks reserved for others, which loads must not evict."""
        manager, pool = self._manager, self._manager.pool
        if not manager.promise(seq.table, len(seq.tokens), reserve):
            return None
        for block_id in found.on_device:
            pool.acquire(block_id)
        block_ids = pool.allocate(len(found.from_host))
        assert block_ids is not None, "they are fewer than those of the sequence"
        has_windows = manager.groups.has_windows  # a block loaded may save many tokens, or several blocks one
        self.counts.loaded_tokens += found.num_tokens if has_windows else len(block_ids) * manager.block_size
        return self._start(self._store.load(found.from_host, block_ids), kept=found.on_device)

    def _store_blocks(self, table: BlockTable) -> None:
        """The committed blocks that the host lacks; at most half of the pool is held by stores, the heads first."""
        manager = self._manager
        room = manager.pool.num_blocks // 2 - manager.pool.num_held
        wanted = [one for one in manager.stored(table) if not self._store.is_kept(one[1])][: max(0, room)]
        costs = [1.0 + place * manager.block_size / COST_DEPTH_TOKENS for place, _, _ in wanted]
        move = self._store.store([(key, block_id) for _, key, block_id in wanted], costs)
        if move is not None:
            manager.pool.hold(move.block_ids)
            self._start(move)

    def _spill(self) -> None:
        move = self._store.spill()
        if move is not None:
            self._start(move)

    def _start(self, move: TierMove, kept: list[int] | None = None) -> _OpenMove:
        patience_s = max(MIN_PATIENCE_S, PATIENCE * self._costs.copy_s(move.kind, len(move.keys)))
        on_disk = move.kind in ("spill", "fetch")
        op = CopyKV(
            kind=move.kind,
            slots=move.slots,
            block_ids=move.block_ids,
            keys=move.keys if on_disk else [],
            dropped=move.dropped,
        )
        ticket = self._transfers.start(op, self._end, late_s=patience_s, on_disk_failure=self._disable_disk)
        opened = self._open[ticket] = _OpenMove(ticket, move, self._costs.num_steps, kept or [])
        if move.kind in ("load", "fetch"):
            self._arriving.update(dict.fromkeys(move.keys, opened))  # for others with this prefix
        return opened

    # ---- ending ----

    def _end(self, outcome: TransferOutcome) -> None:
        """Every rank has answered."""
        opened = self._open.pop(outcome.op.ticket)
        opened.failed |= outcome.failed
        if opened.overlapped is not None and opened.failed:
            self._failed_loads.append(opened.overlapped)
        self._close(opened, outcome)
        self._spill()
        self._events.append(Awaited(Blocker.KV, opened.ticket))

    def _disable_disk(self, reason: str) -> None:
        if self._store.disk is not None:
            self._store.disk.disable(reason)

    def _close(self, opened: _OpenMove, outcome: TransferOutcome) -> None:
        move, pool, counts = opened.move, self._manager.pool, self.counts
        blocks = len(move.keys)
        for key in move.keys:
            if self._arriving.get(key) is opened:
                del self._arriving[key]
        counts.blocks[move.kind] += blocks
        counts.copy_s[move.kind] += outcome.copy_s
        counts.failed_blocks += len(opened.failed)
        if not opened.failed:
            beside_steps = self._costs.num_steps > opened.began_step
            elapsed_s = self._clock() - outcome.began_s
            self._costs.observe_copy(move.kind, blocks, outcome.copy_s, elapsed_s, beside_steps=beside_steps)
        self._store.complete(move, opened.failed)
        if move.kind == "store":
            pool.unhold(move.block_ids)
        elif move.kind == "load":
            for place, (key, block_id) in enumerate(zip(move.keys, move.block_ids, strict=True)):
                if place not in opened.failed:
                    pool.publish(block_id, key)
            pool.release(reversed([*opened.kept, *move.block_ids]), 0)
