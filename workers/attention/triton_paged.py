"""Paged attention on GPUs by a Triton kernel that reads the cache in place, for steps of any kind.

Chosen by workers/platforms/cuda.py where Triton is installed; torch_sdpa.py is the twin, and computes latents. Rows of
up to DECODE_QUERIES queries are decodes, whose contexts are split among programs; others are chunks of prompts, which
prompts/ takes in large steps. The kernel computes any AttentionParams and reads everything else on the device, drafts
in flight included. Shapes as in backend.py.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.triton.triton_attention import Numbers, Rows, attend, takes
from tandem.workers.models.spec.arch import AttentionParams

__all__ = ["TritonAttention", "takes"]

DECODES = range(1, DECODE_QUERIES + 1)
CHUNKS = range(DECODE_QUERIES + 1, 2**31)

TakeChunks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LayerKV, AttentionParams], torch.Tensor | None]
"""Takes what AttentionStep.attend takes; returns an output with a step's large chunks, None to leave them to the
kernel."""


class LargeChunks(Protocol):
    """Another way to attend, for rows of fewest_queries or more."""

    @property
    def fewest_queries(self) -> int: ...

    def prepare(self, batch: ForwardBatch) -> TakeChunks:
        """Return what takes those of a step."""
        ...


class TritonAttention:
    """The backend, of heads."""

    name = "triton-paged"

    def __init__(self, large_chunks: LargeChunks | None = None) -> None:
        self._numbers = Numbers()
        self._large_chunks = large_chunks

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return _Step(batch, self._numbers, self._large_chunks)

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        """One for all decodes: the kernel reads what a row has of a table that holds any."""
        return () if shape.most_queries <= DECODE_QUERIES else None

    def prepare_replay(self, batch: ForwardBatch, num_tokens: int, scratch_block: int) -> ReplayableStep:
        return _PaddedStep(batch, self._numbers, num_tokens, scratch_block)


class _Step:
    """One step."""

    def __init__(self, batch: ForwardBatch, numbers: Numbers, large_chunks: LargeChunks | None) -> None:
        self._batch = batch
        self._numbers = numbers
        self._kinds = _kinds_in(batch, DECODES, CHUNKS)
        self._take_large = None
        if large_chunks is not None:
            self._take_large = large_chunks.prepare(batch)
            self._others = _kinds_in(batch, DECODES, range(CHUNKS.start, large_chunks.fewest_queries))

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        batch = self._batch
        rows = Rows(batch.query_starts, batch.positions_T, batch.block_table(kv.group))
        out_TNV = None if self._take_large is None else self._take_large(q_TND, k_TKD, v_TKD, kv, params)
        kinds = self._kinds if out_TNV is None else self._others
        if out_TNV is None:
            out_TNV = q_TND.new_empty((*q_TND.shape[:2], v_TKD.shape[2]))
        for kind in kinds:
            in_parts = self._kinds == [DECODES]
            attend(q_TND, kv, out_TNV, rows, params, self._numbers, queries=kind, in_parts=in_parts)
        return out_TNV


def _kinds_in(batch: ForwardBatch, *kinds: range) -> list[range]:
    """Return those kinds of which a batch has rows, by their numbers of queries."""
    return [kind for kind in kinds if any(queries in kind for queries in batch.query_lens_list)]


class _PaddedStep:
    """A ReplayableStep of up to num_tokens tokens in as many rows. Padded tokens are rows of their own, which attend to
    the first slot of scratch_block."""

    def __init__(self, batch: ForwardBatch, numbers: Numbers, num_tokens: int, scratch_block: int) -> None:
        device = batch.block_table_RN.device
        self._numbers = numbers
        self._scratch_block = scratch_block
        width = batch.block_table_RN.shape[1]
        self._tables_RW = [
            torch.empty((num_tokens, width), dtype=torch.int32, device=device) for _ in range(batch.num_groups)
        ]
        self._positions_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._starts = torch.empty(num_tokens + 1, dtype=torch.int32, device=device)
        self._place = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        self.set_batch(batch)

    def set_batch(self, batch: ForwardBatch | None) -> None:
        if batch is None:
            for table_RW in self._tables_RW:
                table_RW.fill_(self._scratch_block)
            self._positions_T.zero_()
            self._starts.copy_(self._place)
            return
        rows, tokens = len(batch.query_lens_list), batch.num_tokens
        for group, table_RW in enumerate(self._tables_RW):
            table_RN = batch.block_table(group)
            width = min(table_RW.shape[1], table_RN.shape[1])
            table_RW[rows:].fill_(self._scratch_block)
            table_RW[:rows, :width] = table_RN[:, :width]
        self._positions_T[:tokens] = batch.positions_T
        self._positions_T[tokens:].zero_()
        self._starts[: rows + 1] = batch.query_starts
        self._starts[rows + 1 :] = (self._place[rows + 1 :] + (tokens - rows)).clamp_(max=len(self._positions_T))

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        rows = Rows(self._starts, self._positions_T, self._tables_RW[kv.group])
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], v_TKD.shape[2]))
        attend(q_TND, kv, out_TNV, rows, params, self._numbers, queries=DECODES, in_parts=True)
        return out_TNV
