"""The chain of logits processors: which ids of which rows change, at the edges, alone and together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN
from tandem.workers.sampling.sampling_table import EDITS, SamplingTable
from tests.unit.sampling.chain_now import apply_chain
from tests.unit.sampling.naive_twin import adjusted


@dataclass
class Row:
    """A row's parameters, tokens and where its output begins."""

    sampling: RowSampling
    tokens: list[int]
    prompt_len: int


def row(tokens: list[int], prompt_len: int, **sampling: Any) -> Row:
    return Row(RowSampling(**{"temperature": 0.0, **sampling}), tokens, prompt_len)


def adjust(logits: torch.Tensor, rows: Sequence[Row | None]) -> SamplingTable:
    """Applies the chain to one place per row; None: a row without processors."""
    table = SamplingTable(len(rows), logits.shape[1])
    for number, each in enumerate(rows):
        table.bind(number, RowSampling(temperature=0.0) if each is None else each.sampling)
    apply(table, logits, rows)
    return table


def apply(
    table: SamplingTable, logits: torch.Tensor, rows: Sequence[Row | None], places: list[tuple[int, int]] | None = None
) -> None:
    """places: (row, position) of each place; default: every row's next token."""
    if places is None:
        places = [(number, 0 if each is None else len(each.tokens)) for number, each in enumerate(rows)]

    def history(number: int, position: int) -> tuple[Any, int]:
        each = rows[number]
        assert each is not None, "a row without processors is not asked for its history"
        assert position <= len(each.tokens)
        return np.array(each.tokens[:position], np.int32), each.prompt_len

    at = np.array(places, np.int64)
    apply_chain(table.chain, logits, at[:, 0], at[:, 1], history)


@pytest.mark.parametrize(("num_output", "is_forbidden"), [(0, True), (2, True), (3, False), (4, False)])
@pytest.mark.parametrize("prompt_len", [1, 5])
def test_min_tokens_counts_from_the_end_of_the_prompt(prompt_len: int, num_output: int, is_forbidden: bool) -> None:
    logits = torch.zeros(1, 10)
    adjust(logits, [row([1] * (prompt_len + num_output), prompt_len, min_tokens=3, stop_token_ids=(4, 7))])
    assert np.flatnonzero(logits[0] == FORBIDDEN).tolist() == ([4, 7] if is_forbidden else [])


def test_the_first_and_the_last_id_are_ids_and_the_next_ones_are_not() -> None:
    logits = torch.zeros(4, 10)
    stops = row([1], 1, min_tokens=1, stop_token_ids=(-1, 0, 9, 10))
    bias = row([1], 1, logit_bias=((-1, 7.0), (0, 2.0), (9, 3.0), (10, 7.0)))
    allowed = row([1], 1, allowed_token_ids=(-1, 0, 9, 10))
    bad = row([1, 5], 1, bad_words_token_ids=((-1,), (0,), (9,), (10,), (5, -1), (5, 10), (5, 8)))
    adjust(logits, [stops, bias, allowed, bad])
    assert np.flatnonzero(logits[0] == FORBIDDEN).tolist() == [0, 9] and float(logits[0, 1:9].abs().sum()) == 0
    assert logits[1].tolist() == [2.0, *[0.0] * 8, 3.0]
    assert np.flatnonzero(logits[2] == FORBIDDEN).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert np.flatnonzero(logits[3] == FORBIDDEN).tolist() == [0, 8, 9]
    outside = torch.zeros(1, 10)
    nothing = row(
        [1], 1, min_tokens=1, stop_token_ids=(-1, 10), logit_bias=((-1, 7.0), (10, 7.0)), bad_words_token_ids=((10,),)
    )
    adjust(outside, [nothing])
    assert not outside.any()


BAD = ((3,), (1, 2), (1, 1, 5), (8, 2, 4), (7, 7, 7, 7, 7))


@pytest.mark.parametrize(
    ("prompt", "output", "forbidden"),
    [
        ([1], [], [3]),
        ([], [1], [2, 3]),
        ([8], [2], [3]),
        ([0], [8, 2], [3, 4]),
        ([9], [1, 1], [2, 3, 5]),
        ([1], [1], [2, 3]),
        ([0], [8, 2, 9], [3]),
        ([7], [7, 7, 7], [3]),
        ([0], [7, 7, 7, 7], [3, 7]),
    ],
)
def test_a_bad_words_last_token_is_forbidden_where_the_output_ends_with_its_start(
    prompt: list[int], output: list[int], forbidden: list[int]
) -> None:
    logits = torch.zeros(1, 10)
    adjust(logits, [row(prompt + output, len(prompt), bad_words_token_ids=BAD)])
    assert np.flatnonzero(logits[0] == FORBIDDEN).tolist() == forbidden


def test_only_allowed_tokens_keep_their_logits_whatever_else_is_asked() -> None:
    """A bias or a penalty cannot bring a forbidden token back."""
    logits = torch.arange(10.0).repeat(2, 1)
    more: dict[str, Any] = {"logit_bias": ((0, 1e30), (5, 1.0)), "bad_words_token_ids": ((6,),)}
    rows = [
        row([0, 6], 1, allowed_token_ids=(5, 6, 7), repetition_penalty=0.1, **more),
        row([1], 1, allowed_token_ids=()),
    ]
    adjust(logits, rows)
    assert logits[0].tolist() == [*[FORBIDDEN] * 5, 6.0, FORBIDDEN, 7.0, FORBIDDEN, FORBIDDEN]
    assert bool((logits[1] == FORBIDDEN).all())


