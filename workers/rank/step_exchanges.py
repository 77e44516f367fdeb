"""The exchanges of a rank with its peers in one step, in the order that all ranks keep.

Every rank takes part in every exchange of every step, or the others wait for ever. A rank that cannot compute a step
makes up the rest of them with zeros. The last stage learns of it from a number that travels with the hidden states
along the pipeline, and with the sampled tokens between TP ranks. T tokens, S rows that sample.
"""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.step_collectives import PaddedReplay
from tandem.workers.messages.step import RowWork
from tandem.workers.platforms.base import Platform
from tandem.workers.sampling.prompt_logprobs import pieces_of

if TYPE_CHECKING:
    from tandem.parallel.pipeline import StageLink, StageOutput


class StepVerdict(NamedTuple):
    """The end of a step on the last stage: int64 [S + 1], or [1] with several stages: the tokens that tp rank 0
    sampled, then a number that is not 0 if a rank has failed; on the device, and where they arrive on the host."""

    on_device: torch.Tensor
    on_host: torch.Tensor

    @property
    def ids_S(self) -> torch.Tensor:
        return self.on_device[:-1]

    @property
    def host_ids_S(self) -> torch.Tensor:
        return self.on_host[:-1]

    @property
    def is_failed(self) -> bool:
        """Read it when an event recorded after the step is done."""
        return bool(self.on_host[-1])


class StepExchanges:
    """One rank's exchanges: begin, receive, the layers' collectives, end_layers, then send or agree; or make_up at any
    point after begin, in place of all that has not been done. `link` is None when the pipeline has one stage."""

    def __init__(self, context: ParallelContext, link: "StageLink | None", platform: Platform) -> None:
        self._context = context
        self._link = link
        self._platform = platform
        self._num_tokens = self._num_samples = 0
        self._failed_1: torch.Tensor | None = None
        self._is_over = False

    def begin(
        self,
        work: Sequence[RowWork],
        num_drafts: int = 0,
        pooled: Container[int] = (),
        num_scored: int = 0,
        padded: PaddedReplay | None = None,
    ) -> None:
        """Starts a step, of at least one row. num_drafts, num_scored: of all rows together. pooled: rows for which
        nothing is sampled. padded: the capture that all ranks of the stage replay in it; None: none does."""
        if self._context.world_size > 1:
            self._num_tokens = sum(row.num_tokens for row in work) + num_drafts
            self._num_samples = sum(row.samples and row.row not in pooled for row in work) + num_drafts
            self._failed_1, self._is_over = None, False
            more = pieces_of(num_scored) if self._context.is_last_stage else []
            self._context.tp.begin(self._num_tokens, self._num_samples, more, padded)

    def receive(self) -> "StageOutput":
        """Returns the output of the stage before."""
        assert self._link is not None
        output, self._failed_1 = self._link.receive(self._num_tokens)
        return output

    def end_layers(self) -> None:
        """Notes that the model has made all collectives of the step."""
        self._context.tp.end()

    def send(self, hidden_TH: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
        """Sends this stage's output, as of StageOutput, to the stage behind, and on what the stages before have said of
        themselves."""
        assert self._link is not None
        self._link.send(hidden_TH, kept, self._failed_1)
        self._is_over = True

    def agree(self, ids_S: torch.Tensor | None) -> StepVerdict | None:
        """Ends a step on the last stage. ids_S: int64, on tp rank 0, where rows sample. None for a group of one."""
        return None if self._context.world_size == 1 else self._agree(ids_S, failed=False)

    def make_up(self) -> None:
        """Takes part in all that is left of the step, as a rank that has failed. Raises what comes in the way."""
        if self._context.world_size == 1:
            return
        if self._is_over:
            raise RuntimeError("the peers count on its result already")
        if self._failed_1 is None and not self._context.is_first_stage:
            self.receive()
        self._context.tp.make_up()
        if not self._context.is_last_stage:
            assert self._link is not None
            self._link.send_failure(self._num_tokens)
        else:
            self._agree(None, failed=True)
        self._is_over = True

    def _agree(self, ids_S: torch.Tensor | None, failed: bool) -> StepVerdict:
        """One sum over the TP ranks, of which only rank 0 adds tokens."""
        count = self._num_samples if self._context.pp_size == 1 else 0
        packed = torch.zeros(count + 1, dtype=torch.int64, device=self._platform.device)
        if count and ids_S is not None:
            packed[:-1] = ids_S
        if failed or self._failed_1 is not None:
            packed[-1:] = 1 if failed else self._failed_1
        if self._context.tp_size > 1:
            packed = self._context.tp.all_reduce(packed)
        self._is_over = True
        return StepVerdict(packed, self._platform.accelerator.to_host(packed))
