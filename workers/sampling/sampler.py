"""sample(): logits of a step to one token per row. Called by model_runner.py on tp0 of the last stage.

Greedy rows cost one argmax; a row pays only for what it asks. A row whose logits are not finite gets an error, the
others their tokens. Randomness is philox.py's, so the result of a row is a function of its logits, its parameters and
its position alone. S rows that sample, R of them random, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.messages import TokenLogprobs
from workers.sampling.adjust import RowHistory, adjust
from workers.sampling.draw import draw, thresholds
from workers.sampling.logprobs import RawLogprobs
from workers.sampling.philox import uniforms
from workers.sampling.table import EDITS, LOGPROBS, RANDOM, TRUNCATES, SamplingTable

Ints = npt.NDArray[np.int64]
History = Callable[[int], tuple[npt.NDArray[np.int32], int]]
NOT_FINITE = "the model's output for this request is not finite"


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row (meaningless where `failed`), logprobs where asked for."""

    token_ids: list[int]
    failed: list[bool]
    logprobs: list[TokenLogprobs | None]


def sample(logits_SV: torch.Tensor, rows_S: Ints, positions_S: Ints, table: SamplingTable, history: History) -> Sampled:
    """Chooses a token per row. logits_SV (float32) is overwritten.

    rows_S: rows of the table. positions_S: index in its sequence of the token to choose. history(row) gives the row's
    tokens so far and the length of its prompt; it is asked only for rows with penalties, bias or min_tokens.
    """
    flags_S = table.flags[rows_S]
    used = int(np.bitwise_or.reduce(flags_S))
    raw, with_logprobs = None, np.flatnonzero(flags_S & LOGPROBS)
    if used & LOGPROBS:
        wanted = [table.of(int(row)).logprobs or 0 for row in rows_S[with_logprobs]]
        raw = RawLogprobs.of(logits_SV[_to(with_logprobs, logits_SV)], wanted)
    if used & EDITS:
        places = np.flatnonzero(flags_S & EDITS)
        adjust(logits_SV, [_history(int(s), int(rows_S[s]), table, history) for s in places])
    best_S, ids_S = logits_SV.max(dim=-1)
    if used & RANDOM:
        _draw_random(logits_SV, best_S, ids_S, flags_S, rows_S, positions_S, table)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows_S)
    if raw is not None:
        chosen = raw.of_tokens(ids_S[_to(with_logprobs, logits_SV)])
        for place, entry in zip(with_logprobs.tolist(), chosen, strict=True):
            logprobs[place] = entry
    return Sampled(ids_S.tolist(), (~torch.isfinite(best_S)).tolist(), logprobs)


def _to(array: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)


def _history(place: int, row: int, table: SamplingTable, history: History) -> RowHistory:
    token_ids, prompt_len = history(row)
    return RowHistory(place, table.of(row), token_ids, prompt_len)


def _draw_random(
    logits_SV: torch.Tensor,
    best_S: torch.Tensor,
    ids_S: torch.Tensor,
    flags_S: npt.NDArray[np.uint8],
    rows_S: Ints,
    positions_S: Ints,
    table: SamplingTable,
) -> None:
    """Overwrites ids_S for the rows with temperature, and their logits with weights."""
    places = np.flatnonzero(flags_S & RANDOM)
    rows = rows_S[places]
    every = len(places) == len(rows_S)
    at = _to(places, logits_SV)
    weights_RV = logits_SV if every else logits_SV[at]
    best_R = best_S if every else best_S[at]
    temperature_R = _to(table.temperature[rows].astype(np.float32), logits_SV)
    weights_RV.sub_(best_R[:, None]).div_(temperature_R[:, None]).exp_()
    truncating = np.flatnonzero(flags_S[places] & TRUNCATES)
    if len(truncating):
        _truncate(weights_RV, truncating, rows[truncating], table)
    u_R = _to(uniforms(table.seed[rows], table.choice[rows], positions_S[places]), logits_SV)
    ids_S[at] = draw(weights_RV, u_R)


def _truncate(weights_RV: torch.Tensor, places: Ints, rows: Ints, table: SamplingTable) -> None:
    """Sets to 0, in place, what top-k, top-p and min-p leave out."""
    every = len(places) == weights_RV.shape[0]
    at = _to(places, weights_RV)
    some_RV = weights_RV if every else weights_RV[at]
    floor_R = thresholds(some_RV, table.top_k[rows], table.top_p[rows], table.min_p[rows])
    some_RV.masked_fill_(some_RV < floor_R[:, None], 0.0)
    if not every:
        weights_RV[at] = some_RV
