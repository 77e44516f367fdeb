"""Integers in words of 32 bits: GPTQ, AWQ, and pack-quantized of compressed-tensors. Torch-free until it reads.

O outputs, I inputs, G groups, b bits. GPTQ: qweight [I * b / 32, O], qzeros [G, O * b / 32], scales [G, O], g_idx [I];
v1 stores each zero less 1, modulo 2**b. AWQ: qweight [I, O / 8], qzeros [G, O / 8], whose words have outputs 0 2 4 6 1
3 5 7; scales [G, O]. compressed-tensors: weight_packed [O, I * b / 32], weight_scale [O, G], weight_zero_point
[O * b / 32, G], weight_g_idx [I].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import WHOLE, Param
from tandem.parallel.quantization.layouts.scales import groups_of
from tandem.parallel.quantization.stored_parts import (
    ALL,
    Cut,
    by_input,
    column_cut,
    part_of,
    row_cut,
    words_per,
)

if TYPE_CHECKING:
    import torch

    from tandem.parallel.quantization.coded_weight import CodedWeight

INT32: Final = ("I32",)
INDEX: Final = ("I32", "I64")
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each of a word's codes, from the lowest on."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """The layout of GPTQ's producers. minus_one: zeros are stored less 1 (checkpoint_format gptq, which is v1).
    symmetric: each zero is the middle, which is checked."""

    bits: int
    group: int | None
    ordered: bool = False
    symmetric: bool = False
    minus_one: bool = True

    def stored(self, weight: Param) -> tuple[Param, ...]:
        words = words_per(self.bits)
        columns = ALL if self.group is None else 1 if self.ordered else self.group
        scales = part_of(weight, "scales", columns=columns, transposed=True)
        zeros = part_of(
            weight, "qzeros", rows=words, columns=columns, dtype="int32", stored=INT32, transposed=True, bits=self.bits
        )
        if self.ordered:
            scales, zeros = _of_all_groups(weight, scales, self.group), _of_all_groups(weight, zeros, self.group)
        codes = part_of(weight, "qweight", columns=words, dtype="int32", stored=INT32, transposed=True, bits=self.bits)
        order = (by_input(weight, "g_idx", "int32", INDEX),) if self.ordered else ()
        return (scales, zeros, *order, codes)

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        from tandem.parallel.quantization.unpacking import cut_rows, unpacked

        words, top = words_per(self.bits), 2**self.bits - 1
        zero_OG = cut_rows(unpacked(found[1].T, self.bits).T, row_cut(weight, mesh, words))
        if self.minus_one:
            zero_OG = zero_OG + 1 & top
        if self.symmetric:
            self._check_zeros(weight, zero_OG, row_cut(weight, mesh, words))
        groups = found[2] if self.ordered else None
        return _coded(self, weight, found[-1], found[0], None if self.symmetric else zero_OG, groups, mesh)

    def _check_zeros(self, weight: Param, zero_OG: "torch.Tensor", cut: Cut) -> None:
        present = sum(count for _, count in cut.pieces)
        if bool((zero_OG[:present] != 2 ** (self.bits - 1)).any()):
            name, found = weight.source.names[0].rpartition(".")[0], sorted(set(zero_OG[:present].flatten().tolist()))
            raise SettingsError(
                f"tensor {name}.qzeros: config.json says sym, so each zero is {2 ** (self.bits - 1)}, and here are "
                f"{found[:4]}; is its checkpoint_format (gptq: zeros are stored less 1, or gptq_v2) the right one?",
                "MODEL",
            )


@dataclass(frozen=True, slots=True)
class AwqGemm:
    """The layout of AutoAWQ, version gemm: four bits, with zeros."""

    group: int | None
    bits: int = 4
    ordered: bool = False

    def stored(self, weight: Param) -> tuple[Param, ...]:
        columns = self.group or ALL
        return (
            part_of(weight, "scales", columns=columns, transposed=True),
            part_of(weight, "qzeros", rows=8, columns=columns, dtype="int32", stored=INT32, transposed=True),
            part_of(weight, "qweight", rows=8, dtype="int32", stored=INT32, transposed=True),
        )

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        from tandem.parallel.quantization.coded_weight import CodedWeight
        from tandem.parallel.quantization.unpacking import cut_rows

        def outputs(words: "torch.Tensor") -> "torch.Tensor":
            import torch

            words = words.to(torch.int32)
            codes = words.new_empty(8 * len(words), words.shape[1], dtype=torch.uint8)
            for place, output in enumerate(AWQ_ORDER):
                codes[output::8] = words >> 4 * place & 15
            return cut_rows(codes, row_cut(weight, mesh, 8))

        group, ends_G = groups_of(self.group, weight, mesh)
        zero_OG = outputs(found[1]).float()
        return CodedWeight(outputs(found[2]), _filled(found[0]), 4, group, zero_OG, ends_G=ends_G)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The layout of compressed-tensors, pack-quantized."""

    bits: int
    group: int | None
    ordered: bool = False
    symmetric: bool = True

    def stored(self, weight: Param) -> tuple[Param, ...]:
        words = words_per(self.bits)
        columns = ALL if self.group is None else 1 if self.ordered else self.group
        parts = [part_of(weight, "weight_scale", columns=columns)]
        if not self.symmetric:
            parts.append(
                part_of(
                    weight,
                    "weight_zero_point",
                    rows=words,
                    columns=columns,
                    dtype="int32",
                    stored=INT32,
                    bits=self.bits,
                )
            )
        if self.ordered:
            parts = [_of_all_groups(weight, part, self.group) for part in parts]
            parts.append(by_input(weight, "weight_g_idx", "int32", INDEX))
        codes = part_of(weight, "weight_packed", columns=words, dtype="int32", stored=INT32, bits=self.bits)
        return (*parts, codes)

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        from tandem.parallel.quantization.unpacking import cut_rows, unpacked

        zero_OG = None
        if not self.symmetric:
            cut = row_cut(weight, mesh, words_per(self.bits))
            zero_OG = cut_rows(unpacked(found[1].T, self.bits).T, cut)
        return _coded(self, weight, found[-1], found[0], zero_OG, found[-2] if self.ordered else None, mesh)


