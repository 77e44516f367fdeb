"""CodedWeight: a weight as codes of a few bits, with a scale and perhaps a zero for each group of inputs.

What a checkpoint's layout is read into (layouts/), and what a product's own form is made of: that of the twin
(coded.py) and of compiled kernels. O outputs, I inputs, all of this rank; G groups of inputs.

    weight[o, order[i]] = (value(codes[o, i]) - zero[o, g]) * scale[o, g] * outer[o], with g the group of column i,
    value(c) = table[c], or c itself where there is no table; outer is 1 where scales are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

PIECE_CODES: Final = 2**22
"""Codes that are undone at a time."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """One matrix on this rank. All tensors are contiguous, on one device.

    bits: of a code, 1 to 8; codes are below 2**bits. table: of 2**bits values; what is symmetric about 0 has one
    (-8 .. 7 of int4, then without zeros), so has what is no integer (NF4, E2M1). Groups are `group` columns each, the
    last perhaps fewer; with ends_G they end there instead: some may be empty, the last ends at I.
    """

    codes_OI: torch.Tensor  # uint8, a byte for each
    scale_OG: torch.Tensor  # float32, or with outer_O float8_e4m3fn
    bits: int
    group: int
    zero_OG: torch.Tensor | None = None  # float32, in units of values; None: 0
    table: torch.Tensor | None = None  # float32 [2**bits]; None: a code is its own value
    ends_G: torch.Tensor | None = None  # int32, ascending; None: regular groups
    order_I: torch.Tensor | None = None  # int64: the input that a column multiplies; None: as they are
    outer_O: torch.Tensor | None = None  # float32; None: scales are float32 themselves

    def __post_init__(self) -> None:
        outputs, inputs = self.codes_OI.shape
        groups = -(-inputs // self.group) if self.ends_G is None else len(self.ends_G)
        assert self.scale_OG.shape == (outputs, groups), (self.scale_OG.shape, outputs, groups)
        assert self.zero_OG is None or self.zero_OG.shape == self.scale_OG.shape
        assert self.table is None or self.table.shape == (2**self.bits,)
        assert self.order_I is None or self.order_I.shape == (inputs,)
        assert self.outer_O is None or (self.outer_O.shape == (outputs,) and self.zero_OG is None)

    @property
    def group_of_I(self) -> torch.Tensor:
        """The group of each column, int64 [I]."""
        columns = torch.arange(self.codes_OI.shape[1], device=self.codes_OI.device)
        if self.ends_G is None:
            return columns // self.group
        return torch.searchsorted(self.ends_G.long(), columns, right=True)

    @property
    def wide_scale_OG(self) -> torch.Tensor:
        """The scales with the outer ones, float32 [O, G]."""
        return self.scale_OG if self.outer_O is None else self.scale_OG.float() * self.outer_O[:, None]

    def values_OI(self) -> torch.Tensor:
        """The weights in the order of columns, float32: (value - zero) * scale, each operation rounded once."""
        codes = self.codes_OI.long() if self.table is not None else self.codes_OI
        values_OI = codes.float() if self.table is None else self.table[codes]
        group_I = self.group_of_I
        if self.zero_OG is not None:
            values_OI = values_OI - self.zero_OG[:, group_I]
        return values_OI * self.wide_scale_OG[:, group_I]

    def dense_OI(self) -> torch.Tensor:
        """The weights in the order of inputs, float32."""
        values_OI = self.values_OI()
        if self.order_I is None:
            return values_OI
        dense_OI = torch.empty_like(values_OI)
        dense_OI[:, self.order_I] = values_OI
        return dense_OI


def undone(weight: CodedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights in the order of inputs, [O, I], made piece by piece of outputs: what is between would take
    several times their bytes."""
    outputs, inputs = weight.codes_OI.shape
    found, step = weight.scale_OG.new_empty((outputs, inputs), dtype=dtype), max(1, PIECE_CODES // max(1, inputs))
    for first in range(0, outputs, step):
        rows = slice(first, first + step)
        found[rows] = rows_of(weight, rows).dense_OI()
    return found


def rows_of(weight: CodedWeight, rows: slice) -> CodedWeight:
    """Returns some outputs of a weight."""
    zero_OG = None if weight.zero_OG is None else weight.zero_OG[rows]
    outer_O = None if weight.outer_O is None else weight.outer_O[rows]
    own = {"codes_OI": weight.codes_OI[rows], "scale_OG": weight.scale_OG[rows]}
    return replace(weight, **own, zero_OG=zero_OG, outer_O=outer_O)


def joined(weights: Sequence[CodedWeight]) -> CodedWeight:
    """Returns matrices with the same groups of inputs as one, outputs behind outputs."""
    first = weights[0]
    if len(weights) == 1:
        return first
    assert all(weight.order_I is None and weight.group == first.group for weight in weights)
    zeros = [weight.zero_OG for weight in weights if weight.zero_OG is not None]
    outers = [weight.outer_O for weight in weights if weight.outer_O is not None]
    return replace(
        first,
        codes_OI=torch.cat([weight.codes_OI for weight in weights]),
        scale_OG=torch.cat([weight.scale_OG for weight in weights]),
        zero_OG=torch.cat(zeros) if zeros else None,
        outer_O=torch.cat(outers) if outers else None,
    )
