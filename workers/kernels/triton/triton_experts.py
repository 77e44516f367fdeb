"""ExpertOps for GPUs in Triton: a grouped product per projection, and the sum of a token's experts.

Formulas as in expert_ops.py, whose TorchExperts is the twin and does the routing and sorting here too, in torch
operations that a CUDA graph can hold. A program of the product computes a tile of one expert's rows and a block of
outputs. Which expert that is, it finds from the ends of all of them on the device: grids depend on the number of tokens
alone, and programs beyond the last tile end at once. Experts without tokens are not read. Steps with few rows for each
expert (decode) take tiles of 16 rows, others of 64. bf16, fp16 and fp32, summed in float32, fp32 without TF32. Imported
only where Triton is installed. T tokens, E experts, K of them per token, P = T * K pairs, I inputs, O outputs, H hidden
size.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertMethod, ExpertParams, Groups, StackedExperts
from tandem.parallel.linear_methods import Bias, MakeMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.kernels.triton.tiles import FEW, MANY, ExpertTile, TunedTiles, experts_use
from tandem.workers.kernels.triton.triton_lora import FP_FUSION

CHANGING: Final = ["experts", "top_k"]
"""Integers that differ between models and steps. Triton would compile a kernel anew for each 1 and multiple of 16."""
UNALIGNED: Final = ["order", "ends"]
"""Pointers into other tensors, for which it would do the same by their alignment. Not x and its stride: only rows that
are known to be aligned are fetched ahead."""
SUM_BLOCK: Final = 1024
"""Elements of a token that one program adds up."""
MANY_FROM: Final = 32
"""Rows of an expert on average, from which on tiles are MANY."""


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def grouped_product(
    x, x_stride, weight, bias, y, order, ends, experts, top_k,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, GATHERS: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[r] = x[row of r] @ weight[expert of r].T + bias, in the order of the groups. EXPERTS: a power of two, at least
    `experts`. Programs: tiles of rows, blocks of outputs."""
    e = tl.arange(0, EXPERTS)
    stop = tl.load(ends + e, mask=e < experts, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0)
    tiles = (stop - start + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tl.program_id(0)).to(tl.int32), axis=0)
    if expert < experts:
        before = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
        own_start = tl.sum(tl.where(e == expert, start, 0), axis=0)
        own_stop = tl.sum(tl.where(e == expert, stop, 0), axis=0)
        r = own_start + (tl.program_id(0) - before) * ROWS + tl.arange(0, ROWS)
        o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here, there = r < own_stop, o < OUTPUTS
        row = r.to(tl.int64)
        if GATHERS:
            row = (tl.load(order + r, mask=here, other=0) // top_k).to(tl.int64)
        of_expert = weight + expert.to(tl.int64) * OUTPUTS * INPUTS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, INPUTS, BLOCK):
            i = first + tl.arange(0, BLOCK)
            inside = here[:, None] & (i < INPUTS)[None, :]
            left = tl.load(x + row[:, None] * x_stride + i[None, :], mask=inside, other=0.0)
            right = tl.load(
                of_expert + o[None, :].to(tl.int64) * INPUTS + i[:, None],
                mask=there[None, :] & (i < INPUTS)[:, None], other=0.0,
            )  # fmt: skip
            total = tl.dot(left, right, total, input_precision="ieee")
        if BIASED:
            total += tl.load(bias + expert.to(tl.int64) * OUTPUTS + o, mask=there, other=0.0).to(tl.float32)[None, :]
        at = y + r[:, None].to(tl.int64) * OUTPUTS + o[None, :]
        tl.store(at, total.to(y.dtype.element_ty), mask=here[:, None] & there[None, :])


