"""A naive model of KV on every tier of every rank, and a state machine that drives BlockManager, KVOffload and
TieredStore beside it.

The model is a dictionary: what each place (device block, host slot, file) of each rank holds, written when a plan runs
or a rank moves a ticket's bytes, one place after the other. It knows no pins and no reference counts: it looks at who
uses a place now. Content is the whole prefix, so equal bytes are equal prefixes under the same adapter and salt.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.offload.kv.disk_tier import DiskTier
from tandem.offload.kv.eviction import make_policy
from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.tiered_store import TieredStore
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.messages.transfer import CopyKV, Failure, TransferOp, TransferResult

Place = tuple[str, int | bytes]
RANKS = (0, 1)
LANES = tuple((rank, kinds) for rank in RANKS for kinds in (("store", "load"), ("spill", "fetch")))
"""Each rank moves memory and files on two threads, each in the order in which tickets were sent."""
GARBAGE = ("garbage",)


@dataclass(eq=False)
class Seq:
    """What KVOffload and the model know of a sequence. state: waiting, loading, held or gone."""

    root: tuple[str | None, str]
    tokens: list[int]
    table: BlockTable
    state: str = "waiting"
    ticket: int | None = None
    num_loads: int = 0
    computed: int = 0
    last_step: int = 0
    in_flight: bool = False

    def content(self, num_tokens: int) -> tuple:
        return (self.root, tuple(self.tokens[:num_tokens]))


class Memory:
    """What lies where, by rank; a block is a list of its tokens' contents."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.places: list[dict[Place, list]] = [{} for _ in RANKS]
        self.under_way: dict[int, tuple[CopyKV, set[int]]] = {}
        self.named: dict[int, int] = {}
        self.done = 0

    def write(self, block: int, slot: int, content: tuple) -> None:
        self.assert_untouched(block, "store", "load")
        for places in self.places:
            places.setdefault(("device", block), [None] * self.size)[slot] = content

    def copy(self, source: int, destination: int) -> None:
        self.assert_untouched(source, "load")
        self.assert_untouched(destination, "store", "load")
        for places in self.places:
            places["device", destination] = list(places.get(("device", source), [None] * self.size))

    def assert_untouched(self, block: int, *kinds: str) -> None:
        for transfer, _ in self.under_way.values():
            assert transfer.kind not in kinds or block not in transfer.block_ids, f"block {block}: {transfer.kind}"

    def send(self, transfer: CopyKV) -> None:
        """A ticket begins: nothing under way, plans included, may count on what it writes or write what it reads."""
        for other, _ in self.under_way.values():
            if {"store", "fetch"} & {transfer.kind, other.kind}:
                assert not set(transfer.slots) & set(other.slots), "a slot is reused while it is read or written"
            if "load" in (transfer.kind, other.kind):
                assert not set(transfer.block_ids) & set(other.block_ids), "a block is loaded while another move has it"
        if transfer.kind == "load":
            assert all(self.named.get(block, 0) <= self.done for block in transfer.block_ids), "a plan names it"
        self.under_way[transfer.ticket] = (transfer, set(RANKS))

    def move(self, transfer: CopyKV, rank: int, failed: set[int]) -> None:
        places = self.places[rank]
        for key in transfer.dropped:
            places.pop(("disk", key), None)
        for i, slot in enumerate(transfer.slots):
            above: Place = ("device", transfer.block_ids[i]) if transfer.block_ids else ("disk", transfer.keys[i])
            down = transfer.kind in ("store", "spill")
            source, target = (above, ("host", slot)) if transfer.kind != "spill" else (("host", slot), above)
            source, target = (source, target) if down or transfer.kind == "fetch" else (target, source)
            if i in failed:
                places[target] = [GARBAGE] * self.size
                if "disk" in (above[0],):
                    places.pop(above, None)
            else:
                places[target] = list(places[source])


TEXTS = ([0, 1, 1, 0, 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 1, 0, 1, 0, 0])
TOKENS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(2, 10))
"""Few texts, so that prefixes are met again."""
ROOTS = st.sampled_from([(None, ""), (None, ""), (None, ""), (None, ""), ("x", ""), (None, "s")])
WAITS = ("waiting", "loading")


