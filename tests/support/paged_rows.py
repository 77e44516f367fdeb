"""Drives a decoder by hand: rows with block tables of their own, ForwardBatch built token by token, no engine.

Used by the parity tests. Block tables are shuffled unless asked otherwise, so that a backend that forgets to look a
block up is found out.
"""

import random
from dataclasses import dataclass, field

import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.kv_store import as_indexable
from tandem.workers.models.decoder import Decoder
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import cpu_platform
from tandem.workers.rank.kv_cache import KVCache


@dataclass(slots=True)
class PagedRow:
    """One sequence: its blocks, and how many of its tokens are in the cache."""

    blocks: list[int]
    length: int = 0


@dataclass(slots=True)
class PagedRows:
    """KV tensors for `num_rows` rows of up to `max_len` tokens, and the rows' bookkeeping."""

    decoder: Decoder
    num_rows: int
    max_len: int
    dtype: torch.dtype = torch.float32
    block_size: int = 4
    shuffle: bool = True
    kv_dtype: torch.dtype | None = None
    platform: Platform = field(default_factory=cpu_platform)
    rows: list[PagedRow] = field(init=False)
    kv: KVTensors = field(init=False)

    def __post_init__(self) -> None:
        per_row = -(-self.max_len // self.block_size)
        ids = list(range(1, 1 + self.num_rows * per_row))  # block 0 is what padded tables point at
        if self.shuffle:
            random.Random(0).shuffle(ids)
        self.rows = [PagedRow(ids[row * per_row : (row + 1) * per_row]) for row in range(self.num_rows)]
        decoder, num_blocks = self.decoder, 1 + self.num_rows * per_row
        dtype, platform = self.kv_dtype or self.dtype, self.platform
        cache = KVCache.allocate(decoder.kv_layouts, num_blocks, self.block_size, dtype, platform)
        for plane in cache.planes:
            as_indexable(plane).fill_(7)
        self.kv = cache.tensors

    def batch(self, work: list[tuple[int, list[int]]], all_logits: bool = False) -> ForwardBatch:
        """The batch in which each named row gets these tokens; advances the rows. Logits of the last tokens, or all."""
        ids, positions, slots, starts, seq_lens = [], [], [], [0], []
        for row_id, tokens in work:
            row = self.rows[row_id]
            for token in tokens:
                ids.append(token)
                positions.append(row.length)
                slots.append(row.blocks[row.length // self.block_size] * self.block_size + row.length % self.block_size)
                row.length += 1
            starts.append(len(ids))
            seq_lens.append(row.length)
        used = [-(-length // self.block_size) for length in seq_lens]
        table = torch.zeros(len(work), max(used), dtype=torch.int32)
        for index, ((row_id, _), count) in enumerate(zip(work, used, strict=True)):
            table[index, :count] = torch.tensor(self.rows[row_id].blocks[:count])
        logits_rows = list(range(len(ids))) if all_logits else [stop - 1 for stop in starts[1:]]
        return ForwardBatch(
            input_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            slot_mapping_T=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table_RN=table,
            logits_rows_S=torch.tensor(logits_rows),
            query_lens_list=[len(tokens) for _, tokens in work],
            seq_lens_list=seq_lens,
            block_size=self.block_size,
        )

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
