"""Weight matrices in the form that their device multiplies fastest. Made by the linear layers at load; which of them is
the platform's choice (workers/platforms).

A PackedMatrix is packed once into oneDNN's own layout (2 to 3 times faster at decode batches than F.linear, which
packs in every call) and the original is freed, so memory is not doubled. A skinny-GEMM kernel that reads this layout
(workers/kernels/cpu/cpu_skinny_gemm.py) multiplies inputs of up to its max_rows rows. T tokens, I inputs, O outputs.

A matrix may share its memory with others in turn (offload/weights/weight_stream.py): a Place takes the weight in the
form that is multiplied and returns the tensor to multiply with and a function to call before each use.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

Arrive = Callable[[], object]
Place = Callable[[torch.Tensor], tuple[torch.Tensor, Arrive | None]]
Product = Callable[[torch.Tensor], torch.Tensor]


def as_given(weight: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The Place of a weight that stays where it is."""
    return weight, None


class Matrix(Protocol):
    """A product with a weight: y_TO = x_TI @ weight_OI.T + bias_O, on this rank's shard."""

    nbytes: int

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor: ...


class SkinnyGemm(Protocol):
    """A kernel that multiplies a packed weight by inputs of up to `max_rows` rows."""

    max_rows: int

    def bind(self, packed: torch.Tensor, bias_O: torch.Tensor | None, outputs: int) -> Product | None:
        """Returns x_TI -> y_TO with this weight; None when the kernel cannot read its layout."""
        ...


class PlainMatrix:
    """The weight as it is, multiplied by F.linear (cuBLAS on CUDA)."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, place: Place = as_given) -> None:
        self._weight_OI, self._arrive = place(weight_OI)
        self._bias_O = bias_O
        self.nbytes = weight_OI.nbytes

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        return F.linear(x_TI, self._weight_OI, self._bias_O)


class PackedMatrix:
    """The weight in oneDNN's blocked layout, which can be multiplied but not read by row."""

    def __init__(
        self,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        place: Place = as_given,
        skinny_gemm: SkinnyGemm | None = None,
    ) -> None:
        self.nbytes = weight_OI.nbytes
        self._packed, self._arrive = place(torch.ops.mkldnn._reorder_linear_weight(weight_OI))
        self._bias_O = bias_O
        self._skinny = None if skinny_gemm is None else skinny_gemm.bind(self._packed, bias_O, weight_OI.shape[0])
        self._max_rows = 0 if skinny_gemm is None else skinny_gemm.max_rows

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        if self._skinny is not None and 0 < x_TI.shape[0] <= self._max_rows:
            return self._skinny(x_TI)
        return torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")


class MakeMatrix(Protocol):
    """Makes the matrix of one weight."""

    def __call__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, /, place: Place = as_given) -> Matrix: ...


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this build and CPU pack matrices of that dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32
