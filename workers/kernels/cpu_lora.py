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

from workers.kernels.cpu_calls import COUNT, NUMBER, POINTER, Kernel, Scratch, keep
from workers.kernels.lora_ops import AdapterRows, SectionTables, TorchLora

LANES = 16
KNOWN_LAYERS = 512
"""Layers, with the sections that a step wants of each, remembered at most; beyond, all are forgotten."""
TILES = (4, 2, 1)
"""Tokens of one adapter that cpu_lora.c takes at a time."""
GEMM_TOKENS = 256
"""A run of at least so many tokens of one adapter goes through matmuls. As benchmarks/lora_kernels.py --runs found on a
Zen 5 core: the two meet near 128 tokens at rank 64, 256 at rank 16, above 512 at rank 8."""


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
        while own:
            count = next(size for size in TILES if size <= len(own))
            tiles.append((len(tokens), count, slot))
            tokens += own[:count]
            own = own[count:]
    runs = [segment for segment in segments if segment[1] - segment[0] >= gemm_tokens]
    return Work(torch.tensor(tokens, dtype=torch.int32), torch.tensor(tiles, dtype=torch.int32), runs)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's sections as cpu_lora.c wants them. Holds the sections, whose identities name it, and so their tensors.

    inputs: None where a width is not a whole number of vectors. room: floats of scratch that a token takes.
    """

    sections: tuple[SectionTables, ...]
    packed: "ctypes.Array[ctypes.c_int64]"
    inputs: int | None
    room: int


def pack_layer(sections: Sequence[SectionTables]) -> Layer:
    facts: list[int] = []
    for s in sections:
        assert s.a_rows.shape == s.b_rows.shape and s.inputs == sections[0].inputs
        assert all(table.is_contiguous() for table in (s.a_rows, s.b_rows, s.ranks, s.scales))
        pointers = (s.a_rows.data_ptr(), s.b_rows.data_ptr(), s.ranks.data_ptr(), s.scales.data_ptr())
        facts += (*pointers, s.a_rows.shape[1], s.outputs, s.start)
    whole = not any(s.inputs % LANES or s.outputs % LANES for s in sections)
    inputs = sections[0].inputs if whole else None
    return Layer(
        tuple(sections), (ctypes.c_int64 * len(facts))(*facts), inputs, sum(s.a_rows.shape[1] for s in sections)
    )


class CpuLora:
    """The compiled kernel for one element type. Keeps scratch memory, layers and the last step's work between calls.

    So an AdapterRows, once given, must not be changed; what tables hold may.
    """

    def __init__(self, library: ctypes.CDLL, gemm_tokens: int = GEMM_TOKENS) -> None:
        self._twin = TorchLora()
        self._gemm_tokens = gemm_tokens
        self._scratch = Scratch()
        self._rows = AdapterRows(torch.empty(0, dtype=torch.int32), [])
        self._work = cut_work([], gemm_tokens)
        self._layers: dict[tuple[int, ...], Layer] = {}
        self._add = Kernel(
            library, "lora_add", POINTER, NUMBER, POINTER, NUMBER, POINTER, NUMBER, POINTER, NUMBER, POINTER, NUMBER,
            POINTER, NUMBER, POINTER, COUNT,
        )  # fmt: skip
        self._gather = Kernel(library, "lora_gather", POINTER, POINTER, NUMBER, NUMBER, POINTER)

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        sections: Sequence[SectionTables],
        rows: AdapterRows,
    ) -> None:
        layer = self._layer_of(sections)
        if layer.inputs is None:
            self._twin.add(y_TO, x_TI, slab, sections, rows)
            return
        if rows is not self._rows:
            self._rows, self._work = rows, cut_work(rows.segments, self._gemm_tokens)
        if self._work.tokens.shape[0]:
            self._add_tiles(y_TO, x_TI, slab, layer, self._work)
        for first, last, slot in self._work.runs:
            self._add_run(y_TO[first:last], x_TI[first:last], slab, sections, slot)

    def _layer_of(self, sections: Sequence[SectionTables]) -> Layer:
        names = tuple(map(id, sections))
        layer = self._layers.get(names)
        if layer is None:
            if len(self._layers) == KNOWN_LAYERS:
                self._layers.clear()
            layer = self._layers[names] = pack_layer(sections)
        return layer

    def _add_tiles(self, y_TO: torch.Tensor, x_TI: torch.Tensor, slab: torch.Tensor, layer: Layer, work: Work) -> None:
        (num_tokens,), (num_tiles, _) = work.tokens.shape, work.tiles.shape
        assert y_TO.stride(1) == x_TI.stride(1) == 1 and slab.is_contiguous() and x_TI.shape[1] == layer.inputs
        assert y_TO.dtype == x_TI.dtype == slab.dtype
        self._scratch.reserve(num_tokens * layer.room)
        keep(work)
        self._add(
            y_TO.data_ptr(), y_TO.stride(0), x_TI.data_ptr(), x_TI.stride(0), slab.data_ptr(), layer.inputs,
            layer.packed, len(layer.sections), work.tokens.data_ptr(), num_tokens, work.tiles.data_ptr(), num_tiles,
            self._scratch.address, torch.get_num_threads(),
        )  # fmt: skip

    def _add_run(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, slab: torch.Tensor, sections: Sequence[SectionTables], slot: int
    ) -> None:
        """Tokens of one adapter: a matmul with the rows of A of all sections, then one per section with its B."""
        ranks = [int(section.ranks[slot]) for section in sections]
        if not any(ranks):
            return
        a_RI = torch.empty(sum(ranks), x_TI.shape[1], dtype=slab.dtype)
        for part, section in zip(a_RI.split(ranks), sections, strict=True):
            self._copy_rows(slab, section.a_rows[slot], part)
        for part, rank, section in zip((x_TI @ a_RI.T).split(ranks, dim=1), ranks, sections, strict=True):
            if rank:
                b_RO = torch.empty(rank, section.outputs, dtype=slab.dtype)
                self._copy_rows(slab, section.b_rows[slot], b_RO)
                columns = y_TO[:, section.start : section.start + section.outputs]
                columns.addmm_(part, b_RO, alpha=float(section.scales[slot]))

    def _copy_rows(self, slab: torch.Tensor, starts: torch.Tensor, out: torch.Tensor) -> None:
        """The rows that begin at `starts`, as many as `out` has."""
        self._gather(slab.data_ptr(), starts.data_ptr(), out.shape[0], out.shape[1], out.data_ptr())
