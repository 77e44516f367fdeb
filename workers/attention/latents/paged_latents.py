"""Attention over latents on GPUs by Triton's kernels, which absorb and read the cache in place, for steps of any kind;
long prompts are expanded for torch's flash kernel.

Chosen by workers/platforms/cuda.py where Triton is installed; torch_latents.py is the twin. Everything but what is
expanded is read on the device. Shapes as in latent_backend.py.
"""

from collections.abc import Hashable, Iterator
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch

from tandem.workers.attention.chunks import Gatherer
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_backend import LatentStep
from tandem.workers.attention.latents.latent_chunks import LatentChunks, absorbs
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.attention.prompts.flash_prompts import FEWEST_TOKENS
from tandem.workers.attention.prompts.varlen_attention import VarlenAttention, VarlenChunks
from tandem.workers.attention.row_layout import Chunk, chunk_of, spare_len
from tandem.workers.attention.triton_paged import CHUNKS, DECODES
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore
from tandem.workers.kernels.triton.triton_attention import Kept, Multiprocessors, Rows
from tandem.workers.kernels.triton.triton_decode import WorkLists
from tandem.workers.kernels.triton.triton_latents import (
    LatentQueries,
    attend_latent_chunks,
    attend_latent_decodes,
    takes_latents,
)
from tandem.workers.models.spec.arch import AttentionParams, Mla

__all__ = ["TritonLatents", "takes_latents"]

ABSORBED_BYTES: Final = 96 * 2**20
"""Queries of latents and sums of them that there are at once: 3,072 tokens of 16 heads and 512 elements in 16 bits."""
EXPANDED_BYTES: Final = 64 * 2**20
"""Gathered latents, and what is made of them for the flash kernel, at once: some 58,000 positions of one head at most.
Both are parts of ATTENTION_BYTES (planning/budget.py)."""
FEWEST_EXPANDED: Final = 512
"""Queries of a row from which on it is expanded, in steps of FEWEST_TOKENS or more: some ten calls for each share of
the heads, where the kernel takes all rows by one."""


class TritonLatents:
    """The backend. flash: what attends expanded prompts; None: the kernel absorbs these too. It keeps memory on the
    device between steps, so one instance serves one decoder."""

    name = "triton-paged"

    def __init__(self, multiprocessors: Multiprocessors | None = None, flash: VarlenAttention | None = None) -> None:
        self._kept = Kept(multiprocessors)
        self._expanded: LatentChunks | None = None
        if flash is not None:
            gatherer = Gatherer(TorchKVStore())
            self._expanded = LatentChunks(gatherer, VarlenChunks(flash), keeps_scores=False, room_bytes=EXPANDED_BYTES)

    def prepare(self, batch: ForwardBatch) -> LatentStep:
        self._kept.parts(batch.positions_T.device)  # with the first step of all, behind which memory is measured
        return _AbsorbedStep(batch, self._kept, self._expanded)

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        """One for all steps: the kernels read what a row has of a table that holds any."""
        return ()


class _Run(NamedTuple):
    """Tokens of the step that the kernel takes at once. kinds: of their rows."""

    tokens: slice
    starts: torch.Tensor
    positions_T: torch.Tensor
    kinds: list[range]
    lists: WorkLists


