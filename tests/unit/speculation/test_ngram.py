"""The search for an earlier occurrence of a sequence's end, against a plain one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.configs.schema import SpeculativeSettings
from tandem.workers.platforms.device_rows import NO_DRAFT
from tandem.workers.speculation.ngram import find_continuation
from tandem.workers.speculation.ngram_on_device import NgramOnDevice
from tandem.workers.speculation.proposer import ProposalRow
from tandem.workers.speculation.proposers import make_proposer


def plain(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The definition: the longest end that occurs earlier; of its places the latest with enough behind it, else the
    earliest."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        end = tokens[-length:]
        places = [i + length for i in range(len(tokens) - length) if tokens[i : i + length] == end]
        if places:
            whole = [place for place in places if place + most <= len(tokens)]
            place = whole[-1] if whole else places[0]
            return tokens[place : place + most]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    longest=st.integers(1, 6),
    shorter=st.integers(0, 5),
    most=st.integers(1, 6),
)
def test_equals_the_plain_search(tokens: list[int], longest: int, shorter: int, most: int) -> None:
    shortest = max(1, longest - shorter)
    found = find_continuation(np.array(tokens, np.int32), shortest, longest, most)
    assert found == plain(tokens, shortest, longest, most)
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    ("given_range", "wanted"), [((None, None), (5, 5)), ((2, None), (2, 2)), ((None, 4), (4, 4)), ((2, 4), (2, 4))]
)
def test_the_defaults_are_those_of_vllm(given_range: tuple[int | None, int | None], wanted: tuple[int, int]) -> None:
    fewest, most = given_range
    settings = SpeculativeSettings(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=fewest, prompt_lookup_max=most
    )
    assert settings.lookup_range == wanted


def test_rows_get_at_most_what_they_may_have() -> None:
    proposer = make_proposer(SpeculativeSettings(method="ngram", num_speculative_tokens=4, prompt_lookup_max=1))
    assert proposer is not None and make_proposer(None) is None
    tokens = np.array([1, 2, 3, 4, 5, 1], np.int32)
    rows = [ProposalRow(0, tokens, 2), ProposalRow(7, tokens[:5], 4), ProposalRow(3, tokens, 9)]
    assert proposer.propose(rows) == [[2, 3], [], [2, 3, 4, 5, 1]]


@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 5)), min_size=1),
    longest=st.integers(1, 5),
    shorter=st.integers(0, 4),
    spare=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_device_guesses_the_same(rows: list[tuple[list[int], int]], longest: int, shorter: int, spare: int) -> None:
    """Whatever stands behind a row's known tokens."""
    shortest, most = max(1, longest - shorter), max(count for _, count in rows)
    guess = NgramOnDevice(
        SpeculativeSettings(
            method="ngram", num_speculative_tokens=most, prompt_lookup_min=shortest, prompt_lookup_max=longest
        )
    )
    table = np.random.default_rng(0).integers(0, 4, (len(rows), max(len(row) for row, _ in rows) + spare), np.int32)
    for row, (tokens, _) in enumerate(rows):
        table[row, : len(tokens)] = tokens
    known, counts = (torch.tensor(column) for column in zip(*((len(row), count) for row, count in rows), strict=True))
    for found, (tokens, count) in zip(guess(torch.from_numpy(table), known, counts, most).tolist(), rows, strict=True):
        wanted = find_continuation(np.array(tokens, np.int32), shortest, longest, count)
        assert found == wanted + [NO_DRAFT] * (most - len(wanted))
