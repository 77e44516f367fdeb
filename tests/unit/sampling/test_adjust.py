"""adjust(): which ids of which rows change, at the edges."""

from typing import Any

import numpy as np
import pytest
import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.adjust import FORBIDDEN, RowHistory
from tandem.workers.sampling.processors.adjust import adjust as adjust_on
from tests.unit.sampling.naive_twin import adjusted


def adjust(logits: torch.Tensor, histories: list[RowHistory]) -> None:
    """On CPU, where nothing has to be copied."""
    adjust_on(logits, histories, lambda host: host)


def history(tokens: list[int], prompt_len: int, place: int = 0, **sampling: Any) -> RowHistory:
    return RowHistory(place, RowSampling(**{"temperature": 0.0, **sampling}), np.array(tokens, np.int32), prompt_len)


@pytest.mark.parametrize(("num_output", "is_forbidden"), [(0, True), (2, True), (3, False), (4, False)])
@pytest.mark.parametrize("prompt_len", [1, 5])
def test_min_tokens_counts_from_the_end_of_the_prompt(prompt_len: int, num_output: int, is_forbidden: bool) -> None:
    logits = torch.zeros(1, 10)
    adjust(logits, [history([1] * (prompt_len + num_output), prompt_len, min_tokens=3, stop_token_ids=(4, 7))])
    assert np.flatnonzero(logits[0] == FORBIDDEN).tolist() == ([4, 7] if is_forbidden else [])


def test_the_first_and_the_last_id_are_ids_and_the_next_ones_are_not() -> None:
    logits = torch.zeros(2, 10)
    stops = history([1], 1, place=0, min_tokens=1, stop_token_ids=(-1, 0, 9, 10))
    bias = history([1], 1, place=1, logit_bias=((-1, 7.0), (0, 2.0), (9, 3.0), (10, 7.0)))
    adjust(logits, [stops, bias])
    assert np.flatnonzero(logits[0] == FORBIDDEN).tolist() == [0, 9] and float(logits[0, 1:9].abs().sum()) == 0
    assert logits[1].tolist() == [2.0, *[0.0] * 8, 3.0]
    outside = torch.zeros(1, 10)
    adjust(outside, [history([1], 1, min_tokens=1, stop_token_ids=(-1, 10), logit_bias=((-1, 7.0), (10, 7.0)))])
    assert not outside.any()


def test_every_logit_is_what_the_definitions_say() -> None:
    """Rows with all that there is, some of it and nothing of it, in one step; positive and negative logits."""
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(3)) * 4
    rows: list[tuple[dict[str, Any], list[int], int]] = [
        ({"repetition_penalty": 1.5}, list(range(20)), 5),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, [1, 2, 2, 3, 3, 3], 1),
        ({"repetition_penalty": 0.7, "presence_penalty": -1.0, "logit_bias": ((2, 3.0), (29, -4.0))}, [2, 5, 2], 2),
        ({"frequency_penalty": -0.3, "min_tokens": 4, "stop_token_ids": (7, 8)}, [7, 7, 8, 9], 1),
        ({"presence_penalty": 1.0}, [4, 4], 2),
    ]
    got = logits.clone()
    adjust(got, [history(tokens, begins, place=i + 1, **params) for i, (params, tokens, begins) in enumerate(rows)])
    assert torch.equal(got[0], logits[0])
    for i, (params, tokens, begins) in enumerate(rows, start=1):
        wanted = adjusted(logits[i].double().numpy(), RowSampling(temperature=0.0, **params), tokens, begins)
        assert got[i].tolist() == pytest.approx(wanted.tolist(), rel=1e-5)


def test_penalties_of_rows_that_have_said_nothing_change_nothing() -> None:
    logits = torch.ones(2, 10)
    rows = [history([1, 2], 2, place=i, presence_penalty=1.0, frequency_penalty=1.0) for i in range(2)]
    adjust(logits, rows)
    assert bool((logits == 1).all())
