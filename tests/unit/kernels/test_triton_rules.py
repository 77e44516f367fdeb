"""Triton's masks, bad words, budgets of thinking and log probabilities, in its interpreter and on a CUDA device where
one is: logits as the chain of logits processors leaves them, to the last bit, log probabilities as torch's."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.workers.kernels.logit_edits import DTYPES, FILLS, LogitEdits, RowTokens
from tandem.workers.kernels.sampling_rules import END, HEADER, SamplingRules, free_ends
from tandem.workers.kernels.step_arrays import sending_with
from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.messages.step import RowSampling
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.models.step_tensors import StepRoom
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.captured.frame import PaddingRows
from tandem.workers.rank.captured.framed_step import ReplayOutcome, StepParts
from tandem.workers.rank.captured.ruled_draw import DrawReplay, RuledDraw, RuledPlaces, RuledSampling, draw_memory
from tandem.workers.sampling.logprobs import RawLogprobs, ReportedLogprobs
from tandem.workers.sampling.sampler import sample
from tandem.workers.sampling.sampling_table import SamplingTable
from tests.support import platforms
from tests.support.interpreted import DEVICE, computes, run_in_interpreter, starts
from tests.support.platforms import FixedTwin
from tests.unit.sampling.chain_now import apply_chain

pytest.importorskip("triton")
MOST, PADDING = 300, 3
"""Entries of a step, and places behind its own."""


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def kernels() -> Any:
    from tandem.workers.kernels.triton.sampling.triton_sampling import TritonSampling

    return TritonSampling()


def some_sampling(rng: random.Random, vocab: int) -> RowSampling:
    """Each kind of rule in about half of the rows, beside edits; marks and words of few tokens, so that they occur."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(min(vocab, 5)) for _ in range(rng.randint(1, most)))

    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        fields["bad_words_token_ids"] = tuple(ids(3) for _ in range(rng.randint(1, 12)))
    if rng.random() < 0.5:
        fields["allowed_token_ids"] = (*range(0, vocab, rng.choice((2, 3))), 1)
    if rng.random() < 0.5:
        budget = ThinkingBudget(tokens=rng.randrange(4), start=ids(2), end=ids(3), inside=rng.random() < 0.5)
        fields["thinking_budget"] = budget
    if rng.random() < 0.4:
        fields |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": ((rng.randrange(vocab), 1.5),)}
    if rng.random() < 0.5:
        fields["logprobs"] = rng.choice((0, 2, 20))
        if rng.random() < 0.3:
            fields["logprob_token_ids"] = (*ids(4), vocab + 1)
    return RowSampling(temperature=rng.choice((0.0, 0.8)), top_p=0.9, seed=rng.randrange(99), **fields)


def on_device(array: npt.NDArray[Any], room: int, fill: float, dtype: Any) -> torch.Tensor:
    padded = np.full(room, fill, dtype)
    padded[: len(array)] = array
    return torch.from_numpy(padded).to(DEVICE)


