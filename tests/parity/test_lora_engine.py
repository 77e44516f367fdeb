"""Adapters through the whole engine: rows of sixteen adapters and none, whatever happens to them on the way (n > 1,
prefix reuse, preemption, offload, fewer places than adapters, TP2, PP2), against models with the adapter merged in.

The demo model in float32, random adapters of ranks 4, 8, 16 and 64 on different linears: texts are identical.
"""

import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.workers.messages.request import AdapterRef
from tests.support.adapters import load_adapted_peer, save_merged, save_random_adapter
from tests.support.paged_rows import prompt_ids

BASE = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
KINDS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "v_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("o_proj", "k_proj"),
)
RANKS = (4, 8, 16, 64)
NUM_ADAPTERS = 16
PREFIX = prompt_ids(37, 700, seed=99)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.8, top_k=4, seed=11, n=3, ignore_eos=True)
"""Among four tokens: among all, some draw of hundreds falls nearer to a border than float32 can tell."""
Texts = list[list[list[int]]]


def prompt_of(row: int) -> list[int]:
    return PREFIX + prompt_ids(2 + row, 700, seed=row)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        save_random_adapter(BASE, folder / str(n), rank=RANKS[n % 4], seed=n, modules=KINDS[n // 4])
        for n in range(NUM_ADAPTERS)
    ]


def texts_of(llm: LLM, rows: list[int], refs: list[AdapterRef | None] | None = None) -> Texts:
    """Token ids by request and choice: greedy ones of all rows, then the seeded ones."""
    prompts = [prompt_of(row) for row in rows]
    params = [GREEDY] * len(rows) + [SEEDED] * len(rows)
    given = {} if refs is None else {"lora_request": refs + refs}
    outputs = llm.generate(prompts + prompts, params, use_tqdm=False, **given)
    assert [choice.error for output in outputs for choice in output.outputs if choice.error] == []
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Each row on a model of its own, with its weights merged; the last without an adapter."""
    folder = tmp_path_factory.mktemp("merged")
    greedy, seeded = [], []
    for row in range(NUM_ADAPTERS + 1):
        model = BASE
        if row < NUM_ADAPTERS:
            model = save_merged(BASE, adapters[row], folder / str(row))
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(BASE / name, model / name)
        with LLM(model, dtype="float32", max_num_seqs=4, num_gpu_blocks_override=64) as llm:
            texts = texts_of(llm, [row])
        greedy.append(texts[0])
        seeded.append(texts[1])
    return greedy + seeded


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


CASES: dict[str, dict[str, Any]] = {
    "room for all": {},
    "preemption": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
    "offload": {"num_gpu_blocks_override": 24, "kv_offloading_size": 0.05},
    "few at once": {"max_loras": 3},
    "little memory": {"max_loras": 3, "lora_memory_bytes": 6_000_000, "max_cpu_loras": 4},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_write_what_they_write_alone_merged(case: str, adapters: list[Path], alone: Texts) -> None:
    settings = {"enable_lora": True, "max_loras": 16, "max_lora_rank": 64, "max_num_seqs": 24} | CASES[case]
    with LLM("demo", dtype="float32", **settings) as llm:
        refs: list[AdapterRef | None] = [*(llm.load_adapter(folder) for folder in adapters), None]
        rows = list(range(NUM_ADAPTERS + 1))
        for _ in range(2):  # the second time from the prefix cache, or the tiers
            found = texts_of(llm, rows, refs)
            wrong = [row for row, (mine, theirs) in enumerate(zip(found, alone, strict=True)) if mine != theirs]
            assert not wrong
        stats = llm._engine.stats()
        assert stats.adapters is not None and stats.adapters.in_use == stats.adapters.refused == 0
        if case != "little memory":  # there requests pause for others' adapters, as time goes
            assert (stats.preemptions > 0) == (case in ("preemption", "offload"))
        assert (stats.prefix_cache_hits > 0) == (case != "preemption")
        assert (stats.adapters.evictions > 0) == (case == "little memory"), (
            "pages follow true ranks: the others hold all"
        )
    assert len({tuple(choices[0]) for choices in alone}) == len(alone), "every adapter must matter"


@lru_cache(maxsize=1)
def adapted_peer(adapter: Path) -> Any:
    return load_adapted_peer(BASE, adapter)


def peft_greedy(adapter: Path, ids: list[int]) -> list[int]:
    """peft's own generate with its cache, the adapter beside the weights; EOS does not stop it."""
    model = adapted_peer(adapter)
    model.generation_config.eos_token_id = None
    inputs = torch.tensor([ids])
    count = GREEDY.max_tokens
    out = model.generate(
        input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return list(out[0, len(ids) :].tolist())


def test_the_bundled_adapters_and_tables_write_what_peft_writes(tmp_path: Path) -> None:
    """Embedding and head, which are one table in this model, too: merged, their adapters would mix."""
    folders = [BASE.parent / "adapters" / name for name in ("pirate", "shout")]
    for number, modules in enumerate((("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head", "up_proj"))):
        folders.append(save_random_adapter(BASE, tmp_path / str(number), rank=6, seed=number, modules=modules))
    settings = {"enable_lora": True, "max_lora_rank": 16, "max_num_seqs": 12, "max_num_batched_tokens": 64}
    with LLM("demo", dtype="float32", **settings) as llm:
        refs: list[AdapterRef | None] = [llm.load_adapter(folder) for folder in folders]
        ids = llm.tokenizer.encode("What is 2 + 3?", add_special_tokens=False)
        prompts = [[*ids, *prompt_ids(row, 700, seed=row)] for row in range(2)]
        outputs = llm.generate([p for p in prompts for _ in refs], GREEDY, use_tqdm=False, lora_request=refs * 2)
        texts = [output.outputs[0].token_ids for output in outputs]
    for place, folder in enumerate(folders):
        assert texts[place :: len(folders)] == [peft_greedy(folder, prompt) for prompt in prompts]
    assert len({tuple(text) for text in texts[:5]}) == 5
