"""Triton's products of a few rows against F.linear: in its interpreter, and on a CUDA device where one is; and what is
chosen by measurements.

As in test_triton_lora.py, the tests run in a process of their own, with new memory full of NaN.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.decode_work import small_work
from tests.support.interpreted import DEVICE, INTERPRETED, computes, run_in_interpreter, starts

HALF = torch.float16 if INTERPRETED else torch.bfloat16

pytest.importorskip("triton")


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_work(monkeypatch):
        yield


def plans(outputs: int, inputs: int, multiprocessors: int = 6) -> Any:
    from tandem.workers.kernels.triton.triton_few_rows import few_rows_plans

    return few_rows_plans(outputs, inputs, multiprocessors)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, HALF)


@computes
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 512), (37, 1000), (130, 130), (16, 256)])
def test_products_are_those_of_torch(outputs: int, inputs: int) -> None:
    """Every plan: one span and several, also ones that have no inputs left; sizes that tiles do not divide; strided
    rows, biases. A row's bits are its own, alone or with others."""
    from tandem.workers.kernels.triton.triton_few_rows import multiply_few_rows

    x_TI, weight_OI, bias_O = noise(8, inputs + 24)[:, 8:-16], noise(outputs, inputs), noise(outputs)
    found = plans(outputs, inputs)
    assert {plan.spans > 1 for plan in found} == ({True, False} if inputs > 256 else {plan.spans > 1 for plan in found})
    for plan in found:
        for bias in (None, bias_O):
            all_rows = multiply_few_rows(x_TI, weight_OI, bias, plan)
            exact = F.linear(x_TI.float(), weight_OI.float(), None if bias is None else bias.float())
            torch.testing.assert_close(all_rows.float(), exact, rtol=4e-3, atol=4e-3 * float(exact.abs().max()))
            for rows in (1, 3):
                assert torch.equal(multiply_few_rows(x_TI[:rows], weight_OI, bias, plan), all_rows[:rows])


def test_plans_keep_a_device_busy() -> None:
    """What is large enough is not split; what is small is, in no more spans than it has steps."""
    from tandem.workers.kernels.triton.triton_few_rows import MOST_SPANS, TILES

    assert [plan.spans for plan in plans(28_672, 4096, 132)] == [1] * 3
    assert [plan.spans for plan in plans(1024, 4096, 132)] == [1, MOST_SPANS] * 3
    assert {plan.spans for plan in plans(1024, 512, 132)} == {1, 2, 4}
    assert [plan.tile for plan in plans(10**6, 64, 1)] == list(TILES)


# ---- the choice ----


class Clock:
    """Says how long calls take: by the number of kernels that they launch, each at a rate of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_per_s: dict[str, float]) -> None:
        self.asked: list[str] = []
        self._spent = 0.0
        for name in ("linear", "ours"):
            owner = (
                "torch.nn.functional.linear"
                if name == "linear"
                else "tandem.workers.platforms.few_rows.multiply_few_rows"
            )
            monkeypatch.setattr(owner, self._timed(name, bytes_per_s))

    def _timed(self, name: str, bytes_per_s: dict[str, float]) -> Callable[..., torch.Tensor]:
        def timed(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, plan: Any = None) -> torch.Tensor:
            self.asked.append(name)
            rate = bytes_per_s["linear" if plan is None else f"{plan.tile.outputs} x {plan.spans}"]
            self._spent += weight.nbytes / rate
            return (x.float() @ weight.float().T + (1.0 if rate == WRONG else 0.0) * 100).to(x.dtype)

        return timed

    def __call__(self, work: Callable[[], object]) -> float:
        self._spent = 0.0
        work()
        return self._spent or 1.0


WRONG = 9e9
"""The rate of a plan with wrong results."""
