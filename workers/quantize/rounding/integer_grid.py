"""IntegerGrid: the codes, scales and zeros that a matrix is rounded to, as compressed-tensors stores them.

A code c of `bits` bits stands for (c - zero) * scale, each group of inputs of an output with a scale, and a zero or the
middle code. Scales are those that are written, in the dtype of the checkpoint, so that what is measured is what is
served. O outputs, I inputs, G groups of B inputs.
"""

from dataclasses import dataclass

import torch

LEAST_SCALE = 1e-8
PIECE_BYTES = 2**22
"""Size, in float32, of the weights that are rounded at a time: what is computed of them stays in caches."""


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix on a grid. codes_OI: uint8, from 0. zero_OG: codes too, None where each is the middle one."""

    codes_OI: torch.Tensor
    scale_OG: torch.Tensor
    zero_OG: torch.Tensor | None
    grid: "IntegerGrid"

    def rows(self, rows: slice) -> "RoundedMatrix":
        """Returns some outputs."""
        zero_OG = None if self.zero_OG is None else self.zero_OG[rows]
        return RoundedMatrix(self.codes_OI[rows], self.scale_OG[rows], zero_OG, self.grid)

    def dense_OI(self) -> torch.Tensor:
        """Returns the weights that it stands for, float32."""
        size = self.grid.size_of(self.codes_OI.shape[1])
        codes_OGB = self.codes_OI.float().unflatten(1, (-1, size))
        zero = float(self.grid.middle) if self.zero_OG is None else self.zero_OG.float()[..., None]
        return (codes_OGB - zero).mul_(self.scale_OG.float()[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class IntegerGrid:
    """group: inputs that share a scale, None for all of an output. scale_dtype: in which scales are written."""

    bits: int
    group: int | None
    symmetric: bool
    scale_dtype: torch.dtype = torch.float32

    @property
    def middle(self) -> int:
        """The code of 0 where there are no zeros."""
        return 1 << self.bits - 1

    def size_of(self, inputs: int) -> int:
        """Returns the inputs of a group."""
        return self.group or inputs

    def scales(self, weight_OB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scale [O, 1] and the zero [O, 1], float32, of one group's weights: their range, 0 included.
        Without zeros the range is the largest weight each way (as llm-compressor has it): the last code is half a step
        short of it."""
        if self.symmetric:
            scale_O1 = self._written(weight_OB.abs().amax(1, keepdim=True) / ((2**self.bits - 1) / 2))
            return scale_O1, torch.full_like(scale_O1, self.middle)
        least_O1 = weight_OB.amin(1, keepdim=True).clamp_(max=0)
        most_O1 = weight_OB.amax(1, keepdim=True).clamp_(min=0)
        scale_O1 = self._written((most_O1 - least_O1) / (2**self.bits - 1))
        return scale_O1, (-least_O1 / scale_O1).round_().clamp_(0, 2**self.bits - 1)

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Returns the nearest codes, float32. scale, zero: of each weight, or broadcast."""
        return (weight / scale).round_().add_(zero).clamp_(0, 2**self.bits - 1)

    def round(self, weight_OI: torch.Tensor) -> RoundedMatrix:
        """Returns each weight's nearest value (round to nearest)."""
        outputs, inputs = weight_OI.shape
        codes_OI = torch.empty(outputs, inputs, dtype=torch.uint8)
        scale_OG, zero_OG = self.scales_of(weight_OI)
        for rows in pieces_of(outputs, inputs):
            groups = weight_OI[rows].unflatten(1, (-1, self.size_of(inputs)))
            codes_OI[rows] = self.nearest(groups, scale_OG[rows, :, None], zero_OG[rows, :, None]).flatten(1)
        return self.matrix(codes_OI, scale_OG, zero_OG)

    def scales_of(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scales and the zeros of all groups, float32 [O, G]."""
        outputs, inputs = weight_OI.shape
        found_2OG = torch.empty(2, outputs, inputs // self.size_of(inputs))
        for rows in pieces_of(outputs, inputs):
            groups = weight_OI[rows].reshape(-1, self.size_of(inputs))
            for place, one in enumerate(self.scales(groups)):
                found_2OG[place, rows] = one.view(-1, found_2OG.shape[2])
        return found_2OG[0], found_2OG[1]

    def matrix(self, codes_OI: torch.Tensor, scale_OG: torch.Tensor, zero_OG: torch.Tensor) -> RoundedMatrix:
        """Returns codes, scales and zeros as they are written."""
        zeros = None if self.symmetric else zero_OG.to(torch.uint8)
        return RoundedMatrix(codes_OI, scale_OG.to(self.scale_dtype), zeros, self)

    def _written(self, scale: torch.Tensor) -> torch.Tensor:
        written = scale.clamp_(min=LEAST_SCALE).to(self.scale_dtype).float()
        return torch.where(written > 0, written, torch.finfo(self.scale_dtype).tiny)


def pieces_of(outputs: int, inputs: int) -> list[slice]:
    """Returns ranges of outputs whose weights are at most PIECE_BYTES, or one output's."""
    step = max(1, PIECE_BYTES // (4 * inputs))
    return [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)]
