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

from tandem.workers.kernels.sampling_ops import Draws
from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.messages.step import NOT_FINITE, NOTHING_LEFT
from tandem.workers.platforms.base import Platform
from tandem.workers.sampling.logprobs import ChosenLogprobs, RawLogprobs
from tandem.workers.sampling.philox import uniforms
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, History
from tandem.workers.sampling.sampling_table import EDITS, LOGPROBS, RANDOM, SamplingTable

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
    with_logprobs: places of the rows that want them."""

    ids_S: torch.Tensor
    device_best_S: torch.Tensor
    host_ids_S: torch.Tensor
    best_S: torch.Tensor
    edited_S: npt.NDArray[np.bool_]
    logprobs: ChosenLogprobs | None
    with_logprobs: list[int]

    def marked(self, mark: int, to_host: Callable[[torch.Tensor], torch.Tensor]) -> "Drawn":
        """Returns the same with `mark` in place of the ids of logits that are not finite."""
        ids_S = self.ids_S.where(torch.isfinite(self.device_best_S), mark)
        return replace(self, ids_S=ids_S, host_ids_S=to_host(ids_S))

    def collect(self) -> Sampled:
        """Reads the outcome; an event recorded after `sample` must be done."""
        ids = self.host_ids_S.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if self.logprobs is not None:
            for place, entry in zip(self.with_logprobs, self.logprobs.entries(), strict=True):
                logprobs[place] = entry
        best_S = self.best_S.numpy()
        failed_S = ~np.isfinite(best_S)
        reasons = {
            place: NOTHING_LEFT if self.edited_S[place] and best_S[place] == FORBIDDEN else NOT_FINITE
            for place in np.flatnonzero(failed_S).tolist()
        }
        return Sampled(ids, failed_S.tolist(), logprobs, reasons)


def sample(
    logits_SV: torch.Tensor,
    rows_S: Ints,
    positions_S: Ints,
    table: SamplingTable,
    history: History,
    platform: Platform,
) -> Drawn:
    """Chooses a token per place. logits_SV (float32) is overwritten.

    rows_S: rows of the table; a row with drafts stands several times, with consecutive positions. positions_S: index in
    its sequence of the token to choose. history(row, position) gives the row's tokens before that position, drafts too,
    and the length of its prompt; only logits processors ask for it.
    """
    flags_S = table.flags[rows_S]
    used = int(np.bitwise_or.reduce(flags_S))
    accelerator, ops = platform.accelerator, platform.sampling_ops()
    raw, logprobs, with_logprobs = None, None, np.flatnonzero(flags_S & LOGPROBS) if used & LOGPROBS else None
    if with_logprobs is not None:
        wanted = [table.of(int(row)).logprobs or 0 for row in rows_S[with_logprobs]]
        at = accelerator.to_device(torch.from_numpy(with_logprobs))
        raw = RawLogprobs.of(logits_SV[at], wanted)
    if used & EDITS:
        table.chain.apply(logits_SV, rows_S, positions_S, history, accelerator.to_device, ops)
    best_S, ids_S = ops.best(logits_SV)
    if used & RANDOM:
        places = np.flatnonzero(flags_S & RANDOM)
        ops.draw(logits_SV, best_S, ids_S, _draws(places, rows_S[places], positions_S[places], table))
    if raw is not None:
        logprobs = raw.of_tokens(ids_S[at], accelerator.to_host)
    asked = [] if with_logprobs is None else with_logprobs.tolist()
    edited_S = (flags_S & EDITS).astype(np.bool_)
    return Drawn(ids_S, best_S, accelerator.to_host(ids_S), accelerator.to_host(best_S), edited_S, logprobs, asked)


def _draws(places_R: Ints, rows_R: Ints, positions_R: Ints, table: SamplingTable) -> Draws:
    return Draws(
        places=places_R,
        temperature=table.temperature[rows_R].astype(np.float32),
        top_k=table.top_k[rows_R],
        top_p=table.top_p[rows_R],
        min_p=table.min_p[rows_R].astype(np.float32),
        uniforms=uniforms(table.seed[rows_R], table.choice[rows_R], positions_R),
    )
