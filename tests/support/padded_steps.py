"""Attention of steps as a captured one has them: padded to its room, on the tables of its own."""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.attention.forward_batch import ForwardBatch, GroupTable
from tandem.workers.planning.graph_room import PADDED_QUERIES, CaptureSize
from tandem.workers.rank.captured.frame import NOTHING, PaddingRows, with_room
from tests.support.interpreted import DEVICE

SCRATCH = 0
"""The block that belongs to nobody."""


class Padded:
    """A backend, of heads or of latents, whose steps are captured ones, with room for num_tokens; padding stands behind
    a batch's tokens. backend: None: Triton's, of heads."""

    name = "padded"

    def __init__(self, num_tokens: int, *, has_chunks: bool = False, backend: Any = None) -> None:
        from tandem.workers.attention.triton_paged import TritonAttention

        self.backend = backend or TritonAttention()
        rows = 4 + num_tokens // PADDED_QUERIES if has_chunks else num_tokens
        self._size = CaptureSize(num_tokens, 20, False, has_chunks, rows, 1)

    def prepare(self, batch: ForwardBatch) -> Any:
        size, count = self._size, len(batch.query_lens_list)
        copy = NOTHING._replace(
            ids_T=np.zeros(batch.num_tokens, np.int64),
            rows_R=np.arange(count),
            lens_R=np.array(batch.query_lens_list, np.int32),
            steps_T=batch.positions_T.cpu().numpy(),
        )
        padded = with_room(copy, size, PaddingRows(9, 10), None, drafts=False)
        tables = [torch.full((size.num_rows, 20), SCRATCH, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        for group, table_RN in enumerate(tables):
            table_RN[:count, : batch.block_table_RN.shape[1]] = batch.block_table(min(group, batch.num_groups - 1))
        tokens_T = torch.arange(size.num_tokens, device=DEVICE)
        step = self.backend.prepare(
            dataclasses.replace(
                batch,
                positions_T=torch.from_numpy(padded.steps_T).to(DEVICE),  # type: ignore[arg-type]
                query_starts=torch.from_numpy(padded.starts).to(DEVICE),  # type: ignore[arg-type]
                block_table_RN=tables[0],
                further_groups=(GroupTable(tokens_T, tables[1]),),
                query_lens_list=[1, DECODE_QUERIES + 1] if size.has_chunks else [1],
                real_T=tokens_T < batch.num_tokens,
            )
        )

        def padded_attend(attend: Callable[..., torch.Tensor], q: torch.Tensor, *more: Any) -> torch.Tensor:
            q = torch.cat((q, q.new_zeros((size.num_tokens - len(q), *q.shape[1:]))))
            found = attend(q, *more)
            assert found.isfinite().all(), "padding too"
            return found[: batch.num_tokens]

        members = (name for name in ("attend", "attend_latent") if hasattr(step, name))
        return SimpleNamespace(**{name: partial(padded_attend, getattr(step, name)) for name in members})

    def replay_key(self, *of_step: Any) -> None:
        raise AssertionError("not asked")
