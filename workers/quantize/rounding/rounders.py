"""Rounder: makes a matrix of weights into codes on a grid. Round to nearest, and GPTQ (Frantar et al. 2022).

GPTQ rounds one input's weights after another, and after each changes those of later inputs so that the layer's outputs
over the calibration text stay as near as they can: by the inverse of the matrix of products of its inputs. O outputs, I
inputs, B of a block.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.workers.quantize.rounding.integer_grid import IntegerGrid, RoundedMatrix
from tandem.workers.quantize.rounding.recorded_linear import InputStats
from tandem.workers.quantize.rounding.threads import one_thread

BLOCK = 128
"""Inputs whose changes are added to all later ones at once."""
DAMPING = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to it, the next where the matrix has no inverse with one."""


class NoInverseError(ArithmeticError):
    """The sums over a matrix's inputs have no inverse: they are 0, or no numbers, or too alike."""


class Rounder(Protocol):
    """A way to round. stats: of the matrix's inputs. NoInverseError."""

    def __call__(self, weight_OI: torch.Tensor, stats: InputStats, grid: IntegerGrid, /) -> RoundedMatrix: ...


def to_nearest(weight_OI: torch.Tensor, stats: InputStats, grid: IntegerGrid, /) -> RoundedMatrix:
    """The Rounder that looks at no input."""
    return grid.round(weight_OI)


@dataclass(frozen=True, slots=True)
class GptqRounder:
    """The Rounder of GPTQ. act_order: inputs with the largest squares come first, each in the group of its place, with
    scales of the weights as they are; else in their order, with scales of a group's weights when it begins."""

    act_order: bool = False

    def __call__(self, weight_OI: torch.Tensor, stats: InputStats, grid: IntegerGrid, /) -> RoundedMatrix:
        return self.prepared(stats)(weight_OI, grid)

    def prepared(self, stats: InputStats) -> "PreparedGptq":
        """Returns what rounds any outputs that have these inputs. NoInverseError."""
        order_I = torch.arange(len(stats.products_II))
        if self.act_order:
            order_I = stats.products_II.diagonal().argsort(descending=True, stable=True)
        return PreparedGptq(self.act_order, order_I, _factor(stats.products_II, order_I if self.act_order else None))


@dataclass(frozen=True, slots=True)
class PreparedGptq:
    """GPTQ for some inputs. order_I: in which they are rounded; factor_II: in that order."""

    act_order: bool
    order_I: torch.Tensor
    factor_II: torch.Tensor

    def __call__(self, weight_OI: torch.Tensor, grid: IntegerGrid) -> RoundedMatrix:
        group_I = self.order_I // grid.size_of(weight_OI.shape[1])
        state = _Rounding(grid, *grid.scales_of(weight_OI), group_I, not self.act_order)
        codes_OI = state.run(weight_OI[:, self.order_I], self.factor_II)
        return grid.matrix(codes_OI[:, self.order_I.argsort()], state.scale_OG, state.zero_OG)


@dataclass(slots=True)
class _Rounding:
    """One matrix, whose inputs are rounded one after another. group_I: of each input, in the order in which they are
    rounded; renews: a group's scales are made anew when it begins."""

    grid: IntegerGrid
    scale_OG: torch.Tensor
    zero_OG: torch.Tensor
    group_I: torch.Tensor
    renews: bool

    def run(self, weight_OI: torch.Tensor, factor_II: torch.Tensor) -> torch.Tensor:
        """Returns the codes. weight: is overwritten; factor: as _factor() returns it."""
        inputs = weight_OI.shape[1]
        size = self.grid.size_of(inputs)
        step = (
            BLOCK if size >= inputs else size * max(1, BLOCK // size)
        )  # no group begins within a block and ends behind
        codes_OI = torch.empty(weight_OI.shape, dtype=torch.uint8)
        for first in range(0, inputs, step):
            block = slice(first, min(first + step, inputs))
            with one_thread():  # thousands of small operations
                error_OB = self._block(weight_OI, factor_II, block, codes_OI)
            weight_OI[:, block.stop :].addmm_(error_OB, factor_II[block, block.stop :], alpha=-1)
        return codes_OI

    def _block(
        self, weight_OI: torch.Tensor, factor_II: torch.Tensor, block: slice, codes_OI: torch.Tensor
    ) -> torch.Tensor:
        """Rounds a block's inputs. Returns their errors, by which later ones change."""
        weight_BO = weight_OI[:, block].T.contiguous()
        factor_BB, error_BO = factor_II[block, block], torch.empty_like(weight_BO)
        size = self.grid.size_of(weight_OI.shape[1])
        for place, weight_O in enumerate(weight_BO):
            column = block.start + place
            group = int(self.group_I[column])
            if self.renews and column % size == 0:
                own = weight_BO[place : place + size].T if size <= len(weight_BO) else weight_OI
                scale_O1, zero_O1 = self.grid.scales(own)
                self.scale_OG[:, group], self.zero_OG[:, group] = scale_O1[:, 0], zero_O1[:, 0]
            scale_O, zero_O = self.scale_OG[:, group], self.zero_OG[:, group]
            code_O = self.grid.nearest(weight_O, scale_O, zero_O)
            codes_OI[:, column] = code_O
            error_BO[place] = (weight_O - (code_O - zero_O) * scale_O) / factor_BB[place, place]
            weight_BO[place + 1 :].addr_(factor_BB[place, place + 1 :], error_BO[place], alpha=-1)
        return error_BO.T


def _factor(products_II: torch.Tensor, order_I: torch.Tensor | None) -> torch.Tensor:
    """Returns the upper Cholesky factor of the inverse of the products of inputs, in an order. NoInverseError."""
    diagonal_I = products_II.diagonal()
    if order_I is not None:
        diagonal_I = diagonal_I[order_I]
    mean = diagonal_I.mean()
    if not bool(mean > 0) or not bool(mean.isfinite()):
        raise NoInverseError
    for share in DAMPING:  # each matrix goes when the next is there: two of them at a time
        damped_II = products_II.clone() if order_I is None else products_II[order_I[:, None], order_I]
        # an input that is always 0 says nothing: its weights are rounded by themselves
        damped_II.diagonal().copy_(torch.where(diagonal_I > 0, diagonal_I + share * mean, mean))
        lower_II, failed = torch.linalg.cholesky_ex(damped_II)
        del damped_II
        if failed:
            continue
        inverse_II = torch.cholesky_inverse(lower_II)
        del lower_II
        factor_II, failed = torch.linalg.cholesky_ex(inverse_II, upper=True)
        del inverse_II
        if not failed and bool(factor_II.isfinite().all()):
            return factor_II
    raise NoInverseError
