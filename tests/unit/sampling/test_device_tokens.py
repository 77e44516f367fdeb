"""Logits processors that read tokens on a device: what they make of logits is what they make of them on the host, to
the last bit, however far the device is ahead; and as the definitions say."""

import random
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.sampling.processors import penalties
from tandem.workers.sampling.sampling_table import READS_LATE, READS_ON_HOST, READS_TOKENS, SamplingTable
from tests.unit.sampling.chain_now import Ahead, apply_chain, apply_on_device
from tests.unit.sampling.naive_twin import adjusted

VOCAB, FEW, WIDTH = 40, (0, 0, 0, 1, 1, 2, 3, 4, 5), 48
"""Tokens are few, so that words, repetitions and marks that overlap occur."""
OVERLAPPING = ((0, 0), (0, 0, 0), (0, 1, 0))


def some_sampling(rng: random.Random) -> RowSampling:
    """Each processor in about half of the rows."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.choice(FEW) for _ in range(rng.randint(1, most)))

    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        fields["repetition_penalty"] = rng.choice((0.7, 1.3))
    if rng.random() < 0.5:
        fields |= {"frequency_penalty": rng.choice((-0.3, 0.7)), "presence_penalty": rng.choice((0.0, 0.37))}
    if rng.random() < 0.5:
        fields |= {"min_tokens": rng.randrange(9), "stop_token_ids": (3, VOCAB - 1, VOCAB)}
    if rng.random() < 0.5:
        fields["bad_words_token_ids"] = (*(ids(4) for _ in range(12)), (2, VOCAB), (VOCAB + 1, 2))
    if rng.random() < 0.5:
        start, end = (rng.choice((ids(3), *OVERLAPPING)) for _ in range(2))
        fields["thinking_budget"] = ThinkingBudget(
            tokens=rng.randrange(5), start=start, end=end, inside=rng.random() < 0.5
        )
    if rng.random() < 0.3:
        fields["logit_bias"] = ((1, 2.5), (4, -1.0))
    if rng.random() < 0.2:
        fields["allowed_token_ids"] = tuple(range(0, VOCAB, 2))
    return RowSampling(temperature=0.0, **fields)


class Row:
    """A sequence: all tokens that the device has, and how many the host has read."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.sampling = some_sampling(rng)
        self.tokens = self._some(rng.randint(1, 6))
        self.prompt_len = self.read = len(self.tokens)
        self.drafts: list[int] = []

    def _some(self, count: int) -> list[int]:
        return [self._rng.choice(FEW) for _ in range(count)]

    def go_on(self) -> None:
        """Some tokens more, of which the host reads some; now and then the last ones that it has not read are taken
        back."""
        if self._rng.random() < 0.2:
            self.tokens = self.tokens[: self._rng.randint(self.read, len(self.tokens))]
        self.tokens += self._some(self._rng.randrange(4))
        self.read = self._rng.randint(max(self.read, len(self.tokens) - 5), len(self.tokens))
        self.drafts = self._some(self._rng.randrange(4))


