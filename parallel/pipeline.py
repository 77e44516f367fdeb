"""Sends hidden states between pipeline stages: one tensor [T, H] per step, the residual stream.

Called by the model runner around the decoder's forward. Both sides know the step's tokens from the plan, so no shape is
sent. Ranks of equal tp rank are linked. Sends are asynchronous, so a stage starts its next step while its previous
output is on its way. T tokens, H hidden size.
"""

from collections import deque

import torch

from tandem.parallel.collectives import Pending
from tandem.parallel.context import ParallelContext


class StageLink:
    """This rank's link to the stages before and after it. Steps travel in order."""

    def __init__(self, context: ParallelContext, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._context = context
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._sending: deque[tuple[Pending, torch.Tensor]] = deque()

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Returns [num_tokens, H] from the previous stage; blocks until it has arrived."""
        assert not self._context.is_first_stage
        hidden_TH = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        return self._context.world.recv(hidden_TH, self._context.rank - self._context.tp_size)

    def send(self, hidden_TH: torch.Tensor) -> None:
        """Sends to the next stage. Blocks only when as many sends are under way as there are stages."""
        assert not self._context.is_last_stage
        while len(self._sending) >= self._context.pp_size:
            self._wait_oldest()
        hidden_TH = hidden_TH.contiguous()
        pending = self._context.world.isend(hidden_TH, self._context.rank + self._context.tp_size)
        self._sending.append((pending, hidden_TH))

    def flush(self) -> None:
        """Returns when every send has been received; call it before the context is closed."""
        while self._sending:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        pending, _ = self._sending.popleft()
        pending.wait()
