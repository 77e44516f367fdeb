"""sample(): logits of a step to one token per row. Called by model_runner.py on tp0 of the last stage.

It gives the device work and waits for none of it; Drawn.collect() reads the outcome once that work has run.

Greedy rows cost one argmax; a row pays only for what it asks. A row whose logits are not finite gets an error, the
others their tokens. Randomness is philox.py's, so the result of a row is a function of its logits, its parameters and
its position alone. S rows that sample, R of them random, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.platforms.base import Platform
from tandem.workers.sampling.draw import draw, thresholds
from tandem.workers.sampling.logprobs import ChosenLogprobs, RawLogprobs
from tandem.workers.sampling.philox import uniforms
from tandem.workers.sampling.processors.adjust import RowHistory, adjust
from tandem.workers.sampling.sampling_table import EDITS, LOGPROBS, RANDOM, TRUNCATES, SamplingTable

Ints = npt.NDArray[np.int64]
History = Callable[[int, int], tuple[npt.NDArray[np.int32], int]]
NOT_FINITE = "the model's output for this request is not finite"


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row (meaningless where `failed`), logprobs where asked for."""

    token_ids: list[int]
    failed: list[bool]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The chosen ids_S on the device and which of them come from finite logits (is_finite_S), and host tensors that
    hold both and the log probabilities of rows, once the device has run the step. with_logprobs: places of the rows
    that want them."""

    ids_S: torch.Tensor
    is_finite_S: torch.Tensor
    host_ids_S: torch.Tensor
    finite_S: torch.Tensor
    logprobs: ChosenLogprobs | None
    with_logprobs: list[int]

    def marked(self, mark: int, to_host: Callable[[torch.Tensor], torch.Tensor]) -> "Drawn":
        """Returns the same with `mark` in place of the ids of logits that are not finite."""
        ids_S = self.ids_S.where(self.is_finite_S, mark)
        return replace(self, ids_S=ids_S, host_ids_S=to_host(ids_S))

    def collect(self) -> Sampled:
        """Reads the outcome; an event recorded after `sample` must be done."""
        ids = self.host_ids_S.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if self.logprobs is not None:
            for place, entry in zip(self.with_logprobs, self.logprobs.entries(), strict=True):
                logprobs[place] = entry
        return Sampled(ids, (~self.finite_S).tolist(), logprobs)


def sample(
    logits_SV: torch.Tensor,
    rows_S: Ints,
    positions_S: Ints,
    table: SamplingTable,
    history: History,
    platform: Platform,
) -> Drawn:
    """Chooses a token per row. logits_SV (float32) is overwritten.

    rows_S: rows of the table, several times a row with drafts. positions_S: index in its sequence of the token to
    choose. history(row, position) gives the row's tokens before that and the length of its prompt; it is asked only for
    rows with penalties, bias or min_tokens.
    """
    flags_S = table.flags[rows_S]
    used = int(np.bitwise_or.reduce(flags_S))
    accelerator = platform.accelerator
    raw, logprobs, with_logprobs = None, None, np.flatnonzero(flags_S & LOGPROBS) if used & LOGPROBS else None
    if with_logprobs is not None:
        wanted = [table.of(int(row)).logprobs or 0 for row in rows_S[with_logprobs]]
        at = accelerator.to_device(torch.from_numpy(with_logprobs))
        raw = RawLogprobs.of(logits_SV[at], wanted)
    if used & EDITS:
        places = np.flatnonzero(flags_S & EDITS)
        histories = [_history(int(s), int(rows_S[s]), int(positions_S[s]), table, history) for s in places]
        adjust(logits_SV, histories, accelerator.to_device)
    best_S, ids_S = logits_SV.max(dim=-1)
    if used & RANDOM:
        _draw_random(logits_SV, best_S, ids_S, flags_S, rows_S, positions_S, table, platform)
    if raw is not None:
        logprobs = raw.of_tokens(ids_S[at], accelerator.to_host)
    is_finite_S = torch.isfinite(best_S)
    asked = [] if with_logprobs is None else with_logprobs.tolist()
    return Drawn(ids_S, is_finite_S, accelerator.to_host(ids_S), accelerator.to_host(is_finite_S), logprobs, asked)


def _history(place: int, row: int, position: int, table: SamplingTable, history: History) -> RowHistory:
    token_ids, prompt_len = history(row, position)
    return RowHistory(place, table.of(row), token_ids, prompt_len)


def _draw_random(
    logits_SV: torch.Tensor,
    best_S: torch.Tensor,
    ids_S: torch.Tensor,
    flags_S: npt.NDArray[np.uint8],
    rows_S: Ints,
    positions_S: Ints,
    table: SamplingTable,
    platform: Platform,
) -> None:
    """Overwrites ids_S for the rows with temperature, and their logits with weights."""
    places = np.flatnonzero(flags_S & RANDOM)
    rows = rows_S[places]
    every = len(places) == len(rows_S)
    to_device = platform.accelerator.to_device
    at = to_device(torch.from_numpy(places))
    weights_RV = logits_SV if every else logits_SV[at]
    best_R = best_S if every else best_S[at]
    temperature_R = to_device(torch.from_numpy(table.temperature[rows].astype(np.float32)))
    weights_RV.sub_(best_R[:, None]).div_(temperature_R[:, None]).exp_()
    truncating = np.flatnonzero(flags_S[places] & TRUNCATES)
    if len(truncating):
        _truncate(weights_RV, truncating, rows[truncating], table, platform)
    u_R = to_device(torch.from_numpy(uniforms(table.seed[rows], table.choice[rows], positions_S[places])))
    ids_S[at] = draw(weights_RV, u_R)


def _truncate(weights_RV: torch.Tensor, places: Ints, rows: Ints, table: SamplingTable, platform: Platform) -> None:
    """Sets to 0, in place, what top-k, top-p and min-p leave out."""
    every = len(places) == weights_RV.shape[0]
    at = platform.accelerator.to_device(torch.from_numpy(places))
    some_RV = weights_RV if every else weights_RV[at]
    floor_R = thresholds(some_RV, table.top_k[rows], table.top_p[rows], table.min_p[rows], platform)
    some_RV.masked_fill_(some_RV < floor_R[:, None], 0.0)
    if not every:
        weights_RV[at] = some_RV
