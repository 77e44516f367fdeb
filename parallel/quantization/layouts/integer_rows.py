"""Integers of a byte, row by row: int-quantized of compressed-tensors, and int8 of bitsandbytes. Torch-free until it
reads.

O outputs, I inputs, G groups. compressed-tensors: weight I8 [O, I], weight_scale [O, G], [O] or one, weight_zero_point
I8 [O, G]. bitsandbytes: weight I8 [O, I], SCB F32 [O], which is 127 scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param
from tandem.parallel.quantization.layouts.scales import groups_of, spread_scales
from tandem.parallel.quantization.stored_parts import ALL, part_of

if TYPE_CHECKING:
    import torch

    from tandem.parallel.quantization.coded_weight import CodedWeight


@dataclass(frozen=True, slots=True)
class IntegerRows:
    """rows: outputs that share a scale, ALL for one of the matrix; columns: inputs that do, None for all.

    scale: its name. steps: what it is divided by.
    """

    rows: int = 1
    columns: int | None = None
    symmetric: bool = True
    scale: str = "weight_scale"
    steps: float = 1.0

    def stored(self, weight: Param) -> tuple[Param, ...]:
        columns = self.columns or ALL
        parts = [part_of(weight, self.scale, rows=self.rows, columns=columns, reshaped=True)]
        if not self.symmetric:
            zeros = part_of(
                weight,
                "weight_zero_point",
                rows=self.rows,
                columns=columns,
                dtype="int8",
                stored=("I8",),
                reshaped=True,
            )
            parts.append(zeros)
        return (*parts, part_of(weight, "weight", dtype="int8", stored=("I8",)))

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        import torch

        from tandem.parallel.quantization.code_tables import integer_table
        from tandem.parallel.quantization.coded_weight import CodedWeight

        codes_OI = found[-1].to(torch.int8).view(torch.uint8) ^ 128
        scale_OG = spread_scales(found[0] / self.steps, weight, mesh, self.rows)
        zero_OG = table = None
        if self.symmetric:
            table = integer_table(8).to(codes_OI.device)
        else:
            zero_OG = spread_scales(found[1], weight, mesh, self.rows) + 128
        group, ends_G = groups_of(self.columns, weight, mesh)
        return CodedWeight(codes_OI, scale_OG, 8, group, zero_OG, table, ends_G)
