"""Drives a decoder by hand: rows with block tables of their own, ForwardBatch built token by token, no engine.

Used by the parity tests. Block tables are shuffled unless asked otherwise, so that a backend that forgets to look a
block up is found out.
"""

import random
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch, GroupTable
from tandem.workers.kernels.kv_store import as_indexable
from tandem.workers.models.decoder import Decoder
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.kv_cache import KVCache


@dataclass(slots=True)
class PagedRow:
    """One sequence: its blocks, by group of layers, and how many of its tokens are in the cache."""

    blocks: list[list[int]]
    length: int = 0


@dataclass(slots=True)
class PagedRows:
    """KV tensors for `num_rows` rows of up to `max_len` tokens, and the rows' bookkeeping. windows: of the groups of
    layers, as the decoder has them; a block that a row's window has passed is never named again."""

    decoder: Decoder
    num_rows: int
    max_len: int
    dtype: torch.dtype = torch.float32
    block_size: int = 4
    shuffle: bool = True
    kv_dtype: torch.dtype | None = None
    platform: Platform = field(default_factory=CpuPlatform)
    windows: tuple[int | None, ...] = (None,)
    rows: list[PagedRow] = field(init=False)
    kv: KVTensors = field(init=False)

    def __post_init__(self) -> None:
        per_row, groups = -(-self.max_len // self.block_size), len(self.windows)
        ids = list(range(1, 1 + self.num_rows * groups * per_row))  # block 0 is what padded tables point at
        if self.shuffle:
            random.Random(0).shuffle(ids)
        tables = [ids[start : start + per_row] for start in range(0, len(ids), per_row)]
        self.rows = [PagedRow(tables[row * groups : (row + 1) * groups]) for row in range(self.num_rows)]
        decoder, num_blocks = self.decoder, 1 + len(ids)
        dtype, platform = self.kv_dtype or self.dtype, self.platform
        cache = KVCache.allocate(decoder.kv_layouts, num_blocks, self.block_size, dtype, platform)
        for plane in cache.planes:
            as_indexable(plane).fill_(7)
        self.kv = cache.tensors

    def batch(self, work: list[tuple[int, list[int]]], all_logits: bool = False) -> ForwardBatch:
        """The batch in which each named row gets these tokens; advances the rows. Logits of the last tokens, or all."""
        begins = [self.rows[row_id].length for row_id, _ in work]
        places = [range(begin, begin + len(tokens)) for begin, (_, tokens) in zip(begins, work, strict=True)]
        for (row_id, _), own in zip(work, places, strict=True):
            self.rows[row_id].length = own.stop
        seq_lens = [own.stop for own in places]
        starts = [0, *accumulate(len(tokens) for _, tokens in work)]
        own_group, *further = (
            self._table([row_id for row_id, _ in work], places, group) for group in range(len(self.windows))
        )
        logits_rows = list(range(starts[-1])) if all_logits else [stop - 1 for stop in starts[1:]]
        return ForwardBatch(
            input_ids_T=torch.tensor([token for _, tokens in work for token in tokens]),
            positions_T=torch.tensor([place for own in places for place in own]),
            slot_mapping_T=own_group.slot_mapping_T,
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table_RN=own_group.block_table_RN,
            logits_rows_S=torch.tensor(logits_rows),
            query_lens_list=[len(tokens) for _, tokens in work],
            seq_lens_list=seq_lens,
            block_size=self.block_size,
            further_groups=tuple(further),
        )

    def _table(self, row_ids: list[int], places: list[range], group: int) -> GroupTable:
        """Slots of the positions `places` of these rows, and the rows' block tables."""
        size, window = self.block_size, self.windows[group]
        slots = []
        table = torch.zeros(len(row_ids), max(-(-own.stop // size) for own in places), dtype=torch.int32)
        for index, (row_id, own) in enumerate(zip(row_ids, places, strict=True)):
            blocks = self.rows[row_id].blocks[group]
            slots += [blocks[place // size] * size + place % size for place in own]
            used, first = -(-own.stop // size), 0 if window is None else max(0, own.start + 1 - window) // size
            table[index, :used] = torch.tensor([blocks[max(first, place)] for place in range(used)])
        return GroupTable(torch.tensor(slots), table)

    @torch.inference_mode()
    def step(self, work: list[tuple[int, list[int]]], all_logits: bool = False) -> torch.Tensor:
        """Runs one step of a single-stage decoder; logits [S, V]."""
        return self.decoder.forward(self.batch(work, all_logits), self.kv, None)

    def greedy(self, row: int, prompt: list[int], count: int) -> list[int]:
        """`count` tokens after the prompt, the most likely one each time."""
        tokens = [int(self.step([(row, prompt)])[0].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.step([(row, tokens[-1:])])[0].argmax()))
        return tokens


def prompt_ids(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Seeded token ids, without the first few (specials)."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(length)]
