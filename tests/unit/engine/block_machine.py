"""A naive model of block tables, and a state machine that drives a BlockManager beside it.

The model knows nothing of free lists or reference counts: it counts uses by looking, and remembers what was written
where, and for how many tokens a sequence was admitted. It takes the ids that the manager chose and asserts that each
choice was allowed.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable

Content = tuple[str, ...]


@dataclass(eq=False)
class Held:
    """The model's picture of one admitted sequence. admitted: tokens whose blocks it holds or has reserved."""

    root: tuple[str | None, str]
    tokens: list[int]
    computed: int
    table: BlockTable
    committed: int
    admitted: int
    in_flight: int = 0
    last_step: int = 0

    def content(self, num_tokens: int) -> tuple:
        return (self.root, tuple(self.tokens[:num_tokens]))


@dataclass
class Model:
    """What must be true of num_blocks blocks of `size` tokens, by brute force."""

    num_blocks: int
    size: int
    held: list[Held] = field(default_factory=list)
    memory: dict[tuple[int, int], tuple] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)
    published: dict[int, tuple] = field(default_factory=dict)
    idle_since: dict[int, int] = field(default_factory=dict)
    done: int = 0
    tick: int = 0

    def is_idle(self, block: int) -> bool:
        return self.named.get(block, 0) <= self.done and not any(block in h.table.block_ids for h in self.held)

    def lacking(self, held: Held) -> int:
        """Blocks that were reserved for a sequence and that it has not taken."""
        return max(0, -(-held.admitted // self.size) - len(held.table.block_ids))

    def num_allocatable(self) -> int:
        return len(self.idle()) - sum(map(self.lacking, self.held))

    def idle(self) -> list[int]:
        return [b for b in range(self.num_blocks) if self.is_idle(b)]

    def take(self, blocks: list[int], idle: list[int]) -> None:
        """`blocks` were allocated, in this order, while `idle` were idle."""
        for block in blocks:
            assert block in idle, f"block {block} given out while it is in use"
            idle.remove(block)
            if block in self.published:
                assert all(b in self.published for b in idle), "evicted though a block without content was free"
                assert all(self.idle_since[block] <= self.idle_since[b] for b in idle), "not the least recently used"
                del self.published[block]

    def let_go(self, blocks: list[int], last_step: int) -> None:
        for block in reversed(blocks):
            self.tick += 1
            self.named[block] = max(last_step, self.named.get(block, 0))
            if self.is_idle(block):
                self.idle_since[block] = self.tick

    def retire(self, step: int) -> None:
        before = set(self.idle())
        self.done = step
        self.tick += 1
        self.idle_since.update(dict.fromkeys(set(self.idle()) - before, self.tick))

    def longest_hit(self, root: tuple, tokens: list[int]) -> int:
        known, count = set(self.published.values()), 0
        while (count + 1) * self.size < len(tokens) and (root, tuple(tokens[: (count + 1) * self.size])) in known:
            count += 1
        return count

    def commit(self, held: Held) -> None:
        """Each full block is offered to the index once; of equal contents the first one stays."""
        first, held.committed = held.committed, held.computed // self.size
        for i in range(first, held.committed):
            content, block = held.content((i + 1) * self.size), held.table.block_ids[i]
            if content not in self.published.values() and block not in self.published:
                self.published[block] = content


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def machine(manager_class: type[BlockManager]) -> type[RuleBasedStateMachine]:
    """The state machine over this class of manager (the real one, or one with a seeded defect)."""

    class BlockMachine(RuleBasedStateMachine):
        @initialize(num_blocks=st.integers(3, 10), size=st.integers(1, 3))
        def build(self, num_blocks: int, size: int) -> None:
            self.manager = manager_class(num_blocks, size, model_revision="m", kv_dtype="d")
            self.model = Model(num_blocks, size)
            self.steps: list[tuple[int, Held, int]] = []
            self.next_step = 1

        def pick(self, data: st.DataObject) -> Held:
            return data.draw(st.sampled_from(self.model.held))

        @rule(tokens=TOKENS, adapter=st.sampled_from([None, "x"]), salt=st.sampled_from(["", "s"]))
        def admit(self, tokens: list[int], adapter: str | None, salt: str) -> None:
            manager, model = self.manager, self.model
            held = Held((adapter, salt), tokens, 0, manager.new_table(adapter, salt), 0, len(tokens))
            hits = manager.match_prefix(held.table, tokens)
            for i, block in enumerate(hits):
                assert model.published.get(block) == held.content((i + 1) * model.size), "a hit on other content"
            assert len(hits) == model.longest_hit(held.root, tokens), "not the longest prefix"
            need = -(-len(tokens) // model.size) - len(hits) + len(set(model.idle()) & set(hits))
            fits = need <= model.num_allocatable()
            assert manager.admit(held.table, len(tokens), hits) == fits
            if fits:
                assert held.table.block_ids == hits, "blocks taken before they are needed"
                held.committed, held.computed = len(hits), len(hits) * model.size
                model.held.append(held)

        @precondition(lambda self: any(not self.model.lacking(h) for h in self.model.held))
        @rule(data=st.data(), token=st.integers(0, 1))
        def append(self, data: st.DataObject, token: int) -> None:
            """The next token of a sequence whose other tokens have blocks."""
            held = data.draw(st.sampled_from([h for h in self.model.held if not self.model.lacking(h)]))
            idle, allocatable = self.model.idle(), self.model.num_allocatable()
            before = list(held.table.block_ids)
            added = self.manager.extend(held.table, len(held.tokens) + 1)
            if added is None:
                assert not allocatable, "refused though a block is idle that nobody has reserved"
                return
            assert len(added) <= allocatable, "a block taken that others have reserved"
            assert held.table.block_ids == before + added
            self.model.take(added, idle)
            held.tokens.append(token)

        @precondition(lambda self: any(not h.in_flight and h.computed < len(h.tokens) for h in self.model.held))
        @rule(data=st.data())
        def compute(self, data: st.DataObject) -> None:
            """A plan for one sequence: take blocks for some tokens, copy what is shared, write KV; a late result."""
            model = self.model
            ready = [h for h in model.held if not h.in_flight and h.computed < len(h.tokens)]
            held = data.draw(st.sampled_from(ready))
            end = held.computed + data.draw(st.integers(1, len(held.tokens) - held.computed))
            idle, before = model.idle(), list(held.table.block_ids)
            added = self.manager.take_reserved(held.table, end)
            assert held.table.block_ids == before + added
            assert len(held.table.block_ids) == max(len(before), -(-end // model.size)), "not the blocks of its tokens"
            model.take(added, idle)
            idle, allocatable = model.idle(), model.num_allocatable()
            copies = self.manager.make_writable(held.table, held.computed, end, self.next_step)
            if copies is None:
                return
            for copy in copies:
                for slot in range(model.size):
                    if (copy.source, slot) in model.memory:
                        model.memory[copy.destination, slot] = model.memory[copy.source, slot]
                model.named[copy.source] = self.next_step
            assert len(copies) <= allocatable, "a copy into a block that others have reserved"
            model.take([copy.destination for copy in copies], idle)
            for position in range(held.computed, end):
                block = held.table.block_ids[position // model.size]
                others = [h for h in model.held if h is not held and block in h.table.block_ids]
                assert not others and block not in model.published, f"block {block} written while others count on it"
                model.memory[block, position % model.size] = held.content(position + 1)
            for block in held.table.block_ids:
                model.named[block] = self.next_step
            held.last_step = held.in_flight = self.next_step
            self.steps.append((self.next_step, held, end))
            self.next_step += 1

        @precondition(lambda self: self.steps)
        @rule()
        def result(self) -> None:
            step, held, end = self.steps.pop(0)
            self.manager.pool.retire(step)
            self.model.retire(step)
            held.in_flight = 0
            if held in self.model.held:
                held.computed = end
                self.manager.commit(held.table, held.tokens, end)
                self.model.commit(held)

        @precondition(lambda self: self.model.held)
        @rule(data=st.data(), whole=st.booleans())
        def fork(self, data: st.DataObject, whole: bool) -> None:
            """A child of computed tokens; whole: it will compute the parent's others too, and reserves for them."""
            parent, model = self.pick(data), self.model
            num_tokens = data.draw(st.integers(0, parent.computed))
            table, tokens = self.manager.new_table(*parent.root), parent.tokens[: max(num_tokens, 1)]
            child = Held(parent.root, tokens, num_tokens, table, num_tokens // model.size, num_tokens)
            self.manager.fork(parent.table, child.table, num_tokens)
            if whole:
                allocatable, total = model.num_allocatable(), len(parent.tokens)
                fits = -(-total // model.size) - len(child.table.block_ids) <= allocatable
                assert self.manager.reserve(child.table, total) == fits
                if fits:
                    child.tokens, child.admitted = list(parent.tokens), total
            if child.table.block_ids or child.admitted:
                model.held.append(child)

        @precondition(lambda self: self.model.held)
        @rule(data=st.data(), wrong=st.integers(0, 9))
        def release(self, data: st.DataObject, wrong: int) -> None:
            """Finish, abort and preemption are one thing to blocks, in flight or not; an error forgets them."""
            held = self.pick(data)
            blocks = list(held.table.block_ids)
            if wrong == 0:
                self.manager.forget(held.table)
                for block in blocks:
                    self.model.published.pop(block, None)
            self.model.held.remove(held)
            self.manager.release(held.table, held.last_step)
            self.model.let_go(blocks, held.last_step)

        @invariant()
        def check_all(self) -> None:
            if not hasattr(self, "model"):
                return
            model, pool = self.model, self.manager.pool
            self.manager.check_invariants(held.table for held in model.held)
            for held in model.held:
                assert held.table.num_reserved == model.lacking(held), "what it lacks is not what is reserved for it"
            assert pool.num_allocatable == model.num_allocatable() >= 0, "idle blocks less the reserved ones"
            assert pool.num_cached == sum(b in model.published for b in model.idle())
            for held in model.held:
                for position in range(held.computed):
                    where = (held.table.block_ids[position // model.size], position % model.size)
                    assert model.memory.get(where) == held.content(position + 1), f"KV of position {position} is lost"

    return BlockMachine
