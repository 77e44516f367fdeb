"""Large chunks of prompts by a VarlenAttention in place of triton_attention.py, which is slower for many queries and
slower still over quantized caches.

Their contexts are gathered from the cache, as numbers, into one piece of memory that all layers use in turn; chunks
that begin a prompt are attended over the step's own keys and values where the cache stores these unchanged. A piece has
whole contexts: of several rows, or of one row in as many KV heads as fit. So no softmax is ever split, and nothing has
to be merged. Lengths and blocks are read on the device; the host's copies of the lengths decide how a step is cut.

T tokens, R rows of a piece, J positions of their contexts, N query heads, K KV heads, D elements of a head.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.prompts.varlen_attention import Ragged, VarlenAttention
from tandem.workers.attention.row_layout import spare_len
from tandem.workers.attention.triton_paged import TakeChunks
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.triton.triton_gather import gather
from tandem.workers.models.spec.arch import AttentionParams

PIECE_BYTES: Final = 128 * 2**20
"""The memory of a piece: 32,768 positions of 8 KV heads of 128 elements in 16 bits, so that a call has enough to do,
and 262,144 of one head. It is part of ATTENTION_BYTES (planning/budget.py)."""
FEWEST_TOKENS: Final = 1025
"""Tokens of a step from which on it pays to gather. Steps of fewer are where a captured graph saves most, and that may
hold no call whose arguments are numbers of the host."""
FEWEST_QUERIES: Final = 128
"""Queries of a row from which on it pays to gather its context, which is written and read once more than by our kernel:
by arithmetic the time of some 50 queries there."""


class Piece(NamedTuple):
    """Rows of the step that are attended at once. firsts: int32 [R], the positions that their contexts begin with; None
    where their keys are the step's own. table_RN: their blocks. num_keys: J."""

    tokens: slice
    rows: Ragged
    firsts: torch.Tensor | None
    table_RN: torch.Tensor
    num_keys: int


