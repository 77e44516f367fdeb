"""Scales as they are stored, to one for each output and group of a rank; the groups of its inputs. Torch-free until it
is called."""

from typing import TYPE_CHECKING

from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param
from tandem.parallel.quantization.stored_parts import ALL, row_cut

if TYPE_CHECKING:
    import torch


def spread_scales(stored: "torch.Tensor", weight: Param, mesh: Mesh, rows: int) -> "torch.Tensor":
    """Returns scales [outputs, groups], float32, in memory of their own. stored: a rank's part; rows: outputs that
    share one, ALL for all of the matrix."""
    import torch

    from tandem.parallel.quantization.unpacking import cut_rows

    wide = stored.to(torch.float32, copy=True)
    if rows == 1:
        return wide.contiguous()
    if rows == ALL:
        return wide.expand(weight.span(0, mesh).length, -1).contiguous()
    return cut_rows(wide.repeat_interleave(rows, 0), row_cut(weight, mesh, rows))


def groups_of(group: int | None, weight: Param, mesh: Mesh) -> "tuple[int, torch.Tensor | None]":
    """Returns the regular size of the groups of a rank's inputs, and where they end if that does not say it."""
    from tandem.parallel.quantization.rounding import group_ends
    from tandem.parallel.quantization.schemes import Coded

    span = weight.span(1, mesh)
    if group is None:
        return max(1, span.length), None
    return group, None if span.start % group == 0 else group_ends(Coded(group=group), span)
