"""An executor without a model that keeps the ranks' side of the contract strictly, and notices every breach of it.

It holds its own row table, built from plans alone, and a KV pool in which each slot remembers which token, at which
position, after which whole prefix, under which root (adapter, salt) was computed there. A row "attends" by comparing
all slots of its context with what they should hold; what it samples depends on what it found. So a wrong prefix hit, a
missing copy-on-write or a block reused too early turns up as a violation and as a wrong token. Every rank has a KV
pool of its own, which a transfer (fake_tiers.py) can fill or spoil alone; plans write all of them. With adapters
(fake_adapters.py) the root is what the row's slot holds on the ranks when the plan runs.

A slot holds (position, chain): chain stands for the root and all tokens up to that position, and for the group of
layers that the slot belongs to. Of a group with a window a row compares what its next token sees, and names no other
block.
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from fake_adapters import AdapterPlan, FakeAdapters
from fake_grammars import FakeGrammars
from fake_tiers import GARBAGE, FakeTiers, Slot, TierPlan

from tandem.workers.engine.blocks.block_manager import NO_BLOCK
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.messages.request import Pool, PromptLogprobs, TokenLogprobs
from tandem.workers.messages.step import ExpertTokens, RowInit, RowResult, RowSampling, RowWork, StepPlan, StepResult
from tandem.workers.messages.transfer import CompileGrammar, CopyKV, DropGrammar, TransferOp, TransferResult


def chain_of(root: str, tokens: list[int], after: int | None = None) -> list[int]:
    """For each position the digest of the root and all tokens up to it. after: that of the tokens before these."""
    value, values = sum(ord(c) * 131**i for i, c in enumerate(root)) + 7 if after is None else after, []
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


def in_group(value: int, group: int) -> int:
    """The chain as a group of layers keeps it."""
    return hash((value, group)) if group and value != GARBAGE[1] else value


def fake_token(sampling: RowSampling, context: int, position: int, num_output: int, vocab_size: int) -> int:
    """The token a fake model samples: any function of seed, choice, position and context will do."""
    token = hash((sampling.seed, sampling.choice, position, context)) % vocab_size
    while num_output < sampling.min_tokens and token in sampling.stop_token_ids:
        token = (token + 1) % vocab_size
    return token


def fake_prompt_logprobs(root: str, tokens: list[int]) -> list[TokenLogprobs]:
    """What a fake model says of each token but the first, by the chain of those before it."""
    chain = chain_of(root, tokens)
    return [TokenLogprobs(token, -float(value % 1000)) for token, value in zip(tokens[1:], chain[:-1], strict=True)]


def fake_embedding(kind: str, chain: list[int]) -> bytes:
    """The embedding of a fake model, of the chain of all positions: of the last one's state, or of the sum of all."""
    return struct.pack("<q", chain[-1] if kind == "last" else sum(chain) % 2**62)


@dataclass(eq=False)
class Row:
    """What a rank keeps of one bound row. states: of a mean, by position, computed since the row was bound. chain: of
    the root and the tokens in chained. slots: what the KV of these holds, of each group of layers."""

    tokens: list[int]
    prompt_len: int
    computed: int
    sampling: RowSampling
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    unsent: list[int] | None = None
    failed_load_of: int | None = None
    pool: Pool | None = None
    states: dict[int, int] = field(default_factory=dict)
    chain: list[int] = field(default_factory=list)
    chained: tuple[str, list[int]] = ("", [])
    slots: list[list[Slot]] = field(default_factory=list)


