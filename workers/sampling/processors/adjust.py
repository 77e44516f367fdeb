"""Changes of logits before the choice: min_tokens, logit_bias, penalties, in vLLM's order. Called by sampler.py.

Only the few ids that a row names or has seen are touched; nothing is kept between steps (counts come from the row's own
tokens), so a row that moved, was preempted or resumed elsewhere gets the same logits. S rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.sampling_table import penalizes

Ids = npt.NDArray[np.int64]
ToDevice = Callable[[torch.Tensor], torch.Tensor]
FORBIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class RowHistory:
    """One row as the adjustments see it: `place` in the logits, its tokens so far, where its output begins."""

    place: int
    sampling: RowSampling
    token_ids: npt.NDArray[np.int32]
    prompt_len: int


def adjust(logits_SV: torch.Tensor, histories: list[RowHistory], to_device: ToDevice) -> None:
    """Changes logits_SV in place for the rows in `histories`. to_device copies a host tensor to the logits' device."""
    _forbid_early_stop(logits_SV, histories, to_device)
    _add_bias(logits_SV, histories, to_device)
    penalized = [h for h in histories if penalizes(h.sampling)]
    if penalized:
        _repetition(logits_SV, [h for h in penalized if h.sampling.repetition_penalty != 1.0], to_device)
        _presence_and_frequency(logits_SV, penalized, to_device)


def _known_ids(ids: tuple[int, ...], vocab: int) -> list[int]:
    """A request's ids that the vocabulary holds; others must not end the step."""
    return [i for i in ids if 0 <= i < vocab]


def _forbid_early_stop(logits_SV: torch.Tensor, histories: list[RowHistory], to_device: ToDevice) -> None:
    """Stop tokens cannot be chosen while fewer than min_tokens are out."""
    for h in histories:
        if len(h.token_ids) - h.prompt_len < h.sampling.min_tokens:
            ids = _known_ids(h.sampling.stop_token_ids, logits_SV.shape[1])
            if ids:
                logits_SV[h.place].index_fill_(0, to_device(torch.tensor(ids)), FORBIDDEN)


def _add_bias(logits_SV: torch.Tensor, histories: list[RowHistory], to_device: ToDevice) -> None:
    for h in histories:
        bias = {i: value for i, value in h.sampling.logit_bias if 0 <= i < logits_SV.shape[1]}
        if bias:
            values = to_device(torch.tensor(list(bias.values()), dtype=logits_SV.dtype))
            logits_SV[h.place].index_add_(0, to_device(torch.tensor(list(bias))), values)


def _seen(histories: list[RowHistory], columns: list[Ids], to_device: ToDevice) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column indices of (row, id) pairs."""
    rows = np.repeat([h.place for h in histories], [len(c) for c in columns])
    return to_device(torch.from_numpy(rows)), to_device(torch.from_numpy(np.concatenate(columns)))


def _per_pair(values: list[float], columns: list[Ids], to_device: ToDevice) -> torch.Tensor:
    repeated = np.repeat(np.array(values, np.float32), [len(c) for c in columns])
    return to_device(torch.from_numpy(repeated))


def _repetition(logits_SV: torch.Tensor, histories: list[RowHistory], to_device: ToDevice) -> None:
    """Every id of prompt or output: positive logits are divided by the penalty, others multiplied (CTRL, 2019)."""
    if not histories:
        return
    columns = [np.unique(h.token_ids).astype(np.int64) for h in histories]
    at = _seen(histories, columns, to_device)
    factor = _per_pair([h.sampling.repetition_penalty for h in histories], columns, to_device)
    values = logits_SV[at]
    logits_SV[at] = torch.where(values > 0, values / factor, values * factor)


def _presence_and_frequency(logits_SV: torch.Tensor, histories: list[RowHistory], to_device: ToDevice) -> None:
    """Every id of the output: minus frequency * its count, minus presence (OpenAI's definition)."""
    counted = [np.unique(h.token_ids[h.prompt_len :], return_counts=True) for h in histories]
    columns = [ids.astype(np.int64) for ids, _ in counted]
    if not sum(map(len, columns)):
        return
    at = _seen(histories, columns, to_device)
    counts = to_device(torch.from_numpy(np.concatenate([c for _, c in counted]).astype(np.float32)))
    frequency = _per_pair([h.sampling.frequency_penalty for h in histories], columns, to_device)
    presence = _per_pair([h.sampling.presence_penalty for h in histories], columns, to_device)
    logits_SV[at] = logits_SV[at] - frequency * counts - presence
