"""MXFP4 of experts whose matrices are stored in stacks, as gpt-oss has them. Torch-free until it reads.

E experts, O outputs, I inputs. NAME_blocks U8 [E, O, I / 32, 16]: two codes of E2M1 to a byte, the first in its low
half; NAME_scales U8 [E, O, I / 32]: exponents, 127 for 1. Gate and up are stored in turn, output by output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Each, Param
from tandem.parallel.quantization.layouts.float_codes import EXPONENTS, exponents
from tandem.parallel.quantization.layouts.scales import groups_of
from tandem.parallel.quantization.stored_parts import column_cut

if TYPE_CHECKING:
    import torch

    from tandem.parallel.quantization.coded_weight import CodedWeight

GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class StackedFp4:
    """One expert's matrix of the stack."""

    def stored(self, weight: Param) -> tuple[Param, ...]:
        source, (outputs, inputs) = weight.source, weight.shape
        if source.index is None or inputs % GROUP:
            raise SettingsError(
                f"{weight.name}: MXFP4 is read of experts in stacks, whose inputs are a multiple of {GROUP}", "MODEL"
            )
        rows, experts = source.rows or outputs, source.shape[0]

        def part(end: str, per: int, shape: tuple[int, ...], kinds: tuple[str, ...]) -> Param:
            shard = weight.shard
            if shard.dim == 1:
                shard = replace(shard, each=Each(inputs, per))
            names = tuple(f"{name}_{end}" for name in source.names)
            return replace(
                weight,
                name=f"{weight.stem}.{end}",
                shape=(outputs, inputs // per),
                source=replace(source, names=names, shape=shape, transposed=False),
                shard=shard,
                dtype="uint8",
                stored=kinds,
                scheme=None,
            )

        groups = inputs // GROUP
        return (
            part("scales", GROUP, (experts, rows, groups), EXPONENTS),
            part("blocks", 2, (experts, rows, groups, GROUP // 2), ("U8",)),
        )

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        import torch

        from tandem.parallel.quantization.code_tables import table_of
        from tandem.parallel.quantization.coded_weight import CodedWeight
        from tandem.parallel.quantization.schemes import Coded, Codes
        from tandem.parallel.quantization.unpacking import cut_columns, nibbles

        codes_OI = cut_columns(nibbles(found[1].to(torch.uint8)), column_cut(weight, mesh, 2))
        table = table_of(Coded(Codes.E2M1))
        assert table is not None
        group, ends_G = groups_of(GROUP, weight, mesh)
        scale_OG = exponents(found[0]).contiguous()
        return CodedWeight(codes_OI, scale_OG, 4, group, None, table.to(codes_OI.device), ends_G)
