"""LoRA of --batch-invariant for widths that the compiled kernel does not take: each token by itself.

The twin takes short runs, long ones and gathered rows by other products; here all of them are of one token. It is slow,
and there for the last piece of a vocabulary, and for models of odd widths. Shapes as in kernels/lora_ops.py.
"""

from collections.abc import Sequence

import torch

from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables, TorchLora


class EachToken:
    """LoraOps by the twin's of single tokens."""

    warm_up_tokens: tuple[int, ...] = (1,)
    reads_slots = False

    def __init__(self) -> None:
        self._twin = TorchLora()

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        projections: Sequence[ProjectionTables],
        rows: AdapterRows,
    ) -> None:
        for first, last, slot in rows.segments:
            for token in range(first, last):
                own = slice(token, token + 1)
                self._twin.add(y_TO[own], x_TI[own], slab, projections, AdapterRows(rows.slots_T[own], [(0, 1, slot)]))
