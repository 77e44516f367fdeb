"""SharedDrafts: the guesses of a draft model, which one rank runs, on all ranks of its stage.

Ranks on unlike processors would round a model's logits apart and guess other tokens, and then compute other inputs. So
the first rank tells the others, by a sum to which they add nothing, before any of them begins the step. Q rows with
drafts, D drafts of a row at most.
"""

import logging
from collections.abc import Sequence

import torch

from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.workers.platforms.base import Platform
from tandem.workers.speculation.proposer import DecodedStep, ProposalRow, Proposer, ReadsSteps

log = logging.getLogger(__name__)


class SharedDrafts:
    """A Proposer that all ranks call for the same rows, in step. own: what guesses on this rank; None: it is told. tp:
    of the stage; most: drafts of a row."""

    def __init__(self, own: Proposer | None, tp: StepCollectives, most: int, platform: Platform) -> None:
        self._own, self._tp, self._most, self._platform = own, tp, most, platform

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        told = torch.zeros((len(rows), 1 + self._most), dtype=torch.int64)
        if self._own is not None:
            for place, drafts in enumerate(guessed(self._own, rows)):
                told[place, 0] = len(drafts)
                told[place, 1 : 1 + len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        accelerator = self._platform.accelerator
        heard = accelerator.to_host(self._tp.all_reduce(accelerator.to_device(told)))
        accelerator.event().wait()
        return [ids[1 : 1 + ids[0]] for ids in heard.tolist()]

    def read(self, step: DecodedStep) -> None:
        if isinstance(self._own, ReadsSteps):
            self._own.read(step)

    def catch_up(self) -> None:
        if isinstance(self._own, ReadsSteps):
            self._own.catch_up()


def guessed(own: Proposer, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
    """Returns a proposer's guesses; nothing for all rows where the device runs out of memory: others wait for an
    answer."""
    try:
        return own.propose(rows)
    except torch.OutOfMemoryError as error:
        log.warning("no drafts in this step: %s", error)
        return [()] * len(rows)
