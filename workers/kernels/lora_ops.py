"""Grouped LoRA: the product of a step's adapters with one linear layer, as one call: a Protocol and its torch twin.

    y[t, start:start + outputs] += scale * sum over k of (x[t] . A_k) * B_k        k < the adapter's own rank

Rows of A and of B transposed are stored in pages of a slab, each padded with finite numbers to a multiple of
ALIGNED_ELEMENTS; tables hold the start of each row, such a multiple too, per slot. Called by
workers/lora; compiled for CPUs in cpu_lora.py, for GPUs in triton_lora.py. One grouped shrink and expand over mixed
ranks comes from Punica (Chen et al. 2023) and S-LoRA (Sheng et al. 2023). Never allocates or moves adapters. T tokens,
N of them with an adapter, I inputs, O outputs of the merged layer, R ranks of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

GEMM_TOKENS = 32
"""A run of at least so many tokens of one adapter is computed as two matmuls over its gathered rows."""
GATHER_TOKENS = 64
"""The most tokens of shorter runs whose rows are gathered at once; bounds the twin's memory."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapter slot of each token of a step.

    slots_T: int32 on the layers' device, -1 where a token has no adapter. segments: the same on the host, maximal runs
    (first token, last + 1, slot) of equal slot >= 0 in token order.
    """

    slots_T: torch.Tensor
    segments: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class ProjectionTables:
    """The tables of one projection of a (merged) layer on this rank; tensors on the slab's device, contiguous.

    a_rows: int64 [slots, R], the start of row k of A in the flat slab, in elements; -1 beyond the slot's rank. b_rows:
    the same for the rows of B transposed. ranks: int32 [slots], 0 where the adapter does not change this projection.
    scales: float32 [slots]. inputs, outputs: elements of a row of A, of B transposed. start: first column in the merged
    y.
    """

    a_rows: torch.Tensor
    b_rows: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    inputs: int
    outputs: int
    start: int


class LoraOps(Protocol):
    """An implementation for the layers' device and dtype. Serves one thread.

    warm_up_tokens: numbers of tokens with which, for each shape of layer, every kernel is called that a step may call.
    reads_slots: calls depend on shapes alone; slots are read on the device, so that a graph serves any mix of adapters.
    """

    warm_up_tokens: tuple[int, ...]
    reads_slots: bool

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        projections: Sequence[ProjectionTables],
        rows: AdapterRows,
    ) -> None:
        """Adds the adapters' part to y in place, summed in float32. Tokens without an adapter keep their bits.

        x, y and the contiguous slab have one dtype; rows of x and y may have a stride, their elements may not.
        """
        ...


class TorchLora:
    """The twin, for any device and dtype. It reads ranks on the host, so it waits for the device and cannot be in a
    CUDA graph."""

    warm_up_tokens: tuple[int, ...] = (1, GEMM_TOKENS)
    reads_slots = False

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        projections: Sequence[ProjectionTables],
        rows: AdapterRows,
    ) -> None:
        short = [
            token for first, last, _ in rows.segments if last - first < GEMM_TOKENS for token in range(first, last)
        ]
        tokens_N = torch.tensor(short, dtype=torch.int64, device=y_TO.device)
        for projection in projections:
            for part_N in tokens_N.split(GATHER_TOKENS) if short else ():
                _add_tokens(y_TO, x_TI, slab, projection, part_N, rows.slots_T[part_N].long())
            for first, last, slot in rows.segments:
                if last - first >= GEMM_TOKENS:
                    _add_run(y_TO[first:last], x_TI[first:last], slab, projection, slot)


def gathered(slab: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Returns [*starts.shape, length]: rows of the flat slab that begin at `starts`, zeros where a start is -1."""
    rows = slab.view(-1).unfold(0, length, 1)[starts.clamp(min=0)]
    return rows.masked_fill_((starts < 0)[..., None], 0)


def _add_tokens(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    slab: torch.Tensor,
    projection: ProjectionTables,
    tokens_N: torch.Tensor,
    slots_N: torch.Tensor,
) -> None:
    """Adds for tokens of any adapters: each gathers its own rows, up to the greatest rank among them."""
    rank = int(projection.ranks[slots_N].max())
    if rank == 0:
        return
    a_NRI = gathered(slab, projection.a_rows[slots_N, :rank], projection.inputs).float()
    b_NRO = gathered(slab, projection.b_rows[slots_N, :rank], projection.outputs).float()
    shrunk_N1R = (a_NRI @ x_TI[tokens_N].float()[:, :, None]).transpose(1, 2) * projection.scales[slots_N][
        :, None, None
    ]
    touched = projection.ranks[slots_N] > 0
    columns = y_TO[:, projection.start : projection.start + projection.outputs]
    sums_NO = columns[tokens_N].float() + (shrunk_N1R @ b_NRO).squeeze(1)
    columns[tokens_N[touched]] = sums_NO[touched].to(y_TO.dtype)


def _add_run(
    y_TO: torch.Tensor, x_TI: torch.Tensor, slab: torch.Tensor, projection: ProjectionTables, slot: int
) -> None:
    """Adds for consecutive tokens of one adapter."""
    rank = int(projection.ranks[slot])
    if rank == 0:
        return
    a_RI = gathered(slab, projection.a_rows[slot, :rank], projection.inputs).float()
    b_RO = gathered(slab, projection.b_rows[slot, :rank], projection.outputs).float()
    columns = y_TO[:, projection.start : projection.start + projection.outputs]
    columns.copy_(columns.float() + (x_TI.float() @ a_RI.T * projection.scales[slot]) @ b_RO)
