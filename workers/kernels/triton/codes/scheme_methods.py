"""Linear methods of quantized weights on a GPU, by the class of their scheme: those of Triton's kernels, or torch's
twins where it is missing. And whether the device multiplies eight-bit floats (torch._scaled_mm), as a small product
shows. Imports Triton where it is installed, and when it is asked."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from tandem.parallel.linear_methods import MakeMethod
from tandem.parallel.params import Scheme
from tandem.parallel.quantization.coded import CodedMethod, UndoneMethod
from tandem.parallel.quantization.int8 import Int8Method, W8A8Method
from tandem.parallel.quantization.schemes import Coded, Inputs, Int8Rows, Undone

if TYPE_CHECKING:
    from tandem.workers.kernels.triton.triton_attention import Multiprocessors

log = logging.getLogger(__name__)

PROBED: Final = (32, 64, 256)
"""Rows, outputs and inputs of the product that is tried."""
MOST_APART: Final = 2**-4
"""The most by which its results may differ, beside the largest number: two roundings to E4M3."""


class SchemeMethods:
    """The methods for one device. has_triton: they are kernels'. multiprocessors: of the device; None for an H100's."""

    def __init__(self, device: torch.device, multiprocessors: "Multiprocessors | None", *, has_triton: bool) -> None:
        self._device = device
        self._multiprocessors = multiprocessors
        self._has_triton = has_triton
        self._obstacles: list[str | None] = []

    def methods(self, dtype: torch.dtype, scheme: Scheme) -> MakeMethod:
        """Returns what makes the methods of weights of a scheme."""
        return METHODS[type(scheme)](self, dtype, scheme)

    @property
    def fp8_obstacle(self) -> str | None:
        """The reason why more than a few rows are not multiplied as E4M3 by weights of it; None where they are, or
        nobody has asked."""
        return self._obstacles[0] if self._obstacles else None

    def int8(self, dtype: torch.dtype, scheme: Int8Rows) -> MakeMethod:
        rounds = scheme.inputs is Inputs.INT8
        if not self._has_triton:
            return W8A8Method if rounds else Int8Method
        from tandem.workers.kernels.triton.codes.triton_coded import TritonInt8Method

        return partial(TritonInt8Method, dtype, rounds=rounds, multiprocessors=self._multiprocessors)

    def coded(self, dtype: torch.dtype, scheme: Coded) -> MakeMethod:
        if not self._has_triton:
            return CodedMethod
        from tandem.workers.kernels.triton.codes.triton_coded import Fp8Method, TritonCodedMethod

        asks_fp8 = scheme.inputs is Inputs.FP8 and dtype is torch.bfloat16
        made = Fp8Method if asks_fp8 and self._has_fp8() else TritonCodedMethod
        return partial(made, dtype, multiprocessors=self._multiprocessors)

    def undone(self, dtype: torch.dtype, scheme: Undone) -> MakeMethod:
        return partial(UndoneMethod, dtype)

    def _has_fp8(self) -> bool:
        if not self._obstacles:
            self._obstacles.append(fp8_obstacle(self._device))
            if self._obstacles[0] is not None:
                log.warning("weights in fp8 are multiplied by inputs as they are: %s", self._obstacles[0])
        return self._obstacles[0] is None


METHODS: dict[type[Any], Callable[[SchemeMethods, torch.dtype, Any], MakeMethod]] = {
    Int8Rows: SchemeMethods.int8,
    Coded: SchemeMethods.coded,
    Undone: SchemeMethods.undone,
}
"""Linear methods by the class of the scheme."""


def fp8_obstacle(device: torch.device) -> str | None:
    """Returns why the device does not multiply rows and weights in E4M3, each with scales of their own, if so."""
    from tandem.workers.kernels.triton.codes.triton_coded import multiply_fp8

    rows, outputs, inputs = PROBED
    noise = torch.Generator().manual_seed(0)
    x_TI, wide_OI = (torch.randn(size, inputs, generator=noise) for size in (rows, outputs))
    scale_O = wide_OI.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max
    weight_OI = (wide_OI / scale_O[:, None]).to(device, torch.float8_e4m3fn)
    expected_TO = x_TI @ (weight_OI.float().cpu() * scale_O[:, None]).T
    try:
        y_TO = multiply_fp8(x_TI.to(device, torch.bfloat16), weight_OI, scale_O.to(device), None).float().cpu()
    except Exception as error:  # whatever this build and device say, the kernel multiplies
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    apart = float((y_TO - expected_TO).abs().max() / expected_TO.abs().max())
    return None if apart <= MOST_APART else f"a product of torch._scaled_mm is off by {apart:.3g}"
