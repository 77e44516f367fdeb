"""Logits by what they are of: every row that samples anywhere, by the tokens before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.sampling.sampler import Drawn, Sampling


@dataclass
class SeenLogits:
    """The first logits seen behind each text, and how many later ones were equal to the last bit, and how many not."""

    first: dict[bytes, torch.Tensor] = field(default_factory=dict)
    num_equal: int = 0
    num_other: int = 0

    def take(self, text: bytes, logits_V: torch.Tensor) -> None:
        known = self.first.setdefault(text, logits_V)
        if known is logits_V:
            return
        if torch.equal(known, logits_V):
            self.num_equal += 1
        else:
            self.num_other += 1


@contextmanager
def seeing(seen: SeenLogits) -> Iterator[None]:
    """Notes the logits of all steps of ranks in this process, before anything is done to them."""

    draw = Sampling.draw

    def noted(
        self: Sampling, logits_SV: torch.Tensor, accelerator: Accelerator, *on_device: torch.Tensor | None
    ) -> Drawn:
        for place, (row, position) in enumerate(zip(self._rows_S.tolist(), self._positions_S.tolist(), strict=True)):
            tokens, _ = self._history(row, position)
            assert len(tokens) == position and (tokens >= 0).all(), "a token that is not known yet"
            seen.take(tokens.tobytes(), logits_SV[place].clone())
        return draw(self, logits_SV, accelerator, *on_device)

    with mock.patch.object(Sampling, "draw", noted):
        yield
