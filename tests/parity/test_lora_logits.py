"""Adapters against peft itself: every registered family, every linear, patterns, rsLoRA, the bundled ones; and batches
of many adapters against each row alone with its adapter merged into the weights.

float32. Against peft in float64: no further off than 2e-5 of the largest logit and 4 times peft's own error in float32.
Against merged weights: 5e-5 of the largest logit, the same greedy choice everywhere.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tests.support.adapters import (
    ALL_LINEARS,
    BLOOM_LINEARS,
    GPT2_LINEARS,
    LINEARS_OF,
    load_adapted_peer,
    save_merged,
    save_random_adapter,
)
from tests.support.decoder_ranks import RankProcesses
from tests.support.lora_ranks import AdaptedCase, run_adapted
from tests.support.paged_rows import prompt_ids
from tests.support.tiny_models import BY_NAME, SHALLOW, TinyModel, save_tiny_model, some_in_parity

TinyFolder = Callable[[str], Path]
DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
FAMILIES = [
    "llama-gqa",
    "llama-mqa-biased",
    "llama-wide-heads",
    "mistral-window",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma2",
]
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPT_LEN = 33
RANKS = [4, 8, 16, 64]


def ours(case: AdaptedCase) -> torch.Tensor:
    logits = run_adapted(case, ParallelContext.single())
    assert logits is not None
    return logits


def check_against_peft(base: Path, adapter: Path, vocab_size: int = 200) -> None:
    """A whole prompt's logits; the adapter must matter for the test to."""
    ids = prompt_ids(PROMPT_LEN, vocab_size)
    steps = [[(0, ids[:20])], [(0, ids[20:])]]
    found, plain = (ours(AdaptedCase(base, [adapter], [slot], steps, PROMPT_LEN, all_logits=True)) for slot in (0, -1))
    peer = load_adapted_peer(base, adapter)
    with torch.inference_mode():
        theirs = peer(torch.tensor([ids])).logits[0]
        truth = peer.double()(torch.tensor([ids])).logits[0]
    largest = truth.abs().max()
    assert (found - truth).abs().max() <= 2e-5 * largest + 4 * (theirs - truth).abs().max()
    assert (plain - truth).abs().max() > 0.02 * largest


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_of_every_family_equals_peft(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder(name)
    check_against_peft(base, save_random_adapter(base, tmp_path / "a", rank=8, lora_alpha=20))


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("mixtral", ATTENTION_LINEARS),
        ("gpt2", GPT2_LINEARS),
        ("gpt2", ("c_attn",)),
        ("bloom", BLOOM_LINEARS),
        ("bloom-six-heads", BLOOM_LINEARS),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_other_linears_equal_peft(
    name: str, modules: tuple[str, ...], fan_in_fan_out: bool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Beside experts; fused and transposed: one adapter of the stored q, k and v. The flag says how the base stores its
    weights, and peft corrects it."""
    base = tiny_folder(name)
    adapter = save_random_adapter(base, tmp_path / "a", modules=modules, rank=6, fan_in_fan_out=fan_in_fan_out)
    check_against_peft(base, adapter)


@pytest.mark.parametrize(
    "name", some_in_parity(SHALLOW, ("phi3", "cohere", "gpt_neox", "falcon-groups", "gptj", "deepseek_v3"))
)
def test_linears_of_the_other_families_equal_peft(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Parts of fused tensors, and rows that are turned when weights are loaded."""
    base = tiny_folder(name)
    modules = LINEARS_OF.get(BY_NAME[name].model_type, ALL_LINEARS)
    check_against_peft(base, save_random_adapter(base, tmp_path / "a", modules=modules, rank=6))


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True, "lora_alpha": 6},
        {"rank_pattern": {"q_proj": 3, "model.layers.1.mlp.down_proj": 17}, "lora_alpha": 9},
        {"rank_pattern": {"^model.layers.2.self_attn.o_proj": 5}, "alpha_pattern": {"v_proj": 12, "up_proj": 2.5}},
        {"use_rslora": True, "rank_pattern": {"k_proj": 64, "gate_proj": 2}, "alpha_pattern": {"k_proj": 11}},
        {"modules": ("q_proj", "v_proj")},
        {"modules": ("down_proj",), "layers_to_transform": [1, 3], "size": 1.0},
        {"modules": ("model.layers.0.self_attn.k_proj", "up_proj"), "rank": 1, "size": 2.0},
        {"modules": ("embed_tokens",), "size": 1.0},
        {"modules": ("lm_head",), "size": 1.0},
        {"modules": ("embed_tokens", "lm_head", "q_proj", "down_proj"), "rank_pattern": {"lm_head": 3}},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_what_a_config_says_is_done(config: dict[str, Any], tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder("llama-gqa")
    check_against_peft(base, save_random_adapter(base, tmp_path / "a", **config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama-mqa-biased", "qwen3"])
def test_half_precision_is_as_near_as_peft(
    name: str, dtype: torch.dtype, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """A prompt in two chunks (long and short runs of tokens), the model and the adapter in that dtype."""
    base = tiny_folder(name)
    adapter = save_random_adapter(base, tmp_path / "a", rank=8, modules=(*ALL_LINEARS, "embed_tokens", "lm_head"))
    ids = prompt_ids(60, 200)
    steps = [[(0, ids[:40])], [(0, ids[40:])]]
    found = ours(AdaptedCase(base, [adapter], [0], steps, 60, all_logits=True, dtype=dtype))
    peer = load_adapted_peer(base, adapter)
    with torch.inference_mode():
        truth, theirs = (peer.to(kind)(torch.tensor([ids])).logits[0].float() for kind in (torch.float32, dtype))
    assert (found - truth).square().mean().sqrt() <= 2 * (theirs - truth).square().mean().sqrt()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=str)
def test_tables_of_more_words_than_a_page_holds_equal_peft(changes: dict[str, Any], tmp_path: Path) -> None:
    base = save_tiny_model(TinyModel("many-words", "llama", {"vocab_size": 1001} | changes), tmp_path)
    adapter = save_random_adapter(base, tmp_path / "a", modules=("embed_tokens", "lm_head"), rank=5)
    check_against_peft(base, adapter, vocab_size=1001)


@pytest.mark.parametrize("name", ["pirate", "shout"])
def test_the_bundled_adapters_equal_peft(name: str) -> None:
    check_against_peft(DEMO / "model", DEMO / "adapters" / name)


@pytest.fixture(scope="module")
def many(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """16 adapters of ranks 4, 8, 16 and 64 on different linears of one model."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = [("q_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj"), ("o_proj",), None]
    adapters = []
    for number in range(16):
        kind = kinds[number // 4]
        given = {} if kind is None else {"modules": kind}
        rank = RANKS[number % 4]
        adapters.append(
            save_random_adapter(tiny_folder("qwen3"), folder / str(number), rank=rank, seed=number, **given)
        )
    return adapters


def mixed_steps(num_rows: int) -> list[list[tuple[int, list[int]]]]:
    """Prompts in two chunks, then four steps of one token a row; rows at different places of their prompts share steps,
    and runs are long and short."""
    prompts = [prompt_ids(5 + 7 * (row % 7), 200, seed=row) for row in range(num_rows)]
    first = [(row, prompt[:-2]) for row, prompt in enumerate(prompts)]
    late = [(row, prompts[row][-2:]) for row in range(num_rows) if row % 3]
    mixed = [(row, prompts[row][-2:] if row % 3 == 0 else [9 + row]) for row in reversed(range(num_rows))]
    steps = [[(row, [3 + (5 * row + step) % 190]) for row in range(num_rows)] for step in range(4)]
    return [first, late, mixed, *steps]


def test_sixteen_adapters_in_one_batch_equal_each_row_alone_with_its_weights_merged(
    many: list[Path], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder("qwen3")
    slots = [0, 1, -1, 2, 3, 4, 5, 6, 7, -1, 8, 9, 10, 11, 12, 13, 14, 15]
    steps = mixed_steps(len(slots))
    together = ours(AdaptedCase(base, many, slots, steps, 80))
    places = [row for step in steps for row, _ in step]
    for row, slot in enumerate(slots):
        folder = base if slot < 0 else save_merged(base, many[slot], tmp_path / str(slot))
        own_steps = [[(0, tokens) for r, tokens in step if r == row] for step in steps]
        alone = ours(AdaptedCase(folder, [], [-1], [step for step in own_steps if step], 80))
        mine = together[[place for place, r in enumerate(places) if r == row]]
        torch.testing.assert_close(mine, alone, rtol=0, atol=5e-5 * float(alone.abs().max()))
        assert torch.equal(mine.argmax(-1), alone.argmax(-1))


def test_rows_without_an_adapter_keep_their_bits(many: list[Path], tiny_folder: TinyFolder) -> None:
    """Beside rows with adapters and without any: the same."""
    steps = [[(row, prompt_ids(9, 200, seed=row)) for row in range(3)], [(row, [7 + row]) for row in range(3)]]
    mixed, plain = (
        ours(AdaptedCase(tiny_folder("qwen3"), many[:2], slots, steps, 20)) for slots in ([0, -1, 1], [-1, -1, -1])
    )
    assert torch.equal(mixed[1::3], plain[1::3])
    assert not torch.equal(mixed[0::3], plain[0::3])


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [
        ("llama-gqa", 2, 1),
        ("llama-gqa", 1, 2),
        ("llama-gqa", 4, 1),  # two KV heads on four ranks
        ("llama-mqa-biased", 2, 1),
        ("qwen3", 2, 2),
        ("smollm3", 1, 4),
    ],
)
def test_ranks_equal_one_rank(
    ranks: RankProcesses, tiny_folder: TinyFolder, tmp_path: Path, name: str, tp_size: int, pp_size: int
) -> None:
    base = tiny_folder(name)
    adapters = [
        save_random_adapter(base, tmp_path / "all", rank=16, seed=1),
        save_random_adapter(base, tmp_path / "some", rank=5, seed=2, modules=("k_proj", "down_proj")),
        save_random_adapter(base, tmp_path / "one", rank=64, seed=3, modules=("o_proj",), layers_to_transform=[3]),
        save_random_adapter(base, tmp_path / "tables", rank=9, seed=4, modules=("embed_tokens", "lm_head")),
    ]
    slots = [2, 0, -1, 3, 1, 1, 3]
    steps = mixed_steps(len(slots))
    alone = ours(AdaptedCase(base, adapters, slots, steps, 80))
    case = AdaptedCase(base, adapters, slots, steps, 80, tp_size=tp_size, pp_size=pp_size)
    results = ranks.call(run_adapted, tp_size, pp_size, case)
    assert all(result is None for result in results[:-tp_size])
    for result in results[-tp_size:]:
        torch.testing.assert_close(result, alone, rtol=0, atol=2e-5 * float(alone.abs().max()))