def machine(
    manager_class: type[BlockManager] = BlockManager,
    offload_class: type[KVOffload] = KVOffload,
    host_class: type[HostTier] = HostTier,
    disk_class: type[DiskTier] = DiskTier,
    transfers_class: type[TransferManager] = TransferManager,
) -> type[RuleBasedStateMachine]:
    """The state machine over these classes (the real ones, or one with a seeded defect)."""

    class TierMachine(RuleBasedStateMachine):
        @initialize(
            num_blocks=st.integers(4, 10),
            size=st.integers(1, 2),
            slots=st.integers(1, 10),
            keys=st.sampled_from([0, 1, 3, 30]),
            policy=st.sampled_from(["lru", "cost"]),
        )
        def build(self, num_blocks: int, size: int, slots: int, keys: int, policy: Any) -> None:
            self.now_s = 0.0
            self.manager = manager_class(num_blocks, size, model_revision="m", kv_dtype="d")
            disk = disk_class(Path("nowhere"), keys, 1) if keys else None
            self.store = TieredStore(host_class(slots, make_policy(policy)), disk)
            self.memory = Memory(size)
            self.queues: list[deque[CopyKV]] = [deque() for _ in LANES]
            self.transfers = transfers_class(self.send, len(RANKS), lambda: self.now_s)
            self.offload = offload_class(self.manager, self.store, self.transfers, CopyCosts(1.0), lambda: self.now_s)
            self.seqs: list[Seq] = []
            self.steps: list[tuple[int, Seq, int]] = []
            self.next_step = 1
            self.meaning: dict[bytes, tuple] = {}

        def send(self, transfer: TransferOp) -> None:
            assert isinstance(transfer, CopyKV)
            self.memory.send(transfer)
            for (_, kinds), waiting in zip(LANES, self.queues, strict=True):
                if transfer.kind in kinds:
                    waiting.append(transfer)

        def in_state(self, *states: str) -> list[Seq]:
            return [seq for seq in self.seqs if seq.state in states]

        def pick(self, data: st.DataObject, *states: str) -> Seq:
            return data.draw(st.sampled_from(self.in_state(*states)))

        # ---- sequences ----

        @rule(tokens=TOKENS, root=ROOTS)
        def arrive(self, tokens: list[int], root: tuple[str | None, str]) -> None:
            self.new(tokens, root)

        def new(self, tokens: list[int], root: tuple[str | None, str]) -> Seq:
            seq = Seq(root, tokens, self.manager.new_table(*root))
            self.seqs.append(seq)
            self.enqueue(seq)
            return seq

        @rule(tokens=TOKENS, root=ROOTS, how=st.sampled_from(["finish", "finish", "preempt"]))
        def serve(self, tokens: list[int], root: tuple[str | None, str], how: str) -> None:
            """A whole turn at once, when nothing makes it wait."""
            seq = self.new(tokens, root)
            if seq.state == "waiting":
                self.admit_one(seq)
            if seq.state == "held":
                while self.steps:
                    self.result()
                if self.compute_one(seq, len(seq.tokens)):
                    self.result()
                self.let_go_one(seq, how)

        def enqueue(self, seq: Seq) -> None:
            ticket = self.offload.load(seq, 0)  # type: ignore[arg-type]
            seq.state, seq.ticket = "waiting" if ticket is None else "loading", ticket

        @precondition(lambda self: self.in_state("waiting"))
        @rule(data=st.data())
        def admit(self, data: st.DataObject) -> None:
            self.admit_one(self.pick(data, "waiting"))

        def admit_one(self, seq: Seq) -> None:
            manager = self.manager
            if seq.in_flight:
                return  # preempted, with a step in flight
            self.enqueue(seq)
            if seq.state == "loading":
                return
            hits = manager.match_prefix(seq.table, seq.tokens)
            if manager.admit(seq.table, len(seq.tokens), hits):
                seq.state, seq.computed = "held", len(hits) * manager.block_size
                assert seq.table.block_ids == hits, "blocks taken before they are needed"

        def check_fresh(self, seq: Seq, blocks: list[int]) -> None:
            for block in blocks:
                others = [
                    other for other in self.in_state("held") if other is not seq and block in other.table.block_ids
                ]
                assert not others and self.memory.named.get(block, 0) <= self.memory.done, "given out while in use"
                self.memory.assert_untouched(block, "store", "load")

        @precondition(lambda self: any(not seq.table.num_reserved for seq in self.in_state("held")))
        @rule(data=st.data(), token=st.integers(0, 1))
        def append(self, data: st.DataObject, token: int) -> None:
            seq = data.draw(st.sampled_from([seq for seq in self.in_state("held") if not seq.table.num_reserved]))
            added = self.manager.extend(seq.table, len(seq.tokens) + 1)
            if added is not None:
                self.check_fresh(seq, added)
                seq.tokens.append(token)

        @precondition(lambda self: any(not s.in_flight and s.computed < len(s.tokens) for s in self.in_state("held")))
        @rule(data=st.data())
        def compute(self, data: st.DataObject) -> None:
            """A plan for one sequence: take blocks for some tokens, copy what is shared, write KV; a late result."""
            ready = [s for s in self.in_state("held") if not s.in_flight and s.computed < len(s.tokens)]
            seq = data.draw(st.sampled_from(ready))
            self.compute_one(seq, seq.computed + data.draw(st.integers(1, len(seq.tokens) - seq.computed)))

        def compute_one(self, seq: Seq, end: int) -> bool:
            memory, size = self.memory, self.manager.block_size
            self.check_fresh(seq, self.manager.take_reserved(seq.table, end))
            copies = self.manager.make_writable(seq.table, seq.computed, end, self.next_step)
            if copies is None:
                return False
            for copy in copies:
                self.check_fresh(seq, [copy.destination])
                memory.copy(copy.source, copy.destination)
                memory.named[copy.source] = self.next_step
            for block in seq.table.block_ids:
                memory.assert_untouched(block, "load")
                memory.named[block] = self.next_step
            for position in range(seq.computed, end):
                memory.write(seq.table.block_ids[position // size], position % size, seq.content(position + 1))
            seq.last_step, seq.in_flight = self.next_step, True
            self.steps.append((self.next_step, seq, end))
            self.next_step += 1
            return True

        @precondition(lambda self: self.steps)
        @rule()
        def result(self) -> None:
            step, seq, end = self.steps.pop(0)
            self.manager.pool.retire(step)
            self.memory.done = step
            seq.in_flight = False
            if seq.state == "held":
                seq.computed = end
                self.manager.commit(seq.table, seq.tokens, end)

        @precondition(lambda self: self.in_state("held"))
        @rule(data=st.data())
        def fork(self, data: st.DataObject) -> None:
            parent = self.pick(data, "held")
            count = data.draw(st.integers(0, parent.computed))
            child = Seq(
                parent.root, parent.tokens[: max(count, 1)], self.manager.new_table(*parent.root), computed=count
            )
            self.manager.fork(parent.table, child.table, count)
            if child.table.block_ids:
                child.state = "held"
                self.seqs.append(child)

        @precondition(lambda self: self.in_state("held"))
        @rule(data=st.data(), how=st.sampled_from(["finish", "preempt", "preempt", "error"]))
        def let_go(self, data: st.DataObject, how: str) -> None:
            self.let_go_one(self.pick(data, "held"), how)

        def let_go_one(self, seq: Seq, how: str) -> None:
            if how == "preempt":
                self.offload.swap_out(seq.table)
            else:
                if how == "error":
                    self.manager.forget(seq.table)
                    self.offload.forget(seq.table)
                self.offload.store(seq.table)
            self.manager.release(seq.table, seq.last_step)
            seq.state, seq.computed, seq.num_loads = "waiting" if how == "preempt" else "gone", 0, 0
            if how == "error":
                assert not any(self.store.place(key) for key in seq.table.keys), "found again though it went wrong"

        @precondition(lambda self: self.in_state(*WAITS))
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            seq = self.pick(data, *WAITS)
            self.offload.drop(seq)  # type: ignore[arg-type]
            seq.state = "gone"

        # ---- tickets ----

        @precondition(lambda self: any(self.queues))
        @rule(data=st.data(), goes_wrong=st.integers(0, 2), disk_error=st.integers(0, 40))
        def move(self, data: st.DataObject, goes_wrong: int, disk_error: int) -> None:
            """A lane carries out its next ticket and answers."""
            lane = data.draw(st.sampled_from([i for i, waiting in enumerate(self.queues) if waiting]))
            transfer = self.queues[lane][0]
            failed = data.draw(st.sets(st.integers(0, len(transfer.slots) - 1))) if goes_wrong == 0 else set()
            broken = bool(failed) and disk_error == 0 and transfer.kind in ("spill", "fetch")
            self.carry_out(lane, failed, broken)

        @precondition(lambda self: any(waiting and waiting[0].kind == "load" for waiting in self.queues))
        @rule(data=st.data())
        def spoil(self, data: st.DataObject) -> None:
            """A load, the rarest of tickets, goes wrong on one rank."""
            loads = [i for i, waiting in enumerate(self.queues) if waiting and waiting[0].kind == "load"]
            self.carry_out(data.draw(st.sampled_from(loads)), {0}, False)

        def carry_out(self, lane: int, failed: set[int], broken: bool) -> None:
            rank, transfer = LANES[lane][0], self.queues[lane].popleft()
            self.memory.move(transfer, rank, failed)
            ranks = self.memory.under_way[transfer.ticket][1]
            ranks.remove(rank)
            if not ranks:
                del self.memory.under_way[transfer.ticket]
            failure = Failure("disk" if broken else "internal", "a rule says so") if failed else None
            answer = TransferResult(rank=rank, ticket=transfer.ticket, failed=sorted(failed), failure=failure)
            self.transfers.take(answer)
            self.go_on()

        @precondition(lambda self: any(self.queues))
        @rule()
        def move_all(self) -> None:
            while any(self.queues):
                for lane, waiting in enumerate(self.queues):
                    if waiting:
                        self.carry_out(lane, set(), False)

        @precondition(lambda self: self.in_state("loading"))
        @rule()
        def lose_patience(self) -> None:
            self.now_s += 1000.0
            self.go_on(self.transfers.overdue())
            assert not [seq for seq in self.in_state("loading") if seq.num_loads < 3] or self.memory.under_way

        def go_on(self, late: Iterable[int] = ()) -> None:
            for event in self.offload.take_events(late):
                for seq in [seq for seq in self.in_state("loading") if seq.ticket == event.key]:
                    if event.failure is not None:
                        self.offload.forbid_loads(seq)  # type: ignore[arg-type]
                    self.enqueue(seq)

        # ---- invariants ----

        @invariant()
        def check_all(self) -> None:
            if not hasattr(self, "memory"):
                return
            manager, offload, size = self.manager, self.offload, self.manager.block_size
            for seq in self.seqs:
                for i, key in enumerate(seq.table.keys):
                    content = seq.content((i + 1) * size)
                    assert self.meaning.setdefault(key, content) == content, "one key for two contents"
            for places in self.memory.places:
                self.check_places(places)
            manager.check_invariants([seq.table for seq in self.seqs], offload.table_uses(), offload.held())
            offload.check_invariants([seq.ticket for seq in self.in_state("loading")])
            if isinstance(self.store.disk, DiskTier):
                self.store.disk.check_invariants()

        def check_places(self, places: dict[Place, list]) -> None:
            """What is found is there, on every rank; what a sequence has computed is there."""
            size, store = self.manager.block_size, self.store
            reads = (transfer for transfer, _ in self.memory.under_way.values() if transfer.kind == "fetch")
            lost = {
                key for transfer in reads for key in transfer.keys if ("disk", key) not in places
            }  # known in a moment
            for key, (root, tokens) in self.meaning.items():
                whole = [(root, tokens[: len(tokens) - size + i + 1]) for i in range(size)]
                block = self.manager.pool.lookup(key)
                assert block is None or places.get(("device", block)) == whole, f"device block {block}: other content"
                if store.host.has(key):
                    slot = store.host.slot(key)
                    assert places.get(("host", slot)) == whole, f"host slot {slot}: other content"
                if store.disk is not None and store.disk.has(key) and key not in lost:
                    assert places.get(("disk", key)) == whole, "disk: other content"
            for seq in self.in_state("held"):
                for position in range(seq.computed):
                    block, slot = seq.table.block_ids[position // size], position % size
                    assert places["device", block][slot] == seq.content(position + 1), f"KV of {position} is lost"

        def teardown(self) -> None:
            """Quiescence: when everybody has gone and the ranks have answered, nothing is used."""
            if not hasattr(self, "memory"):
                return
            for seq in self.seqs:
                if seq.state == "held":
                    self.manager.release(seq.table, seq.last_step)
                self.offload.drop(seq)  # type: ignore[arg-type]
                seq.state = "gone"
            for step, _, _ in self.steps:
                self.manager.pool.retire(step)
                self.memory.done = step
            self.move_all()
            assert not self.offload.is_busy and self.manager.pool.num_used == 0
            assert self.manager.pool.num_reserved == self.manager.num_promised == 0, "blocks are kept for nobody"
            self.check_all()

    return TierMachine
