"""GGUF's blocks: codes of 2 to 8 bits, whose groups' scales stand beside them. Torch-free until it reads.

A row is blocks of 32 elements (Q4_0 .. Q8_0, IQ4_NL) or 256 (k-quants, IQ4_XS), as bytes. Each group has a scale, and
of the kinds with a least value one of that too. k-quants store these as integers times a float of the block: they are
multiplied out, so that codes are held as they are and nothing is rounded but a product of float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from tandem.configs.errors import SettingsError
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Each, Param
from tandem.parallel.quantization.layouts.scales import groups_of
from tandem.parallel.quantization.schemes import Coded, Codes
from tandem.parallel.quantization.stored_parts import column_cut
from tandem.parallel.stored.gguf_kinds import BY_NAME

if TYPE_CHECKING:
    import torch

    from tandem.parallel.quantization.coded_weight import CodedWeight


class _Form(NamedTuple):
    """The codes of a kind. zeros: groups have least values."""

    bits: int
    group: int
    zeros: bool = False
    codes: Codes = Codes.INTEGERS


FORMS: Final = {
    "Q4_0": _Form(4, 32),
    "Q4_1": _Form(4, 32, True),
    "Q5_0": _Form(5, 32),
    "Q5_1": _Form(5, 32, True),
    "Q8_0": _Form(8, 32),
    "Q2_K": _Form(2, 16, True),
    "Q3_K": _Form(3, 16),
    "Q4_K": _Form(4, 32, True),
    "Q5_K": _Form(5, 32, True),
    "Q6_K": _Form(6, 16),
    "IQ4_NL": _Form(4, 32, codes=Codes.IQ4),
    "IQ4_XS": _Form(4, 32, codes=Codes.IQ4),
}
"""The kinds that are read. Those of fewer bits (IQ1 to IQ3, TQ) are places in lists of vectors, no codes."""
PIECE_BYTES: Final = 2**22
"""Bytes of blocks that are read at a time: what is between takes several times as many."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A matrix in blocks of one kind, a key of FORMS."""

    kind: str

    @property
    def scheme(self) -> Coded:
        """The scheme of such a matrix."""
        form = FORMS[self.kind]
        return Coded(form.codes, form.bits, form.group, form.zeros, layout=self)

    def stored(self, weight: Param) -> tuple[Param, ...]:
        (outputs, inputs), kind, source, shard = weight.shape, BY_NAME[self.kind], weight.source, weight.shard
        if inputs % kind.elements or source.transposed or source.joined or source.index is not None:
            raise SettingsError(f"{weight.name}: {self.kind} is read of rows of blocks of {kind.elements}", "MODEL")
        if shard.dim == 1 and shard.axis is not None:
            shard = replace(shard, each=Each(inputs, kind.elements, width=kind.bytes))
        shape = outputs, inputs // kind.elements * kind.bytes
        return (
            replace(
                weight,
                name=f"{weight.stem}.blocks",
                shape=shape,
                source=replace(source, shape=()),
                shard=shard,
                dtype="uint8",
                stored=(self.kind,),
                scheme=None,
            ),
        )

    def coded(self, weight: Param, found: "Sequence[torch.Tensor]", mesh: Mesh) -> "CodedWeight":
        import torch

        from tandem.parallel.quantization.code_tables import table_of
        from tandem.parallel.quantization.coded_weight import CodedWeight
        from tandem.parallel.quantization.gguf_codes import DECODERS, with_least
        from tandem.parallel.quantization.unpacking import cut_columns

        kind, form, span = BY_NAME[self.kind], FORMS[self.kind], weight.span(1, mesh)
        cut, pieces = column_cut(weight, mesh, kind.elements), []
        first = span.start // kind.elements * kind.elements // form.group
        low, high = span.start // form.group - first, -(-(span.start + span.length) // form.group) - first
        for rows in found[0].split(max(1, PIECE_BYTES // max(1, found[0].shape[1]))):
            decoded = DECODERS[self.kind](rows.reshape(-1, kind.bytes))
            numbers = (decoded.scales, decoded.scales if decoded.least is None else decoded.least)
            scale, least = (each.reshape(len(rows), -1)[:, low:high] for each in numbers)
            pieces.append((cut_columns(decoded.codes.reshape(len(rows), -1), cut), scale, least))
        columns = zip(*pieces, strict=True)
        codes_OI, scale_OG, least_OG = (torch.cat(part) if len(part) > 1 else part[0].contiguous() for part in columns)
        group, ends_G = groups_of(form.group, weight, mesh)
        if form.zeros:
            return with_least(CodedWeight(codes_OI, scale_OG, form.bits, group, ends_G=ends_G), least_OG)
        table = table_of(self.scheme)
        assert table is not None, self.kind
        return CodedWeight(codes_OI, scale_OG, form.bits, group, None, table.to(codes_OI.device), ends_G)
