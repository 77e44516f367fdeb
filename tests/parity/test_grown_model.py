"""The wide target of benchmarks (benchmarks/grown.py) says what the demo model says."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.grown import grown_folder, grown_heads
from benchmarks.models import DEMO
from tandem import LLM, SamplingParams
from tandem.workers.rank.drafters.medusa_drafts import MedusaDrafts
from tandem.workers.speculation.proposer import ProposalRow
from tests.support.draft_models import random_medusa
from tests.support.free_drafts import constant_drafts
from tests.support.tiny_models import load_peer

PROMPTS = ("Once upon a time there was a small dog who wanted to see the sea.", "Spell the word garden.")


def test_it_has_the_demos_logits_and_greedy_tokens(tmp_path: Path) -> None:
    folder = grown_folder(torch.float32, 6, 512, 1024, tmp_path)
    ids, greedy = {}, SamplingParams(temperature=0, max_tokens=40)
    for model in (DEMO, folder):
        with LLM(model, dtype="float32", max_model_len=256, max_num_seqs=2, cpu_threads=1) as llm:
            ids[model] = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
            text = llm.tokenizer.encode(PROMPTS[0], add_special_tokens=True)
    assert ids[folder] == ids[DEMO]
    with torch.inference_mode():
        narrow, wide = (load_peer(model).float()(torch.tensor([text])).logits for model in (DEMO, folder))
    assert (wide - narrow).abs().max() <= 1e-4 * narrow.abs().max()
    assert grown_folder(torch.float32, 6, 512, 1024, tmp_path) == folder


def test_the_demos_medusa_heads_made_as_wide_guess_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = grown_folder(torch.float32, 6, 512, 1024, tmp_path)
    heads = random_medusa(tmp_path / "heads")
    guesses: list[list[Sequence[int]]] = []
    propose, greedy = MedusaDrafts.propose, SamplingParams(temperature=0, max_tokens=24)

    def noted(self: MedusaDrafts, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        guesses[-1] += (found := propose(self, rows))
        return found

    monkeypatch.setattr(MedusaDrafts, "propose", noted)
    for model, draft in ((DEMO, heads), (folder, grown_heads(heads, folder))):
        guesses.append([])
        config = {"method": "medusa", "model": str(draft), "num_speculative_tokens": 3}
        flags = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 2, "cpu_threads": 1}
        with constant_drafts(), LLM(model, speculative_config=config, **flags) as llm:
            llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert guesses[0] == guesses[1] and sum(map(len, guesses[0])) > 60


@pytest.mark.parametrize("sizes", [(3, 512, 1024), (6, 500, 1024), (6, 512, 100), (6, 128, 1024)])
def test_sizes_that_the_demo_does_not_fit_into(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the demo model has 4 layers of 256 x 512"):
        grown_folder(torch.float32, *sizes, tmp_path)
