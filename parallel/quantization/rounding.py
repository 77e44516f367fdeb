"""round_to_codes(): a dense weight as the nearest codes of a scheme, for weights that are made up or made at load.

By group: scale = largest |weight| / largest value of a code; with zeros the range from the least to the largest weight
is divided evenly, and 0 is one of its values. A group that ranks share has the bounds of all its weights, so that every
TP degree has the same codes. Weights are what the checkpoint stores, whatever the model's dtype; they are finite.
O outputs, I inputs, G groups.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tandem.parallel.context import ParallelContext
from tandem.parallel.params import Param, Span
from tandem.parallel.quantization.code_tables import table_of
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.schemes import Coded, Codes

PIECE_WEIGHTS = 2**16
"""Weights that torch rounds at a time."""
Share = Callable[[torch.Tensor], torch.Tensor]
"""Takes a rank's largest numbers [O, G], none below 0, and returns those of the ranks that share its groups."""


class CodeGroups(NamedTuple):
    """The groups of a rank's inputs: where they end, as group_ends() returns it, their scales, and their zeros, 0 where
    a scheme has none."""

    ends_G: torch.Tensor
    scale_OG: torch.Tensor
    zero_OG: torch.Tensor


class Rounding(Protocol):
    """The two passes over a weight."""

    def bounds(self, weight_OI: torch.Tensor, ends_G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the least and the largest weight of each group, 0 among them, float32 [O, G]."""
        ...

    def codes(self, weight_OI: torch.Tensor, scheme: Coded, groups: CodeGroups) -> torch.Tensor:
        """Returns the nearest codes, uint8 [O, I]."""
        ...


class TorchRounding(Rounding):
    """The twin of compiled passes, a few thousand weights at a time."""

    def bounds(self, weight_OI: torch.Tensor, ends_G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ends = ends_G.tolist()
        found = torch.zeros((2, len(weight_OI), len(ends)), device=weight_OI.device)
        for group, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if start < end:
                found[0, :, group], found[1, :, group] = weight_OI[:, start:end].aminmax(dim=1)
        return found[0].clamp_(max=0), found[1].clamp_(min=0)

    def codes(self, weight_OI: torch.Tensor, scheme: Coded, groups: CodeGroups) -> torch.Tensor:
        ends_G, scale_OG, zero_OG = groups
        columns = torch.arange(weight_OI.shape[1], device=weight_OI.device)
        group_I = torch.searchsorted(ends_G.long().to(weight_OI.device), columns, right=True)
        codes_OI = torch.empty(weight_OI.shape, dtype=torch.uint8, device=weight_OI.device)
        for piece in _small_pieces(*weight_OI.shape):
            scale_OI, zero_OI = scale_OG[piece], zero_OG[piece]
            if len(ends_G) > 1:
                scale_OI, zero_OI = scale_OI[:, group_I], zero_OI[:, group_I]
            units_OI = weight_OI[piece].to(torch.float32, copy=True).div_(scale_OI).masked_fill_(scale_OI == 0, 0)
            codes_OI[piece] = _nearest(units_OI, scheme, zero_OI)
        return codes_OI


def _small_pieces(outputs: int, inputs: int) -> list[slice]:
    """Returns ranges of outputs whose weights stay in a core's caches while they are rounded: larger ones also left a
    process with heaps of several times the weights' bytes."""
    step = max(1, PIECE_WEIGHTS // max(1, inputs))
    return [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)]


TORCH_ROUNDING = TorchRounding()


def round_to_codes(
    weight_OI: torch.Tensor,
    scheme: Coded,
    columns: Span,
    *,
    rounding: Rounding = TORCH_ROUNDING,
    share: Share | None = None,
) -> CodedWeight:
    """Returns the codes of this rank's part of a matrix. columns: its inputs. share: where ranks share groups."""
    ends_G = group_ends(scheme, columns)
    starts = [0, *ends_G[:-1].tolist()]
    least_OG, largest_OG = rounding.bounds(weight_OI, ends_G)
    if share is not None:
        least_OG, largest_OG = -share(-least_OG), share(largest_OG)
    scale_OG, zero_OG = _scales(least_OG, largest_OG, scheme)
    narrow_OG, outer_O = _narrowed(scale_OG) if scheme.narrow else (scale_OG, None)
    if outer_O is not None:
        scale_OG = narrow_OG.float() * outer_O[:, None]
    table = table_of(scheme)
    is_regular = not scheme.ordered and starts == [
        place * (scheme.group or columns.length) for place in range(len(starts))
    ]
    return CodedWeight(
        rounding.codes(weight_OI, scheme, CodeGroups(ends_G, scale_OG, zero_OG)),
        narrow_OG,
        scheme.bits,
        scheme.group or columns.length,
        zero_OG if scheme.zeros else None,
        None if table is None else table.to(weight_OI.device),
        None if is_regular else ends_G.to(weight_OI.device),
        torch.arange(columns.length, device=weight_OI.device) if scheme.ordered else None,
        outer_O,
    )


def group_ends(scheme: Coded, columns: Span) -> torch.Tensor:
    """Returns where each group ends among a rank's inputs, int32 [G]: the groups that Coded.parts() counts."""
    if scheme.group is None:
        return torch.tensor([columns.length], dtype=torch.int32)
    last = columns.start + columns.length
    count = scheme.num_groups(columns.total)
    groups = range(count) if scheme.ordered else range(columns.start // scheme.group, -(-last // scheme.group))
    ends = [min(max((group + 1) * scheme.group, columns.start), last) - columns.start for group in groups]
    return torch.tensor(ends, dtype=torch.int32)


def shared_groups(weight: Param, scheme: Coded, context: ParallelContext) -> Share | None:
    """Returns what the ranks of a matrix agree by on the bounds of groups that are cut between them; None where each
    has whole groups."""
    columns = weight.span(1, context.mesh)
    group = scheme.group or columns.total
    if not 0 < columns.length < columns.total or columns.length % group == 0:
        return None
    first, count = (0 if scheme.ordered else columns.start // group), scheme.num_groups(columns.total)

    def share(mine_OG: torch.Tensor) -> torch.Tensor:
        every_OG = mine_OG.new_zeros(len(mine_OG), count)
        every_OG[:, first : first + mine_OG.shape[1]] = mine_OG
        parts_R = mine_OG.new_empty(context.tp_size, every_OG.numel())
        largest_OG = context.tp.all_gather(parts_R, every_OG.view(-1)).amax(0).view_as(every_OG)
        return largest_OG[:, first : first + mine_OG.shape[1]].contiguous()

    return share


def _scales(least_OG: torch.Tensor, largest_OG: torch.Tensor, scheme: Coded) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales, and zeros, which are codes too, or 0."""
    table = table_of(scheme)
    if table is not None:
        scale_OG = torch.maximum(-least_OG, largest_OG) / float(table.nan_to_num(0.0).max())
        return scale_OG, torch.zeros_like(scale_OG)
    scale_OG = (largest_OG - least_OG) / (2**scheme.bits - 1)
    return scale_OG, torch.where(scale_OG > 0, -least_OG / scale_OG, 0).round()


def _narrowed(scale_OG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales in E4M3, and those in float32 of outputs, by which the largest is E4M3's largest number."""
    most = torch.finfo(torch.float8_e4m3fn).max
    outer_O = F.pad(scale_OG, (1, 0)).amax(1) / most
    outer_O = torch.where(outer_O > 0, outer_O, 1.0)
    return (scale_OG / outer_O[:, None]).clamp_(max=most).to(torch.float8_e4m3fn), outer_O


def _nearest(units_OI: torch.Tensor, scheme: Coded, zero_OI: torch.Tensor) -> torch.Tensor:
    """Returns the codes, uint8, of numbers that are given in units of their scales."""
    if scheme.codes is Codes.E4M3:
        return units_OI.to(torch.float8_e4m3fn).view(torch.uint8)
    if (table := table_of(scheme)) is None:
        return units_OI.round_().add_(zero_OI).clamp_(0, 2**scheme.bits - 1).to(torch.uint8)
    places, middles = middles_of(table)
    return places.to(units_OI.device)[torch.bucketize(units_OI, middles.to(units_OI.device))]


def middles_of(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a table's codes by ascending values, uint8, and the numbers between those values, float32."""
    values, places = table.sort()
    return places.to(torch.uint8), (values[1:] + values[:-1]) / 2
