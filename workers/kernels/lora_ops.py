"""Grouped LoRA: what a step's adapters add to one linear layer, as one call: its data, a Protocol, and the torch twin.

    y[t, start:start + outputs] += scale * sum over k of (x[t] . A_k) * B_k        k < the adapter's own rank

Weights lie in a slab, one row of A or of B transposed after another, wherever its pages are: tables say where each row
begins, per slot. Called by workers/lora; compiled for CPUs in cpu_lora.py, for GPUs in triton_lora.py. The idea of one
grouped shrink and expand over mixed ranks: Punica (Chen et al. 2023), S-LoRA (Sheng et al. 2023). Never allocates or
moves adapters. T tokens, N of them with an adapter, I inputs, O outputs of the merged layer, R ranks a table has room
for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

GEMM_TOKENS = 32
"""A run of at least so many tokens of one adapter is two matmuls over its gathered rows."""
GATHER_TOKENS = 64
"""Tokens of shorter runs whose rows are gathered at once; bounds the twin's memory."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which tokens of a step use which slot.

    slots_T: int32 on the layers' device, -1 where a token has no adapter. segments: the same on the host, maximal runs
    (first token, last + 1, slot) of equal slot >= 0 in token order.
    """

    slots_T: torch.Tensor
    segments: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class SectionTables:
    """One checkpoint linear inside a (merged) layer on this rank; tensors on the slab's device, contiguous.

    a_rows: int64 [slots, R], where row k of A begins in the flat slab, in elements; -1 beyond the slot's rank. b_rows:
    the same for the rows of B transposed. ranks: int32 [slots], 0 where the adapter leaves this linear alone. scales:
    float32 [slots]. inputs, outputs: elements of a row of A, of B transposed. start: first column in the merged y.
    """

    a_rows: torch.Tensor
    b_rows: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    inputs: int
    outputs: int
    start: int


class LoraOps(Protocol):
    """One implementation for the layers' device and dtype. Serves one thread."""

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        sections: Sequence[SectionTables],
        rows: AdapterRows,
    ) -> None:
        """Adds the adapters' part to y in place, summed in float32. Tokens without an adapter keep their bits.

        x, y and the contiguous slab have one dtype; rows of x and y may lie apart, their elements may not.
        """
        ...


class TorchLora:
    """The twin: any device and dtype. Reads ranks on the host, so it waits for the device and fits no CUDA graph."""

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        sections: Sequence[SectionTables],
        rows: AdapterRows,
    ) -> None:
        short = [
            token for first, last, _ in rows.segments if last - first < GEMM_TOKENS for token in range(first, last)
        ]
        tokens_N = torch.tensor(short, dtype=torch.int64, device=y_TO.device)
        for section in sections:
            for part_N in tokens_N.split(GATHER_TOKENS) if short else ():
                _add_tokens(y_TO, x_TI, slab, section, part_N, rows.slots_T[part_N].long())
            for first, last, slot in rows.segments:
                if last - first >= GEMM_TOKENS:
                    _add_run(y_TO[first:last], x_TI[first:last], slab, section, slot)


def gathered(slab: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """[*starts.shape, length]: the rows of the flat slab that begin at `starts`, zeros where a start is -1."""
    rows = slab.view(-1).unfold(0, length, 1)[starts.clamp(min=0)]
    return rows.masked_fill_((starts < 0)[..., None], 0)


def _add_tokens(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    slab: torch.Tensor,
    section: SectionTables,
    tokens_N: torch.Tensor,
    slots_N: torch.Tensor,
) -> None:
    """Tokens of any adapters: each gathers its own rows, cut at the greatest rank among them."""
    rank = int(section.ranks[slots_N].max())
    if rank == 0:
        return
    a_NRI = gathered(slab, section.a_rows[slots_N, :rank], section.inputs).float()
    b_NRO = gathered(slab, section.b_rows[slots_N, :rank], section.outputs).float()
    shrunk_N1R = (a_NRI @ x_TI[tokens_N].float()[:, :, None]).transpose(1, 2) * section.scales[slots_N][:, None, None]
    touched = section.ranks[slots_N] > 0
    columns = y_TO[:, section.start : section.start + section.outputs]
    sums_NO = columns[tokens_N].float() + (shrunk_N1R @ b_NRO).squeeze(1)
    columns[tokens_N[touched]] = sums_NO[touched].to(y_TO.dtype)


def _add_run(y_TO: torch.Tensor, x_TI: torch.Tensor, slab: torch.Tensor, section: SectionTables, slot: int) -> None:
    """Tokens of one adapter."""
    rank = int(section.ranks[slot])
    if rank == 0:
        return
    a_RI = gathered(slab, section.a_rows[slot, :rank], section.inputs).float()
    b_RO = gathered(slab, section.b_rows[slot, :rank], section.outputs).float()
    columns = y_TO[:, section.start : section.start + section.outputs]
    columns.copy_(columns.float() + (x_TI.float() @ a_RI.T * section.scales[slot]) @ b_RO)
