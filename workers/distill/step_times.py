"""StepTimes: what a step of the target costs with and without guesses, and a guess; and what guesses would save.

Measured here and now, for one sequence: by the decoder that serves where the written files are a model, else by the
torch module that has learned. All in turns, the least of each: other work on the machine comes and goes within seconds,
and only adds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.distill.kept_guesses import Acceptance
from tandem.workers.distill.target_model import BLOCK_SIZE, TargetModel
from tandem.workers.rank.kv_cache import KVCache

CONTEXT: Final = 128
"""Tokens before those of a step, unless the model's context is shorter."""
REPEATS: Final = 15


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds. target: of the target's step by the number of tokens it computes, from 1. guess: of one guess, or of all
    of them where they are computed in one pass (once)."""

    target: tuple[float, ...]
    guess: float
    once: bool

    def gain(self, acceptance: Acceptance) -> tuple[float, int]:
        """Returns how many times as fast decoding would be, and with how many guesses, 0 for none."""
        best, most = 1.0, 0
        for count in range(1, len(self.target)):
            seconds = self.target[count] + self.guess * (1 if self.once else count)
            if (gain := acceptance.tokens[count - 1] * self.target[0] / seconds) > best:
                best, most = gain, count
        return best, most


def decode_steps(model: TargetModel, most: int) -> list[Callable[[], object]]:
    """Returns decode steps that compute 1 to `most` tokens of one sequence, logits and all, to be timed."""
    layouts = model.decoder.kv_layouts
    context = min(CONTEXT, model.spec.max_position_embeddings - most)
    blocks = -(-(context + most) // BLOCK_SIZE)
    kv = KVCache.allocate(layouts, blocks, BLOCK_SIZE, model.dtype, model.platform).tensors
    return [partial(_step, model, kv, context, count) for count in range(1, most + 1)]


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the least seconds of each call."""
    least_s = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(REPEATS):
        for place, call in enumerate(calls):
            started_s = time.perf_counter()
            call()
            least_s[place] = min(least_s[place], time.perf_counter() - started_s)
    return least_s


def _step(model: TargetModel, kv: KVTensors, context: int, count: int) -> None:
    device, places = model.platform.device, torch.arange(context, context + count)
    blocks = -(-(context + count) // BLOCK_SIZE)
    batch = ForwardBatch(
        input_ids_T=torch.zeros(count, dtype=torch.int64, device=device),
        positions_T=places.to(device),
        slot_mapping_T=places.to(device),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([context + count], dtype=torch.int32, device=device),
        block_table_RN=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        logits_rows_S=torch.arange(count, device=device),
        query_lens_list=[count],
        seq_lens_list=[context + count],
        block_size=BLOCK_SIZE,
    )
    with torch.inference_mode():
        model.decoder.forward(batch, kv, None).sum().item()
