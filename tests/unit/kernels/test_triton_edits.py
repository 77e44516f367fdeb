"""Triton's logit edits and penalties against the chain of logits processors, to the last bit: in its interpreter, and
on a CUDA device where one is."""

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.workers.kernels.logit_edits import DTYPES, FILLS, LogitEdits, RowTokens
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import History
from tandem.workers.sampling.sampling_table import SamplingTable
from tests.support.interpreted import DEVICE, computes, run_in_interpreter, starts
from tests.support.platforms import FixedTwin
from tests.unit.sampling.chain_now import apply_chain

pytest.importorskip("triton")
MOST, PADDING = 300, 3
"""Entries of a step, and places behind its own."""


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def some_sampling(rng: random.Random, vocab: int) -> RowSampling:
    """Each processor in about half of the rows; several of one token."""

    def ids(most: int) -> list[int]:
        return [rng.randrange(min(vocab, 9)) for _ in range(rng.randint(1, most))]

    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        fields["repetition_penalty"] = rng.choice((0.7, 1.3))
    if rng.random() < 0.5:
        fields |= {"frequency_penalty": rng.choice((-0.3, 0.7)), "presence_penalty": rng.choice((0.0, 0.37))}
    if rng.random() < 0.5:
        fields |= {"min_tokens": rng.randrange(1, 9), "stop_token_ids": (*ids(4), vocab + 3)}
    if rng.random() < 0.5:
        fields["bad_words_token_ids"] = tuple((token,) for token in ids(5))
    if rng.random() < 0.5:
        fields["logit_bias"] = tuple((token, rng.uniform(-5, 5)) for token in {*ids(6)})
    return RowSampling(temperature=0.0, **fields)


def on_device(array: npt.NDArray[Any], room: int, fill: float, dtype: Any) -> torch.Tensor:
    padded = np.full(room, fill, dtype)
    padded[: len(array)] = array
    return torch.from_numpy(padded).to(DEVICE)


def history_of(held: npt.NDArray[np.int32], prompts: npt.NDArray[np.int64]) -> History:
    return lambda row, position: (held[row, :position], int(prompts[row]))


@computes
@pytest.mark.parametrize(("vocab", "width"), [(1, 30), (40, 48), (5_003, 3_000)])
def test_logits_change_as_the_processors_say(vocab: int, width: int) -> None:
    """Places of one row behind each other, as with drafts, tokens that occur often, infinite logits, padding; the
    memory of counts is zeros again, and the twin's logits are the same."""
    from tandem.workers.kernels.triton.sampling.triton_sampling import TritonSampling

    rng = random.Random(vocab)
    ops: list[Any] = [TritonSampling(), FixedTwin()]
    for seed in range(6):
        generator = np.random.default_rng(seed)
        rows, table = 5, SamplingTable(5, vocab)
        for row in range(rows):
            table.bind(row, some_sampling(rng, vocab))
        held = generator.integers(0, min(vocab, 12), (rows + 1, width)).astype(np.int32)
        held[:, ::3] = generator.integers(0, vocab, held[:, ::3].shape)
        prompts = generator.integers(1, width // 2, rows)
        numbers = np.sort(generator.integers(0, rows, 7))
        positions = prompts[numbers] + np.sort(generator.integers(0, width // 2, len(numbers))) + 1
        own = table.captured(numbers, prompts[numbers], MOST)
        assert own is not None
        places = len(numbers) + PADDING
        logits = torch.randn(places, vocab, generator=torch.Generator().manual_seed(seed)) * 4
        logits[1, vocab // 2], logits[0, 0] = float("-inf"), -0.0
        wanted = logits.clone()
        apply_chain(table.chain, wanted[: len(numbers)], numbers, positions, history_of(held, prompts))
        rooms = [MOST if name.endswith("_E") else places for name in LogitEdits._fields]
        numbered = zip(own.edits, rooms, FILLS, DTYPES, strict=True)
        edits = LogitEdits[torch.Tensor](*(on_device(*each) for each in numbered))
        ends = on_device(positions, places, 1, np.int64), on_device(numbers, places, rows, np.int64)
        tokens = RowTokens(torch.from_numpy(held).to(DEVICE), ends[1], ends[0])
        for each in ops:
            padded = torch.full((places, vocab + 2), float("nan"), device=DEVICE)
            got, counts = padded[:, :vocab], torch.zeros(places, vocab, dtype=torch.int32, device=DEVICE)
            got.copy_(logits)
            each.edit_all(got, tokens, edits, counts)
            assert torch.equal(got.cpu(), wanted) and padded[:, vocab:].isnan().all()
            assert not counts.any()
