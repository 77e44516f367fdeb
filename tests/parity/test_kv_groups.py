"""Layers with a window give back KV blocks (docs/decisions/037-kv-groups.md): a model like Gemma 3, with a window on
five of six layers, and one like Mistral's first, with one on all, through the whole engine. Texts are those of
transformers, in float32, from pools that could not hold the tokens of all layers."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.workers.platforms.device_rows import StepTensors
from tandem.workers.rank.drafters.draft_model import DraftModel
from tests.support.adapters import load_adapted_peer, save_random_adapter
from tests.support.engine_invariants import check_invariants
from tests.support.free_drafts import free_drafts
from tests.support.tiny_models import TinyModel, greedy_after, load_peer, save_tiny_model

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
WINDOW, TOKENS, BLOCK = 16, 90, 4
LAYERS = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_hidden_layers": 6}
SIZES = {"tie_word_embeddings": False, "vocab_size": 768, "max_position_embeddings": 512, "sliding_window": WINDOW}
MODELS = {
    "mixed": TinyModel("mixed", "gemma3_text", {**SIZES, **LAYERS, "head_dim": 32, "query_pre_attn_scalar": 24}),
    "all": TinyModel("all", "mistral", {**SIZES, "num_hidden_layers": 2}),
}
PROMPTS = [[7 + (i * j) % 40 for i in range(length)] for j, length in enumerate((15, 12, 150, 30, 21), 1)]
POOL = {"mixed": 150, "all": 20}
"""Blocks, in the first model of one layer each. The longest context takes 60 of the full layer and at most 17 of each
of the five others, where it would take 60 too; of the second model's two layers 17 in place of 60. The sequences do not
fit all at once."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(scope="module", params=sorted(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo's tokenizer."""
    saved = save_tiny_model(MODELS[request.param], tmp_path_factory.mktemp("windows"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, saved)
    return saved


def greedy(peer: Any, ids: list[int], count: int) -> list[int]:
    """What a model of peft answers."""
    peer.generation_config.eos_token_id = None
    inputs = torch.tensor([ids])
    mask = torch.ones_like(inputs)
    out = peer.generate(input_ids=inputs, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(out[0, len(ids) :].tolist())


@contextmanager
def serving(folder: Path, **flags: Any) -> Iterator[LLM]:
    threads = torch.get_num_threads()
    asked = {"num_gpu_blocks_override": POOL[folder.name], "max_num_seqs": 4, "max_num_batched_tokens": 24, **flags}
    with LLM(str(folder), dtype="float32", cpu_threads=1, max_model_len=256, block_size=BLOCK, **asked) as llm:
        yield llm
    torch.set_num_threads(threads)


def answers(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
    asked = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **params)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """What transformers answers to PROMPTS: proposed by an engine with room, and seen to be that."""
    with serving(folder, num_gpu_blocks_override=1000, max_num_seqs=5) as llm:
        told = [answer for (answer,) in answers(llm, PROMPTS)]
    peer = load_peer(folder)
    assert told == [greedy_after(peer, ids, answer) for ids, answer in zip(PROMPTS, told, strict=True)]
    assert [len(answer) for answer in told] == [TOKENS] * len(PROMPTS)
    return told


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"speculative_config": NGRAM, "cpu_offload_gb": 1e-4},
        {"kv_offloading_size": 0.02},
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.parity),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.parity),
        pytest.param({"pipeline_parallel_size": 2, "kv_offloading_size": 0.02}, marks=pytest.mark.parity),
    ],
    ids=lambda flags: "+".join(flags) or "plain",
)
def test_texts_from_a_small_pool_are_those_of_transformers(
    folder: Path, wanted: list[list[int]], flags: dict[str, Any]
) -> None:
    """Twice, so that the second time there is something to find; all at once, so that some are preempted."""
    with serving(folder, **flags) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == [[answer] for answer in wanted]
        stats, engine = llm._engine.stats(), llm._engine
        check_invariants(engine)
        assert stats.used_blocks == stats.reserved_blocks == 0 or stats.offload is not None
        assert stats.preemptions or folder.name == "all", "the pool is not too small for all at once"


