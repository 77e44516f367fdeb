"""Triton's products of a few rows against F.linear: in its interpreter, and on a CUDA device where one is; and what is
chosen by measurements.

As in test_triton_lora.py, the tests run in a process of their own, with new memory full of NaN.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.parallel.linear_methods import as_given
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
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 512), (37, 1000), (130, 136), (16, 256)])
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

WRONG = 9e9
"""The bandwidth of a plan with wrong results."""
READ = 4e9


class Device:
    """Products by torch that take as long as `rates` says, in bytes a second: of cuBLAS, and of the kernel by its
    tile's outputs and spans. launched: what was multiplied with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rates: dict[tuple[int, int] | None, float]) -> None:
        self.launched: list[tuple[int, int] | None] = []
        self._rates = rates
        self._spent_s = 0.0
        product = F.linear

        def timed(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, plan: Any = None) -> torch.Tensor:
            kind = None if plan is None else (plan.tile.outputs, plan.spans)
            self.launched.append(kind)
            if kind not in self._rates:
                raise RuntimeError("no kernel image")
            self._spent_s += weight.nbytes / self._rates[kind]
            return product(x, weight) + (100.0 if self._rates[kind] == WRONG else 0.0)

        monkeypatch.setattr("torch.nn.functional.linear", timed)
        monkeypatch.setattr("tandem.workers.platforms.few_rows.multiply_few_rows", timed)

    def seconds_of(self, work: Callable[[], Any]) -> float:
        self._spent_s = 0.0
        found = work()
        assert found
        return self._spent_s or SHAPE[0] * SHAPE[1] * 2 / READ


SHAPE = (64, 512)


def chosen(monkeypatch: pytest.MonkeyPatch, rates: dict[tuple[int, int] | None, float], **change: Any) -> Any:
    """Returns two methods of one shape behind a choice, the device, and the lines."""
    from tandem.workers.platforms import few_rows

    device = Device(monkeypatch, rates)
    monkeypatch.setattr(few_rows, "LEAST_BYTES", change.get("least_bytes", 1))
    choice = few_rows.FewRowsChoice(6)
    methods = [few_rows.FewRowsMethod(choice.add) for _ in range(2)]
    for method in methods:
        method.take(torch.randn(SHAPE, dtype=torch.float32).to(torch.float16), None)
    return methods, device, choice.settle(device.seconds_of)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({None: 3.5e9, (16, 1): 3.9e9}, None),
        ({None: 3e9, (16, 1): 3.1e9, (16, 2): 3.1e9}, None),
        ({None: 3e9, (16, 1): 3.2e9, (32, 2): 3.6e9, (64, 4): 3.5e9}, (32, 2)),
        ({None: 3e9, (16, 1): WRONG, (64, 1): 3.7e9}, (64, 1)),
        ({None: 3e9, (16, 1): float("nan")}, None),
        ({None: 3e9}, None),
    ],
    ids=["near the bandwidth", "hardly faster", "the fastest", "a wrong one", "no time", "none runs"],
)
def test_measurements_decide(
    rates: dict[tuple[int, int] | None, float], best: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS keeps what it reads at 85 % of the bandwidth, and where the kernel is not faster by 5 %."""
    methods, device, (line,) = chosen(monkeypatch, rates)
    plans = {None if method.plan is None else (method.plan.tile.outputs, method.plan.spans) for method in methods}
    assert plans == {best} and line.startswith("products of a row with 64 x 512: ")
    assert (f"in tiles of {best[0]}" in line) if best else line.startswith("products of a row with 64 x 512: cuBLAS ")
    assert rates[None] < 0.85 * READ or set(device.launched) == {None}, "nothing is compiled for it"
    for rows, kind in ((1, best), (8, best), (9, None), (0, None)):
        device.launched.clear()
        methods[0].apply(torch.zeros(rows, SHAPE[1], dtype=torch.float16))
        assert device.launched == [kind]


def test_what_a_cache_could_hold_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.workers.platforms.few_rows import FewRowsMethod

    methods, device, lines = chosen(monkeypatch, {None: 1e9, (16, 1): 4e9}, least_bytes=2**20)
    assert not lines and not device.launched and methods[0].plan is None
    seen: list[Any] = []
    for dtype, inputs, place in (
        (torch.float32, 64, as_given),
        (torch.bfloat16, 63, as_given),
        (torch.bfloat16, 64, lambda weight: (weight, lambda: None)),
    ):
        FewRowsMethod(seen.append, place).take(torch.zeros(16, inputs, dtype=dtype), None)
    assert not seen, "float32, rows at odd addresses, weights that move"
