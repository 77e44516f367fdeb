"""Triton's grouped LoRA against dense products and the twin: in its interpreter, and on a CUDA device where one is.

The interpreter multiplies no bf16 matrices, so prompts in bf16 are left to the device.
"""

import pytest
import torch

from tandem.workers.kernels.lora_ops import LoraOps, TorchLora
from tests.support.interpreted import DEVICE, INTERPRETED, computes, run_in_interpreter, starts
from tests.support.lora_layers import LoraLayer, check_close, make_layer, noise, rows_of

RANKS = [4, 8, 16, 64, 3, 0, 33]

pytest.importorskip("triton")


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def kernels() -> LoraOps:
    from tandem.workers.kernels.triton.triton_lora import TritonLora

    return TritonLora()


def merged(dtype: torch.dtype, inputs: int = 80, outputs: tuple[int, ...] = (272, 64, 48)) -> LoraLayer:
    ranks = [RANKS[shift:] + RANKS[:shift] for shift in range(len(outputs))]
    return make_layer(inputs, outputs, ranks, dtype, gap=8, device=DEVICE)


def check(layer: LoraLayer, slots: list[int], dtype: torch.dtype) -> None:
    """Against the dense products, and what has no adapter keeps its bits."""
    x = noise(len(slots), layer.projections[0].inputs, dtype=dtype, device=DEVICE)
    y = noise(len(slots), layer.width + 3, dtype=dtype, seed=2, device=DEVICE)[:, : layer.width]
    before, twin = y.clone(), y.clone()
    expected = layer.expected(y, x, slots)
    kernels().add(y, x, layer.slab, layer.projections, rows_of(slots, DEVICE))
    check_close(y, expected)
    none = torch.tensor(slots) < 0
    assert torch.equal(y[none], before[none])
    TorchLora().add(twin, x, layer.slab, layer.projections, rows_of(slots, DEVICE))
    check_close(y, twin.double())


@computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_single_tokens_of_mixed_ranks(dtype: torch.dtype) -> None:
    """In the interpreter every rank in float32 alone, as it takes 0.1 s for a token."""
    is_short = INTERPRETED and dtype is not torch.float32
    check(merged(dtype), [3, -1, 5, 6] if is_short else [0, -1, 1, 2, 3, 3, -1, 4, 5, 6, 0], dtype)


@computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_prompts_and_single_tokens_in_one_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of many tokens: tiles of one adapter, of several, of none, and one cut off at the end."""
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies no bf16 matrices")
    from tandem.workers.kernels.triton import triton_lora

    monkeypatch.setattr(triton_lora, "TOKEN_STEP", 16)
    check(merged(dtype), [*[3] * 40, *[-1] * 30, 0, 1, 2, -1, 4, 5, *[6] * 27], dtype)


@computes
@pytest.mark.parametrize("tokens", [1, 40])
def test_more_projections_and_inputs_than_one_launch_or_block_or_vector(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.workers.kernels.triton import triton_lora

    monkeypatch.setattr(triton_lora, "TOKEN_STEP", 16)
    check(merged(torch.float32, inputs=597, outputs=(48, 32, 16, 20)), [3] * tokens, torch.float32)


@computes
def test_a_step_without_tokens_or_adapters() -> None:
    check(merged(torch.float32), [], torch.float32)
    check(merged(torch.float32), [-1, -1], torch.float32)


@pytest.mark.cuda
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device")
def test_one_graph_serves_any_mix() -> None:
    """Captured with one mix of adapters, replayed with another."""
    device = torch.device("cuda")
    ops, layer, dtype = kernels(), merged(torch.bfloat16), torch.bfloat16
    x, y = noise(4, 80, dtype=dtype, device="cuda"), torch.zeros(4, layer.width, dtype=dtype, device=device)
    rows = rows_of([0, 1, 2, -1], "cuda")
    ops.add(y, x, layer.slab, layer.projections, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.add(y, x, layer.slab, layer.projections, rows)
    slots = [3, -1, 6, 4]
    rows.slots_T.copy_(torch.tensor(slots))
    y.zero_()
    graph.replay()
    check_close(y, layer.expected(torch.zeros_like(y), x, slots))
