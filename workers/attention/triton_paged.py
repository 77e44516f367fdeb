"""Paged attention on GPUs by a Triton kernel that reads the cache in place, for steps of any kind.

Chosen by workers/platforms/cuda.py where Triton is installed; torch_sdpa.py is the twin, and computes latents. Rows of
up to DECODE_QUERIES queries are decodes, whose contexts are split among programs; others are chunks of prompts. The
kernel computes any AttentionParams and reads everything else on the device, drafts in flight included. Shapes as in
backend.py.
"""

from collections.abc import Hashable

import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.triton.triton_attention import Numbers, Rows, attend, takes
from tandem.workers.models.spec.arch import AttentionParams

__all__ = ["TritonAttention", "takes"]

DECODES = range(1, DECODE_QUERIES + 1)
CHUNKS = range(DECODE_QUERIES + 1, 2**31)


class TritonAttention:
    """The backend, of heads."""

    name = "triton-paged"

    def __init__(self) -> None:
        self._numbers = Numbers()

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return _Step(batch, self._numbers)

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        """One for all steps: the kernel reads what a row has of a table that holds any."""
        return ()


class _Step:
    """One step."""

    def __init__(self, batch: ForwardBatch, numbers: Numbers) -> None:
        self._batch = batch
        self._numbers = numbers
        most, least = max(batch.query_lens_list), min(batch.query_lens_list)
        self._kinds = [kind for kind in (DECODES, CHUNKS) if least < kind.stop and most >= kind.start]

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        batch = self._batch
        rows = Rows(batch.query_starts, batch.positions_T, batch.block_table(kv.group))
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], v_TKD.shape[2]))
        for kind in self._kinds:
            in_parts = self._kinds == [DECODES]
            attend(q_TND, kv, out_TNV, rows, params, self._numbers, queries=kind, in_parts=in_parts)
        return out_TNV
