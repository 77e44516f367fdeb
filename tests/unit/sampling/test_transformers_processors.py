"""Every sampling field beside transformers' logits processors and warpers, on the same logits and histories."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from tandem.workers.kernels.sampling_ops import SamplingOps, TorchSampling
from tandem.workers.messages.step import RowSampling
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.sampling.sampling_table import SamplingTable
from tests.unit.sampling.chain_now import apply_chain
from tests.unit.sampling.numpy_twin import exponents
from tests.unit.sampling.sampling_kinds import draw, lowest_of

VOCAB, PROMPT = 320, 6
OPS: dict[str, SamplingOps] = {"own": CpuPlatform().sampling_ops(), "torch": TorchSampling()}
PLAIN = SamplingTable(1, VOCAB)


def history(seed: int, length: int) -> list[int]:
    """Few distinct tokens, so that words and repetitions occur."""
    return np.random.default_rng(seed).integers(0, 12, length).tolist()


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def ours(sampling: dict[str, Any], tokens: list[int], logits: torch.Tensor, prompt_len: int = PROMPT) -> torch.Tensor:
    """What the chain of logits processors makes of a row."""
    table = SamplingTable(1, VOCAB)
    table.bind(0, RowSampling(temperature=0.0, **sampling))
    got = logits.clone()
    apply_chain(
        table.chain,
        got,
        np.zeros(1, np.int64),
        np.array([len(tokens)]),
        lambda row, position: (np.array(tokens[:position], np.int32), prompt_len),
    )
    return got


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 7.0])
@pytest.mark.parametrize("length", [PROMPT, 7, 40])
def test_repetition_penalty(penalty: float, length: int) -> None:
    tokens, logits = history(length, length), logits_of(length)
    wanted = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    assert torch.equal(ours({"repetition_penalty": penalty}, tokens, logits), wanted)


@pytest.mark.parametrize("num_output", [0, 1, 4, 5, 6])
def test_min_tokens(num_output: int) -> None:
    tokens, logits = history(1, PROMPT + num_output), logits_of(1)
    wanted = theirs.MinNewTokensLengthLogitsProcessor(PROMPT, 5, [7, 300])(torch.tensor([tokens]), logits.clone())
    assert torch.equal(ours({"min_tokens": 5, "stop_token_ids": (7, 300)}, tokens, logits), wanted)


@pytest.mark.parametrize("seed", range(25))
def test_bad_words(seed: int) -> None:
    """transformers looks for words in the prompt too: here all tokens are output."""
    generator = np.random.default_rng(seed)
    words = [generator.integers(0, 12, generator.integers(1, 5)).tolist() for _ in range(30)]
    tokens, logits = history(seed, 12), logits_of(seed)
    words += [[*tokens[-3:], 200], [*tokens[-1:], 201], [202]]
    wanted = theirs.NoBadWordsLogitsProcessor(words)(torch.tensor([tokens]), logits.clone())
    got = ours({"bad_words_token_ids": tuple(map(tuple, words))}, tokens, logits, prompt_len=0)
    assert torch.equal(got, wanted)
    assert all(got[0, i] == -torch.inf for i in (200, 201, 202))


def test_allowed_token_ids() -> None:
    allowed, logits = [3, 77, 319], logits_of(2)
    wanted = theirs.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(torch.tensor([[1]]), logits.clone())
    assert torch.equal(ours({"allowed_token_ids": tuple(allowed)}, [1], logits), wanted)
    rest = [i for i in range(VOCAB) if i not in allowed]
    suppressed = theirs.SuppressTokensLogitsProcessor(rest)(torch.tensor([[1]]), logits.clone())
    assert torch.equal(ours({"allowed_token_ids": tuple(allowed)}, [1], logits), suppressed)


def test_logit_bias() -> None:
    bias, logits = {5: 2.5, 9: -float("inf"), 319: -1.0}, logits_of(3)
    wanted = theirs.SequenceBiasLogitsProcessor([[[i], v] for i, v in bias.items()])(
        torch.tensor([[1]]), logits.clone()
    )
    assert torch.equal(ours({"logit_bias": tuple(bias.items())}, [1], logits), wanted)


def kept_by(kind: str, logits: torch.Tensor, **limits: float) -> set[int]:
    """The ids that may be drawn, which are those that transformers leaves; the others are never."""
    scores = theirs.TemperatureLogitsWarper(limits.get("temperature", 1.0))(torch.tensor([[1]]), logits.clone())
    for name, warper in (
        ("min_p", theirs.MinPLogitsWarper),
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
    ):
        if name in limits:
            value = limits[name]
            scores = warper(int(value) if name == "top_k" else value)(torch.tensor([[1]]), scores)
    probabilities = scores.double().softmax(-1)[0].numpy()
    owners = np.flatnonzero(probabilities)
    row = logits[0].numpy()
    kept = np.flatnonzero(exponents(row, limits.get("temperature", 1.0)) >= lowest_of(kind, row, **limits))
    clear = probabilities[kept] > 1e-5  # smaller shares are within the rounding of float32 sums
    assert kept[clear].tolist() == owners[probabilities[owners] > 1e-5].tolist()
    assert {*kept.tolist(), *draw(kind, logits, range(200), **limits)} <= {*owners.tolist()}
    return {*kept[clear].tolist()}


@pytest.mark.parametrize("kind", ["torch", "compiled"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "limits",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.4},
        {"top_p": 0.95, "temperature": 1.4},
        {"min_p": 0.1},
        {"min_p": 0.002, "top_k": 30, "top_p": 0.8, "temperature": 0.9},
    ],
    ids=str,
)
def test_temperature_and_truncations(kind: str, seed: int, limits: dict[str, float]) -> None:
    """In vLLM's order, which is also min-p first."""
    if kind == "compiled" and isinstance(OPS["own"], TorchSampling):
        pytest.skip("there is no C compiler")
    kept = kept_by(kind, logits_of(seed), **limits)
    assert len(kept) == limits.get("top_k", len(kept)) or "top_p" in limits