@triton.jit(do_not_specialize=["top_k"], do_not_specialize_on_alignment=["here", "base", "gate"])
def add_experts(
    y, weights, place, here, base, gate, out, top_k,
    HIDDEN: tl.constexpr, BASED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = base[t] * sigmoid(gate[t]) + sum over a token's experts of weight * y. here: the number of pairs that
    this rank has computed. Programs: tokens, blocks of elements."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if BASED:
        total = tl.load(base + token * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
        if GATED:
            total *= tl.sigmoid(tl.load(gate + token).to(tl.float32))
    computed = tl.load(here)
    for k in range(top_k):
        at = tl.load(place + token * top_k + k).to(tl.int64)
        if at < computed:
            own = tl.load(y + at * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
            total += own * tl.load(weights + token * top_k + k)
    tl.store(out + token * HIDDEN + h, total.to(out.dtype.element_ty), mask=h < HIDDEN)


class _AsItIs:
    """One expert's dense weight [O, I]: an ExpertForm."""

    def __init__(self, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> None:
        self._place = place
        self.nbytes = 0

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        yield ParameterSlot(tuple(weights), self._take, self)

    def _take(self, weight_OI: torch.Tensor) -> None:
        self.nbytes = weight_OI.nbytes
        self._place(weight_OI)


def multiply_groups(
    x: torch.Tensor, weight_EOI: torch.Tensor, bias_EO: torch.Tensor | None, groups: Groups, tile: ExpertTile, *,
    gathers: bool,
) -> torch.Tensor:  # fmt: skip
    """Returns y_PO in the order of the groups. gathers: as in ExpertMethod.apply."""
    (experts, outputs, inputs), pairs = weight_EOI.shape, len(groups.order_P)
    y_PO = x.new_empty(pairs, outputs)
    most_tiles = pairs // tile.rows + min(pairs, experts)
    if pairs:
        grouped_product[(most_tiles, triton.cdiv(outputs, tile.columns))](
            x, x.stride(0), weight_EOI, weight_EOI if bias_EO is None else bias_EO, y_PO, groups.order_P, groups.ends_E,
            experts, groups.top_k, INPUTS=inputs, OUTPUTS=outputs, EXPERTS=triton.next_power_of_2(experts),
            GATHERS=gathers, BIASED=bias_EO is not None, ROWS=tile.rows, COLUMNS=tile.columns, BLOCK=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return y_PO


class TritonExpertMethod(StackedExperts):
    """The products with dense weights. Launches depend on shapes alone, so a CUDA graph may hold them."""

    def __init__(
        self,
        experts: Sequence[ExpertParams],
        context: ParallelContext,
        place: Place = as_given,
        tiles: TunedTiles | None = None,
    ) -> None:
        super().__init__(_AsItIs, experts, context, place)
        self._tiles = tiles or TunedTiles()

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        weights = self.weights()
        assert x.stride(1) == 1 and x.shape[1] == self.inputs and weights.is_contiguous()
        has_many = len(groups.order_P) >= MANY_FROM * len(weights)
        use = experts_use(x.dtype, *weights.shape, has_many=has_many)
        tile = self._tiles.pick(use, (MANY if has_many else FEW)[x.element_size()][0])
        return multiply_groups(x, weights, self._bias_EO, groups, tile, gathers=gathers)


MakeCodes = Callable[[Sequence[ExpertParams], ParallelContext, Place], ExpertMethod | None]
"""Makes the products with one projection of quantized experts; None where they are not of its kinds."""


class TritonExperts(TorchExperts):
    """ExpertOps by these kernels, and by the twin's routing and sorting. tiles: as chosen for the device. codes: makes
    the products with weights that have schemes."""

    def __init__(
        self,
        make: MakeMethod,
        place: Place,
        device: torch.device | None = None,
        tiles: TunedTiles | None = None,
        codes: MakeCodes | None = None,
    ) -> None:
        super().__init__(make, place, device)
        self._tiles = tiles
        self._codes = codes

    def method(self, experts: Sequence[ExpertParams], context: ParallelContext) -> ExpertMethod:
        if all(weight.scheme is None for expert in experts for weight in expert.weights):
            return TritonExpertMethod(experts, context, self._place, self._tiles)
        found = None if self._codes is None else self._codes(experts, context, self._place)
        return super().method(experts, context) if found is None else found

    def combine(
        self,
        y_PH: torch.Tensor,
        weight_TK: torch.Tensor,
        groups: Groups,
        base_TH: torch.Tensor | None = None,
        gate_T1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (tokens, top_k), hidden = weight_TK.shape, y_PH.shape[1]
        assert y_PH.is_contiguous() and weight_TK.is_contiguous()
        out_TH = y_PH.new_empty(tokens, hidden)
        base = out_TH if base_TH is None else base_TH.contiguous()
        gate = out_TH if gate_T1 is None else gate_T1.contiguous()
        if tokens:
            add_experts[(tokens, triton.cdiv(hidden, SUM_BLOCK))](
                y_PH, weight_TK, groups.place_P, groups.ends_E[-1:], base, gate, out_TH, top_k, HIDDEN=hidden,
                BASED=base_TH is not None, GATED=gate_T1 is not None, BLOCK=SUM_BLOCK, enable_fp_fusion=FP_FUSION,
            )  # fmt: skip
        return out_TH