class FlashPrompts:
    """The steps of a decoder. fewest_tokens: of a step, and fewest_queries: of a row, to be taken. It keeps memory
    between steps, so one instance serves one decoder on one thread."""

    def __init__(
        self, varlen: VarlenAttention, fewest_tokens: int = FEWEST_TOKENS, fewest_queries: int = FEWEST_QUERIES
    ) -> None:
        self.varlen = varlen
        self.fewest_tokens = fewest_tokens
        self.fewest_queries = fewest_queries
        self._memory: torch.Tensor | None = None
        self._gathered: set[Hashable] = set()

    def prepare(self, batch: ForwardBatch) -> TakeChunks:
        return PromptStep(batch, self).attend

    def suits(self, q_TND: torch.Tensor, kv: LayerKV, params: AttentionParams) -> bool:
        """Return whether chunks of a layer may be taken, as far as the layer says it."""
        dim = q_TND.shape[2]
        return params.is_plain and kv.values.shape[3] == dim and self.varlen.takes(q_TND.dtype, dim)

    def memory(self, kv: LayerKV, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a piece. The first step with a layer that suits makes it, whatever its size: so
        profiling has it when it measures what the KV pool may take. It gathers no position then, for the kernel to be
        compiled at the start, whose prompts may all have keys of their own."""
        if self._memory is None:
            self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=kv.keys.device)
        heads, dim = kv.keys.shape[2:]
        if (kind := (kv.keys.dtype, kv.keys.shape[1:], dtype)) not in self._gathered:
            self._gathered.add(kind)
            none = torch.zeros(3, dtype=torch.int32, device=kv.keys.device)
            pair_21KD = self._memory[: _key_bytes(dim, dtype) * heads].view(dtype).view(2, 1, heads, dim)
            gather(kv, none[:2], none[2:], none[None, :1], pair_21KD, 0)
        return self._memory


class PromptStep:
    """Large chunks of one step, cut into pieces once for layers with one window, group of blocks and kind of cache."""

    def __init__(self, batch: ForwardBatch, prompts: FlashPrompts) -> None:
        self._batch = batch
        self._prompts = prompts
        self._made: dict[Hashable, list[Piece]] = {}

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor | None:
        """Return out_TND with the tokens of all large chunks, others undefined; None where triton_attention.py is to
        compute them."""
        if not self._prompts.suits(q_TND, kv, params):
            return None
        memory = self._prompts.memory(kv, q_TND.dtype)
        kind = params.window, kv.group, kv.keys.dtype is q_TND.dtype, kv.keys.shape[2:]
        if kind not in self._made:
            self._made[kind] = self._cut(kv, q_TND.dtype, params.window)
        out_TND: torch.Tensor | None = None
        for tokens, heads, part_TND in self._parts(self._made[kind], q_TND, k_TKD, v_TKD, kv, params, memory):
            if part_TND.shape == q_TND.shape:
                return part_TND
            if out_TND is None:
                out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
            out_TND[tokens, heads] = part_TND
        return out_TND

    def _parts(
        self,
        pieces: Sequence[Piece],
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        memory: torch.Tensor,
    ) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield tokens and query heads with their outputs."""
        attend, (kv_heads, dim) = self._prompts.varlen.attend, kv.keys.shape[2:]
        group = q_TND.shape[1] // kv_heads
        for tokens, rows, firsts, table_RN, num_keys in pieces:
            if firsts is None:
                yield tokens, slice(None), attend(q_TND[tokens], k_TKD[tokens], v_TKD[tokens], rows, params)
                continue
            of_head = num_keys * _key_bytes(dim, q_TND.dtype)
            for heads in _shares(kv_heads, PIECE_BYTES // of_head):
                pair_2JKD = memory[: of_head * len(heads)].view(q_TND.dtype).view(2, num_keys, len(heads), dim)
                gather(kv, rows.k_starts, firsts, table_RN, pair_2JKD, heads.start)
                own = slice(heads.start * group, heads.stop * group)
                keys_JKD, values_JKD = pair_2JKD
                yield tokens, own, attend(q_TND[tokens, own], keys_JKD, values_JKD, rows, params)

    def _cut(self, kv: LayerKV, dtype: torch.dtype, window: int | None) -> list[Piece]:
        """Return the pieces; none where the step has too few tokens, or of a large chunk the host does not know the
        length, or the context is too long for a piece."""
        batch, (kv_heads, dim) = self._batch.of_group(kv.group), kv.keys.shape[2:]
        if batch.num_tokens < self._prompts.fewest_tokens:
            return []
        most, cuts = PIECE_BYTES // _key_bytes(dim, dtype), list[tuple[range, bool, int]]()
        for row, (queries, length) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
            if queries < self._prompts.fewest_queries:
                continue
            is_own = kv.keys.dtype is dtype and queries == length
            num_keys = length if window is None or is_own else min(length, queries + window - 1)
            if spare_len(batch, row) or (num_keys > most and not is_own):
                return []
            if cuts and cuts[-1][0].stop == row and cuts[-1][1] == is_own:
                rows, _, before = cuts[-1]
                if is_own or (before + num_keys) * kv_heads <= most:
                    cuts[-1] = range(rows.start, row + 1), is_own, before + num_keys
                    continue
            cuts.append((range(row, row + 1), is_own, num_keys))
        return [_piece(batch, *cut, window) for cut in cuts]


def _piece(batch: ForwardBatch, rows: range, is_own: bool, num_keys: int, window: int | None) -> Piece:
    """Return the piece of some rows. Its tensors are made on the device: nothing is copied there."""
    own, first = slice(rows.start, rows.stop), sum(batch.query_lens_list[: rows.start])
    queries, lengths = batch.query_lens_list[own], batch.seq_lens_list[own]
    tokens, table_RN = slice(first, first + sum(queries)), batch.block_table_RN[own]
    starts, lengths_R = batch.query_starts[rows.start : rows.stop + 1], batch.seq_lens[own]
    q_starts = starts - starts[:1]
    if is_own:
        return Piece(tokens, Ragged(q_starts, q_starts, max(queries), max(queries)), None, table_RN, num_keys)
    firsts = torch.zeros_like(lengths_R)
    if window is not None:
        firsts = (lengths_R - starts.diff() - (window - 1)).clamp_(min=0)
    k_starts = F.pad((lengths_R - firsts).cumsum(0, dtype=torch.int32), (1, 0))
    return Piece(tokens, Ragged(q_starts, k_starts, max(queries), max(lengths)), firsts, table_RN, num_keys)


def _key_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a key and a value of one head."""
    return 2 * dim * dtype.itemsize


def _shares(heads: int, most: int) -> Iterator[range]:
    """Yield ranges of at most so many heads, as equal as can be."""
    each = -(-heads // -(-heads // most))
    return (range(start, min(start + each, heads)) for start in range(0, heads, each))
