"""NF4 and FP4 as bitsandbytes stores them. Torch-free until it reads. Its int8 is an IntegerRows.

O outputs, I inputs. weight U8 [O * I / 2, 1]: two codes to a byte, the first in its high half, in blocks of 64 codes,
row behind row. weight.absmax: a scale for each block, F32, or with double quantization U8: a code of
weight.nested_quant_map F32 [256], times weight.nested_absmax F32 for each 256 of them, plus nested_offset, a number in
the JSON of weight.quant_state.bitsandbytes__nf4. A block lies within a row where I is a multiple of its size.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param
from tandem.parallel.quantization.layouts.scales import groups_of
from tandem.parallel.quantization.schemes import Codes
from tandem.parallel.quantization.stored_parts import CROSSING, column_cut, part_of, row_cut, whole_of

if TYPE_CHECKING:
    import torch

    from tandem.parallel.quantization.coded_weight import CodedWeight

NESTED_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class FourBits:
    """codes: NF4 or FP4. nested: scales are codes themselves."""

    codes: Codes
    block: int = 64
    nested: bool = False

    def stored(self, weight: Param) -> tuple[Param, ...]:
        inputs = weight.shape[1]
        if inputs % self.block:
            raise SettingsError(
                f"{weight.name}: bitsandbytes' blocks of {self.block} cross its rows of {inputs} inputs, which is not "
                "read; save the model without quantization (model.dequantize() of transformers)",
                "MODEL",
            )
        codes = part_of(weight, "weight", columns=2, dtype="uint8", stored=("U8",), reshaped=True)
        if not self.nested:
            return part_of(weight, "weight.absmax", columns=self.block, reshaped=True, stored=("F32",)), codes
        scales = whole_of(weight, "weight.absmax", "uint8", ("U8",))
        outer = whole_of(weight, "weight.nested_absmax", "float32", ("F32",))
        values = whole_of(weight, "weight.nested_quant_map", "float32", ("F32",))
        state = whole_of(weight, f"weight.quant_state.bitsandbytes__{self.codes.value}", "uint8", ("U8",))
        return scales, outer, values, state, codes

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        import torch

        from tandem.parallel.quantization.code_tables import table_of
        from tandem.parallel.quantization.coded_weight import CodedWeight
        from tandem.parallel.quantization.schemes import Coded
        from tandem.parallel.quantization.unpacking import cut_columns, nibbles

        codes_OI = cut_columns(nibbles(found[-1].to(torch.uint8), high_first=True), column_cut(weight, mesh, 2))
        scale_OG = self._scales(weight, found, mesh) if self.nested else found[0].float().clone()
        table = table_of(Coded(self.codes))
        assert table is not None
        group, ends_G = groups_of(self.block, weight, mesh)
        return CodedWeight(codes_OI, scale_OG, 4, group, None, table.to(codes_OI.device), ends_G)

    def _scales(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "torch.Tensor":
        """Returns a rank's scales, of all of the matrix's that are stored as codes."""
        from tandem.parallel.quantization.unpacking import cut_rows

        codes, outer, values, state = found[:4]
        offset = self._offset(weight, codes, outer, values, state)
        flat = values[codes.long()] * outer.repeat_interleave(NESTED_BLOCK)[: len(codes)] + offset
        columns = weight.span(1, mesh)
        first, last = columns.start // self.block, -(-(columns.start + columns.length) // self.block)
        scale_OG = flat.view(-1, weight.shape[1] // self.block)[:, first:last]
        return cut_rows(scale_OG, row_cut(weight, mesh, CROSSING))

    def _offset(self, weight: Param, *found: "torch.Tensor") -> float:
        """Returns what is added to a matrix's scales. SettingsError where their tensors, which are read whole, are not
        those of its size, or the JSON beside them is none."""
        codes, outer, values, state = found
        name, count = weight.source.names[0], (weight.source.rows or weight.shape[0]) * weight.shape[1] // self.block
        sizes = {"absmax": (codes, count), "nested_absmax": (outer, -(-count // NESTED_BLOCK))}
        for end, (tensor, wanted) in {**sizes, "nested_quant_map": (values, 256)}.items():
            if len(tensor) != wanted:
                words = f"tensor {name}.{end} has {len(tensor)} elements, config.json makes it {wanted}"
                raise SettingsError(words, "MODEL")
        try:
            told = json.loads(bytes(state.tolist()))
            sizes_told = told["blocksize"], told["nested_blocksize"]
            if sizes_told != (self.block, NESTED_BLOCK):
                raise ValueError(f"its blocks are of {sizes_told}, read: {self.block, NESTED_BLOCK}")
            return float(told["nested_offset"])
        except (ValueError, KeyError, TypeError) as error:
            words = f"tensor {name}.quant_state.bitsandbytes__{self.codes.value} is not read: {error!r}"
            raise SettingsError(words, "MODEL") from error
