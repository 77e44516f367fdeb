"""Entry: what happens to embeddings before the first layer: a scale, learned positions, a norm; often nothing.

Built by decoder.py on the first stage. T tokens, H hidden size, C positions.
"""

from collections.abc import Iterator

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.models.layers.norms import AddNorm, make_norm
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.parameters import ParameterTable


class Entry:
    """Makes the residual stream of embeddings."""

    def __init__(self, spec: ArchSpec, table: ParameterTable, ops: FusedOps) -> None:
        self._scale = spec.embedding_scale
        self._scale_1: torch.Tensor | None = None
        self._positions = table.positions
        self._offset = 0 if spec.positions is None else spec.positions.offset
        self._positions_CH: torch.Tensor | None = None
        self._norm: AddNorm | None = None
        if spec.embedding_norm is not None and table.embedding_norm is not None:
            self._norm = make_norm(spec.embedding_norm, table.embedding_norm, ops)

    def __call__(self, x_TH: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Returns [T, H]. x: the embeddings, which may be overwritten; positions_T: of the tokens in their rows."""
        if self._scale != 1.0:
            if self._scale_1 is None:  # once: a graph reads it
                self._scale_1 = torch.tensor(self._scale, dtype=x_TH.dtype, device=x_TH.device)
            x_TH = x_TH * self._scale_1
        if self._positions_CH is not None:
            last = len(self._positions_CH) - 1  # what is beyond is discarded
            x_TH = x_TH + self._positions_CH[(positions_T + self._offset).clamp(max=last)]
        return x_TH if self._norm is None else self._norm.alone(x_TH)

    def slots(self) -> Iterator[ParameterSlot]:
        if self._positions is not None:
            yield ParameterSlot((self._positions,), self._accept)
        if self._norm is not None:
            yield from self._norm.slots()

    def _accept(self, positions_CH: torch.Tensor) -> None:
        self._positions_CH = positions_CH
