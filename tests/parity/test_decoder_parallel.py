"""TP x PP ranks against one rank: the same logits, for every way of sharding heads, vocabulary, tables and layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.paged_rows import prompt_ids
from tests.support.tiny_models import SHALLOW, some_in_parity

TinyFolder = Callable[[str], Path]
PROMPTS = [prompt_ids(length, 200, seed=length) for length in (31, 18, 7)]
IN_TEST = (
    *("phi3", "olmo2", "gemma3", "cohere", "gpt_neox", "gptj", "falcon-groups"),
    *("mpt-six-heads", "qwen2_moe", "deepseek_v3", "gpt_oss"),
)
STEPS = [
    [(0, PROMPTS[0][:20]), (2, PROMPTS[2][:-1])],
    [(2, PROMPTS[2][-1:]), (0, PROMPTS[0][20:]), (1, PROMPTS[1])],
    *[[(row, [5 + row + step]) for row in range(3)] for step in range(6)],
]


def check(ranks: RankProcesses, folder: Path, tp_size: int, pp_size: int, **changes: Any) -> None:
    def case(tp: int, pp: int) -> DecoderCase:
        return DecoderCase(folder, tp, pp, STEPS, num_rows=3, max_len=40, **changes)

    alone = run_case(case(1, 1), ParallelContext.single())
    results = ranks.call(run_case, tp_size, pp_size, case(tp_size, pp_size))
    last_stage = results[-tp_size:]
    assert all(result is None for result in results[:-tp_size])
    assert all(torch.equal(result, last_stage[0]) for result in last_stage)
    assert alone is not None
    torch.testing.assert_close(last_stage[0], alone, rtol=0, atol=2e-5 * float(alone.abs().max()))


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [
        ("llama-gqa", 2, 1),
        ("llama-mqa-biased", 2, 1),  # one KV head on both ranks, biases added once
        ("llama-gqa", 4, 1),  # two KV heads on four ranks
        ("llama-mha-tied", 1, 2),  # the tied table on both stages
        ("llama-many-files", 1, 4),
        ("qwen2", 2, 2),
        ("qwen3", 2, 2),
        ("smollm3", 2, 2),
        ("mistral-window", 2, 1),
        ("mistral-window", 1, 2),
        ("llama-gqa", 2, 2),
        ("mixtral", 2, 2),
        ("gemma2", 2, 2),
        ("gpt2", 2, 2),
        ("bloom", 2, 2),
        ("bloom-six-heads", 2, 1),  # slopes of other heads than the first
    ],
)
def test_ranks_equal_one_rank(
    ranks: RankProcesses, tiny_folder: TinyFolder, name: str, tp_size: int, pp_size: int
) -> None:
    check(ranks, tiny_folder(name), tp_size, pp_size)


@pytest.mark.parametrize("name", some_in_parity(SHALLOW, IN_TEST))
def test_ranks_of_every_family_equal_one_rank(ranks: RankProcesses, tiny_folder: TinyFolder, name: str) -> None:
    """Two stages of two ranks: whole heads, norms over all heads, experts, biases."""
    check(ranks, tiny_folder(name), 2, 2)


@pytest.mark.parametrize("name", ["olmo2", "falcon-groups"])
def test_more_ranks_than_kv_heads(ranks: RankProcesses, tiny_folder: TinyFolder, name: str) -> None:
    check(ranks, tiny_folder(name), 4, 1)


def test_random_weights_are_the_same_model_at_every_degree(ranks: RankProcesses, tiny_folder: TinyFolder) -> None:
    check(ranks, tiny_folder("qwen2"), 2, 2, load_format="dummy")


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [
        ("mixtral", 2, 2),
        ("mixtral", 4, 1),
        ("mixtral-window", 2, 1),
        ("qwen2_moe", 2, 1),
        ("qwen3_moe", 2, 1),
        ("granitemoe", 2, 2),
        ("deepseek_v2", 2, 1),
        ("deepseek_v3", 2, 2),
        ("gpt_oss", 2, 1),
    ],
)
def test_whole_experts_on_each_rank_equal_one_rank(
    ranks: RankProcesses, tiny_folder: TinyFolder, name: str, tp_size: int, pp_size: int
) -> None:
    check(ranks, tiny_folder(name), tp_size, pp_size, expert_parallel=True)