def test_a_draft_model_writes_no_block_that_was_given_back(
    folder: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model as its own draft: when it first reads a long prompt, windows have given the first blocks back, and they
    may be another row's, in planes where that has KV of the model."""
    passes, batch, least = DraftModel._guess, StepTensors.batch, [0]
    wrong: list[tuple[int, int]] = []

    def watched(self: StepTensors, *lists: Any, **more: Any) -> Any:
        groups = (self[2], self[5]), *self.further_groups
        least.append(min(int(ids.min()) for group in groups for ids in group))
        return batch(self, *lists, **more)

    def guess(self: DraftModel, step: Any, drafts: Any) -> Any:
        tables = {seq.row: seq.table.block_ids for seq in llm._engine.scheduler.rows.sequences}
        groups = len(self._table.windows)
        for row, begin, end in zip(step.rows_R.tolist(), step.begin_R.tolist(), step.end_R.tolist(), strict=True):
            for at in range(begin // BLOCK * groups, -(-end // BLOCK) * groups if end > begin else 0):
                if at % groups in self._reads._groups and tables[row][at] != self._table.block_ids[row, at]:
                    wrong.append((row, at))
        return passes(self, step, drafts)

    monkeypatch.setattr(StepTensors, "batch", watched)
    monkeypatch.setattr(DraftModel, "_guess", guess)
    drafts = {"model": str(folder), "num_speculative_tokens": 3}
    with free_drafts(), serving(folder, num_gpu_blocks_override=400, speculative_config=drafts) as llm:
        assert answers(llm, PROMPTS[2:4]) == [[answer] for answer in wanted[2:4]]
        stats = llm._engine.stats().drafts
        assert stats is not None and stats.num_accepted > 40
    assert not wrong and min(least) == 0


def test_a_conversation_finds_its_kv_and_choices_share_it(folder: Path, wanted: list[list[int]]) -> None:
    """A pool with room: the next turn computes nothing but its own tokens; choices begin with the blocks of the first,
    and with those alone that they see."""
    with serving(folder, num_gpu_blocks_override=400) as llm:
        engine = llm._engine
        (first,) = answers(llm, PROMPTS[2:3])
        assert first == wanted[2:3]
        turn = [*PROMPTS[2], *first[0], 9]
        before = engine.stats().prefix_cache_hits
        (fresh,) = answers(llm, [turn])
        assert engine.stats().prefix_cache_hits - before == (len(turn) - 2) // BLOCK * BLOCK
        assert answers(llm, [turn], n=3) == [fresh * 3]
        check_invariants(engine)
    with serving(folder, num_gpu_blocks_override=400, disable_hybrid_kv_cache_manager=True) as llm:
        assert answers(llm, [turn]) == [fresh]


def test_windows_decide_what_the_pool_holds(folder: Path) -> None:
    """The longest sequence, by the pool and without windows by as many bytes."""
    groups = 6 if folder.name == "mixed" else 1
    with serving(
        folder, disable_hybrid_kv_cache_manager=True, num_gpu_blocks_override=POOL[folder.name] // groups
    ) as llm:
        assert llm._engine.max_len < len(PROMPTS[2])
    with serving(folder) as llm:
        assert llm._engine.max_len == 256


@pytest.mark.parametrize("folder", ["mixed"], indirect=True)
def test_rows_with_adapters_give_blocks_back_too(folder: Path, wanted: list[list[int]], tmp_path: Path) -> None:
    """Two adapters and none in one batch, of one long prompt and short ones, from a pool that is too small for all at
    once; from one with room, where the second time each finds the blocks of its own adapter."""
    count = 40
    adapters = [save_random_adapter(folder, tmp_path / str(seed), rank=4 + 4 * seed, seed=seed) for seed in range(2)]
    prompts = [PROMPTS[2], PROMPTS[2], PROMPTS[0], PROMPTS[3]]
    expected = [
        wanted[2][:count],
        greedy(load_adapted_peer(folder, adapters[0]), PROMPTS[2], count),
        greedy(load_adapted_peer(folder, adapters[1]), PROMPTS[0], count),
        greedy(load_adapted_peer(folder, adapters[0]), PROMPTS[3], count),
    ]
    assert expected[0] != expected[1] and expected[2] != wanted[0][:count], "every adapter must matter"
    for room, rounds in ({}, 1), ({"num_gpu_blocks_override": 1000}, 2):
        with serving(folder, enable_lora=True, max_loras=2, max_lora_rank=8, **room) as llm:
            first, second = (llm.load_adapter(adapter) for adapter in adapters)
            for _ in range(rounds):
                outputs = llm.generate(
                    [{"prompt_token_ids": ids} for ids in prompts],
                    SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
                    lora_request=[None, first, second, first],
                    use_tqdm=False,
                )
                assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            stats = llm._engine.stats()
            llm.local.ask(check_invariants)
            assert stats.used_blocks == 0
            assert (stats.preemptions > 0) == (not room) and (stats.prefix_cache_hits > 0) == bool(room)
