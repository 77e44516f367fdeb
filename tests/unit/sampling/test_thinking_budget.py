"""The budget of thinking: where the end mark is preferred, and that what is forbidden stays so."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.messages.thinking import ThinkingBudget, ThinkingSpan
from tandem.workers.sampling.processors.logits_processor import History
from tandem.workers.sampling.processors.thinking_budget import PREFERENCE
from tandem.workers.sampling.sampling_table import SamplingTable
from tests.unit.sampling.chain_now import apply_chain
from tests.unit.sampling.naive_twin import adjusted

START, END = (7,), (8, 9)


def sampling(tokens: int, *, inside: bool = False, **more: Any) -> RowSampling:
    budget = ThinkingBudget(tokens=tokens, start=START, end=END, inside=inside)
    return RowSampling(temperature=0.0, thinking_budget=budget, **more)


def logits_of(table: SamplingTable, tokens: list[int], positions: list[int], prompt_len: int) -> torch.Tensor:
    logits = torch.zeros(len(positions), 12)
    at = np.array([[0, position] for position in positions], np.int64)
    history: History = lambda _, position: (np.array(tokens[:position], np.int32), prompt_len)  # noqa: E731
    apply_chain(table.chain, logits, at[:, 0], at[:, 1], history)
    return logits


@pytest.mark.parametrize(
    ("inside", "output", "preferred"),
    [
        (False, [], None),
        (False, [1, 1, 1], None),
        (False, [7, 1], None),
        (False, [7, 1, 2], 8),
        (False, [7, 1, 2, 3], 8),
        (False, [7, 1, 2, 8], 9),
        (False, [7, 1, 8], None),
        (False, [7, 1, 2, 8, 8], 9),
        (False, [7, 1, 2, 8, 9], None),
        (False, [7, 1, 2, 8, 9, 1, 1], None),
        (True, [], None),
        (True, [1, 1], 8),
        (True, [8, 9], None),
    ],
)
def test_the_end_mark_is_preferred_from_the_budget_on(inside: bool, output: list[int], preferred: int | None) -> None:
    table = SamplingTable(1, 12)
    table.bind(0, sampling(2, inside=inside))
    tokens = [7, 7, *output]
    (logits,) = logits_of(table, tokens, [len(tokens)], 2)
    assert logits.tolist() == [PREFERENCE if i == preferred else 0.0 for i in range(12)]


def test_a_budget_of_nothing_ends_the_thinking_at_once() -> None:
    table = SamplingTable(1, 12)
    table.bind(0, sampling(0, inside=True))
    assert logits_of(table, [7], [1], 1)[0].argmax() == 8


def test_what_is_forbidden_stays_forbidden() -> None:
    table = SamplingTable(1, 12)
    table.bind(0, sampling(0, inside=True, allowed_token_ids=(1, 2)))
    assert logits_of(table, [7], [1], 1)[0].tolist() == [0.0 if i in (1, 2) else float("-inf") for i in range(12)]


def test_drafts_rejections_and_tokens_taken_back_do_not_confuse_it() -> None:
    """Random histories against the plain definition: places behind drafts, other drafts, shorter histories."""
    draw = random.Random(5)
    for _ in range(60):
        table = SamplingTable(1, 12)
        params = sampling(draw.randrange(5), inside=draw.random() < 0.5)
        table.bind(0, params)
        known = [7]
        for _ in range(12):
            drafts = draw.choices([1, 2, 7, 8, 9], k=draw.randrange(4))
            tokens = [*known, *drafts]
            positions = list(range(len(known), len(tokens) + 1))
            got = logits_of(table, tokens, positions, 1)
            for place, position in enumerate(positions):
                wanted = adjusted(np.zeros(12), params, tokens[:position], 1)
                assert got[place].tolist() == wanted.tolist(), (params, tokens[:position])
            accepted = draw.randrange(len(drafts) + 1)
            known = [*known, *drafts[:accepted], draw.choice([1, 7, 8, 9])]
            if draw.random() < 0.1:
                known = known[: draw.randrange(1, len(known) + 1)]


def test_a_span_that_is_copied_reads_on_by_itself() -> None:
    span = ThinkingSpan(START, END, inside=True)
    span.add([1, 8])
    other = span.copy()
    other.add([9])
    span.add([1, 1])
    assert (other.is_inside, other.tokens) == (False, 1)
    assert (span.is_inside, span.tokens) == (True, 4)
