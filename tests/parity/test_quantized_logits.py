"""--quantization int8 computes what transformers does with the rounded weights: every way that layers are made of
matrices, in chunks and decodes, on several ranks, with adapters, streamed. w8a8 rounds inputs too, alike on all ranks
that see a whole row of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.offload.weights.layer_placement import spread
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import Linear
from tandem.parallel.quantization.int8 import Int8Method
from tandem.workers.kernels.cpu import cpu_int8_gemm
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.adapters import save_random_adapter
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.dequantized import save_dequantized
from tests.support.lora_ranks import AdaptedCase, run_adapted
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import load_peer

TinyFolder = Callable[[str], Path]
PROMPTS = [prompt_ids(length, 200, seed=length) for length in (31, 18, 7)]
STEPS = [
    [(0, PROMPTS[0][:20]), (2, PROMPTS[2][:-1])],
    [(2, PROMPTS[2][-1:]), (0, PROMPTS[0][20:]), (1, PROMPTS[1])],
    *[[(row, [5 + row + step]) for row in range(3)] for step in range(3)],
]


def logits_of(folder: Path, **changes: Any) -> torch.Tensor:
    case = DecoderCase(folder, 1, 1, STEPS, num_rows=3, max_len=40, **changes)
    logits = run_case(case, ParallelContext.single())
    assert logits is not None
    return logits


def check_near(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=share * float(expected.abs().max()))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the differences, as a share of that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "twin"])
@pytest.mark.parametrize("name", ["llama-mqa-biased", "qwen3", "mixtral", "gemma2", "gpt2", "bloom"])
def test_logits_equal_those_of_transformers_with_rounded_weights(
    name: str, compiled: bool, tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(cpu_int8_gemm, "int8_kernel", lambda _: None)
    folder, ids = tiny_folder(name), prompt_ids(50, 200)
    decoder = build_decoder(
        load_spec(folder, quantization="int8"), ParallelContext.single(), folder=folder, dtype=torch.float32,
        platform=CpuPlatform(),
    )  # fmt: skip
    rows = PagedRows(decoder, 1, 50)
    found = torch.cat([rows.step([(0, part)], all_logits=True) for part in (ids[:30], ids[30:49], ids[49:])])
    with torch.inference_mode():
        theirs = load_peer(save_dequantized(folder, tmp_path / name))(torch.tensor([ids])).logits[0]
    check_near(found, theirs, 2e-5)
    assert (found - logits_of_prompt(folder, ids)).abs().max() > 1e-3 * theirs.abs().max(), "nothing was rounded"


def logits_of_prompt(folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return load_peer(folder)(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size", "changes"),
    [
        ("llama-mqa-biased", 2, 1, {}),
        ("qwen3", 2, 2, {}),
        ("mixtral", 2, 2, {}),
        ("mixtral", 2, 1, {"expert_parallel": True}),
        ("gpt2", 2, 1, {}),
    ],
)
def test_ranks_equal_one_rank(
    ranks: RankProcesses, tiny_folder: TinyFolder, name: str, tp_size: int, pp_size: int, changes: dict[str, Any]
) -> None:
    given = {"quantization": "int8", **changes}
    case = DecoderCase(tiny_folder(name), tp_size, pp_size, STEPS, num_rows=3, max_len=40, **given)
    results = ranks.call(run_case, tp_size, pp_size, case)[-tp_size:]
    assert all(torch.equal(result, results[0]) for result in results)
    check_near(results[0], logits_of(tiny_folder(name), quantization="int8"), 2e-5)


def integers_of(folder: Path, context: ParallelContext) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The integers and scales of each linear layer of this rank, in order."""
    decoder = build_decoder(
        load_spec(folder, quantization="int8"), context, folder=folder, dtype=torch.float32, platform=CpuPlatform()
    )
    methods = [linear._method for linear in decoder.linears() if isinstance(linear, Linear)]
    return [(method.weight_OI.clone(), method.scale_O.clone()) for method in methods if isinstance(method, Int8Method)]


def test_ranks_that_share_rows_round_them_alike(ranks: RankProcesses, tiny_folder: TinyFolder) -> None:
    """Integers and scales are exactly one rank's: qkv, o, up and down of each layer."""
    folder = tiny_folder("llama-mha-tied")
    whole = integers_of(folder, ParallelContext.single())
    halves = ranks.call(integers_of, 2, 1, folder)
    assert len(whole) == 16
    for place in (1, 3, 5, 7):  # o and down: inputs are shared
        assert torch.equal(torch.cat([half[place][0] for half in halves], dim=1), whole[place][0])
        assert all(torch.equal(half[place][1], whole[place][1]) for half in halves)
    q = halves[0][0][0].shape[0] // 3
    assert torch.equal(torch.cat([half[0][0][:q] for half in halves]), whole[0][0][: 2 * q])


@pytest.mark.parametrize(("quantization", "near"), [("int8", 1e-5), ("w8a8", 0.1)])
def test_adapters_are_added_to_rounded_weights(
    quantization: str, near: float, tiny_folder: TinyFolder, tmp_path: Path, ranks: RankProcesses
) -> None:
    folder = tiny_folder("llama-gqa")
    adapter = save_random_adapter(folder, tmp_path / "a", rank=8)

    def case(base: Path, tp_size: int = 1, **changes: Any) -> AdaptedCase:
        return AdaptedCase(base, [adapter], [0, -1, 0], STEPS, 40, tp_size=tp_size, **changes)

    dense = run_adapted(case(save_dequantized(folder, tmp_path / "rounded")), ParallelContext.single())
    found = run_adapted(case(folder, quantization=quantization), ParallelContext.single())
    assert found is not None and dense is not None
    assert distance(found, dense) < near
    assert distance(ranks.call(run_adapted, 2, 1, case(folder, 2, quantization=quantization))[0], dense) < near


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_streamed_layers_equal_resident_ones(quantization: str, dtype: torch.dtype, tiny_folder: TinyFolder) -> None:
    resident = logits_of(tiny_folder("qwen3"), quantization=quantization, dtype=dtype)
    streamed = logits_of(tiny_folder("qwen3"), quantization=quantization, dtype=dtype, streamed=spread(4, 3))
    assert bool(resident.isfinite().all()) and torch.equal(resident, streamed)


def test_bf16_is_as_near_as_dense_bf16(tiny_folder: TinyFolder) -> None:
    """The integers are the same, and inputs keep their bits."""
    folder = tiny_folder("llama-gqa")
    usual = distance(logits_of(folder, dtype=torch.bfloat16), logits_of(folder))
    exact = logits_of(folder, quantization="int8")
    found = logits_of(folder, quantization="int8", dtype=torch.bfloat16)
    assert distance(found, exact) < 1.2 * usual
    assert distance(logits_of(folder, quantization="w8a8", dtype=torch.bfloat16), exact) < 3 * usual