class Places:
    """A step of seven places of five rows, of whose tokens the host has not read the last ones."""

    def __init__(self, seed: int, vocab: int, width: int) -> None:
        rng, generator = random.Random(seed), np.random.default_rng(seed)
        self.table, rows = SamplingTable(5, vocab), 5
        for row in range(rows):
            self.table.bind(row, some_sampling(rng, vocab))
        self.held = generator.integers(0, min(vocab, 5), (rows + 1, width)).astype(np.int32)
        self.prompts = generator.integers(1, width // 2, rows)
        self.rows_S = np.sort(generator.integers(0, rows, 7))
        ahead = np.sort(generator.integers(0, width // 2, len(self.rows_S)))
        self.positions_S = self.prompts[self.rows_S] + ahead + 1
        self.count = len(self.rows_S) + PADDING
        self.logits = torch.randn(self.count, vocab, generator=torch.Generator().manual_seed(seed)) * 4
        self.logits[1, vocab // 2] = float("-inf")
        least_S = [min(self.positions_S[self.rows_S == row]) for row in self.rows_S]  # the same of all places of a row
        behind = np.array([rng.randrange(8) for _ in range(rows)])
        read_S = np.maximum(self.prompts[self.rows_S], least_S - behind[self.rows_S])
        self.rules = self.table.rules(self.rows_S, read_S, self.history)
        own = self.table.captured(self.rows_S, self.prompts[self.rows_S], MOST, with_rules=True)
        assert own is not None
        rooms = [MOST if name.endswith("_E") else self.count for name in LogitEdits._fields]
        numbered = zip(own.edits, rooms, FILLS, DTYPES, strict=True)
        self.edits = LogitEdits[torch.Tensor](*(on_device(*each) for each in numbered))
        ends = on_device(self.positions_S, self.count, 1, np.int64), on_device(self.rows_S, self.count, rows, np.int64)
        self.tokens = RowTokens(torch.from_numpy(self.held).to(DEVICE), ends[1], ends[0])
        numbers = on_device(self.rules.numbers_I, len(self.rules.numbers_I) + 5, -7, np.int32)
        self.sent = SamplingRules(on_device(self.rules.begin_S, self.count, -1, np.int32), numbers)

    def history(self, row: int, position: int) -> tuple[npt.NDArray[np.int32], int]:
        return self.held[row, :position], int(self.prompts[row])


@computes
@pytest.mark.parametrize(("vocab", "width"), [(5, 24), (40, 28), (5_003, 30)])
def test_logits_change_as_the_processors_say(vocab: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of one row behind each other, tokens that the host has not read, padding; the twin's too."""
    monkeypatch.setattr(platforms, "MOST_UNREAD", width)
    changed = 0
    for seed in range(8):
        step = Places(seed, vocab, width)
        wanted = step.logits.clone()
        own = slice(len(step.rows_S))
        apply_chain(step.table.chain, wanted[own], step.rows_S, step.positions_S, step.history)
        changed += int((wanted != step.logits).sum())
        for ops in (kernels(), FixedTwin()):
            padded = torch.full((step.count, vocab + 2), float("nan"), device=DEVICE)
            got, counts = padded[:, :vocab], torch.zeros(step.count, vocab, dtype=torch.int32, device=DEVICE)
            got.copy_(step.logits)
            ops.edit_all(got, step.tokens, step.edits, counts, step.sent)
            assert torch.equal(got.cpu(), wanted) and padded[:, vocab:].isnan().all(), (seed, ops)
    assert changed > 50


@computes
@pytest.mark.parametrize(("vocab", "width"), [(5, 24), (5_003, 30)])
def test_log_probabilities_are_torchs(vocab: int, width: int) -> None:
    """Of the chosen token, with its rank, and of the best or of named ones, ties by id; of rows whose logits change
    from the memory that keeps them."""
    told = 0
    for seed in range(6):
        step = Places(seed, vocab, width)
        step.logits[:, ::2] = torch.round(step.logits[:, ::2])
        places, ids = sorted(step.rules.wanted), torch.arange(step.count) % vocab
        logits = step.logits.clone().to(DEVICE)
        kept = torch.full((max(1, step.rules.num_kept), vocab), float("nan"), device=DEVICE)
        noted = kernels().keep_logits(logits, step.sent, kept)
        is_edited = [step.table.flags[row] & 2 > 0 for row in step.rows_S]
        for place, edited in enumerate(is_edited):
            if edited:
                logits[place] = 0.0
        report = kernels().report(logits, ids.to(DEVICE), step.sent, kept, noted).cpu()
        found = ReportedLogprobs(report, step.rules.wanted).entries(ids.tolist())
        assert [place for place, _ in found] == places
        for place, entry in found:
            asked = step.rules.wanted[place]
            raw = RawLogprobs.of(step.logits[[place]], [asked if isinstance(asked, int) else 0])
            named = (None, ()) if isinstance(asked, int) else (torch.tensor([asked or [0]]), [asked])
            (wanted,) = raw.of_tokens(ids[[place]], lambda tensor: tensor, *named).entries()
            check(entry, wanted)
            told += 1
    assert told > 10


def check(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-5)


@computes
def test_a_draw_with_rules_gives_the_tokens_of_single_operations() -> None:
    """The whole of it, from packed arrays to what the host reads, with room behind the step's places."""
    room, told = 16, 0
    for seed in range(3):
        step = Places(seed, 40, 28)
        count, rows = len(step.rows_S), step.rows_S
        wanted = sample(step.logits[:count].clone(), rows, step.positions_S, step.table, step.history, CpuPlatform())
        logits = torch.zeros(room, 40, device=DEVICE)
        logits[:count] = step.logits[:count].to(DEVICE)
        parts = parts_of(StepRoom(logits[:0], logits[:0], logits), step)
        draw = RuledDraw(parts, room, draw_memory(parts, room, lambda shape, dtype: zeros(shape, dtype)))
        draw.pad()
        own = step.table.captured(rows, step.prompts[rows], draw.most_edits, with_rules=True)
        assert own is not None and draw.has_room(step.rules)
        positions = on_device(step.positions_S, room, 0, np.int64)
        outcome = ReplayOutcome(positions, positions, positions[None], positions[:0], positions[:0])
        draw.fill(torch.from_numpy(draw.packed(own, rows, step.rules)).to(DEVICE), outcome)
        (flat,) = draw.run()
        captured = DrawReplay(draw, lambda: None, (flat,))
        places = RuledPlaces(rows, step.positions_S, step.prompts[rows], step.positions_S, step.history)
        sampling = RuledSampling(captured, step.table, parts.ops, places, own, step.rules)  # type: ignore[arg-type]
        sampling.prepare(sending_with(lambda host: host.to(DEVICE)))
        found = sampling.draw(outcome, lambda tensor: tensor.cpu()).collect()
        one_by_one = wanted.collect()
        assert found.token_ids == one_by_one.token_ids and found.failed == one_by_one.failed
        for mine, its in zip(found.logprobs, one_by_one.logprobs, strict=True):
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                check(mine, its)
                told += 1
    assert told > 3


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def parts_of(room: StepRoom, step: Places) -> StepParts:
    """Those of a rank without layers."""
    nothing: Any = SimpleNamespace(num_groups=1)
    return StepParts(
        decoder=nothing,
        kv=nothing,
        clear=nothing,
        rows=nothing,
        spare=PaddingRows(len(step.held) - 1, 0),
        room=room,
        memory=room.logits_SV,
        ops=kernels(),
        shards=None,
        tokens_NL=torch.from_numpy(step.held).to(DEVICE),
        counts_SV=zeros((len(room.logits_SV), room.logits_SV.shape[1]), torch.int32),
        samples=True,
        adds=False,
        max_drafts=0,
    )


@computes
def test_a_text_may_end_where_nothing_else_is_left() -> None:
    logits = torch.tensor([[float("-inf")] * 3, [float("-inf")] * 3, [1.0, 2.0, 0.0]], device=DEVICE)
    numbers = torch.full((3 * HEADER,), -1, dtype=torch.int32, device=DEVICE)
    numbers[END::HEADER] = torch.tensor([2, -1, 2], dtype=torch.int32)
    rules = SamplingRules(torch.arange(3, device=DEVICE).int() * HEADER, numbers)
    best, ids = free_ends(logits, logits.amax(1), logits.argmax(1), rules)
    assert best.tolist() == [0.0, float("-inf"), 2.0] and ids.tolist()[::2] == [2, 1]
    assert logits[0].tolist() == [float("-inf"), float("-inf"), 0.0] and logits[2].tolist() == [1.0, 2.0, 0.0]
