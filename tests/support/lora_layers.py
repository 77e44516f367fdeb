"""A merged linear layer with random adapters whose rows lie scattered over a slab, and the dense sum they should add.

Used by the tests of the LoRA kernels. Whatever in the slab belongs to no adapter is NaN, and what pads a row is no
zero, so that a kernel that reads beside a row, or beyond a rank, is found out.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables
from tandem.workers.planning.adapter_room import row_stride

ROWS_A_PAGE = 3


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """adapters[projection][slot]: A [rank, I] and B [O, rank], as PEFT has them; None without weights."""

    slab: torch.Tensor
    projections: list[ProjectionTables]
    adapters: list[list[tuple[torch.Tensor, torch.Tensor] | None]]
    width: int

    def expected(self, y_TO: torch.Tensor, x_TI: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """y with each token's part added, in float64."""
        y = y_TO.double()
        for projection, adapters in zip(self.projections, self.adapters, strict=True):
            for token, slot in enumerate(slots):
                if slot >= 0 and (pair := adapters[slot]) is not None:
                    a, b = (matrix.double().to(y.device) for matrix in pair)
                    part = float(projection.scales[slot]) * (b @ (a @ x_TI[token].double()))
                    y[token, projection.start : projection.start + projection.outputs] += part
        return y


def make_layer(
    inputs: int,
    outputs: Sequence[int],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype,
    room: int = 64,
    gap: int = 0,
    device: str = "cpu",
) -> LoraLayer:
    """One projection per width of `outputs`, `gap` columns apart; ranks[projection][slot], 0 for none."""
    generator = torch.Generator().manual_seed(0)
    stride = row_stride(max(inputs, *outputs)) + row_stride(1)
    page = ROWS_A_PAGE * stride
    rows = sum(2 * rank for of_projection in ranks for rank in of_projection)
    pages = rows // ROWS_A_PAGE + 2
    places = [at * page + row * stride for at in range(pages) for row in range(ROWS_A_PAGE)]
    random.Random(0).shuffle(places)
    slab = torch.full((pages, page), float("nan"), dtype=dtype)
    projections, adapters, start = [], [], gap
    for width, of_projection in zip(outputs, ranks, strict=True):
        a_rows = torch.full((len(of_projection), room), -1, dtype=torch.int64)
        b_rows = a_rows.clone()
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for slot, rank in enumerate(of_projection):
            a = (torch.randn(rank, inputs, generator=generator) / inputs**0.5).to(dtype)
            b = (torch.randn(width, rank, generator=generator) / max(rank, 1) ** 0.5).to(dtype)
            for matrix, table in ((a, a_rows), (b.T, b_rows)):
                for k, row in enumerate(matrix):
                    table[slot, k] = place = places.pop()
                    slab.view(-1)[place : place + row_stride(len(row))] = 9.0
                    slab.view(-1)[place : place + len(row)] = row
            pairs.append((a, b) if rank else None)
        scales = torch.linspace(0.5, 2.0, len(of_projection))
        tables = (a_rows, b_rows, torch.tensor(of_projection, dtype=torch.int32), scales)
        projections.append(ProjectionTables(*(table.to(device) for table in tables), inputs, width, start))
        adapters.append(pairs)
        start += width + gap
    return LoraLayer(slab.to(device), projections, adapters, start)


def rows_of(slots: Sequence[int], device: str = "cpu") -> AdapterRows:
    """The step whose token t uses slots[t]."""
    segments, first = [], 0
    for slot, run in groupby(slots):
        last = first + len(list(run))
        if slot >= 0:
            segments.append((first, last, slot))
        first = last
    return AdapterRows(torch.tensor(slots, dtype=torch.int32, device=device), segments)


def noise(*shape: int, dtype: torch.dtype, seed: int = 1, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32: rounding noise. bf16 and fp16: the last rounding, and one of what lies between the two products."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[ours.dtype]
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
