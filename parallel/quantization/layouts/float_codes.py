"""Codes of small floats: FP8 with scales by matrix, output or block, and FP4 with scales by group. Torch-free until it
reads.

O outputs, I inputs, G groups. FP8: weight F8_E4M3 [O, I], and weight_scale or weight_scale_inv, by which it is
multiplied: one, [O], or [O / rows, I / columns]. FP4 (E2M1): two codes to a byte, the first in its low half, U8
[O, I / 2], weight_scale [O, G] of F8_E4M3 or, as exponents, of U8, and perhaps one scale of the matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tandem.parallel.mesh import Mesh
from tandem.parallel.params import FLOATS, Param
from tandem.parallel.quantization.layouts.scales import groups_of, spread_scales
from tandem.parallel.quantization.stored_parts import ALL, column_cut, part_of

if TYPE_CHECKING:
    import torch

    from tandem.parallel.quantization.coded_weight import CodedWeight

SCALES: Final = ("weight_scale", "weight_scale_inv")
EXPONENTS: Final = ("U8", "F8_E8M0")
BIAS: Final = 127
"""The exponent that is stored for 2**0."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """rows: outputs that share a scale, ALL for one of the matrix; columns: inputs that do, None for all."""

    rows: int = 1
    columns: int | None = None

    def stored(self, weight: Param) -> tuple[Param, ...]:
        scale = part_of(
            weight, SCALES, rows=self.rows, columns=self.columns or ALL, stored=(*FLOATS, "F8_E8M0"), reshaped=True
        )
        return scale, part_of(weight, "weight", dtype="uint8", stored=("F8_E4M3",))

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        import torch

        from tandem.parallel.quantization.code_tables import table_of
        from tandem.parallel.quantization.coded_weight import CodedWeight
        from tandem.parallel.quantization.schemes import Coded, Codes

        codes_OI = found[1].to(torch.float8_e4m3fn).view(torch.uint8).clone()
        table = table_of(Coded(Codes.E4M3, 8))
        assert table is not None
        group, ends_G = groups_of(self.columns, weight, mesh)
        scale_OG = spread_scales(found[0], weight, mesh, self.rows)
        return CodedWeight(codes_OI, scale_OG, 8, group, None, table.to(codes_OI.device), ends_G)


@dataclass(frozen=True, slots=True)
class Fp4Rows:
    """codes: the name of the tensor with codes. outer: that of the matrix's own scale, None where there is none.

    multiplies: the outer scale multiplies (ModelOpt) or divides (compressed-tensors).
    """

    codes: str
    group: int
    outer: str | None = None
    multiplies: bool = False

    def stored(self, weight: Param) -> tuple[Param, ...]:
        kinds = ("F8_E4M3",) if self.outer is not None else EXPONENTS
        scale = part_of(weight, "weight_scale", columns=self.group, dtype="uint8", stored=kinds)
        outer = () if self.outer is None else (part_of(weight, self.outer, rows=ALL, columns=ALL, reshaped=True),)
        return (scale, *outer, part_of(weight, self.codes, columns=2, dtype="uint8", stored=("U8",)))

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        import torch

        from tandem.parallel.quantization.code_tables import table_of
        from tandem.parallel.quantization.coded_weight import CodedWeight
        from tandem.parallel.quantization.schemes import Coded, Codes
        from tandem.parallel.quantization.unpacking import cut_columns, nibbles

        codes_OI = cut_columns(nibbles(found[-1].to(torch.uint8)), column_cut(weight, mesh, 2))
        scale_OG, outer_O = found[0].clone(), None
        if self.outer is None:
            scale_OG = exponents(found[0])
        else:
            outer = found[1].float().view(1)
            outer_O = (outer if self.multiplies else 1 / outer).expand(len(codes_OI)).contiguous()
        table = table_of(Coded(Codes.E2M1))
        assert table is not None
        group, ends_G = groups_of(self.group, weight, mesh)
        table = table.to(codes_OI.device)
        return CodedWeight(codes_OI, scale_OG.contiguous(), 4, group, None, table, ends_G, outer_O=outer_O)


def exponents(stored: "torch.Tensor") -> "torch.Tensor":
    """Returns the powers of two whose exponents are stored, float32."""
    import torch

    if stored.dtype is not torch.uint8:
        return stored.float()
    return torch.ldexp(torch.ones_like(stored, dtype=torch.float32), stored.int() - BIAS)