def test_every_logit_is_what_the_definitions_say() -> None:
    """Rows with all that there is, some of it and nothing of it, in one step; positive and negative logits."""
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(3)) * 4
    rows: list[Row | None] = [
        None,
        row(list(range(20)), 5, repetition_penalty=1.5),
        row([1, 2, 2, 3, 3, 3], 1, presence_penalty=1.0, frequency_penalty=0.5),
        row([2, 5, 2], 2, repetition_penalty=0.7, presence_penalty=-1.0, logit_bias=((2, 3.0), (29, -4.0))),
        row([7, 7, 8, 9], 1, frequency_penalty=-0.3, min_tokens=4, stop_token_ids=(7, 8)),
        row([4, 4], 2, presence_penalty=1.0),
        row([4, 4, 2], 1, allowed_token_ids=(2, 3, 9), bad_words_token_ids=((4, 2, 9), (29,)), repetition_penalty=1.2),
        row([4, 4, 2], 1, bad_words_token_ids=((4, 2, 9), (29,)), frequency_penalty=1.0, logit_bias=((9, 50.0),)),
    ]
    got = logits.clone()
    table = adjust(got, rows)
    assert torch.equal(got[0], logits[0])
    assert [bool(flags & EDITS) for flags in table.flags] == [each is not None for each in rows]
    for i, each in enumerate(rows):
        if each is not None:
            wanted = adjusted(logits[i].double().numpy(), each.sampling, each.tokens, each.prompt_len)
            assert got[i].tolist() == pytest.approx(wanted.tolist(), rel=1e-5)


def test_penalties_of_rows_that_have_said_nothing_change_nothing() -> None:
    logits = torch.ones(2, 10)
    adjust(logits, [row([1, 2], 2, presence_penalty=1.0, frequency_penalty=1.0) for _ in range(2)])
    assert bool((logits == 1).all())


ALL: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "min_tokens": 3,
    "stop_token_ids": (6,),
    "bad_words_token_ids": ((4, 5), (9, 4, 1)),
    "logit_bias": ((2, 1.0),),
}


def test_every_position_of_a_row_with_drafts_sees_its_own_history_and_keeps_nothing() -> None:
    """Two rows with drafts, the first one's rejected from the second on, and a row without."""
    rows: list[Row | None] = [row([1, 2], 2, **ALL), row([3, 9], 1, **ALL), row([5], 1, **ALL)]
    table = SamplingTable(3, 12)
    for number, each in enumerate(rows):
        assert each is not None
        table.bind(number, each.sampling)

    def check(places: list[tuple[int, int]]) -> None:
        logits = torch.randn(len(places), 12, generator=torch.Generator().manual_seed(len(places)))
        got = logits.clone()
        apply(table, got, rows, places)
        for i, (number, position) in enumerate(places):
            each = rows[number]
            assert each is not None
            wanted = adjusted(logits[i].double().numpy(), each.sampling, each.tokens[:position], each.prompt_len)
            assert got[i].tolist() == pytest.approx(wanted.tolist(), rel=1e-5), (number, position)

    first, second, third = rows
    assert first is not None and second is not None and third is not None
    first.tokens, second.tokens = [1, 2, 4, 4, 7], [3, 9, 4, 1]
    check([(0, 2), (0, 3), (0, 4), (0, 5), (1, 2), (1, 3), (1, 4), (2, 1)])
    first.tokens, second.tokens, third.tokens = [1, 2, 4, 11, 2], [3, 9, 4, 1, 9], [5, 5]
    check([(2, 2), (0, 4), (0, 5), (1, 5)])
    first.tokens = [1, 2, 8]
    check([(0, 3), (1, 5)])
    first.tokens = [1, 2]
    check([(0, 2)])


def test_a_row_that_is_freed_or_bound_again_forgets_its_tokens() -> None:
    table = SamplingTable(1, 10)
    for tokens in ([1, 2, 3], [4, 4, 4, 5], [6]):
        each = row(tokens, 0, frequency_penalty=1.0)
        table.bind(0, each.sampling)
        logits = torch.zeros(1, 10)
        apply(table, logits, [each])
        assert logits[0].tolist() == [-float(tokens.count(i)) for i in range(10)]
        table.free(0)
        table.free(0)
    table.bind(0, RowSampling(temperature=0.0))
    logits = torch.zeros(1, 10)
    apply(table, logits, [None])
    assert not logits.any() and not table.flags[0] & EDITS


def test_rows_keep_what_they_hold_when_the_table_grows() -> None:
    table = SamplingTable(1, 10)
    rows = [row([1, 1], 0, frequency_penalty=1.0), row([2], 0, bad_words_token_ids=((2,),))]
    table.bind(0, rows[0].sampling)
    apply(table, torch.zeros(1, 10), rows[:1])
    table.grow(4)
    table.bind(1, rows[1].sampling)
    rows[0].tokens += [1, 3]
    logits = torch.zeros(2, 10)
    apply(table, logits, rows)
    assert logits[0].tolist() == [0, -3.0, 0, -1.0, *[0.0] * 6] and logits[1, 2] == FORBIDDEN


def test_counts_of_many_tokens_stay_equal_to_a_recount() -> None:
    """Beyond the room that was made, with tokens taken back on the way."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 500, 900).tolist()
    each = row(tokens[:40], 40, frequency_penalty=1.0, repetition_penalty=2.0)
    table = SamplingTable(1, 500)
    table.bind(0, each.sampling)
    length = 40
    while length < 900:
        each.tokens = tokens[:length]
        logits = torch.ones(1, 500)
        apply(table, logits, [each])
        wanted = adjusted(np.ones(500), each.sampling, each.tokens, 40)
        assert logits[0].tolist() == wanted.tolist()
        length += int(generator.integers(-5, 60))
        length = max(41, length)