class FakeExecutor:
    """num_rows rows over num_blocks blocks. stages > 1: sampled tokens must come back in a later plan.

    roots: the root of a request's KV by its seed (plans do not carry it). fail_at: (seed, choice, output position) of
    rows that come back with an error. room: by step, the most tokens for which the device has memory. stalls: how many
    looks at the ranks give nothing before each result. proposes: gives, of a row's tokens, how many of its max_drafts
    are guessed, and how many of these rightly; any function will do. wanted, filled by tests: the adapter of a request
    by its seed, or None.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        *,
        stages: int = 1,
        vocab_size: int = 97,
        roots: dict[int, str] | None = None,
        fail_at: frozenset[tuple[int, int, int]] = frozenset(),
        device_s: Callable[[StepPlan], float] = lambda plan: 0.0,
        stalls: int = 0,
        proposes: Callable[[int], tuple[int, int]] = lambda context: (context % 7, context // 7 % 7),
        room: Callable[[int], float] = lambda step_id: math.inf,
        tiers: TierPlan | None = None,
        adapters: AdapterPlan | None = None,
        windows: tuple[int | None, ...] = (None,),
        experts: Sequence[dict[int, list[int]]] = (),
    ) -> None:
        self.windows = windows
        self.experts = experts
        self.num_counts = 0
        self.num_blocks, self.block_size, self.num_rows = num_blocks, block_size, num_rows
        self.stages, self.vocab_size = stages, vocab_size
        self.roots = roots or {}
        self.proposes = proposes
        self.num_accepted = self.num_rejected = 0
        self.fail_at, self.device_s, self.stalls, self.room = fail_at, device_s, stalls, room
        self.failures: list[int] = []
        self._owed: list[tuple[int, int]] = []
        self.rows: dict[int, Row] = {}
        self.num_ranks = max(1 if plan is None else plan.num_ranks for plan in (tiers, adapters))
        self.adapters = None if adapters is None else FakeAdapters(adapters)
        self.grammars = FakeGrammars(self.num_ranks)
        self.wanted: dict[int, str | None] = {}
        self.pools: list[list[list[Slot | None]]] = [
            [[None] * block_size for _ in range(num_blocks)] for _ in range(self.num_ranks)
        ]
        self.tiers = None if tiers is None else FakeTiers(tiers, self.pools)
        self.plans: list[StepPlan] = []
        self.most_in_flight = 0
        self._results: deque[StepResult] = deque()
        self._named: deque[dict[int, set[int]]] = deque()
        self._touched: deque[tuple[set[int], set[int]]] = deque()
        self._slots: deque[set[int]] = deque()
        self._stalled = 0
        self._messages: deque[StepResult | TransferResult | ExpertTokens | None] = deque()

    # ---- Executor ----

    def start(self) -> ExecutorReady:
        return ExecutorReady(
            num_blocks=self.num_blocks,
            pipeline_parallel_size=self.stages,
            device="fake",
            dtype="float32",
            threads=1,
            weight_bytes=0,
            block_bytes=0 if self.tiers is None else self.tiers.plan.block_bytes,
            load_s=0.0,
            num_ranks=self.num_ranks,
            store=None if self.tiers is None else self.tiers.store,
            adapter_pages=0 if self.adapters is None else self.adapters.plan.num_pages,
        )

    def submit(self, plan: StepPlan) -> None:
        """Runs the plan at once, as ranks would in this order, and keeps the result for poll()."""
        assert plan.step_id == len(self.plans) + 1, "step ids count plans"
        assert plan.work, "an empty plan"
        assert len({work.row for work in plan.work}) == len(plan.work), "a row twice in one plan"
        self.plans.append(plan)
        if self.tiers is not None:
            self.tiers.bring(plan.awaits)
        self._roll_back(plan)
        self._bind(plan)
        self._name_slots(plan)
        failure = self._failure_of(plan)
        self._extend(plan)
        self._check_writes(plan)
        self._owed += plan.block_copies
        results: list[RowResult] = []
        if failure is None:
            self._copy(self._owed)
            self._owed = []
            results = [result for work in plan.work if (result := self._result(work)) is not None]
        else:
            self._spoil(plan)
        device_s = self.device_s(plan)
        self._results.append(StepResult(step_id=plan.step_id, rows=results, device_s=device_s, failure=failure))
        self.most_in_flight = max(self.most_in_flight, len(self._results))

    def count_experts(self) -> None:
        """Each stage answers, one for each look."""
        self.num_counts += 1
        for by_layer in self.experts:
            self._messages += [ExpertTokens(by_layer), None]

    def poll(self, timeout_s: float) -> StepResult | TransferResult | ExpertTokens | None:
        """One look at the ranks gives the answers of their lanes, then a result or nothing."""
        if not self._messages:
            self._look()
        message = self._messages.popleft()
        if isinstance(message, TransferResult):
            for fakes in (self.tiers, self.adapters, self.grammars):
                if fakes is not None and message.ticket in fakes.under_way:
                    fakes.taken(message)
        return message

    def _look(self) -> None:
        for fakes in (self.tiers, self.adapters, self.grammars):
            if fakes is not None:
                self._messages += fakes.pump()
        self._messages.append(self._next_result())

    def _next_result(self) -> StepResult | None:
        if not self._results:
            return None
        if self._stalled < self.stalls:
            self._stalled += 1
            return None
        self._stalled = 0
        self._named.popleft()
        self._touched.popleft()
        self._slots.popleft()
        return self._results.popleft()

    def transfer(self, op: TransferOp) -> None:
        if isinstance(op, CompileGrammar | DropGrammar):
            self.grammars.send(op)
            return
        if not isinstance(op, CopyKV):
            assert self.adapters is not None, "an adapter moves without --enable-lora"
            self.adapters.send(op, set().union(*self._slots))
            return
        assert self.tiers is not None, "a transfer without tiers"
        named = set().union(*(named for named, _ in self._touched))
        written = set().union(*(written for _, written in self._touched))
        self.tiers.send(op, named, written)

    def close(self) -> None:
        self._results.clear()

    # ---- a rank's order of work ----

    def _failure_of(self, plan: StepPlan) -> str | None:
        """Why nothing of a plan is computed: there is no memory, or it was made before such a failure was known."""
        if self.failures and plan.known_failure < self.failures[-1]:
            return "planned in ignorance"
        if sum(work.num_tokens + work.max_drafts for work in plan.work) <= self.room(plan.step_id):
            return None
        self.failures.append(plan.step_id)
        return "out of memory"

    def _roll_back(self, plan: StepPlan) -> None:
        """Until then rows count as though failed steps had been computed, on all ranks."""
        for number, num_known, num_computed in plan.rolled_back:
            row = self.rows[number]
            assert num_known <= len(row.tokens) and num_computed < row.computed, "nothing to roll back"
            del row.tokens[num_known:]
            row.computed = num_computed

    def _spoil(self, plan: StepPlan) -> None:
        """A step that failed on some rank: the others have computed nonsense."""
        for work in plan.work:
            row = self.rows[work.row]
            for position in range(row.computed, row.computed + work.num_tokens + work.max_drafts):
                self._write(self.pools, row, position, GARBAGE[1])
            row.computed += work.num_tokens
            if work.samples and self.stages == 1 and row.pool is None:
                row.tokens.append(self.vocab_size)

    def _bind(self, plan: StepPlan) -> None:
        for number in plan.freed_rows:
            assert number in self.rows, f"row {number} freed but not bound"
            del self.rows[number]
        worked = {work.row: work for work in plan.work}
        for init in plan.new_rows:
            assert 0 <= init.row < self.num_rows, f"no row {init.row}"
            assert init.row in worked, "a row bound without work"
            assert init.num_computed < len(init.token_ids), "nothing left to compute"
            self.rows[init.row] = self._new_row(init)

    def _new_row(self, init: RowInit) -> Row:
        self.grammars.check_bound(init.sampling.grammar)
        sampling, slot = init.sampling, init.adapter_slot
        return Row(list(init.token_ids), init.prompt_len, init.num_computed, sampling, slot=slot, pool=init.pool)

    def _name_slots(self, plan: StepPlan) -> None:
        slots = {slot for work in plan.work if (slot := self.rows[work.row].slot) is not None}
        self._slots.append(slots)
        if self.adapters is not None:
            assert len(slots) <= self.adapters.plan.max_loras, "more adapters in a step than --max-loras"
            self.adapters.check_plan(slots)

    def _root(self, row: Row) -> str:
        """What keeps the row's KV apart; checks that its slot holds, on every rank, what its request wants."""
        root, wanted = self.roots.get(row.sampling.seed, ""), self.wanted.get(row.sampling.seed)
        if row.slot is None:
            assert wanted is None, f"a row that wants {wanted} has no slot"
            return root
        assert self.adapters is not None
        held = {self.adapters.content(rank, row.slot) for rank in range(self.num_ranks)}
        assert held == {wanted}, f"a row that wants {wanted} computes with {held}"
        return f"{root}{wanted}"

    def _extend(self, plan: StepPlan) -> None:
        for work in plan.work:
            assert work.row in self.rows, f"row {work.row} used before it was bound"
            row = self.rows[work.row]
            if row.unsent is not None:
                assert list(work.token_ids) == row.unsent, "the coordinator must send back the sampled tokens"
                row.tokens += row.unsent
                row.unsent = None
            else:
                assert not work.token_ids, "ranks know this token already"
            row.blocks += work.new_block_ids
            for place, block_id in work.replaced_blocks:
                row.blocks[place] = block_id
            blocks = self._seen_blocks(row)
            assert len(set(blocks)) == len(blocks), "a block twice in one table"
            assert all(0 <= block_id < self.num_blocks for block_id in blocks)
            assert len(row.blocks) % len(self.windows) == 0, "each group has its entry"
            end = row.computed + work.num_tokens
            assert work.num_tokens > 0 and end <= len(row.tokens), "work beyond the known tokens"
            assert work.samples == (end == len(row.tokens)), "samples exactly at the last known token"
            room = len(row.blocks) // len(self.windows) * self.block_size
            assert end + work.max_drafts + work.num_guesses <= room, "the table does not cover the tokens"
            assert not work.max_drafts + work.num_guesses or (work.samples and work.num_tokens == 1), "drafts"
            assert len(work.draft_ids) == (work.max_drafts if self.stages > 1 else 0), "who guesses"
            assert not work.num_guesses or self.stages > 1, "drafts are guessed when a step begins"

    def _check_writes(self, plan: StepPlan) -> None:
        """No block is written that another row of this plan, or of a plan in flight, reads or writes."""
        named: dict[int, set[int]] = {}
        for work in plan.work:
            row = self.rows[work.row]
            used = -(-(row.computed + work.num_tokens + work.max_drafts + work.num_guesses) // self.block_size)
            for group in range(len(self.windows)):
                for place in range(self._first_seen(row, group) // self.block_size, used):
                    named.setdefault(self._block(row, group, place), set()).add(id(row))
        for work in plan.work:
            row = self.rows[work.row]
            for block_id in row.blocks[self._written(row, work)]:
                for users in (named, *self._named):
                    others = users.get(block_id, set()) - {id(row)}
                    assert not others, f"block {block_id} written by row {work.row} while another row names it"
        self._named.append(named)
        self._note_touched(plan, set(named))

    def _written(self, row: Row, work: RowWork) -> slice:
        """The row's blocks that a plan may write, by their places."""
        end = row.computed + work.num_tokens + work.max_drafts + work.num_guesses
        groups = len(self.windows)
        return slice(row.computed // self.block_size * groups, -(-end // self.block_size) * groups)

    def _first_seen(self, row: Row, group: int) -> int:
        """The first position that the row's next token sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, row.computed - window + 1)

    def _seen_blocks(self, row: Row) -> list[int]:
        """The row's blocks but for those that nothing tells ranks of: they may be another row's by now."""
        count = len(self.windows)
        return [
            block_id
            for entry, block_id in enumerate(row.blocks)
            if entry // count >= self._first_seen(row, entry % count) // self.block_size
        ]

    def _block(self, row: Row, group: int, place: int) -> int:
        block_id = row.blocks[place * len(self.windows) + group]
        assert block_id != NO_BLOCK, f"block {place} of group {group} was given back, and is seen"
        return block_id

    def _write(self, pools: list[list[list[Slot | None]]], row: Row, position: int, value: int) -> None:
        place, offset = divmod(position, self.block_size)
        for group in range(len(self.windows)):
            for pool in pools:
                slot = GARBAGE if value == GARBAGE[1] else (position, in_group(value, group))
                pool[self._block(row, group, place)][offset] = slot

    def _note_touched(self, plan: StepPlan, named: set[int]) -> None:
        """Blocks that the plan reads or writes in whatever way, for transfers, which keep no order with plans."""
        written = {destination for _, destination in plan.block_copies}
        for work in plan.work:
            row = self.rows[work.row]
            written.update(row.blocks[self._written(row, work)])
        named = named | written | {source for source, _ in plan.block_copies}
        self._touched.append((named, written))
        if self.tiers is not None:
            self.tiers.check_plan(named, written)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        destinations = [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        assert not {source for source, _ in copies} & set(destinations), "a copy of a copy in one plan"
        for source, destination in copies:
            for pool in self.pools:
                pool[destination][:] = pool[source]

    def _result(self, work: RowWork) -> RowResult | None:
        row = self.rows[work.row]
        first, result = row.computed, self._compute(work)
        if not work.num_scored:
            return result
        assert row.sampling.prompt_logprobs is not None and work.num_scored <= work.num_tokens
        assert first + work.num_scored < row.prompt_len, "no token of the prompt is behind it"
        entries = fake_prompt_logprobs(self._root(row), row.tokens[: first + work.num_scored + 1])[first:]
        got = PromptLogprobs(first + 1, entries)
        return msgspec.structs.replace(result or RowResult(row=work.row, token_ids=[]), prompt_logprobs=got)

    def _chain(self, row: Row) -> list[int]:
        """chain_of() its tokens; only what is new is computed."""
        root, known = self._root(row), len(row.chain)
        if not known or row.chained != (root, row.tokens[:known]):
            row.chain, row.slots, known = [], [[] for _ in self.windows], 0
        row.chain += (new := chain_of(root, row.tokens[known:], row.chain[-1] if known else None))
        for group, slots in enumerate(row.slots):
            slots += [(known + place, in_group(value, group)) for place, value in enumerate(new)]
        row.chained = (root, row.tokens[:])
        return row.chain[:]

    def _check_kv(self, who: str, pool: list[list[Slot | None]], row: Row, group: int) -> None:
        """Asserts that blocks hold what a row sees, unless it waits for a load that has failed, which is noted."""
        size, first = self.block_size, self._first_seen(row, group)
        for place in range(first // size, -(-row.computed // size)):
            block_id = self._block(row, group, place)
            if self.tiers is not None and (ticket := self.tiers.spoiled_by(block_id)) is not None:
                row.failed_load_of = ticket
            if row.failed_load_of is not None:
                return
            begin, end = max(first, place * size), min(row.computed, (place + 1) * size)
            found = pool[block_id][begin - place * size : end - place * size]
            assert found == row.slots[group][begin:end], f"{who}: wrong KV at positions {begin} to {end}: {found}"

    def _compute(self, work: RowWork) -> RowResult | None:
        row = self.rows[work.row]
        chain = self._chain(row)
        for rank, pool in enumerate(self.pools):
            for group in range(len(self.windows)):
                self._check_kv(f"rank {rank}, row {work.row}", pool, row, group)
                if row.failed_load_of is not None:
                    break
        if row.failed_load_of is not None:
            assert self.tiers is not None and row.failed_load_of in self.tiers.under_way, (
                "a row goes on after its load failed"
            )
            self.tiers.num_failed_loads += 1
            chain = [GARBAGE[1]] * len(chain)
        drafts = [*work.draft_ids]
        if work.max_drafts and self.stages == 1:
            drafts = self._propose(row, chain, work.max_drafts)
        chain = self._extended(chain, drafts)
        end = row.computed + work.num_tokens
        for position in range(row.computed, end + len(drafts)):
            value = chain[position] if row.failed_load_of is None else GARBAGE[1]
            self._write(self.pools, row, position, value)
        row.states |= {position: chain[position] for position in range(row.computed, end)}
        row.computed = end
        if not work.samples:
            return None
        if row.pool is not None:
            return self._pool(work.row, row, chain)
        known = len(row.tokens)
        result = self._verify(work.row, row, chain, drafts) if drafts else self._sample(work.row, row, chain[-1])
        return result if self.stages == 1 else self._relayed(work, row, chain[:known], result)

    def _relayed(self, work: RowWork, row: Row, chain: list[int], result: RowResult) -> RowResult:
        """The stages get a row's tokens in a later plan; what may come behind them is guessed now."""
        known = len(chain)
        row.unsent = row.tokens[known:]
        guesses: list[int] = []
        if work.num_guesses:
            guesses = self._propose(row, self._extended(chain, row.unsent), work.num_guesses)
        del row.tokens[known:]
        return msgspec.structs.replace(result, draft_ids=guesses)

    def _pool(self, number: int, row: Row, chain: list[int]) -> RowResult:
        assert row.pool is not None and len(row.tokens) == row.prompt_len, "it generates"
        if (row.sampling.seed, row.sampling.choice, 0) in self.fail_at:
            return RowResult(row=number, token_ids=[], error="hidden states are not finite")
        if row.pool.kind == "mean":
            assert sorted(row.states) == list(range(row.computed)), "a mean lacks states"
            chain = [row.states[position] for position in range(row.computed)]
        return RowResult(row=number, token_ids=[], embedding=fake_embedding(row.pool.kind, chain))

    def _extended(self, chain: list[int], tokens: list[int]) -> list[int]:
        """The chain with more tokens."""
        chain = [*chain]
        for token in tokens:
            chain.append(GARBAGE[1] if chain[-1] == GARBAGE[1] else hash((chain[-1], token)))
        return chain

    def _propose(self, row: Row, chain: list[int], max_drafts: int) -> list[int]:
        """Drafts of which the first ones are what will be sampled, the next one is not."""
        count, num_right = self.proposes(chain[-1])
        drafts: list[int] = []
        for place in range(min(count, max_drafts)):
            length = len(row.tokens) + place
            context = self._extended(chain, drafts)[-1]
            token = fake_token(row.sampling, context, length, length - row.prompt_len, self.vocab_size)
            drafts.append(token if place < num_right else (token + 1) % self.vocab_size)
        return drafts

    def _verify(self, number: int, row: Row, chain: list[int], drafts: list[int]) -> RowResult:
        """Samples behind the row's last token and its drafts, up to the first one that is not as drafted."""
        tokens: list[int] = []
        for draft in [*drafts, None]:
            result = self._sample(number, row, chain[row.computed - 1])
            if result.error is not None:
                return RowResult(row=number, token_ids=tokens, error=result.error, num_drafts=len(drafts))
            tokens += result.token_ids
            if result.token_ids != [draft]:
                break
            row.computed += 1
        self.num_accepted += len(tokens) - 1
        self.num_rejected += len(drafts) - (len(tokens) - 1)
        return RowResult(row=number, token_ids=tokens, num_drafts=len(drafts))

    def _sample(self, number: int, row: Row, context: int) -> RowResult:
        num_output = len(row.tokens) - row.prompt_len
        token = fake_token(row.sampling, context, len(row.tokens), num_output, self.vocab_size)
        row.tokens.append(token)
        if (row.sampling.seed, row.sampling.choice, num_output) in self.fail_at:
            return RowResult(row=number, token_ids=[], error="logits are not finite")
        return RowResult(row=number, token_ids=[token])