def ahead_of(rng: random.Random, rows: list[Row], places: list[tuple[int, int]]) -> Ahead:
    """places: the row and the position of each place."""
    table = torch.randint(0, VOCAB, (len(rows), WIDTH), generator=torch.Generator().manual_seed(rng.randrange(99)))
    for number, row in enumerate(rows):
        known = [*row.tokens, *row.drafts]
        table[number, : len(known)] = torch.tensor(known)
    spare = [rng.randint(0, len(row.tokens) - row.read) for row in rows]
    more = [rng.randrange(3) for _ in rows]

    def column(values: list[int]) -> npt.NDArray[np.int64]:
        return np.array(values, np.int64)

    return Ahead(
        table.int(),
        torch.tensor([position for _, position in places]),
        column([rows[row].prompt_len for row, _ in places]),
        column([rows[row].read for row, _ in places]),
        column([position - spare[row] for row, position in places]),
        column([position + more[row] for row, position in places]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_device_changes_logits_as_the_host_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any mix, places behind drafts, tokens that the host has not read. Some of the logits are infinite."""
    rng = random.Random(seed)
    monkeypatch.setattr(penalties, "PART", 3)
    rows = [Row(rng) for _ in range(5)]

    def bound() -> SamplingTable:
        table = SamplingTable(len(rows), VOCAB)
        for number, row in enumerate(rows):
            table.bind(number, row.sampling)
        return table

    on_device = bound()
    for step in range(7):
        if step:
            for row in rows:
                row.go_on()
        chosen = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
        places = [
            (number, len(rows[number].tokens) + place)
            for number in chosen
            for place in range(1 + len(rows[number].drafts))
        ]
        logits = torch.randn(len(places), VOCAB, generator=torch.Generator().manual_seed(step)) * 4
        logits[:, 7], logits[0, 5] = float("-inf"), -0.0
        numbers, positions = np.array([row for row, _ in places]), np.array([position for _, position in places])

        def history(number: int, position: int) -> tuple[npt.NDArray[np.int32], int]:
            row = rows[number]
            return np.array([*row.tokens, *row.drafts][:position], np.int32), row.prompt_len

        def read(number: int, position: int) -> tuple[npt.NDArray[np.int32], int]:
            assert position <= rows[number].read, "a token that the host has not read"
            return history(number, position)

        wanted, got = logits.clone(), logits.clone()
        apply_chain(bound().chain, wanted, numbers, positions, history)
        apply_on_device(on_device.chain, got, numbers, ahead_of(rng, rows, places), read)
        assert torch.equal(got, wanted), step
        for place, (number, position) in enumerate(places):
            row, tokens = rows[number], history(number, position)[0].tolist()
            sampling = RowSampling(**{**_fields(row.sampling), "stop_token_ids": (3, VOCAB - 1)})
            sampling = RowSampling(**{**_fields(sampling), "bad_words_token_ids": _known(sampling)})
            plain = adjusted(logits[place].double().numpy(), sampling, tokens, row.prompt_len)
            assert got[place].tolist() == pytest.approx(plain.tolist(), rel=1e-5, abs=1e-5)


def _fields(sampling: RowSampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def _known(sampling: RowSampling) -> tuple[tuple[int, ...], ...]:
    return tuple(word for word in sampling.bad_words_token_ids if word[-1] < VOCAB)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("start", "end"), [*product([(0,), (0, 0), (0, 1, 0)], [(0, 0), (0, 1, 0), (1, 0, 1, 0)])])
def test_every_short_thinking_is_read_on(start: tuple[int, ...], end: tuple[int, ...], inside: bool) -> None:
    """All outputs of seven tokens out of two, of which the host has read none, some or all."""
    outputs = [*product([0, 1], repeat=7)]
    held = np.array([(2, *output) for output in outputs], np.int32)
    budget = ThinkingBudget(tokens=1, start=start, end=end, inside=inside)
    on_host, on_device = (SamplingTable(len(held), 8) for _ in range(2))
    for table in (on_host, on_device):
        for row in range(len(held)):
            table.bind(row, RowSampling(temperature=0.0, thinking_budget=budget))
    rows, positions, prompts = np.arange(len(held)), np.full(len(held), 8), np.ones(len(held), np.int64)
    read = 1 + rows % 8
    wanted, got = torch.zeros(len(held), 8), torch.zeros(len(held), 8)
    apply_chain(on_host.chain, wanted, rows, positions, lambda row, position: (held[row, :position], 1))
    ahead = Ahead(torch.from_numpy(held), torch.from_numpy(positions), prompts, read, read, positions)
    apply_on_device(on_device.chain, got, rows, ahead, lambda row, position: (held[row, :position], 1))
    assert torch.equal(got, wanted) and got.any() and not got.any(1).all()


def test_rows_that_are_freed_or_bound_again_forget_their_words_and_thinking() -> None:
    rng = random.Random(3)
    table, fresh = (SamplingTable(1, VOCAB) for _ in range(2))
    for words in (((1, 2),), ((3, 4), (5,))):
        budget = ThinkingBudget(tokens=0, start=(1,), end=(0,), inside=len(words) == 1)
        sampling = RowSampling(temperature=0.0, bad_words_token_ids=words, thinking_budget=budget)
        row = Row(rng)
        row.tokens, row.prompt_len, row.read = [2, 3], 1, 2
        table.bind(0, sampling)
        fresh = SamplingTable(1, VOCAB)
        fresh.bind(0, sampling)
        found = []
        for each in (table, fresh):
            logits = torch.zeros(1, VOCAB)
            ahead = ahead_of(random.Random(0), [row], [(0, 2)])
            apply_on_device(
                each.chain, logits, np.zeros(1, np.int64), ahead, lambda *_: (np.array([2, 3], np.int32), 1)
            )
            found.append(logits)
        assert torch.equal(*found) and found[0].any()
        table.free(0)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"logit_bias": ((1, 1.0),), "allowed_token_ids": (1,)}, 0),
        ({"presence_penalty": 1.0, "min_tokens": 2, "stop_token_ids": (1,)}, READS_TOKENS),
        ({"grammar": "any"}, READS_LATE),
    ],
)
def test_who_waits(fields: dict[str, Any], wanted: int) -> None:
    table = SamplingTable(1, VOCAB)
    table.bind(0, RowSampling(temperature=0.0, **fields))
    assert table.flags[0] & (READS_TOKENS | READS_LATE | READS_ON_HOST) == wanted
