"""WordLayout: a CodedWeight in the form that triton_code_gemm.py multiplies, in one piece of memory. Imports no Triton.

codes | scales | zeros or outer scales | order | parts. Codes of up to four bits: words of eight, in steps of the
kernel, which are four parts of 16 or 32 inputs; word j of a step has at bits 4 p + 16 h the code of input 2 j + h of
part p. So one mask finds the codes of two neighbours, which a kernel turns into 16-bit floats at once, and those of all
words are a part. More bits: a byte each, as they are. Scales and zeros: float32 [G, O]; scales that have outer ones,
float32 [O], are a byte each (E4M3). Order: int32, the input that a column multiplies, -1 for one that is padding.
Parts: int32, the group of each 16 columns.

Groups that a step of the kernel divides, or that whole parts make up, stand as they are, and there is no order unless
the weight has one. Any others are padded to whole parts, each of which has a group in the list; a shape decides how
much room that takes, so that layers of one shape can share memory. O outputs, I inputs, G groups.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from tandem.parallel.quantization.code_tables import table_of
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.schemes import Coded, Codes

PART: Final = 16
"""Inputs that a tensor core multiplies at once."""
PARTS: Final = 4
"""Parts of a step, where eight codes are a word."""
NIBBLE_BITS: Final = 4
STEPS: Final = (128, 64, 32, 16)
"""Inputs of a step of the kernel, the most first; of codes of four bits whole blocks."""
ALIGNED: Final = 16
"""Bytes that parts of the piece begin at a multiple of."""
PADDING: Final = -1


class CodeKind(IntEnum):
    """The way in which codes become values."""

    INTEGERS = 0
    FLOATS = 1  # E2M1 of four bits, E4M3 of eight: their bits are those of wider floats but for the exponent's offset
    TABLE = 2


class Scaled(IntEnum):
    """The inputs that share a scale."""

    WHOLE = 0  # all of an output
    STEP = 1  # those of one or several steps
    PART = 2  # those of a part of a step
    LIST = 3  # those of parts with the same number in a list


class Meaning(NamedTuple):
    """Values of codes. offset: is subtracted from integers. table: float32, of CodeKind.TABLE."""

    kind: CodeKind
    offset: int
    table: tuple[float, ...] | None


def meaning_of(table: torch.Tensor | None, bits: int) -> Meaning:
    """Returns what codes of so many bits mean. table: as CodedWeight has it."""
    if table is None:
        return Meaning(CodeKind.INTEGERS, 0, None)
    values = table.cpu()
    if torch.equal(values, values[0] + torch.arange(len(values))) and float(values[0]).is_integer():
        return Meaning(CodeKind.INTEGERS, -int(values[0]), None)
    floats = table_of(Coded(Codes.E2M1) if bits <= NIBBLE_BITS else Coded(Codes.E4M3, 8))
    if floats is not None and torch.equal(values.nan_to_num(), floats.nan_to_num()):
        return Meaning(CodeKind.FLOATS, 0, None)
    return Meaning(CodeKind.TABLE, 0, tuple(values.tolist()))


@dataclass(frozen=True)
class WordLayout:
    """The form of a weight. columns: inputs with those that are padding, whole steps. step: inputs of one."""

    outputs: int
    inputs: int
    groups: int
    group: int
    bits: int
    columns: int
    step: int
    scaled: Scaled
    meaning: Meaning
    has_zeros: bool
    has_order: bool
    is_narrow: bool = False

    @property
    def is_packed(self) -> bool:
        """True if eight codes are a word."""
        return self.bits <= NIBBLE_BITS

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Places in bytes where scales, zeros or outer scales, order and parts begin, and where the piece ends."""
        numbers, lists = 4 * self.outputs * self.groups, 4 * self.columns
        outer = 4 * self.outputs if self.is_narrow else 0
        sizes = (
            self.outputs * self.columns // (2 if self.is_packed else 1),
            numbers // 4 if self.is_narrow else numbers,
            numbers if self.has_zeros else outer,
            lists if self.has_order else 0,
            lists // PART if self.scaled is Scaled.LIST else 0,
        )
        places, end = [], 0
        for size in sizes:
            end += -(-size // ALIGNED) * ALIGNED
            places.append(end)
        return tuple(places)

    @property
    def room(self) -> int:
        """Bytes of the piece."""
        return self.starts[-1]

    def pack(self, weight: CodedWeight) -> torch.Tensor:
        """Returns the piece of a weight, uint8 [room], on its device."""
        held = torch.zeros(self.room, dtype=torch.uint8, device=weight.codes_OI.device)
        scales, zeros, order, parts, end = self.starts
        codes_OC = weight.codes_OI
        if self.scaled is Scaled.LIST:
            place_C, group_P = _padded_groups(weight, self.columns)
            held[parts:end].view(torch.int32)[: len(group_P)] = group_P
        else:
            place_C = torch.arange(self.inputs, device=held.device)
            place_C = F.pad(place_C, (0, self.columns - self.inputs), value=PADDING)
        if self.columns != self.inputs:
            codes_OC = torch.where(place_C >= 0, codes_OC[:, place_C.clamp(min=0)], 0).to(torch.uint8)
        if self.has_order:
            order_C = place_C
            if weight.order_I is not None:
                order_C = torch.where(place_C >= 0, weight.order_I[place_C.clamp(min=0)], PADDING)
            held[order:parts].view(torch.int32)[: self.columns] = order_C.int()
        self._fill(held[scales:zeros], weight.scale_OG)
        if weight.zero_OG is not None:
            self._fill(held[zeros:order], weight.zero_OG)
        if weight.outer_O is not None:
            self._fill(held[zeros:order], weight.outer_O[:, None])
        codes_OC = words_of(codes_OC, self.step) if self.is_packed else codes_OC
        held[: codes_OC.nbytes].view(codes_OC.shape[0], -1).copy_(codes_OC.contiguous().view(torch.uint8))
        return held

    def _fill(self, held: torch.Tensor, number_OG: torch.Tensor) -> None:
        held.view(number_OG.dtype)[: number_OG.numel()].view(-1, self.outputs).copy_(number_OG.T)


def layout_of(weight: CodedWeight) -> WordLayout:
    """Returns how a weight is held."""
    (outputs, inputs), groups = weight.codes_OI.shape, weight.scale_OG.shape[1]
    is_packed = weight.bits <= NIBBLE_BITS
    is_regular = weight.ends_G is None or torch.equal(weight.ends_G, _ends(inputs, weight.group, groups, weight))
    group = weight.group if groups > 1 else None
    scaled, step = _steps(inputs, group, is_packed) if is_regular else (Scaled.LIST, 0)
    has_order = weight.order_I is not None
    columns = inputs
    if scaled is Scaled.LIST:
        step, has_order = (PARTS * PART if is_packed else PART), True
        columns += (PART - 1) * min(groups, inputs)
    columns = -(-columns // step) * step
    meaning, has_zeros = meaning_of(weight.table, weight.bits), weight.zero_OG is not None
    is_narrow = weight.outer_O is not None
    return WordLayout(
        outputs,
        inputs,
        groups,
        weight.group,
        weight.bits,
        columns,
        step,
        scaled,
        meaning,
        has_zeros,
        has_order,
        is_narrow,
    )


def words_of(codes_OC: torch.Tensor, step: int) -> torch.Tensor:
    """Returns codes of four bits as words, int32 [O, C / 8]. C: a multiple of the step."""
    outputs = len(codes_OC)
    parts = codes_OC.view(outputs, -1, PARTS, step // PARTS // 2, 2)  # step, part, word, half
    words = torch.zeros(outputs, parts.shape[1], parts.shape[3], dtype=torch.int32, device=codes_OC.device)
    for part in range(PARTS):
        for half in range(2):
            words |= parts[:, :, part, :, half].int() << 4 * part + 16 * half
    return words.view(outputs, -1)


def whole_step(inputs: int, *, is_packed: bool) -> int:
    """Returns the inputs of a step where an output has one scale: the most that divide them, where some do."""
    sizes = _sizes(is_packed)
    return next((size for size in sizes if inputs % size == 0), sizes[0])


def _sizes(is_packed: bool) -> list[int]:
    return [size for size in STEPS if not is_packed or size >= PARTS * PART]


def _steps(inputs: int, group: int | None, is_packed: bool) -> tuple[Scaled, int]:
    """Returns which inputs share a scale, and the inputs of a step. group: None for all."""
    sizes = _sizes(is_packed)
    if group is None:
        return Scaled.WHOLE, whole_step(inputs, is_packed=is_packed)
    whole = next((size for size in sizes if group % size == 0), None)
    if whole is not None:
        return Scaled.STEP, whole
    return (Scaled.PART, PARTS * group) if group in (PART, 2 * PART) else (Scaled.LIST, 0)


def _ends(inputs: int, group: int, groups: int, weight: CodedWeight) -> torch.Tensor:
    ends_G = torch.arange(1, groups + 1, dtype=torch.int32, device=weight.codes_OI.device)
    return ends_G.mul_(group).clamp_(max=inputs)


def _padded_groups(weight: CodedWeight, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight's column that each of the padded ones is, PADDING for none; and the group of each part."""
    inputs, groups = weight.codes_OI.shape[1], weight.scale_OG.shape[1]
    ends_G = _ends(inputs, weight.group, groups, weight) if weight.ends_G is None else weight.ends_G
    ends_G = ends_G.long()
    starts_G = F.pad(ends_G[:-1], (1, 0))
    parts_G = (ends_G - starts_G + PART - 1) // PART
    firsts_G = parts_G.cumsum(0) - parts_G  # the first part of each group
    column_I = torch.arange(inputs, device=ends_G.device)
    group_I = torch.searchsorted(ends_G, column_I, right=True)
    place_C = torch.full((columns,), PADDING, device=ends_G.device)
    place_C[firsts_G[group_I] * PART + column_I - starts_G[group_I]] = column_I
    group_P = torch.zeros(columns // PART, dtype=torch.int32, device=ends_G.device)
    used = int(parts_G.sum())
    group_P[:used] = torch.repeat_interleave(torch.arange(groups, device=ends_G.device), parts_G).int()
    return place_C, group_P
