"""Prompts on a GPU: torch's flash kernel over gathered contexts beside our kernel over the cache in place."""

import random

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.parallel.quantization.weight_plan import DENSE
from tandem.workers.attention.prompts.varlen_attention import FlashVarlen
from tandem.workers.kernels.kv_store import LayerKV, encode
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.platforms.cuda import CudaPlatform
from tests.support.attention_check import QUANTIZED, RELATIVE, TOLERANCE, random_batch
from tests.support.paged_rows import prompt_ids
from tests.unit.kernels.test_triton_attention import on_device

HALVES = [torch.float16, torch.bfloat16]
SHAPES = [
    ([1500], [1500], None),
    ([700, 700, 300], [700, 2900, 301], None),
    ([1, 1200, 3, 40, 500], [4000, 1200, 90, 6000, 777], None),
    ([1100, 200], [5000, 200], 128),
    ([130] * 12, [130 + 397 * row for row in range(12)], 1000),
]
"""Queries and lengths of rows, and a window."""


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((8, 2), 128), ((6, 6), 64), ((4, 1), 256), ((5, 1), 80)])
def test_prompts_are_those_of_our_kernel(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    heads: tuple[int, int],
    dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of many rows and of few heads."""
    from tandem.workers.attention.prompts import flash_prompts
    from tandem.workers.attention.triton_paged import TritonAttention

    generator = torch.Generator().manual_seed(0)
    for queries, lengths, window in SHAPES:
        batch = on_device(random_batch(random.Random(0), 16, queries, lengths))
        blocks, tokens = int(batch.block_table_RN.max()) + 1, batch.num_tokens

        def noise(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to("cuda", dtype)

        planes = [encode(noise(blocks, 16, heads[1], dim), kv_dtype or dtype) for _ in "kv"]
        kv = LayerKV.of([codes for codes, _ in planes], [scales for _, scales in planes if scales is not None])
        q_TND, params = noise(tokens, heads[0], dim), AttentionParams(dim**-0.5, window)
        own = [noise(tokens, heads[1], dim) for _ in "kv"]
        if kv_dtype is None:
            own = [plane.flatten(0, 1)[batch.slot_mapping_T] for plane in (kv.keys, kv.values)]
        wanted = TritonAttention().prepare(batch).attend(q_TND, *own, kv, params)
        for piece_bytes in (flash_prompts.PIECE_BYTES, 6000 * 2 * dim * dtype.itemsize):
            monkeypatch.setattr(flash_prompts, "PIECE_BYTES", piece_bytes)
            backend = TritonAttention(large_chunks=flash_prompts.FlashPrompts(FlashVarlen()))
            found = backend.prepare(batch).attend(q_TND, *own, kv, params)
            torch.testing.assert_close(found, wanted, rtol=2 * RELATIVE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, *QUANTIZED], ids=str)
def test_the_device_passes_the_look_of_a_start(kv_dtype: torch.dtype) -> None:
    platform = CudaPlatform.open(torch.device("cuda", 0))
    assert platform.attention(torch.bfloat16, 128, kv_dtype).name == "triton-paged"
    assert platform.kernel_notes(torch.bfloat16, DENSE) == ()


def test_an_engine_reads_its_prompts_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of which many are in a step, and long ones in several steps, over a quantized cache."""
    rows: list[int] = []
    attend = FlashVarlen.attend

    def counted(*args: torch.Tensor) -> torch.Tensor:
        rows.append(len(args[4].q_starts) - 1)
        return attend(*args)

    monkeypatch.setattr(FlashVarlen, "attend", counted)
    prompts = [prompt_ids(300, 700, seed=row) for row in range(12)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    flags = {
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 2**28,
        "max_model_len": 512,
        "kv_cache_dtype": "int8",
        "tune": False,
    }
    with LLM("demo", device="cuda", max_num_batched_tokens=2048, **flags) as llm:
        looked = len(rows)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    assert max(rows[looked:]) > 1
