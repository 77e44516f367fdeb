"""SharedDrafts: the guesses of a draft model, which one rank runs, on all ranks of its stage.

Ranks on unlike processors would round a model's logits apart and guess other tokens, and then compute other inputs. So
the first rank tells the others, by a sum to which they add nothing, before any of them begins the step. Q rows with
drafts, D drafts of a row at most.
"""

from collections.abc import Sequence

import torch

from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.workers.platforms.base import Platform
from tandem.workers.rank.drafters.guess_draw import GuessRoom
from tandem.workers.rank.drafters.step_record import DecodedStep, ReadsSteps
from tandem.workers.speculation.proposer import GuessesAhead, GuessRow, ProposalRow, Proposer


class SharedDrafts:
    """A Proposer that all ranks call for the same rows, in step. own: what guesses on this rank; None: it is told. tp:
    of the stage; most: drafts of a row; room: for guesses of the device."""

    def __init__(
        self, own: Proposer | None, tp: StepCollectives, most: int, room: GuessRoom, platform: Platform
    ) -> None:
        self.own, self._tp, self._most, self._room, self._platform = own, tp, most, room, platform

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        told = torch.zeros((len(rows), 1 + self._most), dtype=torch.int64)
        if self.own is not None:
            for place, drafts in enumerate(self.own.propose(rows)):
                told[place, 0] = len(drafts)
                told[place, 1 : 1 + len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        accelerator = self._platform.accelerator
        heard = accelerator.to_host(self._tp.all_reduce(self._room.copied(told)))
        accelerator.event().wait()
        return [ids[1 : 1 + ids[0]] for ids in heard.tolist()]

    def guess(self, rows: Sequence[GuessRow]) -> torch.Tensor:
        """Returns as GuessesAhead.guess() does. The sum is one of the device: no host waits for it."""
        if self.own is None:
            told = self._room.filled(rows, 0)
        else:
            assert isinstance(self.own, GuessesAhead)
            told = self.own.guess(rows)
        return self._tp.all_reduce(told.contiguous())


class SharedHeads(SharedDrafts):
    """The same of a head, which ReadsSteps."""

    @property
    def keeps_up(self) -> bool:
        return isinstance(self.own, ReadsSteps) and self.own.keeps_up

    def read(self, step: DecodedStep) -> None:
        if isinstance(self.own, ReadsSteps):
            self.own.read(step)

    def catch_up(self) -> None:
        if isinstance(self.own, ReadsSteps):
            self.own.catch_up()
