"""Rows' tokens where they live on a device, for logits processors that read tokens there: nobody waits for the host to
read them. ReadsOnDevice is the form of a processor that does.

A step may be launched before the host has read the one ahead. The host then knows bounds: how many tokens of a row it
has read, and how many there may be at most. What lies between is read by the device, in shapes that depend on these
bounds alone. P places of a step whose row needs the processor, S places of the step, N rows, L tokens.
"""

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.sampling.processors.logits_processor import Ids, SampledRows


class DeviceTokens:
    """The tokens of a step's rows. Made before the step; positions and tokens are there from arrive() on.

    prompt_len_S, read_S, most_S: int64 [S], for each place the length of its row's prompt, the number of its tokens
    that the host has read, and the greatest index that the token to choose may have.
    """

    def __init__(self, prompt_len_S: Ids, read_S: Ids, most_S: Ids) -> None:
        self.prompt_len_S, self.read_S, self.most_S = prompt_len_S, read_S, most_S
        self._arrived: tuple[torch.Tensor, torch.Tensor] | None = None

    def arrive(self, tokens_NL: torch.Tensor, positions_S: torch.Tensor) -> None:
        """Takes the tokens of all rows (int32), drafts of this step behind the known ones, and the index of the token
        to choose at each place (int64)."""
        self._arrived = tokens_NL, positions_S

    @property
    def tokens_NL(self) -> torch.Tensor:
        assert self._arrived is not None, "read before the step was made"
        return self._arrived[0]

    @property
    def positions_S(self) -> torch.Tensor:
        assert self._arrived is not None, "read before the step was made"
        return self._arrived[1]


class PlaceTokens:
    """The tokens of P places. On the host: prompt_len_P, read_P; width: tokens ahead of a place, at most; most_unread:
    those of them that the host has not read, at most. On the device, once the step was made: the rest."""

    def __init__(self, rows: SampledRows, tokens: DeviceTokens) -> None:
        at = rows.places_P
        self._step = tokens
        self.prompt_len_P, self.read_P = tokens.prompt_len_S[at], tokens.read_S[at]
        self.width = int(tokens.most_S[at].max())
        self.most_unread = int((tokens.most_S[at] - self.read_P).max())
        self._sent = rows.send(np.stack((at, rows.rows_P, self.prompt_len_P)))

    @property
    def places_P(self) -> torch.Tensor:
        """Rows of the logits."""
        return self._sent()[0]

    @property
    def positions_P(self) -> torch.Tensor:
        """The index of the token to choose, which is the number of tokens ahead of it."""
        return self._step.positions_S[self.places_P]

    @property
    def prompts_P(self) -> torch.Tensor:
        """Lengths of prompts."""
        return self._sent()[2]

    def tokens_PL(self, part: slice) -> torch.Tensor:
        """The first `width` tokens of the rows of some places, int32; what lies behind a place's position is anything
        in the vocabulary."""
        return self._step.tokens_NL[self._sent()[1][part], : self.width]

    def at(self, places: torch.Tensor, columns_NK: torch.Tensor) -> torch.Tensor:
        """The tokens at these indices of the rows of N of the P places, int32 [N, K]; of indices below 0 some token."""
        return self._step.tokens_NL[self._sent()[1][places][:, None], columns_NK.clamp(min=0)]


@runtime_checkable
class ReadsOnDevice(Protocol):
    """A LogitsProcessor with Reads.TOKENS that can read them on the device."""

    def prepare_on_device(self, rows: SampledRows, tokens: DeviceTokens) -> Change | None:
        """Does what prepare() does, for a device that may be ahead of the host: positions in `rows` are the least that
        they may be, and history() has what the host has read. The change is the same, to the last bit."""
        ...
