"""Paged attention on GPUs by a Triton kernel that reads the cache in place, for steps of any kind.

Chosen by workers/platforms/cuda.py where Triton is installed; torch_sdpa.py is the twin, and computes latents. Rows of
up to DECODE_QUERIES queries are decodes, whose contexts are cut into parts; others are chunks of prompts, which
prompts/ takes in large steps. The kernels compute any AttentionParams and read everything else on the device, drafts in
flight included. Shapes as in backend.py.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.triton.tiles import TunedTiles
from tandem.workers.kernels.triton.triton_attention import Kept, Multiprocessors, Rows, attend_chunks, takes
from tandem.workers.kernels.triton.triton_decode import WorkLists, attend_decodes
from tandem.workers.models.spec.arch import AttentionParams

__all__ = ["Multiprocessors", "TritonAttention", "takes"]

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
    """The backend, of heads. It keeps memory on the device between steps, so one instance serves one decoder."""

    name = "triton-paged"

    def __init__(
        self,
        multiprocessors: Multiprocessors | None = None,
        large_chunks: LargeChunks | None = None,
        tiles: TunedTiles | None = None,
    ) -> None:
        self._kept = Kept(multiprocessors, tiles)
        self._large_chunks = large_chunks

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        self._kept.parts(batch.positions_T.device)  # with the first step of all, behind which memory is measured
        return _Step(batch, self._kept, self._large_chunks)

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        """One for all steps: the kernels read what a row has of a table that holds any."""
        return ()


class _Step:
    """One step."""

    def __init__(self, batch: ForwardBatch, kept: Kept, large_chunks: LargeChunks | None) -> None:
        self._batch = batch
        self._kept = kept
        self._kinds = _kinds_in(batch, DECODES, CHUNKS)
        self._lists = WorkLists(batch.query_starts, batch.positions_T, DECODES)
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
            if kind is DECODES:
                attend_decodes(q_TND, kv, out_TNV, rows, params, self._kept, self._lists)
            else:
                attend_chunks(q_TND, kv, out_TNV, rows, params, self._kept, kind)
        return out_TNV


def _kinds_in(batch: ForwardBatch, *kinds: range) -> list[range]:
    """Return those kinds of which a batch has rows, by their numbers of queries."""
    return [kind for kind in kinds if any(queries in kind for queries in batch.query_lens_list)]
