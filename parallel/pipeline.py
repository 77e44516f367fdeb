"""Sends hidden states between pipeline stages: one message per step, the residual stream [T, H], what a head of the
last stage reads of earlier stages' layers, [T, H] each, and one element that is not 0 if a stage has failed.

Called by step_exchanges.py around the decoder's forward. Both sides know the step's tokens from the plan, and the
layers that are read from the head, so no shape is sent. Ranks of equal tp rank are linked. Sends are asynchronous, so a
stage starts its next step while its previous output is on its way. T tokens, H hidden size.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import Pending


class StageOutput(NamedTuple):
    """The tensors that a stage hands on of a step, [T, H] each: the residual stream, and what was kept of it for a head
    before layers of this stage and those before it (Decoder.listen)."""

    hidden_TH: torch.Tensor
    kept: tuple[torch.Tensor, ...] = ()


class StageLink:
    """This rank's link to the stages before and after it. Steps travel in order. num_received, num_sent: tensors that
    are kept for a head, of what the stage before hands on, and of this one's output."""

    def __init__(
        self,
        context: ParallelContext,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_received: int = 0,
        num_sent: int = 0,
    ) -> None:
        self._context = context
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._received, self._sent = 1 + num_received, 1 + num_sent
        self._sending: deque[tuple[Pending, torch.Tensor]] = deque()

    def receive(self, num_tokens: int) -> tuple[StageOutput, torch.Tensor]:
        """Returns the output of the previous stage, of num_tokens, and [1]: not 0 if that stage or one before it has
        failed. Blocks until they have arrived."""
        assert not self._context.is_first_stage
        message = self._message(self._received * num_tokens)
        hidden_TH, *kept = message[:-1].view(self._received, num_tokens, self._hidden_size).unbind()
        parts = StageOutput(hidden_TH, tuple(kept)), message[-1:]
        self._context.world.recv(message, self._context.rank - self._context.tp_size)
        return parts  # and nothing that may fail once it is received

    def send(
        self, hidden_TH: torch.Tensor, kept: Sequence[torch.Tensor] = (), failed_1: torch.Tensor | None = None
    ) -> None:
        """Sends a StageOutput to the next stage. failed_1: what the stage before has said of itself; None on the first.
        Blocks only when as many sends are under way as there are stages."""
        assert len(kept) + 1 == self._sent, "the next stage expects others"
        message = self._next_message(len(hidden_TH))
        for part, each in zip(message[:-1].view(self._sent, *hidden_TH.shape), (hidden_TH, *kept), strict=True):
            part.copy_(each)
        message[-1:] = 0 if failed_1 is None else failed_1
        self._send(message)

    def send_failure(self, num_tokens: int) -> None:
        """Send for a stage that has failed: zeros in place of its output."""
        message = self._next_message(num_tokens).zero_()
        message[-1:] = 1
        self._send(message)

    def flush(self) -> None:
        """Returns when every send has been received; call it before the context is closed."""
        while self._sending:
            self._wait_oldest()

    def _message(self, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows * self._hidden_size + 1, dtype=self._dtype, device=self._device)

    def _next_message(self, num_tokens: int) -> torch.Tensor:
        """Returns memory for a message to send, so that no more than pp_size are there at once."""
        assert not self._context.is_last_stage
        while len(self._sending) >= self._context.pp_size:
            self._wait_oldest()
        return self._message(self._sent * num_tokens)

    def _send(self, message: torch.Tensor) -> None:
        pending = self._context.world.isend(message, self._context.rank + self._context.tp_size)
        self._sending.append((pending, message))

    def _wait_oldest(self) -> None:
        pending, _ = self._sending.popleft()
        pending.wait()
