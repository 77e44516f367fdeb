"""LoraOps compiled for CPUs: one call per layer for all its projections and all adapters of the step.

Formula and layouts as in lora_ops.py, whose TorchLora is the twin and serves widths of partial vectors (of 16
elements). Tokens of one adapter are grouped, whatever their order in the step, and read its rows once per 4 tokens.
True ranks, bf16 and fp32, summed in fp32. Bound by memory: the roofline is the bytes of the adapters in use. Long runs
(prefill) are two matmuls each over the gathered rows; in bf16 the values between the two are rounded to bf16.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel, Scratch, keep
from tandem.workers.kernels.lora_ops import AdapterRows, LoraOps, ProjectionTables, TorchLora

LANES = 16
KNOWN_LAYERS = 512
"""The most packed layers to remember; beyond that, all are dropped."""
TILES = (4, 2, 1)
"""Tokens of one adapter that cpu_lora.c computes at a time."""
GEMM_TOKENS = 256
"""A run of at least so many tokens of one adapter goes through matmuls. benchmarks/kernels/lora_kernels.py --runs on a
Zen 5 core: both ways take the same time near 128 tokens at rank 64, 256 at rank 16, above 512 at rank 8."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work for one step's rows, the same in every layer.

    tokens: int32 [N], grouped by slot. tiles: int32 [tiles, 3]: first of `tokens`, how many, slot. runs: (first token,
    last + 1, slot) of each long run.
    """

    tokens: torch.Tensor
    tiles: torch.Tensor
    runs: list[tuple[int, int, int]]


def split_work(segments: Sequence[tuple[int, int, int]], gemm_tokens: int) -> Work:
    """Separates runs of at least gemm_tokens; groups all other tokens by slot and splits them into tiles."""
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
    """A layer's projections in cpu_lora.c's form. It keeps them, and so their tensors, alive: their identities are its
    key.

    inputs: None where a width is not a multiple of a vector. room: floats of scratch per token.
    """

    projections: tuple[ProjectionTables, ...]
    packed: "ctypes.Array[ctypes.c_int64]"
    inputs: int | None
    room: int


def pack_layer(projections: Sequence[ProjectionTables]) -> Layer:
    """Returns the layer of these projections."""
    facts: list[int] = []
    for s in projections:
        assert s.a_rows.shape == s.b_rows.shape and s.inputs == projections[0].inputs
        assert all(table.is_contiguous() for table in (s.a_rows, s.b_rows, s.ranks, s.scales))
        pointers = (s.a_rows.data_ptr(), s.b_rows.data_ptr(), s.ranks.data_ptr(), s.scales.data_ptr())
        facts += (*pointers, s.a_rows.shape[1], s.outputs, s.start)
    whole = not any(s.inputs % LANES or s.outputs % LANES for s in projections)
    inputs = projections[0].inputs if whole else None
    return Layer(
        tuple(projections), (ctypes.c_int64 * len(facts))(*facts), inputs, sum(s.a_rows.shape[1] for s in projections)
    )


class CpuLora:
    """The compiled kernel for one element type. twin: for layers with partial vectors.

    It keeps scratch memory, layers and the last step's work between calls, so an AdapterRows must not change after its
    first use. The tables' content may.
    """

    warm_up_tokens: tuple[int, ...] = (1, 64)
    reads_slots = False

    def __init__(self, library: ctypes.CDLL, gemm_tokens: int = GEMM_TOKENS, twin: LoraOps = TorchLora()) -> None:
        self._twin = twin
        self._gemm_tokens = gemm_tokens
        self._scratch = Scratch()
        self._rows = AdapterRows(torch.empty(0, dtype=torch.int32), [])
        self._work = split_work([], gemm_tokens)
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
        projections: Sequence[ProjectionTables],
        rows: AdapterRows,
    ) -> None:
        layer = self._layer_of(projections)
        if layer.inputs is None:
            self._twin.add(y_TO, x_TI, slab, projections, rows)
            return
        if rows is not self._rows:
            self._rows, self._work = rows, split_work(rows.segments, self._gemm_tokens)
        if self._work.tokens.shape[0]:
            self._add_tiles(y_TO, x_TI, slab, layer, self._work)
        for first, last, slot in self._work.runs:
            self._add_run(y_TO[first:last], x_TI[first:last], slab, projections, slot)

    def _layer_of(self, projections: Sequence[ProjectionTables]) -> Layer:
        names = tuple(map(id, projections))
        layer = self._layers.get(names)
        if layer is None:
            if len(self._layers) == KNOWN_LAYERS:
                self._layers.clear()
            layer = self._layers[names] = pack_layer(projections)
        return layer

    def _add_tiles(self, y_TO: torch.Tensor, x_TI: torch.Tensor, slab: torch.Tensor, layer: Layer, work: Work) -> None:
        (num_tokens,), (num_tiles, _) = work.tokens.shape, work.tiles.shape
        assert y_TO.stride(1) == x_TI.stride(1) == 1 and slab.is_contiguous() and x_TI.shape[1] == layer.inputs
        assert y_TO.dtype == x_TI.dtype == slab.dtype
        self._scratch.reserve(num_tokens * layer.room)
        keep(work)
        self._add(
            y_TO.data_ptr(), y_TO.stride(0), x_TI.data_ptr(), x_TI.stride(0), slab.data_ptr(), layer.inputs,
            layer.packed, len(layer.projections), work.tokens.data_ptr(), num_tokens, work.tiles.data_ptr(), num_tiles,
            self._scratch.address, torch.get_num_threads(),
        )  # fmt: skip

    def _add_run(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        projections: Sequence[ProjectionTables],
        slot: int,
    ) -> None:
        """Adds for tokens of one adapter: one matmul with the rows of A of all projections, then one per projection
        with its B."""
        ranks = [int(projection.ranks[slot]) for projection in projections]
        if not any(ranks):
            return
        a_RI = torch.empty(sum(ranks), x_TI.shape[1], dtype=slab.dtype)
        for part, projection in zip(a_RI.split(ranks), projections, strict=True):
            self._copy_rows(slab, projection.a_rows[slot], part)
        for part, rank, projection in zip((x_TI @ a_RI.T).split(ranks, dim=1), ranks, projections, strict=True):
            if rank:
                b_RO = torch.empty(rank, projection.outputs, dtype=slab.dtype)
                self._copy_rows(slab, projection.b_rows[slot], b_RO)
                columns = y_TO[:, projection.start : projection.start + projection.outputs]
                columns.addmm_(part, b_RO, alpha=float(projection.scales[slot]))

    def _copy_rows(self, slab: torch.Tensor, starts: torch.Tensor, out: torch.Tensor) -> None:
        """Copies the rows that begin at `starts`, as many as `out` has."""
        self._gather(slab.data_ptr(), starts.data_ptr(), out.shape[0], out.shape[1], out.data_ptr())