class _AbsorbedStep:
    """One step."""

    def __init__(self, batch: ForwardBatch, kept: Kept, expanded: LatentChunks | None) -> None:
        self._batch = batch
        self._kept = kept
        self._large = expanded if batch.real_T is None and batch.num_tokens >= FEWEST_TOKENS else None
        self._cuts: dict[Hashable, tuple[list[_Run], list[Chunk]]] = {}

    def attend_latent(
        self, q_TND: torch.Tensor, latents_T1E: torch.Tensor, kv: LayerKV, params: AttentionParams, heads: LatentHeads
    ) -> torch.Tensor:
        assert params.is_plain and params.window is None, "scores that no family of latents has"
        q_TND, spec, table_RN = q_TND.contiguous(), heads.spec, self._batch.block_table(kv.group)
        out_TNV = torch.empty((*q_TND.shape[:2], spec.v_dim), dtype=q_TND.dtype, device=q_TND.device)
        runs, chunks = self._cut(q_TND, kv, spec)
        for run in runs:
            own_TND = q_TND[run.tokens]
            queries = LatentQueries(heads.onto_latents(own_TND), own_TND, spec.rope_dim, params.scale)
            sums_TNL = torch.empty_like(queries.q_TNL)
            rows = Rows(run.starts, run.positions_T, table_RN)
            for kind in run.kinds:
                if kind is DECODES:
                    attend_latent_decodes(queries, kv, sums_TNL, rows, self._kept, run.lists)
                else:
                    attend_latent_chunks(queries, kv, sums_TNL, rows, self._kept, kind)
            heads.release(sums_TNL, out_TNV[run.tokens])
        for chunk in chunks:
            assert self._large is not None
            own = slice(chunk.start, chunk.stop)
            out_TNV[own] = self._large.attend(chunk, q_TND, latents_T1E, kv, params, heads)
        return out_TNV

    def _cut(self, q_TND: torch.Tensor, kv: LayerKV, spec: Mla) -> tuple[list[_Run], list[Chunk]]:
        """Return what the kernel takes and what is expanded, which layers with one group of blocks share."""
        key = kv.group, spec, q_TND.dtype, q_TND.shape[1]
        if key not in self._cuts:
            batch, chunks = self._batch.of_group(kv.group), list[Chunk]()
            if self._large is not None:
                chunks = list(_large_rows(batch, self._large, q_TND, kv, spec))
            most = max(1, ABSORBED_BYTES // (2 * q_TND.shape[1] * spec.kv_rank * q_TND.element_size()))
            self._cuts[key] = [_run(batch, tokens) for tokens in _spans(len(q_TND), chunks, most)], chunks
        return self._cuts[key]


def _large_rows(
    batch: ForwardBatch, large: LatentChunks, q_TND: torch.Tensor, kv: LayerKV, spec: Mla
) -> Iterator[Chunk]:
    """Yield the rows that are expanded: those for which it multiplies less, and whose latents fit."""
    stop = 0
    for row, (queries, length) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
        start, stop = stop, stop + queries
        if queries < FEWEST_EXPANDED or spare_len(batch, row) or absorbs(spec, queries, length):
            continue
        chunk = chunk_of(batch, row, start, None, kv.keys.dtype is q_TND.dtype)
        if large.heads_at_once(chunk, q_TND[start:stop], spec):
            yield chunk


def _spans(num_tokens: int, without: list[Chunk], most: int) -> Iterator[range]:
    """Yield the tokens outside some rows, at most so many at once."""
    start = 0
    for stop, following in [*((chunk.start, chunk.stop) for chunk in without), (num_tokens, num_tokens)]:
        yield from (range(first, min(first + most, stop)) for first in range(start, stop, most))
        start = following


def _run(batch: ForwardBatch, tokens: range) -> _Run:
    """Return a run of tokens; a row that it cuts has fewer queries there, at the same positions."""
    starts, positions_T = batch.query_starts, batch.positions_T
    if len(tokens) < len(positions_T):
        starts = (starts - tokens.start).clamp_(0, len(tokens))
        positions_T = positions_T[tokens.start : tokens.stop]
    lists = WorkLists(starts, positions_T, DECODES)
    return _Run(slice(tokens.start, tokens.stop), starts, positions_T, _kinds_in(batch, tokens), lists)


def _kinds_in(batch: ForwardBatch, tokens: range) -> list[range]:
    """Return the kinds of rows that a run may have; a captured step's lists say which kinds that has."""
    lengths = {1, *batch.query_lens_list}
    if batch.real_T is None:
        ends = list(accumulate(batch.query_lens_list, initial=0))
        lengths = {min(stop, tokens.stop) - max(start, tokens.start) for start, stop in pairwise(ends)}
    return [kind for kind in (DECODES, CHUNKS) if any(length in kind for length in lengths)]
