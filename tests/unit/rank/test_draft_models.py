"""A draft model beside the demo: what it guesses, what of the prompt it reads, and that nothing it does changes a text.

Texts under all kinds of requests: tests/parity/test_speculation.py.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem import LLM, SamplingParams
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.workers.planning.resolve import draft_spec
from tandem.workers.rank.drafters import draft_model
from tandem.workers.rank.drafters.draft_model import DraftModel
from tandem.workers.rank.drafters.eagle_head import EagleHead
from tandem.workers.rank.drafters.guess_draw import GuessDraw
from tandem.workers.speculation.proposer import ProposalRow
from tests.support.draft_models import DEMO, random_eagle, random_eagle_one, random_medusa, shorter_demo
from tests.support.free_drafts import constant_drafts, free_drafts
from tests.support.in_process import runner_of

PROMPTS = ["Once upon a time there was a little dog. The little dog", "The cat", "A boat sails over the lake. " * 3]
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=32, temperature=0.9, seed=4, ignore_eos=True, logprobs=1, presence_penalty=0.4)
PARAMS = [GREEDY, DRAWN, SamplingParams(max_tokens=32, temperature=1.0, seed=9, top_p=0.9, n=2, ignore_eos=True)]


@pytest.fixture(scope="module", autouse=True)
def _drafts_pay() -> Iterator[None]:
    threads = torch.get_num_threads()
    with free_drafts():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shorter_demo(tmp_path_factory.mktemp("draft") / "shorter")


def opened(draft: Path | str | None, method: str = "draft_model", **settings: Any) -> LLM:
    if draft is not None:
        settings["speculative_config"] = {"method": method, "model": str(draft), "num_speculative_tokens": 4}
    return LLM("demo", dtype="float32", cpu_threads=1, num_gpu_blocks_override=64, **settings)


def texts(llm: LLM) -> list[list[list[int]]]:
    return [[one.token_ids for one in each.outputs] for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    with opened(None) as llm:
        return texts(llm)


def test_a_model_that_thinks_alike_draws_alike(plain: list[list[list[int]]]) -> None:
    """Every guess of the model itself is right, greedy or drawn: a guess is drawn by the noise that the token will be
    drawn by, and by the row's own parameters."""
    with opened("demo") as llm:
        assert texts(llm) == plain
        drafts = llm._engine.stats().drafts
        assert drafts is not None and drafts.num_accepted == drafts.num_draft_tokens >= 90


def test_what_is_in_the_drafts_cache_changes_no_text(shorter: Path, plain: list[list[list[int]]]) -> None:
    """Its planes hold anything at any time: other numbers, or none."""
    rng, guess = np.random.default_rng(1), DraftModel.propose

    def corrupted(self: DraftModel, rows: list[ProposalRow]) -> Any:
        for layer in self._kv.draft.layers:
            for plane in layer.planes:
                plane.copy_(torch.from_numpy(rng.normal(size=plane.shape)))
                plane[rng.random(len(plane)) < 0.1] = float("nan")
        return guess(self, rows)

    with mock.patch.object(DraftModel, "propose", corrupted), opened(shorter) as llm:
        assert texts(llm) == plain
        drafts = llm._engine.stats().drafts
        assert drafts is not None and drafts.num_draft_tokens > 0


class Reads:
    """Counts the tokens that a draft model computes."""

    def __init__(self, llm: LLM) -> None:
        drafter = runner_of(llm._engine.executor)._proposer
        assert isinstance(drafter, DraftModel)
        self.counts: list[int] = []
        self._forward = drafter._decoder.forward
        drafter._decoder.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Any, *rest: Any) -> torch.Tensor:
        self.counts.append(batch.num_tokens)
        return self._forward(batch, *rest)


def test_a_prefix_that_is_found_is_not_read_again(shorter: Path) -> None:
    prompt = list(range(3, 103))
    with opened(shorter, block_size=16) as llm:
        reads = Reads(llm)
        first = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert reads.counts[0] == 101  # the prompt, and the token behind it
        reads.counts.clear()
        assert llm.generate([*prompt, 7, 8, 9], GREEDY, use_tqdm=False)
        assert reads.counts[0] == 104 - 96, "whole blocks of the first request"
        reads.counts.clear()
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs == first[0].outputs


