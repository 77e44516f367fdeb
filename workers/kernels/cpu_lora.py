"""LoraOps compiled for CPUs: one call a layer for all its sections and all adapters of the step.

Formula and layouts as in lora_ops.py, whose TorchLora is the twin and serves widths that are not whole vectors of 16
elements. Tokens of one adapter are put together, wherever they stand in the step, and read its rows once per 4 of
them; true ranks, bf16 and fp32, summed in fp32. Memory bounds it: the floor is the bytes of the adapters in use. Long
runs (prompts) are two matmuls each over the gathered rows; in bf16 what lies between the two is rounded to bf16.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kernels.lora_ops import AdapterRows, SectionTables, TorchLora, gathered

LANES = 16
TILE_TOKENS = 4
"""TILE of cpu_lora.c."""
GEMM_TOKENS = 32
"""A run of at least so many tokens of one adapter goes through matmuls. Measured by benchmarks/lora_kernels.py."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done for one step's rows, the same in every layer.

    tokens: int32 [N], grouped by slot. tiles: int32 [tiles, 3]: first of `tokens`, how many, slot. runs: (first token,
    last + 1, slot) of each long run.
    """

    tokens: torch.Tensor
    tiles: torch.Tensor
    runs: list[tuple[int, int, int]]


def cut_work(segments: Sequence[tuple[int, int, int]], gemm_tokens: int) -> Work:
    """Runs of at least gemm_tokens apart; the tokens of all others by slot, cut in tiles."""
    by_slot: dict[int, list[int]] = {}
    for first, last, slot in segments:
        if last - first < gemm_tokens:
            by_slot.setdefault(slot, []).extend(range(first, last))
    tokens: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for slot, own in by_slot.items():
        for at in range(0, len(own), TILE_TOKENS):
            tiles.append((len(tokens) + at, min(TILE_TOKENS, len(own) - at), slot))
        tokens += own
    runs = [segment for segment in segments if segment[1] - segment[0] >= gemm_tokens]
    return Work(torch.tensor(tokens, dtype=torch.int32), torch.tensor(tiles, dtype=torch.int32), runs)


class CpuLora:
    """The compiled kernel for one element type. Keeps scratch memory and the last step's work between calls."""

    def __init__(self, library: ctypes.CDLL, gemm_tokens: int = GEMM_TOKENS) -> None:
        self._twin = TorchLora()
        self._gemm_tokens = gemm_tokens
        self._scratch = torch.empty(0)
        self._rows = AdapterRows(torch.empty(0, dtype=torch.int32), [])
        self._work = cut_work([], gemm_tokens)
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._add = library.lora_add
        self._add.restype = None
        self._add.argtypes = [
            pointer, number, pointer, number, pointer, number, pointer, number, pointer, number, pointer, number,
            pointer, ctypes.c_int,
        ]  # fmt: skip

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        sections: Sequence[SectionTables],
        rows: AdapterRows,
    ) -> None:
        if any(section.inputs % LANES or section.outputs % LANES for section in sections):
            self._twin.add(y_TO, x_TI, slab, sections, rows)
            return
        if rows is not self._rows:
            self._rows, self._work = rows, cut_work(rows.segments, self._gemm_tokens)
        if self._work.tokens.shape[0]:
            self._add_tiles(y_TO, x_TI, slab, sections, self._work)
        for first, last, slot in self._work.runs:
            for section in sections:
                _add_run(y_TO[first:last], x_TI[first:last], slab, section, slot)

    def _add_tiles(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, slab: torch.Tensor, sections: Sequence[SectionTables], work: Work
    ) -> None:
        inputs, num_tokens = x_TI.shape[1], work.tokens.shape[0]
        assert y_TO.stride(1) == x_TI.stride(1) == 1 and slab.is_contiguous()
        assert all(section.inputs == inputs for section in sections)
        assert y_TO.dtype == x_TI.dtype == slab.dtype
        facts: list[int] = []
        size = 0
        for section in sections:
            room = section.a_rows.shape[1]
            size += num_tokens * room
            facts += (
                section.a_rows.data_ptr(), section.b_rows.data_ptr(), section.ranks.data_ptr(),
                section.scales.data_ptr(), room, section.outputs, section.start,
            )  # fmt: skip
        if self._scratch.shape[0] < size:
            self._scratch = torch.empty(size)
        self._add(
            y_TO.data_ptr(), y_TO.stride(0), x_TI.data_ptr(), x_TI.stride(0), slab.data_ptr(), inputs,
            (ctypes.c_int64 * len(facts))(*facts), len(sections), work.tokens.data_ptr(), num_tokens,
            work.tiles.data_ptr(), work.tiles.shape[0], self._scratch.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip


def _add_run(y_TO: torch.Tensor, x_TI: torch.Tensor, slab: torch.Tensor, section: SectionTables, slot: int) -> None:
    """Tokens of one adapter, as two matmuls in their own dtype."""
    rank = int(section.ranks[slot])
    if rank == 0:
        return
    a_RI = gathered(slab, section.a_rows[slot, :rank], section.inputs)
    b_RO = gathered(slab, section.b_rows[slot, :rank], section.outputs)
    columns = y_TO[:, section.start : section.start + section.outputs]
    columns.addmm_(x_TI @ a_RI.T, b_RO, alpha=float(section.scales[slot]))