def _of_all_groups(weight: Param, part: Param, group: int | None) -> Param:
    """Returns the part, of which every rank has all groups."""
    count = -(-weight.shape[1] // (group or weight.shape[1]))
    shard = part.shard if weight.shard.dim == 0 else WHOLE
    return replace(part, shape=(part.shape[0], count), shard=shard)


def _coded(
    layout: Gptq | PackedRows,
    weight: Param,
    words: "torch.Tensor",
    scale_OG: "torch.Tensor",
    zero_OG: "torch.Tensor | None",
    group_I: "torch.Tensor | None",
    mesh: Mesh,
) -> "CodedWeight":
    """Returns codes that stand row by row in words. group_I: of each of a rank's inputs, where they are ordered."""
    import torch

    from tandem.parallel.quantization.code_tables import integer_table
    from tandem.parallel.quantization.coded_weight import CodedWeight
    from tandem.parallel.quantization.unpacking import cut_columns, unpacked

    codes_OI = cut_columns(unpacked(words, layout.bits), column_cut(weight, mesh, words_per(layout.bits)))
    group, ends_G = groups_of(layout.group, weight, mesh)
    order_I = None
    if group_I is not None:
        group_I = group_I.long()
        order_I = group_I.argsort(stable=True)
        codes_OI = codes_OI[:, order_I]
        ends_G = group_I.bincount(minlength=scale_OG.shape[1]).cumsum(0).to(torch.int32)
    table = integer_table(layout.bits).to(codes_OI.device) if zero_OG is None else None
    zeros = None if zero_OG is None else zero_OG.float().contiguous()
    return CodedWeight(codes_OI, _filled(scale_OG), layout.bits, group, zeros, table, ends_G, order_I)


def _filled(scale_OG: "torch.Tensor") -> "torch.Tensor":
    """Returns scales as float32, in memory of their own."""
    import torch

    return scale_OG.to(torch.float32, copy=True).contiguous()
