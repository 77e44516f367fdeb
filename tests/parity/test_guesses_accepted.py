"""How often a draft model's guess is the model's token, at temperatures where tokens are drawn: nearly as often as by
rejection sampling, whose chance is 1 less the total variation of the two distributions (Leviathan et al. 2023)."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.workers.kernels.gumbel_noise import gumbel_noise
from tests.support.draft_models import DEMO, shorter_demo

STORY = (
    "Once upon a time there was a little dog. The little dog was red and liked to run in the garden. One day it saw a "
    "small boat on the lake. The boat sailed over the quiet lake, and the dog wanted to see where it would go. "
)
SEEDS = 400


def logits_of(folder: Path) -> torch.Tensor:
    """Logits behind each token of the story, float32 [T, V]."""
    ids = AutoTokenizer.from_pretrained(DEMO)(STORY, return_tensors="pt").input_ids
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(ids).logits[0]


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, torch.Tensor]:
    return logits_of(DEMO), logits_of(shorter_demo(tmp_path_factory.mktemp("draft") / "shorter"))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_guesses_are_nearly_as_often_right_as_by_rejection_sampling(
    logits: tuple[torch.Tensor, torch.Tensor], temperature: float
) -> None:
    one, other = (each / temperature for each in logits)
    bound = 1 - (one.softmax(-1) - other.softmax(-1)).abs().sum(-1).mean().item() / 2
    same, positions = 0, torch.arange(len(one))
    for seed in range(SEEDS):
        noise = gumbel_noise(torch.full_like(positions, seed), torch.zeros_like(positions), positions, one.shape[1])
        same += int(((one + noise).argmax(-1) == (other + noise).argmax(-1)).sum())
    accepted = same / (SEEDS * len(one))
    print(f"temperature {temperature}: {accepted:.3f} accepted, {bound:.3f} by rejection sampling")
    assert 0.3 < bound < 0.95, "the models differ, and not too much"
    assert bound - 0.04 <= accepted <= bound + 0.01
