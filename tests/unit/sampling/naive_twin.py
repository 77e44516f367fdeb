"""Sampling in plain numpy, one row at a time, as the definitions say: what workers/sampling is compared with."""

import numpy as np
import numpy.typing as npt

from tandem.workers.messages.step import RowSampling
from tests.unit.sampling.numpy_twin import noise

Floats = npt.NDArray[np.float64]


def adjusted(logits: Floats, sampling: RowSampling, tokens: list[int], prompt_len: int) -> Floats:
    out = logits.astype(np.float64).copy()
    output = tokens[prompt_len:]
    if len(output) < sampling.min_tokens:
        out[list(sampling.stop_token_ids)] = -np.inf
    if sampling.allowed_token_ids is not None:
        out[[i for i in range(len(out)) if i not in sampling.allowed_token_ids]] = -np.inf
    for *start, last in sampling.bad_words_token_ids:
        if start == output[max(0, len(output) - len(start)) :][: len(start)]:
            out[last] = -np.inf
    for i, bias in sampling.logit_bias:
        out[i] += bias
    if (preferred := end_of_thinking(sampling, output)) is not None:
        out[preferred] += 1e9
    for i in set(tokens):
        out[i] = out[i] / sampling.repetition_penalty if out[i] > 0 else out[i] * sampling.repetition_penalty
    for i in set(output):
        out[i] -= sampling.frequency_penalty * output.count(i) + sampling.presence_penalty
    return out


def end_of_thinking(sampling: RowSampling, output: list[int]) -> int | None:
    """The next token of the end mark, where the thinking has had its budget. Marks are looked for from the left."""
    budget = sampling.thinking_budget
    if budget is None:
        return None
    inside, rest, thought = budget.inside, list(output), 0
    while True:
        mark = list(budget.end if inside else budget.start)
        at = next((i for i in range(len(rest) - len(mark) + 1) if rest[i : i + len(mark)] == mark), None)
        if at is None:
            break
        thought += at if inside else 0
        inside, rest = not inside, rest[at + len(mark) :]
    if not inside:
        return None
    end = list(budget.end)
    begun = next(size for size in range(min(len(rest), len(end) - 1), -1, -1) if rest[len(rest) - size :] == end[:size])
    return end[begun] if thought + len(rest) - begun >= budget.tokens else None


def kept(logits: Floats, sampling: RowSampling) -> npt.NDArray[np.bool_]:
    """Ids that may be drawn, after temperature: min-p, then top-k, then top-p, ties at the border kept."""
    probabilities = softmax(logits / sampling.temperature)
    keep = probabilities >= sampling.min_p * probabilities.max() * (1 - 1e-12)
    if sampling.top_k:
        kth = np.sort(probabilities)[::-1][min(sampling.top_k, len(logits)) - 1]
        keep &= probabilities >= kth
    if sampling.top_p < 1:
        left = np.where(keep, probabilities, 0)
        left = left / left.sum()
        mass, edge = 0.0, 1.0
        for value in np.sort(left)[::-1]:
            if mass >= sampling.top_p and edge < 1.0:
                break
            mass, edge = mass + value, value
        keep &= left >= edge
    return keep


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return e / e.sum()


def choose(logits: Floats, sampling: RowSampling, tokens: list[int], prompt_len: int) -> int:
    out = adjusted(logits, sampling, tokens, prompt_len)
    if sampling.temperature == 0:
        return int(out.argmax())
    scores = out / sampling.temperature + noise(sampling.seed, sampling.choice, len(tokens), len(out))
    return int(np.where(kept(out, sampling), scores, -np.inf).argmax())
