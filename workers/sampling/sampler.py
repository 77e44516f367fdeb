"""Sampling: logits of a step to one token per row. Made and called by model_runner.py on tp0 of the last stage.

Its arrays travel with the step's rows, in one copy, before the forward pass. It gives the device work and waits for
none of it; Drawn.collect() reads the outcome once that work has run.

Greedy rows cost one argmax; a row pays only for what it asks. A row whose logits are not finite gets an error, the
others their tokens. Randomness is that of kernels/gumbel_noise.py, so the result of a row is a function of its logits,
its parameters and its position alone. S rows that sample, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.kernels.sampling_ops import Change, DrawTokens, SamplingOps
from tandem.workers.kernels.step_arrays import Send, Sent, sending_with
from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.messages.step import NOT_FINITE, NOTHING_LEFT
from tandem.workers.platforms.base import Platform
from tandem.workers.sampling.logprobs import ChosenLogprobs, RawLogprobs, ReportedLogprobs
from tandem.workers.sampling.processors.device_tokens import DeviceTokens
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, History
from tandem.workers.sampling.sampling_table import EDITS, LOGPROBS, RANDOM, READS_LATE, READS_TOKENS, SamplingTable

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per place (meaningless where `failed`), logprobs where asked for; reasons: why places failed."""

    token_ids: list[int]
    failed: list[bool]
    logprobs: list[TokenLogprobs | None]
    reasons: dict[int, str]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The chosen ids_S and the greatest logit of each row on the device, and host tensors that hold both and the row's
    log probabilities, once the device has run the step. edited_S: whether logits processors have changed it.
    with_logprobs: places of the rows that want them. host_drafts_S, reported: of a capture, where it has some."""

    ids_S: torch.Tensor
    device_best_S: torch.Tensor
    host_ids_S: torch.Tensor
    best_S: torch.Tensor
    edited_S: npt.NDArray[np.bool_]
    logprobs: ChosenLogprobs | None
    with_logprobs: list[int]
    host_drafts_S: torch.Tensor | None = None
    reported: ReportedLogprobs | None = None

    def marked(self, mark: int, to_host: Callable[[torch.Tensor], torch.Tensor]) -> "Drawn":
        """Returns the same with `mark` in place of the ids of logits that are not finite."""
        ids_S = self.ids_S.where(torch.isfinite(self.device_best_S), mark)
        return replace(self, ids_S=ids_S, host_ids_S=to_host(ids_S))

    @classmethod
    def captured(
        cls,
        sampled_XS: torch.Tensor,
        host_XS: torch.Tensor,
        edited_S: npt.NDArray[np.bool_],
        reported: ReportedLogprobs | None = None,
    ) -> "Drawn":
        """Returns what a capture has drawn, from one copy to the host: int64, the ids, the bits of the greatest logits
        in the first half of a row, and drafts where there may be some."""
        count = len(edited_S)
        best_S, drafts_S = host_XS[1].view(torch.float32)[:count], host_XS[2, :count] if len(host_XS) > 2 else None
        ids_S = sampled_XS[0, :count], best_S, host_XS[0, :count], best_S
        return cls(*ids_S, edited_S, None, [], drafts_S, reported)

    def collect(self) -> Sampled:
        """Reads the outcome; an event recorded after `sample` must be done."""
        ids = self.host_ids_S.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if self.logprobs is not None:
            for place, entry in zip(self.with_logprobs, self.logprobs.entries(), strict=True):
                logprobs[place] = entry
        if self.reported is not None:
            for place, entry in self.reported.entries(ids):
                logprobs[place] = entry
        best_S = self.best_S.numpy()
        failed_S = ~np.isfinite(best_S)
        reasons = {
            place: NOTHING_LEFT if self.edited_S[place] and best_S[place] == FORBIDDEN else NOT_FINITE
            for place in np.flatnonzero(failed_S).tolist()
        }
        return Sampled(ids, failed_S.tolist(), logprobs, reasons)


class Sampling:
    """The choice of one token per place of a step: what the host prepares before there are logits, and `draw`.

    rows_S: rows of the table; a row with drafts stands several times, with consecutive positions. positions_S: index in
    its sequence of the token to choose. history(row, position) gives the row's tokens before that position, drafts too,
    and the length of its prompt; only logits processors ask for it. send: takes arrays to the device by the time of
    draw(). is_ahead: the device's counts may be ahead of positions_S, and draw() gets the positions that it has.
    tokens: the rows' tokens there, for logits processors that read tokens; None: they read them on the host. reports:
    with the log probabilities that rows ask for.
    """

    def __init__(
        self,
        rows_S: Ints,
        positions_S: Ints,
        table: SamplingTable,
        history: History,
        ops: SamplingOps,
        send: Send,
        *,
        is_ahead: bool = False,
        tokens: DeviceTokens | None = None,
        reports: bool = True,
    ) -> None:
        self._rows_S, self._positions_S = rows_S, positions_S
        self._table, self._history, self._ops = table, history, ops
        self._tokens = tokens
        self._flags_S = table.flags[rows_S]
        self._used = int(np.bitwise_or.reduce(self._flags_S))
        self._changes = self._changes_by(send, late=False) if self._used & EDITS else []
        self._logged = self._logged_of(send) if reports and self._used & LOGPROBS else None
        self._random = self._random_of(send) if self._used & RANDOM else None
        self._known = None if self._random is None or is_ahead else send(positions_S)

    @property
    def reads_positions(self) -> bool:
        """True if draw() wants the positions that the device has, where it may be ahead."""
        return self._random is not None or self._tokens is not None

    @property
    def read_rows(self) -> Ints | None:
        """The rows whose tokens draw() reads on the device; None for none."""
        return None if self._tokens is None else np.unique(self._rows_S[self._flags_S & READS_TOKENS > 0])

    @property
    def prepares_late(self) -> bool:
        """True if prepare_late() has something to do."""
        return bool(self._used & READS_LATE)

    def prepare_late(self, send: Send) -> None:
        """Prepares, behind the forward pass, what takes long (Reads.TOKENS_LATE). The row table has the tokens of all
        steps before."""
        self._changes += self._changes_by(send, late=True)

    def draw(
        self,
        logits_SV: torch.Tensor,
        accelerator: Accelerator,
        device_positions_S: torch.Tensor | None = None,
        device_tokens_NL: torch.Tensor | None = None,
    ) -> Drawn:
        """Chooses a token per place. logits_SV (float32) is overwritten. device_positions_S: int64, where is_ahead and
        reads_positions. device_tokens_NL: int32, the tokens of all rows of the table, where there are read_rows."""
        raw, logprobs = None, None
        if self._logged is not None:
            raw = RawLogprobs.of(logits_SV[self._logged.at()], self._logged.wanted)
        best_S, ids_S = self.choose(logits_SV, device_positions_S, device_tokens_NL)
        if raw is not None and self._logged is not None:
            named = None if self._logged.named is None else self._logged.named()
            logprobs = raw.of_tokens(ids_S[self._logged.at()], accelerator.to_host, named, self._logged.named_ids)
        asked = [] if self._logged is None else self._logged.places
        edited_S = (self._flags_S & EDITS).astype(np.bool_)
        return Drawn(ids_S, best_S, accelerator.to_host(ids_S), accelerator.to_host(best_S), edited_S, logprobs, asked)

    def choose(
        self,
        logits_SV: torch.Tensor,
        device_positions_S: torch.Tensor | None = None,
        device_tokens_NL: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the greatest logit of each place, and the token that is chosen there; nothing is copied to the host.
        Arguments as for draw()."""
        if self._tokens is not None:
            assert device_positions_S is not None and device_tokens_NL is not None
            self._tokens.arrive(device_tokens_NL, device_positions_S)
        for change in self._changes:
            change(logits_SV)
        best_S, ids_S = self._ops.best(logits_SV)
        if self._random is not None:
            positions_S = device_positions_S if self._known is None else self._known()
            assert positions_S is not None
            self._random(logits_SV, best_S, ids_S, positions_S)
        return best_S, ids_S

    # ---- inside ----

    def _changes_by(self, send: Send, *, late: bool) -> list[Change]:
        return self._table.chain.prepare(
            self._rows_S, self._positions_S, self._history, send, self._ops, late=late, tokens=self._tokens
        )

    def _logged_of(self, send: Send) -> "_Logged":
        places = np.flatnonzero(self._flags_S & LOGPROBS)
        rows = [self._table.of(int(row)) for row in self._rows_S[places]]
        wanted = [row.logprobs or 0 if row.logprob_token_ids is None else 0 for row in rows]
        named_ids = [self._table.named_ids(row) for row in rows]
        most = max(map(len, named_ids))
        ids_LN = np.array([[*ids, *[0] * (most - len(ids))] for ids in named_ids], np.int64)
        return _Logged(places.tolist(), wanted, send(places), named_ids, send(ids_LN) if most else None)

    def _random_of(self, send: Send) -> DrawTokens:
        places = np.flatnonzero(self._flags_S & RANDOM)
        return self._ops.prepare_draw(self._table.draws(places, self._rows_S[places]), send)


@dataclass(frozen=True, slots=True)
class _Logged:
    """Places of the rows that want log probabilities, how many best tokens each, and the places on the device; and the
    tokens that rows name instead, filled up with zeros on the device, None where there are none."""

    places: list[int]
    wanted: list[int]
    at: Sent
    named_ids: list[list[int]]
    named: Sent | None


def sample(
    logits_SV: torch.Tensor,
    rows_S: Ints,
    positions_S: Ints,
    table: SamplingTable,
    history: History,
    platform: Platform,
) -> Drawn:
    """Chooses a token per place at once, with a copy for each array that the device lacks. Arguments as for Sampling;
    logits_SV is overwritten."""
    accelerator = platform.accelerator
    send = sending_with(accelerator.to_device)
    sampling = Sampling(rows_S, positions_S, table, history, platform.sampling_ops(), send)
    if sampling.prepares_late:
        sampling.prepare_late(send)
    return sampling.draw(logits_SV, accelerator)
