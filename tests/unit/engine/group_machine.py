"""A state machine that drives a BlockManager whose layers have groups, some with windows, beside a naive memory.

The memory knows what was written to each slot of each block, and for which group. At every moment each sequence must
find, in each group, the KV of every token that a later one sees, and hold no more blocks than KVGroups says. Sequences
have plans in flight, two at most, as the engine has them.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.offload.kv.kv_groups import KVGroups
from tandem.workers.engine.blocks.block_manager import NO_BLOCK, BlockManager, BlockTable

WINDOWS = [(None,), (3,), (None, 2), (None, 5, 5), (2, 5), (1, None)]
CHUNK, DEPTH = 4, 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@dataclass(eq=False)
class Held:
    """The picture of one admitted sequence. planned: tokens in plans; computed: with results; ends: of plans out."""

    tokens: list[int]
    table: BlockTable
    planned: int
    computed: int
    ends: list[tuple[int, int]] = field(default_factory=list)
    last_step: int = 0


def machine(manager_class: type[BlockManager]) -> type[RuleBasedStateMachine]:
    """The state machine over this class of manager (the real one, or one with a seeded defect)."""

    class GroupMachine(RuleBasedStateMachine):
        @initialize(num_blocks=st.integers(8, 40), size=st.integers(1, 3), windows=st.sampled_from(WINDOWS))
        def build(self, num_blocks: int, size: int, windows: tuple[int | None, ...]) -> None:
            self.groups = KVGroups(size, windows, CHUNK * DEPTH)
            self.manager = manager_class(num_blocks, size, model_revision="m", kv_dtype="d", groups=self.groups)
            self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
            self.held: list[Held] = []
            self.steps: list[tuple[int, Held]] = []
            self.next_step = 1

        def pick(self, data: st.DataObject, among: list[Held] | None = None) -> Held:
            return data.draw(st.sampled_from(self.held if among is None else among))

        def places(self, held: Held, group: int, first: int, last: int) -> list[tuple[int, tuple[int, int]]]:
            """(position, (block, slot)) of a group for positions [first, last)."""
            size, count = self.groups.block_size, self.groups.count
            ids = held.table.block_ids
            return [(p, (ids[p // size * count + group], p % size)) for p in range(first, last)]

        def sees(self, held: Held, group: int, position: int) -> None:
            """A token at `position` finds what it sees of what was there before."""
            window = self.groups.windows[group]
            first = 0 if window is None else max(0, position - window + 1)
            for p, where in self.places(held, group, first, position):
                assert where[0] != NO_BLOCK, f"position {p} was given back, {position} sees it"
                assert self.memory.get(where) == (group, tuple(held.tokens[: p + 1])), f"KV of position {p} is lost"

        @rule(tokens=TOKENS)
        def admit(self, tokens: list[int]) -> None:
            manager, size, count = self.manager, self.groups.block_size, self.groups.count
            table = manager.new_table(None, "")
            hits = manager.match_prefix(table, tokens)
            held = Held(tokens, table, len(hits) // count * size, len(hits) // count * size)
            assert held.computed < len(tokens), "the last token is always computed"
            assert self.longest_hit(tokens) == held.computed, "not the longest prefix"
            if manager.admit(table, len(tokens), hits):
                self.held.append(held)
            else:
                idle = manager.pool.num_blocks if not self.held and not manager.pool.num_pending else 0
                assert self.groups.needed(len(tokens)) > idle, "an empty pool refuses"

        def longest_hit(self, tokens: list[int]) -> int:
            """By brute force over all lengths."""
            table = self.manager.new_table(None, "")
            keys = list(self.manager._keys(table, tokens, (len(tokens) - 1) // self.groups.block_size))
            there, size, count = [self.manager.pool.lookup(key) is not None for key in keys], self.groups.block_size, 0
            for places in range(1, len(keys) // self.groups.count + 1):
                seen = [
                    place * self.groups.count + group
                    for group, window in enumerate(self.groups.windows)
                    for place in range(places)
                    if window is None or (place + 1) * size > places * size - window + 1
                ]
                count = places if all(there[entry] for entry in seen) else count
            return count * size

        def plan(self, held: Held, end: int) -> None:
            """Writes KV up to `end`, by a plan that returns later."""
            copies = self.manager.make_writable(held.table, held.planned, end, self.next_step)
            if copies is None:
                return
            size, count = self.groups.block_size, self.groups.count
            for copy in copies:
                for slot in range(size):
                    if (copy.source, slot) in self.memory:
                        self.memory[copy.destination, slot] = self.memory[copy.source, slot]
            for group in range(count):
                for position, where in self.places(held, group, held.planned, end):
                    self.sees(held, group, position)
                    users = [h for h in self.held if h is not held and where[0] in h.table.block_ids]
                    assert not users, f"block {where[0]} written while others count on it"
                    self.memory[where] = (group, tuple(held.tokens[: position + 1]))
            held.planned = end
            held.last_step = self.next_step
            held.ends.append((self.next_step, end))
            self.steps.append((self.next_step, held))
            self.next_step += 1

        def ready(self) -> list[Held]:
            return [h for h in self.held if len(h.ends) < DEPTH and h.planned < len(h.tokens)]

        @precondition(lambda self: self.ready())
        @rule(data=st.data(), chunk=st.integers(1, CHUNK))
        def compute(self, data: st.DataObject, chunk: int) -> None:
            held = self.pick(data, self.ready())
            end = min(len(held.tokens), held.planned + chunk)
            if self.manager.can_take(held.table, end):
                self.manager.take_reserved(held.table, end)
                self.plan(held, end)
            else:
                assert len(self.held) > 1, "a sequence alone lacks blocks that were reserved for it"

        @precondition(lambda self: any(h.planned == len(h.tokens) and len(h.ends) < DEPTH for h in self.held))
        @rule(data=st.data(), token=st.integers(0, 1))
        def decode(self, data: st.DataObject, token: int) -> None:
            held = self.pick(data, [h for h in self.held if h.planned == len(h.tokens) and len(h.ends) < DEPTH])
            if self.manager.extend(held.table, len(held.tokens) + 1) is not None:
                held.tokens = [*held.tokens, token]
                self.plan(held, len(held.tokens))

        @precondition(lambda self: self.steps)
        @rule()
        def result(self) -> None:
            step, held = self.steps.pop(0)
            self.manager.pool.retire(step)
            if held in self.held:
                _, held.computed = held.ends.pop(0)
                if held.computed >= held.table.next_commit:
                    self.manager.commit(held.table, held.tokens, held.computed)

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def fork(self, data: st.DataObject) -> None:
            """A child of computed tokens, which will compute the parent's others itself."""
            parent = self.pick(data)
            num_tokens, total = data.draw(st.integers(0, parent.computed)), len(parent.tokens)
            cost = self.manager.cost_of_fork(parent.table, num_tokens, total)
            if cost is None or cost > self.manager.pool.num_allocatable or num_tokens == total:
                return
            child = Held(list(parent.tokens), self.manager.new_table(None, ""), num_tokens, num_tokens)
            self.manager.fork(parent.table, child.table, num_tokens)
            self.held.append(child)
            before = self.manager.pool.num_allocatable
            copies = self.manager.make_writable(child.table, num_tokens, total, self.next_step)
            assert copies is not None and self.manager.reserve(child.table, total)
            assert before - self.manager.pool.num_allocatable <= cost, "a fork takes more than it says"
            for copy in copies:
                for slot in range(self.groups.block_size):
                    if (copy.source, slot) in self.memory:
                        self.memory[copy.destination, slot] = self.memory[copy.source, slot]

        @precondition(lambda self: self.held)
        @rule(data=st.data(), wrong=st.integers(0, 9))
        def release(self, data: st.DataObject, wrong: int) -> None:
            held = self.pick(data)
            if wrong == 0:
                self.manager.forget(held.table)
                found = {self.manager.pool.lookup(key) for key in held.table.keys}
                assert not found & set(held.table.block_ids), "a block that may be wrong can still be found"
            self.held.remove(held)
            self.manager.release(held.table, held.last_step)

        @invariant()
        def check_all(self) -> None:
            if not hasattr(self, "held"):
                return
            self.manager.check_invariants(held.table for held in self.held)
            for held in self.held:
                own = [block_id for block_id in held.table.block_ids if block_id != NO_BLOCK]
                assert len(own) + held.table.num_reserved <= self.groups.needed(len(held.tokens)), "more than it needs"
                for group in range(self.groups.count):
                    for position in {held.computed, held.planned, held.computed // self.groups.block_size}:
                        if position >= held.computed // self.groups.block_size * self.groups.block_size:
                            self.sees(held, group, position)

    return GroupMachine
