"""LoraOps whose calls depend on shapes alone, as those of a GPU's kernels: every token gathers the rows of its slot."""

from collections.abc import Sequence

import torch

from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables


class SlotLora:
    """The twin of TritonLora in torch's operations, for graphs that record them."""

    warm_up_tokens: tuple[int, ...] = (1,)
    reads_slots = True

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        projections: Sequence[ProjectionTables],
        rows: AdapterRows,
    ) -> None:
        slots_T = rows.slots_T.long().clamp(min=0)
        for each in projections:
            a_TRI, b_TRO = (
                _rows_of(slab, starts[slots_T], length)
                for starts, length in ((each.a_rows, each.inputs), (each.b_rows, each.outputs))
            )
            shrunk_TR1 = (a_TRI @ x_TI.float()[:, :, None]) * each.scales[slots_T][:, None, None]
            columns = y_TO[:, each.start : each.start + each.outputs]
            sums_TO = (columns.float() + (shrunk_TR1.transpose(1, 2) @ b_TRO).squeeze(1)).to(y_TO.dtype)
            touched_T = (rows.slots_T >= 0) & (each.ranks[slots_T] > 0)
            columns.copy_(torch.where(touched_T[:, None], sums_TO, columns))


def _rows_of(slab: torch.Tensor, starts_TR: torch.Tensor, length: int) -> torch.Tensor:
    """Returns float32 [T, R, length]; zeros where a start is -1."""
    places = starts_TR.clamp(min=0)[..., None] + torch.arange(length, device=slab.device)
    return slab.view(-1)[places].float().masked_fill(starts_TR[..., None] < 0, 0.0)
