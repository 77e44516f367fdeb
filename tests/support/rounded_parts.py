"""What ranks compute that round inputs to int8, on one rank: those that share a row of inputs scale their own parts,
so a product of such a row is the sum of the products of its parts, each rounded by itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tandem.parallel.params import Param
from tandem.parallel.quantization.coded import CodedMethod
from tandem.parallel.quantization.int8 import W8A8Method
from tandem.workers.kernels.cpu import cpu_code_gemm, cpu_experts, cpu_int8_gemm


@contextmanager
def rounded_by_parts(tp_size: int, *, whole_experts: bool = False) -> Iterator[None]:
    """Twins of products, built and called within, multiply as `tp_size` ranks do; so do int8 weights as codes, whose
    products are not their twin's to the last bit. whole_experts: each is on one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_code_gemm, "code_gemm", lambda dtype, planes: None)
        patch.setattr(cpu_experts, "grouped_code_gemm", lambda dtype, planes: None)
        patch.setattr(cpu_int8_gemm, "int8_kernel", lambda dtype: None)
        patch.setattr(cpu_experts, "grouped_int8_kernel", lambda dtype: None)
        for method in (CodedMethod, W8A8Method, cpu_int8_gemm.Int8CodesMethod):
            _by_parts(patch, method, tp_size, whole_experts)
        yield


def _by_parts(patch: pytest.MonkeyPatch, method: Any, tp_size: int, whole_experts: bool) -> None:
    init, multiply = method.__init__, method.apply

    def make(self: Any, weights: Sequence[Param], *given: Any, **named: Any) -> None:
        is_whole = weights[0].shard.dim == 0 or (whole_experts and weights[0].expert is not None)
        self.parts = 1 if is_whole else tp_size
        init(self, weights, *given, **named)

    def apply(self: Any, x_TI: torch.Tensor) -> torch.Tensor:
        share = x_TI.shape[1] // self.parts
        y_TO = torch.zeros(())
        bias_O = self._bias_O
        for first in range(0, share * self.parts, share):
            part_TI = torch.zeros_like(x_TI)
            part_TI[:, first : first + share] = x_TI[:, first : first + share]
            y_TO = y_TO + multiply(self, part_TI)
            self._bias_O = None  # it is added once
        self._bias_O = bias_O
        return y_TO

    patch.setattr(method, "__init__", make)
    patch.setattr(method, "apply", apply)
