"""Triton's grouped products of experts against their torch twin: in its interpreter, and on a CUDA device where one is.

As in test_triton_lora.py, the tests run in a process of their own, whose interpreter multiplies no bf16.
"""

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertParams
from tandem.parallel.linear_methods import as_given, plain
from tandem.parallel.params import Param, Source
from tandem.workers.kernels.expert_ops import ExpertOps, TorchExperts
from tests.support.interpreted import DEVICE, computes, run_in_interpreter, starts

HERE = range(2, 5)
"""The experts of this rank, of 6."""

pytest.importorskip("triton")


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def both() -> tuple[ExpertOps, ExpertOps]:
    from tandem.workers.kernels.triton.triton_experts import TritonExperts

    return TritonExperts(plain, as_given, DEVICE), TorchExperts(plain, as_given, DEVICE)


@computes
@pytest.mark.parametrize(
    ("tokens", "top_k", "outputs", "inputs", "dtype"),
    [
        (1, 2, 72, 40, torch.float32),
        (9, 3, 70, 24, torch.float16),
        (60, 2, 72, 40, torch.float32),
        (60, 2, 136, 72, torch.float16),
    ],
    ids=["one", "decode", "prompt", "prompt-float16"],
)
def test_products_and_sums_are_those_of_the_twin(
    tokens: int, top_k: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """Experts without tokens, tiles that end within an expert, experts of other ranks; with and without biases."""

    def param(*shape: int) -> Param:
        return Param(name="x.weight", shape=shape, role="x", source=Source(("x.weight",)), merge="x")

    expert_TK = torch.rand(tokens, 6, generator=torch.Generator().manual_seed(tokens)).topk(top_k).indices.to(DEVICE)
    weight_TK = noise(tokens, top_k, seed=3).abs()
    base, gate = noise(tokens, outputs, dtype=dtype, seed=4), noise(tokens, 1, dtype=dtype, seed=5)
    for biased in (False, True):
        found = []
        for ops in both():
            biases = (param(outputs),) if biased else ()
            method = ops.method([ExpertParams((param(outputs, inputs),), biases)] * len(HERE), ParallelContext.single())
            for index, slot in enumerate(method.slots()):
                slot.accept(noise(*slot.params[0].shape, dtype=dtype, seed=index))
            loads = torch.zeros(6, dtype=torch.int64, device=DEVICE)
            groups = ops.group(expert_TK, HERE, loads)
            rows = int(groups.ends_E[-1])
            assert int(loads.sum()) == tokens * top_k
            from_tokens = method.apply(noise(tokens, inputs, dtype=dtype, seed=6), groups, gathers=True)
            from_pairs = method.apply(noise(tokens * top_k, inputs, dtype=dtype, seed=7), groups, gathers=False)
            from_tokens[rows:] = float("nan")
            sums = [ops.combine(from_tokens, weight_TK, groups, *more) for more in ((), (base,), (base, gate))]
            found.append([from_tokens[:rows], from_pairs[:rows], *sums])
        close = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 4e-3, "atol": 2e-2}
        for ours, twin in zip(*found, strict=True):
            torch.testing.assert_close(ours, twin, **close)
