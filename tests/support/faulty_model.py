"""A Decoder that runs out of memory or computes NaN in chosen forward passes: given to a ModelRunner in tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.graphs.graph_runner import GraphRunner
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.step_tensors import Heard

Fault = Literal["out of memory at once", "out of memory at the end", "nan"]


@dataclass
class FaultyModel:
    """`model` with faults by the number of the forward pass, from 0; "nan" spoils the step's first row of logits, or
    the first hidden state where it pools."""

    model: Decoder
    faults: dict[int, Fault] = field(default_factory=dict)
    calls: int = 0

    @property
    def graphs(self) -> GraphRunner:
        return self.model.graphs

    @property
    def heard(self) -> Heard | None:
        return self.model.heard

    def forward(
        self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None, passed: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        fault = self._begin()
        output = self.model.forward(batch, kv, hidden_TH, passed)
        self._end(fault, output)
        return output

    def forward_and_pool(
        self,
        batch: ForwardBatch,
        kv: KVTensors,
        hidden_TH: torch.Tensor | None,
        rows_P: torch.Tensor,
        passed: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fault = self._begin()
        output, hidden_PH = self.model.forward_and_pool(batch, kv, hidden_TH, rows_P, passed)
        self._end(fault, hidden_PH)
        return output, hidden_PH

    def logits(self, hidden_PH: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        return self.model.logits(hidden_PH, adapters)

    def close(self) -> None:
        self.model.close()

    def _begin(self) -> Fault | None:
        fault = self.faults.get(self.calls)
        self.calls += 1
        if fault == "out of memory at once":
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
        return fault

    @staticmethod
    def _end(fault: Fault | None, output: torch.Tensor) -> None:
        if fault == "out of memory at the end":
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        if fault == "nan":
            output[:1] = float("nan")
