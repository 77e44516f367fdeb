"""The recipe "Add a logits processor" of CONTRIBUTING.md, followed with an invented processor."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.sampling.processors.chain import all_processors
from tandem.workers.sampling.processors.device_tokens import DeviceTokens, PlaceTokens
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, Reads, SampledRows
from tandem.workers.sampling.sampler import sample
from tandem.workers.sampling.sampling_table import EDITS, SamplingTable
from tests.unit.sampling.chain_now import Ahead, apply_chain, apply_on_device

ROOT = Path(__file__).resolve().parents[3]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a logits processor")[2].partition("\n## ")[0]


class Capped(RowSampling, frozen=True, array_like=True, kw_only=True):
    """Step 1: a field of its own, appended."""

    max_repeats: int | None = None


class MaxRepeats:
    """Step 2: no token more than max_repeats times in a row."""

    reads = Reads.TOKENS

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        most = sampling.max_repeats if isinstance(sampling, Capped) else None
        if most is None:
            return False
        self.rows[row] = most
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
        columns = []
        for row, position in rows:
            tokens, prompt_len = rows.history(row, position)
            end = tokens[prompt_len:][-self.rows[row] :]
            is_full = len(end) == self.rows[row] and bool((end == end[0]).all())
            columns.append(end[:1].astype(np.int64) if is_full else np.empty(0, np.int64))
        return rows.forbid(columns)

    def prepare_on_device(self, rows: SampledRows, tokens: DeviceTokens) -> Change | None:
        own, most = PlaceTokens(rows, tokens), [self.rows[row] for row, _ in rows]
        sent = rows.send(np.array(most))

        def change(logits_SV: torch.Tensor) -> None:
            most_P1, back_K = sent()[:, None], torch.arange(max(most))
            found_PK = own.at(torch.arange(len(most)), own.positions_P[:, None] - 1 - back_K)
            same_P = ((found_PK == found_PK[:, :1]) | (back_K >= most_P1)).all(1)
            is_full_P = same_P & (own.positions_P - own.prompts_P >= sent())
            at = own.places_P, found_PK[:, 0].long()
            logits_SV[at] = logits_SV[at].masked_fill_(is_full_P, FORBIDDEN)

        return change

    def free(self, row: int) -> None:
        del self.rows[row]


def test_an_invented_processor_follows_the_recipe() -> None:
    """Step 3: appended to the chain; a greedy row that would say 4 forever says something else after every third."""
    invented = MaxRepeats()
    table = SamplingTable(1, 8, [*all_processors(8), invented])
    table.bind(0, Capped(temperature=0.0, max_repeats=3, logit_bias=((4, 1.0),)))
    tokens = [4, 4, 4]
    table.grow(2)
    table.bind(1, RowSampling(temperature=0.0))
    assert [bool(flags & EDITS) for flags in table.flags] == [True, False]
    for _ in range(9):
        logits = torch.zeros(2, 8)
        logits[:, 2] = 0.5
        logits[1, 4] = 1.0
        positions = np.array([len(tokens), 5])
        drawn = sample(
            logits, np.arange(2), positions, table, lambda *_: (np.array(tokens, np.int32), 3), CpuPlatform()
        )
        first, second = drawn.collect().token_ids
        tokens.append(first)
        assert second == 4, "rows without it are as they were"
    assert tokens[3:] == [4, 4, 4, 2, 4, 4, 4, 2, 4]
    table.free(0)
    assert not invented.rows


def test_its_form_for_devices_does_the_same() -> None:
    """A device has two tokens that the host has not read: of three, or of one that had not been said."""
    table = SamplingTable(2, 8, [*all_processors(8), MaxRepeats()])
    for row in range(2):
        table.bind(row, Capped(temperature=0.0, max_repeats=3))
    assert not table.chain.waits(0)
    for tokens, forbidden in (([2, 4, 4, 4], 4), ([2, 4, 4, 5], None), ([4, 4, 4, 4], 4), ([4, 4], None)):
        held, rows = np.array([tokens, tokens], np.int32), np.arange(2)
        positions, prompts = np.full(2, len(tokens)), np.ones(2, np.int64)
        wanted, got = torch.zeros(2, 8), torch.zeros(2, 8)
        apply_chain(table.chain, wanted, rows, positions, lambda row, position, held=held: (held[row, :position], 1))
        ahead = Ahead(torch.from_numpy(held), torch.from_numpy(positions), prompts, prompts, positions - 1, positions)
        apply_on_device(table.chain, got, rows, ahead, lambda *_: pytest.fail("it reads nothing on the host"))
        assert torch.equal(got, wanted)
        assert np.flatnonzero(got[0] == FORBIDDEN).tolist() == ([] if forbidden is None else [forbidden])


def test_the_recipe_names_what_is_there() -> None:
    """Its paths and names, all of which the test above uses or stands beside."""
    for path in re.findall(r"`((?:workers|cluster|tests|benchmarks)/[\w/.]+)`", RECIPE):
        assert (ROOT / path).exists(), path
    for name in (
        "LogitsProcessor",
        "SampledRows",
        "Reads",
        "ReadsOnDevice",
        "PlaceTokens",
        "all_processors",
        "RowSampling",
        "SamplingParams",
        "row_sampling",
    ):
        assert f"`{name}" in RECIPE
        assert re.search(rf"(class|def) {name}\b", "".join(f.read_text() for f in (ROOT / "workers").rglob("*.py")))
