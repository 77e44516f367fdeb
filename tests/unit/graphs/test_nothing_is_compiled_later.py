"""After the start of a rank on a GPU nothing is compiled, whatever is asked: each variant of a Triton kernel that a
request launches has been launched before the rank was ready. The GPU's platform over the host's memory, by Triton's own
choice of variants; nothing is computed."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.schema import (
    CacheSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from tandem.workers.build import model_facts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.kernels.triton.late_kernels import LateKernels
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tandem.workers.planning import graph_room
from tandem.workers.planning.budget import MIB
from tandem.workers.platforms.base import DeviceMemory
from tandem.workers.platforms.cpu import HostAccelerator
from tests.support.adapters import ref_of, save_random_adapter
from tests.support.draft_models import random_eagle, random_medusa, shorter_demo
from tests.support.engine_ranks import Told
from tests.support.free_drafts import free_drafts
from tests.support.interpreted import INTERPRETED
from tests.support.platforms import replaced
from tests.support.tiny_models import BY_NAME, save_tiny_model

pytest.importorskip("triton")

PROMPTS = (1, 3, 17, 40, 100, 130, 5, 64)
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 2},
    {"temperature": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "seed": 3},
    {"logprobs": 3, "frequency_penalty": 0.3},
    {"temperature": 1.0, "allowed_token_ids": list(range(50)), "bad_words": ["ab cd"]},
    {"logprobs": 25, "temperature": 0.5},
    {"prompt_logprobs": 2},
)

DRAFTS: dict[str, Any] = {"draft_model": shorter_demo, "eagle3": random_eagle, "medusa": random_medusa}


def change_config(folder: Path, **changes: int) -> None:
    """Changes a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class Case(NamedTuple):
    """A model, and what is asked of its rank. tiny: of tests/support/tiny_models.py; None: the demo. has_adapter: for
    every second request. method: of drafts; draft_heads: query heads of a draft model, where they are not the
    model's. launches: kernels that have to be among those of the start."""

    tiny: str | None = None
    drafts: int = 0
    method: str = "ngram"
    eager: bool = False
    quantization: Any = None
    dtype: Any = "float32"
    has_adapter: bool = False
    launches: tuple[str, ...] = ()
    rows: int = 6
    step_tokens: int = 64
    draft_heads: int | None = None


CASES = {
    "captured": Case(),
    "eager": Case(eager=True),
    "drafts": Case(drafts=3),
    "draft model, flash prompts": Case(
        drafts=3, method="draft_model", dtype="bfloat16", launches=("gather_contexts",), draft_heads=4
    ),
    "eagle3": Case(drafts=3, method="eagle3"),
    "medusa": Case(drafts=3, method="medusa"),
    "experts": Case("qwen3_moe"),
    "codes of experts": Case("qwen3_moe", quantization="int4"),
    "latents": Case("deepseek_v2"),
    "adapters": Case("llama-gqa", has_adapter=True, launches=("shrink_tokens", "expand_tiles")),
    "flash prompts": Case("llama-gqa", dtype="bfloat16", launches=("gather_contexts",)),
    "flash prompts, whole": Case(
        "llama-gqa", dtype="bfloat16", launches=("gather_contexts",), rows=16, step_tokens=256
    ),
}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no variants")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_requests_launch_no_variant_that_the_start_has_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: Case
) -> None:
    from tandem.workers.attention.prompts import flash_prompts
    from tandem.workers.kernels.triton import triton_lora
    from tests.support.triton_variants import GpuWithTriton, variants_told

    monkeypatch.setattr(graph_room, "CHUNK_BUCKETS", (16,))  # others are not captured
    monkeypatch.setattr(triton_lora, "TOKEN_STEP", 32)
    of_few = partial(flash_prompts.FlashPrompts, fewest_tokens=40, fewest_queries=18)
    monkeypatch.setattr(flash_prompts, "FlashPrompts", of_few)
    platform = replaced(
        GpuWithTriton(HostAccelerator(), lambda body: (lambda: None, body())),
        memory=lambda: DeviceMemory(900 * MIB, 1024 * MIB),
    )
    monkeypatch.setattr("tandem.workers.rank.rank_server.open_platform", lambda *_: platform)
    folder = DEMO_MODEL
    if case.tiny is not None:
        folder = save_tiny_model(BY_NAME[case.tiny], tmp_path)
    draft = None
    if case.method in DRAFTS:
        draft = ModelSettings(model=str(DRAFTS[case.method](tmp_path / "draft")), dtype=case.dtype)
        if case.draft_heads is not None:
            heads = {"num_attention_heads": case.draft_heads, "num_key_value_heads": case.draft_heads // 4}
            change_config(Path(draft.model), head_dim=256 // case.draft_heads, **heads)
    settings = EngineSettings(
        model=ModelSettings(
            model=str(folder),
            dtype=case.dtype,
            max_model_len=200,
            enforce_eager=case.eager,
            quantization=case.quantization,
            draft=draft,
        ),
        cache=CacheSettings(num_blocks=60),
        scheduler=SchedulerSettings(max_num_seqs=case.rows, max_num_batched_tokens=case.step_tokens),
        speculative=SpeculativeSettings(method=case.method, num_speculative_tokens=case.drafts)
        if case.drafts
        else None,
        lora=LoraSettings(enable_lora=case.has_adapter, max_loras=1, max_lora_rank=8),
    )
    adapter = ref_of(save_random_adapter(folder, tmp_path / "adapter")) if case.has_adapter else None
    with variants_told() as variants, free_drafts():
        group, told = in_process_group(settings), Told()
        try:
            ready = group.start()
            engine, at_start = build_engine(settings, model_facts(settings, ready), group, ready, told), set(variants)
            assert all(any(name in variant for variant in at_start) for name in ("rotate_store", *case.launches))
            for number, (length, fields) in enumerate(zip(PROMPTS, FIELDS, strict=True)):
                sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields})
                prompt = [3 + (7 * number + 5 * k) % 100 for k in range(length)]
                engine.add_request(
                    GenerationRequest(
                        request_id=f"r{number}",
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        adapter=adapter if number % 2 else None,
                    )
                )
            while engine.has_work():
                engine.turn(0.0)
            assert engine.stats().launches["eager"] > 0 and len(told.tokens) >= 6
        finally:
            group.close()
    assert sorted(variants - at_start) == []


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_kernel_that_is_compiled_later_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    import triton

    from tandem.workers.kernels.triton.sampling.triton_sampling import pair_part
    from tools.check_kernels import compiling

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    late, none = LateKernels(), torch.zeros(8)
    late.watch()
    late.pause()
    for parts, wanted in ((8, 0), (16, 1)):
        with compiling(90) as found:
            pair_part[(1,)](none, none.int(), 1, none.int(), PARTS=parts, num_warps=1, enable_fp_fusion=False)
        assert len(found) == 1 and len(late.names) == wanted
        late.watch()
    assert caplog.text.count("a kernel was compiled after the start") == 1 and "pair_part" in late.names[0]
