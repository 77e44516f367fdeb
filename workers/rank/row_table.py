"""RowTable: a rank's state of each row between steps, so that plans carry only changes.

Called by model_runner.py. Ranks own the last token and the computed count of a row and derive positions from them. All
columns are preallocated numpy arrays: a step of decode rows is a few gathers. Knows no tensors, no device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from tandem.workers.messages.step import RowInit, RowWork, StepPlan
from tandem.workers.planning.graph_room import OVERRUN, most_blocks
from tandem.workers.platforms.device_rows import PENDING
from tandem.workers.rank.pooler import PooledRow
from tandem.workers.sampling.sampling_table import SamplingTable
from tandem.workers.structured.grammar_store import GrammarStore

Ints = npt.NDArray[np.int64]
COUNTS = ("num_known", "num_computed", "num_blocks", "told_blocks", "num_unread", "num_accepted", "max_accepted")


class RowTable:
    """Columns indexed by row. token_ids int32 [rows, tokens], counts int64 [rows]. block_ids int32 [rows, blocks x
    groups]: entry i * groups + g is the block of the i-th tokens in group g of layers; below 0 where none is needed.
    windows: of the groups, None where a token sees all before it.

    adapter_slots: int64 [rows], -1 without an adapter; num_adapted: rows with one.
    told_blocks: block ids of a row, from its first on, that have not changed since the device was told them.
    lives: int64 [rows], counts how often a row was bound, freed or rolled back, so that a late token finds its own.
    num_unread: tokens counted in num_known whose values the host has not read. num_accepted: accepted drafts among the
    known tokens since the row was bound. max_accepted: the most that the steps in flight may add to num_known and
    num_computed, which count one token for each of them; has_drafts: some step has ever had any.
    pooled: rows that end with an embedding. scored: rows with prompt_logprobs. `errors[row]`: why nothing can be
    sampled for it (its tokens are outside the vocabulary); it runs on harmlessly.
    """

    def __init__(
        self,
        capacity: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        grammars: GrammarStore | None = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self._groups = len(windows)
        self.vocab_size = vocab_size
        self._max_tokens = max_model_len + OVERRUN
        self._max_blocks = most_blocks(max_model_len, block_size)
        self.sampling = SamplingTable(capacity, vocab_size, grammars=grammars)
        self.token_ids = np.zeros((capacity, self._max_tokens), np.int32)
        self.block_ids = np.zeros((capacity, self._max_blocks * self._groups), np.int32)
        self.num_known = np.zeros(capacity, np.int64)
        self.num_computed = np.zeros(capacity, np.int64)
        self.num_blocks = np.zeros(capacity, np.int64)
        self.told_blocks = np.zeros(capacity, np.int64)
        self.num_unread = np.zeros(capacity, np.int64)
        self.num_accepted = np.zeros(capacity, np.int64)
        self.max_accepted = np.zeros(capacity, np.int64)
        self.has_drafts = False
        self.prompt_len = np.zeros(capacity, np.int64)
        self.lives = np.zeros(capacity, np.int64)
        self.adapter_slots = np.full(capacity, -1, np.int64)
        self.num_adapted = 0
        self.pooled: dict[int, PooledRow] = {}
        self.scored: set[int] = set()
        self.errors: dict[int, str] = {}

    def apply(self, plan: StepPlan) -> list[int]:
        """Frees, binds and extends rows, in the plan's order. Does not count the plan's tokens as computed.

        Returns new blocks that rows will write, without those that have computed tokens.
        """
        fresh: list[int] = []
        for row in plan.freed_rows:
            self._clear(row)
        for init in plan.new_rows:
            self._bind(init)
        for work in plan.work:
            if work.new_block_ids or work.token_ids or work.replaced_blocks:
                self._extend(work, fresh)
        return fresh

    def take_told(self, plan: StepPlan) -> Ints:
        """Counts the drafts that the plan's tokens tell to be accepted (PP > 1): those of the row's last step, whose
        tokens these are, but for the last one. Comes before apply().

        Returns the KV slots of the rejected drafts: only the last stage knows whether something harmful is there.
        """
        slots = [np.empty(0, np.int64)]
        for work in plan.work:
            if work.token_ids and (num_drafts := int(self.max_accepted[work.row])):
                num_accepted = len(work.token_ids) - 1
                self.num_computed[work.row] += num_accepted
                self.max_accepted[work.row] = 0
                start = int(self.num_computed[work.row])
                slots.append(self._slots(work.row, start, num_drafts - num_accepted))
        return np.concatenate(slots)

    def tails(self, plan: StepPlan) -> Ints:
        """Returns the KV slots behind the computed tokens of rows that the plan has bound, where these end inside a
        block (PP > 1). Comes behind apply() and the plan's copies, with which such a block is the row's own.

        Drafts may have been there that were rejected when the row lost its place, which no plan has told of.
        """
        slots = [np.empty(0, np.int64)]
        for init in plan.new_rows:
            slots.append(self._slots(init.row, init.num_computed, -init.num_computed % self.block_size))
        return np.concatenate(slots)

    @contextmanager
    def ahead(self, sampled: Mapping[int, Sequence[int]]) -> Iterator[None]:
        """Counts tokens that the last stage has sampled, by row, as known and all but the last as computed, as they
        will be once a plan has brought them to all stages."""
        rows = [*sampled]
        known, computed = self.num_known[rows], self.num_computed[rows]
        for row, token_ids in sampled.items():
            self.draft(row, token_ids)
        counts = np.fromiter(map(len, sampled.values()), np.int64, len(rows))
        self.num_known[rows] += counts
        self.num_computed[rows] += counts - 1
        try:
            yield
        finally:
            self.num_known[rows], self.num_computed[rows] = known, computed

    def roll_back(self, rows: Sequence[tuple[int, int, int]]) -> Ints:
        """Sets (row, known tokens, computed tokens) back to what they were before steps that failed.

        Returns the KV slots of the tokens that no longer count as computed, each in a block that only its row holds.
        """
        slots = [np.empty(0, np.int64)]
        for row, num_known, num_computed in rows:
            end = int(self.num_computed[row] + self.max_accepted[row])
            slots.append(self._slots(row, num_computed, end - num_computed))
            assert num_known <= self.num_known[row], f"row {row}: {num_known} known, here {self.num_known[row]}"
            self.num_known[row], self.num_computed[row] = num_known, num_computed
            self.num_unread[row] = self.max_accepted[row] = self.num_accepted[row] = 0
            self.lives[row] += 1
        return np.concatenate(slots)

    def reserve(self, rows: Ints) -> None:
        """Counts one more known token per row, whose value `fill` or `accept` brings. Rows are distinct."""
        self.token_ids[rows, self.num_known[rows]] = PENDING
        self.num_known[rows] += 1
        self.num_unread[rows] += 1

    def fill(self, rows: Ints, token_ids: Sequence[int]) -> None:
        """Sets the first reserved token of each row."""
        self.token_ids[rows, self.num_known[rows] - self.num_unread[rows]] = token_ids
        self.num_unread[rows] -= 1

    def history(self, row: int, position: int) -> tuple[npt.NDArray[np.int32], int]:
        """The row's tokens before a position (a view), drafts included, and the length of its prompt."""
        return self.token_ids[row, :position], int(self.prompt_len[row])

    def known(self, row: int) -> npt.NDArray[np.int32]:
        """The row's known tokens, a view."""
        return self.token_ids[row, : self.num_known[row]]

    def settled(self, row: int) -> npt.NDArray[np.int32]:
        """The row's known tokens whose values are here, a view."""
        return self.token_ids[row, : self.num_known[row] - self.num_unread[row]]

    def draft(self, row: int, token_ids: Sequence[int]) -> None:
        """Writes drafts behind the row's known tokens. They do not count as known."""
        start = int(self.num_known[row])
        self.token_ids[row, start : start + len(token_ids)] = token_ids

    def accept(self, row: int, token_ids: Sequence[int], num_drafts: int) -> Ints:
        """Sets the tokens that a step with drafts has sampled; of all steps that were launched since, `reserve` has
        counted one each. Returns the KV slots of the rejected drafts."""
        accepted = len(token_ids) - 1
        start = int(self.num_known[row] - self.num_unread[row])
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        for counts in (self.num_known, self.num_computed, self.num_accepted):
            counts[row] += accepted
        self.max_accepted[row] -= num_drafts
        self.num_unread[row] -= 1
        self.token_ids[row, start + len(token_ids) : int(self.num_known[row])] = PENDING
        return self._slots(row, start + accepted, num_drafts - accepted)

    def _slots(self, row: int, start: int, count: int) -> Ints:
        """The KV slots of `count` positions from `start` on, in all groups."""
        block, offset = np.divmod(np.arange(start, start + count), self.block_size)
        ids = self.block_ids[row].reshape(-1, self._groups)[block].astype(np.int64)
        return np.asarray(ids * self.block_size + offset[:, None]).reshape(-1)

    def _clear(self, row: int) -> None:
        if row < len(self.num_known):
            self.block_ids[row, : self.num_blocks[row] * self._groups] = 0
            self.num_known[row] = self.num_computed[row] = self.num_blocks[row] = self.told_blocks[row] = 0
            self.num_unread[row] = self.max_accepted[row] = self.num_accepted[row] = 0
            self.lives[row] += 1
            self.num_adapted -= int(self.adapter_slots[row] >= 0)
            self.adapter_slots[row] = -1
            self.pooled.pop(row, None)
            self.scored.discard(row)
            self.errors.pop(row, None)
            self.sampling.free(row)

    def _bind(self, init: RowInit) -> None:
        row = init.row
        self._make_room(row)
        self._clear(row)
        self.num_computed[row] = init.num_computed
        self.prompt_len[row] = init.prompt_len
        if init.adapter_slot is not None:
            self.adapter_slots[row] = init.adapter_slot
            self.num_adapted += 1
        if init.pool is not None:
            self.pooled[row] = PooledRow(init.pool)
        if init.sampling.prompt_logprobs is not None:
            self.scored.add(row)
        self.sampling.bind(row, init.sampling)
        self._append_tokens(row, init.token_ids)

    def _extend(self, work: RowWork, fresh: list[int]) -> None:
        row = work.row
        if work.token_ids:
            self._append_tokens(row, work.token_ids)
        if work.new_block_ids:
            start = int(self.num_blocks[row]) * self._groups
            self.block_ids[row, start : start + len(work.new_block_ids)] = work.new_block_ids
            self.num_blocks[row] += len(work.new_block_ids) // self._groups
            filled = -(-int(self.num_computed[row]) // self.block_size) * self._groups
            fresh += work.new_block_ids[max(0, filled - start) :]
        for index, block_id in work.replaced_blocks:
            assert index < self.num_blocks[row] * self._groups, f"row {row} has no block {index}"
            self.block_ids[row, index] = block_id
            self.told_blocks[row] = min(self.told_blocks[row], index)

    def _append_tokens(self, row: int, token_ids: list[int]) -> None:
        tokens = np.asarray(token_ids, np.int64)
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            self.errors[row] = f"token id {tokens[wrong][0]} is outside the vocabulary of {self.vocab_size}"
            tokens = np.where(wrong, 0, tokens)
        start = int(self.num_known[row])
        assert start + len(tokens) <= self._max_tokens, f"row {row}: {start + len(tokens)} tokens exceed the context"
        self.token_ids[row, start : start + len(tokens)] = tokens
        self.num_known[row] += len(tokens)

    def _make_room(self, row: int) -> None:
        """Doubles the columns when a row lies beyond them."""
        held = len(self.num_known)
        if row < held:
            return
        capacity = max(row + 1, 2 * held)
        for name in (*COUNTS, "token_ids", "block_ids", "prompt_len", "lives"):
            old = getattr(self, name)
            new = np.zeros((capacity, *old.shape[1:]), old.dtype)
            new[:held] = old
            setattr(self, name, new)
        self.adapter_slots = np.append(self.adapter_slots, np.full(capacity - held, -1, np.int64))
        self.sampling.grow(capacity)
