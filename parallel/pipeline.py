"""Sends hidden states between pipeline stages: one message per step, the residual stream [T, H] and one element that
is not 0 if a stage has failed.

Called by step_exchanges.py around the decoder's forward. Both sides know the step's tokens from the plan, so no shape
is sent. Ranks of equal tp rank are linked. Sends are asynchronous, so a stage starts its next step while its previous
output is on its way. T tokens, H hidden size.
"""

from collections import deque

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import Pending


class StageLink:
    """This rank's link to the stages before and after it. Steps travel in order."""

    def __init__(self, context: ParallelContext, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._context = context
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._sending: deque[tuple[Pending, torch.Tensor]] = deque()

    def receive(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [num_tokens, H] from the previous stage, and [1]: not 0 if that stage or one before it has failed.
        Blocks until they have arrived."""
        assert not self._context.is_first_stage
        count = num_tokens * self._hidden_size
        message = torch.empty(count + 1, dtype=self._dtype, device=self._device)
        parts = message[:count].view(num_tokens, self._hidden_size), message[count:]
        self._context.world.recv(message, self._context.rank - self._context.tp_size)
        return parts  # and nothing that may fail once it is received

    def send(self, hidden_TH: torch.Tensor, failed_1: torch.Tensor | None = None) -> None:
        """Sends to the next stage. failed_1: what the stage before has said of itself; None on the first.
        Blocks only when as many sends are under way as there are stages."""
        message = self._message(len(hidden_TH))
        message[:-1].view_as(hidden_TH).copy_(hidden_TH)
        message[-1:] = 0 if failed_1 is None else failed_1
        self._send(message)

    def send_failure(self, num_tokens: int) -> None:
        """Send for a stage that has failed: zeros in place of hidden states."""
        message = self._message(num_tokens).zero_()
        message[-1:] = 1
        self._send(message)

    def flush(self) -> None:
        """Returns when every send has been received; call it before the context is closed."""
        while self._sending:
            self._wait_oldest()

    def _message(self, num_tokens: int) -> torch.Tensor:
        return torch.empty(num_tokens * self._hidden_size + 1, dtype=self._dtype, device=self._device)

    def _send(self, message: torch.Tensor) -> None:
        assert not self._context.is_last_stage
        while len(self._sending) >= self._context.pp_size:
            self._wait_oldest()
        pending = self._context.world.isend(message, self._context.rank + self._context.tp_size)
        self._sending.append((pending, message))

    def _wait_oldest(self) -> None:
        pending, _ = self._sending.popleft()
        pending.wait()
