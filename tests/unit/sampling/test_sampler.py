"""sample() against the naive twin, its distribution, independence of batch mates, and rows that go wrong."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.messages.step import NOT_FINITE, NOTHING_LEFT, RowSampling
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.sampling.sampler import Sampled, sample
from tandem.workers.sampling.sampling_table import SamplingTable
from tests.support.platforms import replaced
from tests.unit.sampling.naive_twin import adjusted, choose, kept, softmax

PLATFORM = CpuPlatform()
IN_TORCH = replaced(PLATFORM, sampling_ops=TorchSampling)
PLATFORMS = pytest.mark.parametrize("platform", [PLATFORM, IN_TORCH], ids=["own", "torch"])

Row = tuple[RowSampling, list[int], int]


def run(logits_SV: torch.Tensor, rows: list[Row], platform: Platform = PLATFORM) -> Sampled:
    table = SamplingTable(len(rows), logits_SV.shape[1])
    for row, (sampling, _, _) in enumerate(rows):
        table.bind(row, sampling)
    return sample(
        logits_SV.clone(),
        np.arange(len(rows)),
        np.array([len(tokens) for _, tokens, _ in rows]),
        table,
        lambda row, position: (np.array(rows[row][1], np.int32), rows[row][2]),
        platform,
    ).collect()


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


sampling_params = st.builds(
    lambda **k: RowSampling(**k),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 5),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.just((1, 4)),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (7, -100.0))]),
    allowed_token_ids=st.sampled_from([None, None, None, (3, 5, 18, 19)]),
    bad_words_token_ids=st.sampled_from([(), (), ((2,), (3, 5), (0, 1, 2))]),
)
a_row = st.tuples(sampling_params, st.lists(st.integers(0, 19), min_size=1, max_size=12), st.integers(0, 3))


@PLATFORMS
@settings(max_examples=150, deadline=None)
@given(st.lists(a_row, min_size=1, max_size=5), st.sampled_from([20, 128, 300]), st.integers(0, 2**20))
def test_equals_the_naive_twin(platform: Platform, rows: list[Row], vocab: int, seed: int) -> None:
    rows = [(sampling, tokens, min(prompt_len, len(tokens))) for sampling, tokens, prompt_len in rows]
    logits = random_logits(len(rows), vocab, seed)
    got = run(logits, rows, platform)
    wanted = [choose(logits[i].double().numpy(), *row) for i, row in enumerate(rows)]
    assert got.token_ids == wanted
    assert not any(got.failed)
    alone = [run(logits[i : i + 1], [row], platform).token_ids[0] for i, row in enumerate(rows)]
    assert alone == wanted, "the same without batch mates"


@PLATFORMS
@pytest.mark.parametrize(
    "limits",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7, "min_p": 0.01, "temperature": 0.7}],
)
def test_distribution_by_chi_square(platform: Platform, limits: dict[str, Any]) -> None:
    """8,000 positions of one seed fall as the probabilities say (fixed seed: the same numbers on every run)."""
    n, vocab = 8_000, 50
    row = random_logits(1, vocab, 5) / 2
    sampling = RowSampling(**({"temperature": 1.0, "seed": 11} | limits))
    table = SamplingTable(1, vocab)
    table.bind(0, sampling)
    got = sample(
        row.repeat(n, 1), np.zeros(n, np.int64), np.arange(n), table, lambda *_: (np.zeros(0, np.int32), 0), platform
    ).collect()
    logits = row[0].double().numpy()
    keep = kept(logits, sampling)
    expected = np.where(keep, softmax(logits / sampling.temperature), 0)
    expected *= n / expected.sum()
    counts = np.bincount(got.token_ids, minlength=vocab)
    assert counts[~keep].sum() == 0
    chi_square = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_ties_are_greedy_by_lowest_id_and_stay_together_under_top_k() -> None:
    logits = torch.zeros(1, 8)
    logits[0, [3, 5, 6]] = 2.0
    assert run(logits, [(RowSampling(temperature=0.0), [0], 1)]).token_ids == [3]
    assert run(logits, [(RowSampling(temperature=1e-6), [0], 1)]).token_ids == [3]
    seen = {run(logits, [(RowSampling(temperature=1.0, top_k=1, seed=s), [0], 1)]).token_ids[0] for s in range(40)}
    assert seen == {3, 5, 6}


@PLATFORMS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(platform: Platform, bad: float, temperature: float) -> None:
    logits = random_logits(3, 300)
    params = [(RowSampling(temperature=temperature, seed=4, top_p=0.9, logprobs=1), [1, 2], 1)] * 3
    clean = run(logits, params, platform)
    logits[1, 17] = bad
    got = run(logits, params, platform)
    assert got.failed == [False, True, False]
    assert [got.token_ids[0], got.token_ids[2]] == [clean.token_ids[0], clean.token_ids[2]]
    assert 0 <= got.token_ids[1] < 300
    assert got.reasons == {1: NOT_FINITE} and "not finite" in NOT_FINITE


@PLATFORMS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_to_choose_fails_alone_and_says_why(platform: Platform, temperature: float) -> None:
    logits = random_logits(4, 300)
    params = [(RowSampling(temperature=temperature, seed=4, top_p=0.9), [1, 2], 1)] * 4
    clean = run(logits, params, platform)
    nothing = RowSampling(
        temperature=temperature,
        seed=4,
        top_k=5,
        allowed_token_ids=(3, 7),
        bad_words_token_ids=((3,),),
        min_tokens=2,
        stop_token_ids=(7,),
        logprobs=2,
    )
    got = run(logits, [params[0], (nothing, [1, 2], 1), params[0], params[0]], platform)
    assert got.reasons == {1: NOTHING_LEFT} and got.failed == [False, True, False, False]
    assert [got.token_ids[i] for i in (0, 2, 3)] == [clean.token_ids[i] for i in (0, 2, 3)]
    assert run(logits[:1], [(nothing, [1, 2, 5, 5], 1)], platform).token_ids == [7], "two tokens are out"
    broken = torch.full((1, 300), -torch.inf)
    assert run(broken, params[:1], platform).reasons == {0: NOT_FINITE}, "not the request's fault"


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = random_logits(3, 40)
    sampling = RowSampling(temperature=0.5, seed=3, top_k=2, logprobs=4, logit_bias=((9, 100.0),))
    plain = RowSampling(temperature=0.0, logprobs=0)
    got = run(logits, [(sampling, [1], 1), (RowSampling(temperature=0.0), [1], 1), (plain, [1], 1)])
    raw = torch.log_softmax(logits.double(), -1)
    first, second, third = got.logprobs
    assert second is None
    assert first is not None and third is not None
    assert first.token_id == got.token_ids[0] == 9
    assert first.logprob == pytest.approx(raw[0, 9].item(), abs=1e-5)
    assert [i for i, _ in first.top] == raw[0].topk(4).indices.tolist()
    assert [v for _, v in first.top] == pytest.approx(raw[0].topk(4).values.tolist(), abs=1e-5)
    assert first.rank == 1 + (raw[0] > raw[0, 9]).sum().item() > 4 and third.rank == 1
    assert third.top == []
    assert third.logprob == pytest.approx(raw[2].max().item(), abs=1e-5)


def test_of_equal_logprobs_those_of_lower_ids_are_reported() -> None:
    """However many another row of the step asks for, which torch.topk heeds."""
    logits = (random_logits(2, 600, seed=5) / 3).round()
    for count, others in [(1, 1), (3, 3), (3, 8), (8, 200), (20, 599)]:
        wanted, mate = (RowSampling(temperature=0.0, logprobs=number) for number in (count, others))
        first = run(logits, [(wanted, [1], 1), (mate, [1], 1)]).logprobs[0]
        assert first is not None
        order = sorted(range(600), key=lambda token: (-logits[0, token].item(), token))
        assert [token for token, _ in first.top] == order[:count]


def test_named_tokens_have_their_logprobs_in_their_order() -> None:
    """Beside rows that want the best ones, and rows that want none; ids outside the vocabulary are left out."""
    logits = random_logits(4, 40)
    named = RowSampling(temperature=0.0, logprobs=0, logprob_token_ids=(7, 3, 99, -1), allowed_token_ids=(5,))
    one = RowSampling(temperature=0.0, logprobs=0, logprob_token_ids=(0,))
    best = RowSampling(temperature=0.0, logprobs=2)
    got = run(logits, [(named, [1], 1), (RowSampling(temperature=0.0), [1], 1), (best, [1], 1), (one, [1], 1)])
    raw = torch.log_softmax(logits.double(), -1)
    first, second, third, fourth = got.logprobs
    assert first is not None and second is None and third is not None and fourth is not None
    assert first.token_id == 5 and first.top == [(i, pytest.approx(raw[0, i].item(), abs=1e-5)) for i in (7, 3)]
    assert [i for i, _ in third.top] == raw[2].topk(2).indices.tolist()
    assert fourth.top == [(0, pytest.approx(raw[3, 0].item(), abs=1e-5))]


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = random_logits(1, 30)
    odd = RowSampling(temperature=0.0, min_tokens=9, stop_token_ids=(99, -1), logit_bias=((50, 3.0),))
    assert run(logits, [(odd, [1], 1)]).token_ids == [int(logits.argmax())]


def test_penalties_touch_the_right_tokens() -> None:
    logits = random_logits(1, 30)
    sampling = RowSampling(temperature=0.0, presence_penalty=1, frequency_penalty=2, repetition_penalty=1.5)
    out = adjusted(logits[0].double().numpy(), sampling, [1, 2, 2, 3, 3], 2)
    changed = set(np.flatnonzero(out != logits[0].double().numpy()).tolist())
    assert changed == {1, 2, 3}
    assert run(logits, [(sampling, [1, 2, 2, 3, 3], 2)]).token_ids == [int(out.argmax())]


def test_only_rows_that_change_logits_are_asked_for_their_history() -> None:
    """It costs the caller a copy of all tokens."""
    rows = [RowSampling(temperature=t, seed=5, **more) for t, more in ((0.0, {}), (1.0, {}), (1.0, {"min_tokens": 2}))]
    table = SamplingTable(3, 20)
    for row, sampling in enumerate(rows):
        table.bind(row, sampling)
    asked: list[int] = []

    def history(row: int, position: int) -> tuple[Any, int]:
        asked.append(row)
        return np.zeros(1, np.int32), 1

    sample(random_logits(3, 20), np.arange(3), np.ones(3, np.int64), table, history, PLATFORM)
    assert asked == [2]
