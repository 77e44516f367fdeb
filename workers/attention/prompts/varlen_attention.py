"""Attention of several rows at once over contiguous contexts of any lengths: a Protocol, torch's flash kernel for it,
and the twin that says row by row what that computes.

T queries of all rows, J keys of all rows, N query heads, K KV heads, D elements of a head.
"""

from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tandem.workers.attention.chunks import SdpaChunks
from tandem.workers.models.spec.arch import AttentionParams

MOST_ELEMENTS: Final = 256
"""Elements of a head that the flash kernel takes at most, in eights."""


class Ragged(NamedTuple):
    """The rows of a call. q_starts, k_starts: int32 [R + 1] on the device, their places among the queries and the keys;
    most_queries, most_keys: of a row."""

    q_starts: torch.Tensor
    k_starts: torch.Tensor
    most_queries: int
    most_keys: int


class VarlenAttention(Protocol):
    """Causal attention whose queries are the last of each row's positions, within the window if there is one."""

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether it computes heads of this size."""
        ...

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, rows: Ragged, params: AttentionParams
    ) -> torch.Tensor:
        """Return out_TND, contiguous. params are plain."""
        ...


class FlashVarlen:
    """VarlenAttention by the FlashAttention-2 (Dao 2023) that torch brings for CUDA."""

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= MOST_ELEMENTS

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, rows: Ragged, params: AttentionParams
    ) -> torch.Tensor:
        """Call the operator behind torch.nn.attention.varlen, of which a window of 0 to the right makes it causal from
        the rows' last keys. Without its block_table, which is wrong for rows of several queries (pytorch#194167)."""
        out_TND: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q_TND, k_JKD, v_JKD, rows.q_starts, rows.k_starts, rows.most_queries, rows.most_keys, 0.0, True, False,
            scale=params.scale,
            window_size_left=-1 if params.window is None else params.window - 1,
            window_size_right=0,
        )[0]  # fmt: skip
        return out_TND.contiguous()


class VarlenChunks:
    """ChunkAttention of one row by a VarlenAttention, also where values have fewer elements than keys."""

    def __init__(self, varlen: VarlenAttention) -> None:
        self.varlen = varlen

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        (tokens, _, dim), positions, v_dim = q_TND.shape, len(k_JKD), v_JKD.shape[2]
        starts = torch.zeros((2, 2), dtype=torch.int32, device=q_TND.device)
        starts[0, 1], starts[1, 1] = tokens, positions
        wide_JKD = F.pad(v_JKD, (0, dim - v_dim))
        rows = Ragged(starts[0], starts[1], tokens, positions)
        return self.varlen.attend(q_TND, k_JKD, wide_JKD, rows, params)[..., :v_dim]


class SdpaVarlen:
    """The twin, for tests."""

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        return True

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, rows: Ragged, params: AttentionParams
    ) -> torch.Tensor:
        (q_ends, k_ends), sdpa = (starts.tolist() for starts in (rows.q_starts, rows.k_starts)), SdpaChunks()
        spans = zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False)
        return torch.cat([sdpa.attend(q_TND[a:b], k_JKD[c:d], v_JKD[c:d], params) for a, b, c, d in spans])
