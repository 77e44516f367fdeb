"""MedusaHeads: a head for each of the next places, over the model's last hidden state (Cai et al. 2024, Medusa).

A head is a block, x + silu(linear(x)) as often as it has layers, and a vocabulary table. None sees the guesses ahead of
its own, and none has KV. S rows, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.embedding import VocabParallelHead
from tandem.parallel.linear import ColumnParallelLinear
from tandem.workers.models.spec.config.head_config import HeadSpec, MedusaParams
from tandem.workers.platforms.base import Platform


class MedusaHeads:
    """The heads, whole on this rank."""

    def __init__(self, spec: HeadSpec, platform: Platform, dtype: torch.dtype) -> None:
        assert isinstance(spec.params, MedusaParams)
        alone, make = ParallelContext.single(), partial(platform.linear, dtype=dtype)
        self._blocks = [
            [ColumnParallelLinear((weight,), (bias,), alone, make) for weight, bias in block]
            for block in spec.params.blocks
        ]
        self._tables = [VocabParallelHead(table, alone, make) for table in spec.params.tables]

    def logits(self, hidden_SH: torch.Tensor, place: int) -> torch.Tensor:
        """Returns the logits [S, V], float32, of the guess at a place, from 0 on. hidden_SH: after the final norm,
        behind the last token that the model has computed of each row."""
        for layer in self._blocks[place]:
            hidden_SH = hidden_SH + functional.silu(layer(hidden_SH))
        return self._tables[place](hidden_SH)

    def slots(self) -> Iterator[ParameterSlot]:
        for block in self._blocks:
            for layer in block:
                yield from layer.slots()
        for table in self._tables:
            yield from table.slots()