def test_a_long_prompt_is_read_over_several_steps(shorter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP", 40)
    with opened(shorter) as llm:
        reads = Reads(llm)
        llm.generate(list(range(3, 103)), GREEDY, use_tqdm=False)
        assert reads.counts[:3] == [40, 40, 22 + 1], "a token was sampled in each step without drafts"


def test_a_draft_whose_context_is_full_guesses_no_more(tmp_path: Path, plain: list[list[list[int]]]) -> None:
    folder = shorter_demo(tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    with opened(folder) as llm:
        assert texts(llm) == plain
        drafts = llm._engine.stats().drafts
        assert drafts is not None and 0 < drafts.num_draft_tokens < 20 * sum(each.n for each in PARAMS)


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "medusa"])
def test_a_drafter_without_memory_guesses_nothing_and_ends_nothing(
    kind: str, tmp_path: Path, plain: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the model's own step would: it is planned again, and the group goes on."""
    kinds: dict[str, Any] = {"draft_model": shorter_demo, "eagle3": random_eagle, "medusa": random_medusa}
    calls, places = [0], [(GuessDraw, "prepare"), (EagleHead, "vectors")]

    def failing(method: Any) -> Any:
        def call(*given: Any) -> Any:
            calls[0] += 1
            if calls[0] % 5 == 3:
                raise torch.OutOfMemoryError("no room")
            return method(*given)

        return call

    for owner, name in places:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    with constant_drafts(), opened(kinds[kind](tmp_path / kind), kind) as llm:
        assert texts(llm) == plain
        drafts = llm._engine.stats().drafts
        assert calls[0] > 20 and drafts is not None and drafts.num_draft_tokens > 0


# ---- refusals ----

TAPPED = "eagle_aux_hidden_state_layer_ids"


def spec_of(draft: Path, **config: Any) -> Any:
    settings = {"speculative_config": {"model": str(draft), "num_speculative_tokens": 2, **config}}
    return draft_spec(build_settings(str(DEMO), settings).engine)


def test_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    folder = shorter_demo(tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = [word for word, token in vocab.items() if token in (300, 301)]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SettingsError, match="another token by id 300 than") as caught:
        spec_of(folder)
    assert caught.value.flag == "--speculative-config"
    config = json.loads((folder / "config.json").read_text())
    shutil.copy(DEMO / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    with pytest.raises(SettingsError, match=r"a vocabulary of 512 tokens, .* one of 768"):
        spec_of(folder, quantization="int8")  # another key, as what was read is kept


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "draft_model"}, "method 'draft_model' needs the key model"),
        ({"model": "m", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size 2: the draft runs whole"),
        ({"model": "m", "prompt_lookup_max": 2}, "prompt_lookup_max 2: not a key of method 'draft_model'"),
        ({"method": "ngram", "model": "m"}, "model 'm': not a key of method 'ngram'"),
        ({"model": "m", "quantization": "int7"}, "int7"),
    ],
)
def test_a_config_that_cannot_be(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        build_settings("demo", {"speculative_config": {"num_speculative_tokens": 2, **config}})
    assert caught.value.flag == "--speculative-config"


def test_a_draft_that_is_not_there_is_refused_with_its_flag() -> None:
    with pytest.raises(SettingsError, match=r"model: \./nowhere: no such folder") as caught:
        opened("./nowhere")
    assert caught.value.flag == "--speculative-config"


@pytest.mark.parametrize(
    ("method", "key", "value", "words"),
    [
        ("eagle3", "hidden_size", None, "hidden_size None in config.json must be a whole number above 0"),
        ("eagle3", "hidden_size", 128, "its hidden_size 128 is not the model's 256"),
        ("eagle3", "target_hidden_size", 512, "hidden size 512; this one has 256"),
        ("eagle3", "draft_vocab_size", "many", "draft_vocab_size 'many' in config.json"),
        ("eagle3", "draft_vocab_size", 1024, "draft_vocab_size 1024 is more than the model's 768 tokens"),
        (
            "eagle3",
            "eagle_config",
            {TAPPED: [1, 2, 9]},
            r"layers \[1, 2, 9\] of a model that has 4",
        ),
        ("eagle3", "eagle_config", {TAPPED: "all"}, "layers 'all' of a model"),
        ("eagle3", "architectures", ["LlamaForCausalLM"], "is no EAGLE-3 head"),
        ("eagle", "vocab_size", 512, "a head for models of 256 x 512, not 256 x 768"),
        ("eagle", "architectures", ["LlamaForCausalLMEagle3"], "it is a head: give method eagle3"),
        ("medusa", "medusa_num_heads", 0, "medusa_num_heads 0 in config.json"),
        ("medusa", "vocab_size", 512, "heads of 256 x 512"),
        ("draft_model", "architectures", ["LlamaForCausalLMEagle3"], "it is a head: give method eagle3"),
        ("medusa", "medusa_num_heads", None, "medusa_num_heads None in config.json"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_what_is_wrong(
    tmp_path: Path, method: str, key: str, value: Any, words: str
) -> None:
    write = {"eagle": random_eagle_one, "medusa": random_medusa}.get(method, random_eagle)
    folder = write(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=words) as caught:
        spec_of(folder, method=method)
    assert caught.value.flag == "--speculative-config"


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa"])
def test_a_draft_of_another_kind_is_refused_with_the_method_that_it_needs(tmp_path: Path, method: str) -> None:
    """Before anything is started, as `tandem plan` reads no more than this."""
    kinds = {"eagle": random_eagle_one, "eagle3": random_eagle, "medusa": random_medusa}
    for kind, write in kinds.items():
        folder = write(tmp_path / kind)
        if kind != method:
            with pytest.raises(SettingsError, match=f"give method {kind}$"):
                spec_of(folder, method=method)
    if method != "draft_model":
        with pytest.raises(SettingsError, match=r"medusa_num_heads|is no EAGLE-3 head|given as draft_model"):
            spec_of(shorter_demo(tmp_path / "model"), method=method)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa"])
def test_a_draft_that_is_not_finished_is_named_so(tmp_path: Path, method: str) -> None:
    """What a run of `tandem distill` leaves that was ended. tests/parity/test_distill.py makes one."""
    folder = tmp_path / "draft"
    (folder / "unfinished").mkdir(parents=True)
    (folder / "unfinished/state.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"config\.json.*: it is not finished: the command that began it"):
        spec_of(folder, method=method)


@pytest.mark.parametrize(
    ("ids", "words"), [([700] * 96, "d2t must name 96 different ids below the model's 768"), (None, "no tensor d2t")]
)
def test_ids_that_the_model_lacks_are_refused(tmp_path: Path, ids: list[int] | None, words: str) -> None:
    folder = random_eagle(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    if ids is not None:
        tensors["d2t"] = torch.tensor(ids)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    with pytest.raises(SettingsError, match=words) as caught:
        LLM("demo", dtype="float32", cpu_threads=1, num_gpu_blocks_override=64, speculative_config=config)
    assert caught.value.flag == "--speculative-config"


def test_a_model_without_mtp_layers_is_told_so() -> None:
    with pytest.raises(SettingsError, match="names no layer that guesses"):
        draft_spec(
            build_settings(str(DEMO), {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}).engine
        )
