"""A weight matrix in the form its device multiplies fastest, behind one call. Made by the linear layers, at load.

On CPU a matrix is packed once into oneDNN's own layout (2 to 3 times faster at decode batches than F.linear, which
packs anew in every call) and the original is freed, so memory is not doubled. Where the caller has a kernel that reads
that layout (workers/kernels/cpu_few_rows.py), it multiplies few rows. T tokens, I inputs, O outputs.

A matrix may lie in memory that others use too, between its turns (offload/weight_stream.py): whoever makes it passes a
Place, which takes the weight in the form that is multiplied and answers with the tensor to multiply with, and what to
call before each use.
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
    """y_TO = x_TI @ weight_OI.T + bias_O, on this rank's shard."""

    nbytes: int

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor: ...


class FewRows(Protocol):
    """A kernel that reads a packed weight, for inputs of up to `most_rows` rows."""

    most_rows: int

    def bind(self, packed: torch.Tensor, bias_O: torch.Tensor | None, outputs: int) -> Product | None:
        """x_TI -> y_TO with this weight; None where it cannot read it."""
        ...


class PlainMatrix:
    """The weight as it is, through F.linear (cuBLAS on CUDA)."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, place: Place = as_given) -> None:
        self._weight_OI, self._arrive = place(weight_OI)
        self._bias_O = bias_O
        self.nbytes = weight_OI.nbytes

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        return F.linear(x_TI, self._weight_OI, self._bias_O)


class PackedMatrix:
    """The weight in oneDNN's blocked layout; it can be multiplied with, not read."""

    def __init__(
        self,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        place: Place = as_given,
        few_rows: FewRows | None = None,
    ) -> None:
        self.nbytes = weight_OI.nbytes
        self._packed, self._arrive = place(torch.ops.mkldnn._reorder_linear_weight(weight_OI))
        self._bias_O = bias_O
        self._few = None if few_rows is None else few_rows.bind(self._packed, bias_O, weight_OI.shape[0])
        self._most = 0 if few_rows is None else few_rows.most_rows

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        if self._few is not None and 0 < x_TI.shape[0] <= self._most:
            return self._few(x_TI)
        return torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")


def make_matrix(
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    place: Place = as_given,
    few_rows: FewRows | None = None,
) -> Matrix:
    """Packed where oneDNN packs: on CPU, fp32 always, bf16 and fp16 where the CPU multiplies them. Plain elsewhere."""
    if weight_OI.device.type == "cpu" and can_pack(weight_OI.dtype):
        return PackedMatrix(weight_OI, bias_O, place, few_rows)
    return PlainMatrix(weight_OI, bias_O, place)


class MakeMatrix(Protocol):
    """`make_matrix`, its last two arguments given by who builds the layers."""

    def __call__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, /) -> Matrix: ...


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and CPU pack matrices of that dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32
