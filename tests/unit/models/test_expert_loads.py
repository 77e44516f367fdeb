"""Loads of experts: each token is counted once for each of its experts, and the counts reach the statistics."""

from pathlib import Path

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.workers.models import expert_loads
from tandem.workers.models.expert_loads import PERIOD_S, ExpertLoads
from tandem.workers.models.spec.config_reader import load_spec
from tests.support.tiny_models import BY_NAME, save_tiny_model


def test_counts_are_read_once_a_period() -> None:
    counter, now_s = torch.tensor([3, 4]), [100.0]
    loads = ExpertLoads({7: counter}, lambda: now_s[0])
    assert loads.due() == {7: [3, 4]}
    counter += 1
    now_s[0] += PERIOD_S / 2
    assert loads.due() is None
    now_s[0] += PERIOD_S / 2
    assert loads.due() == {7: [4, 5]}
    loads.clear()
    now_s[0] += PERIOD_S
    assert loads.due() == {7: [0, 0]}
    assert ExpertLoads({}).due() is None


def test_every_token_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a model with two experts a token in each layer; the tokens of the warm-up are not."""
    monkeypatch.setattr(expert_loads, "PERIOD_S", 0.0)
    folder = save_tiny_model(BY_NAME["mixtral"], tmp_path)
    with LLM(str(folder), tokenizer="demo", dtype="float32", max_model_len=64) as llm:
        assert llm._engine.stats().experts is None
        greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5, 6, 7, 8, 9]}], greedy, use_tqdm=False)
        found, layers = llm._engine.stats().experts, load_spec(folder).num_layers
    assert found is not None and len(found.tokens) == 4
    assert sum(found.tokens) == (5 + 3) * 2 * layers
    assert len(found.imbalance) == layers and all(1 <= ratio <= 4 for ratio in found.imbalance.values())
