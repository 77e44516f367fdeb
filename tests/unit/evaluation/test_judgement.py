"""Figures of rows: probabilities, KL and agreement, by a formula of their own in float64."""

import math

import numpy as np
import pytest
import torch

from tandem.workers.evaluation import judgement
from tandem.workers.evaluation.judgement import Judgement, verdict_of, worst_of


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.log_softmax(3 * torch.randn(count, 50, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.mark.parametrize("row_bytes", [64 * 2**20, 700])
def test_figures_beside_a_reference(monkeypatch: pytest.MonkeyPatch, row_bytes: int) -> None:
    monkeypatch.setattr(judgement, "ROW_BYTES", row_bytes)
    own, other, ids = rows(20, 1), rows(20, 2), [int(7 * k % 50) for k in range(20)]
    judged = Judgement()
    judged.add(0, 1, ids[:12], own[:12], other[:12])
    judged.add(3, 5, ids[12:], own[12:], other[12:])
    scores = judged.scores()
    p, log_q = np.exp(other.double().numpy()), own.double().numpy()
    kl = (p * (np.log(p) - log_q)).sum(1)
    np.testing.assert_allclose(scores.kl_N, kl, rtol=1e-5)
    nll = -log_q[np.arange(20), ids]
    verdict = verdict_of(scores, num_bytes=70)
    assert verdict.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert verdict.bits_per_byte == pytest.approx(nll.sum() / math.log(2) / 70, rel=1e-6)
    assert verdict.against is not None
    assert verdict.against.mean_kl == pytest.approx(kl.mean(), rel=1e-5)
    assert verdict.against.p99_kl == pytest.approx(np.quantile(kl, 0.99), rel=1e-5)
    assert verdict.against.agreement == (log_q.argmax(1) == p.argmax(1)).mean()
    assert list(zip(scores.text_N, scores.position_N, strict=True))[11:14] == [(0, 12), (3, 5), (3, 6)]
    assert worst_of(scores, 3) == np.argsort(-kl)[:3].tolist()


def test_a_token_that_cannot_come_costs_nothing_if_both_say_so() -> None:
    own, other = rows(2, 1), rows(2, 2)
    own[:, 7] = other[:, 7] = -math.inf
    judged = Judgement()
    judged.add(0, 1, [3, 4], own, other)
    assert np.isfinite(judged.scores().kl_N).all()


def test_what_the_judged_model_rules_out_costs_everything() -> None:
    own, other = rows(1, 1), rows(1, 2)
    own[:, 7] = -math.inf
    judged = Judgement()
    judged.add(0, 1, [3], own, other)
    assert judged.scores().kl_N.tolist() == [math.inf]


def test_without_a_reference_the_least_probable_are_worst() -> None:
    judged = Judgement()
    judged.add(0, 1, [1, 2, 3], rows(3, 4))
    scores = judged.scores()
    assert scores.kl_N is None
    assert verdict_of(scores, 0).bits_per_byte is None
    assert worst_of(scores, 1) == [int(scores.logprob_N.argmin())]


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        Judgement().add(0, 1, [1, 2], rows(2, 1), rows(2, 1)[:, :40])
