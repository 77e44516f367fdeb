"""LinearMethod: the product with the weights of a linear layer, in the form in which its device multiplies them best.

A platform chooses it for a dtype and a weight format (workers/platforms); linear layers own sharding, collectives and
the LoRA hook. Here are the methods of dense weights. T tokens, I inputs, O outputs, all of this rank.

A PackedMethod packs once into oneDNN's own layout (2 to 3 times faster at decode batches than F.linear, which packs in
every call) and the original is freed, so memory is not doubled. A skinny-GEMM kernel that reads this layout
(workers/kernels/cpu/cpu_skinny_gemm.py) multiplies inputs of up to its max_rows rows.

Weights may share their memory with others in turn (offload/weights/weight_stream.py): a Place takes them in the form
that is multiplied and returns the tensor to multiply with and a function to call before each use.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.params import Param

Arrive = Callable[[], object]
Place = Callable[[torch.Tensor], tuple[torch.Tensor, Arrive | None]]
Product = Callable[[torch.Tensor], torch.Tensor]
Bias = Callable[[], torch.Tensor | None]


def as_given(weight: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The Place of a weight that stays where it is."""
    return weight, None


class LinearMethod(Protocol):
    """A product with a weight on this rank's shard: y_TO = x_TI @ weight_OI.T + bias_O.

    nbytes: of the weight, once it is loaded, without the padding of packed forms. is_copy: it holds a form of its own,
    not the tensor that take() was given. reads_stored: that has the checkpoint's dtype, not the model's.
    """

    nbytes: int
    is_copy: bool
    reads_stored: bool = False

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        """Yields what is to be read for the merged weights; their outputs stand one behind the other. bias: is called
        when the last slot has been filled."""
        yield ParameterSlot(
            tuple(weights),
            lambda weight_OI: self.take(weight_OI, bias()),
            self,
            as_stored=self.reads_stored,
            keeps=not self.is_copy,
        )

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        """Makes the product's form of a dense weight. bias: in the model's dtype."""
        ...

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Returns y_TO in x's dtype."""
        ...


class MakeMethod(Protocol):
    """Makes the method of one linear layer. weights: those that it merges."""

    def __call__(
        self, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given
    ) -> LinearMethod: ...


class SkinnyGemm(Protocol):
    """A kernel that multiplies a packed weight by inputs of up to `max_rows` rows."""

    max_rows: int

    def bind(self, packed: torch.Tensor, bias_O: torch.Tensor | None, outputs: int) -> Product | None:
        """Returns x_TI -> y_TO with this weight; None when the kernel cannot read its layout."""
        ...


class DenseMethod(LinearMethod):
    """The weight as it is, multiplied by F.linear (cuBLAS on CUDA)."""

    is_copy = False

    def __init__(self, place: Place = as_given) -> None:
        self._place = place
        self._weight_OI: torch.Tensor | None = None
        self._bias_O: torch.Tensor | None = None
        self._arrive: Arrive | None = None
        self.nbytes = 0

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.nbytes = weight_OI.nbytes
        self._weight_OI, self._arrive = self._place(weight_OI)
        self._bias_O = bias_O

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self.weight(), self._bias_O)

    def weight(self) -> torch.Tensor:
        """Returns weight_OI, for products with parts of it."""
        assert self._weight_OI is not None, "not loaded"
        if self._arrive is not None:
            self._arrive()
        return self._weight_OI


class PackedMethod(LinearMethod):
    """The weight in oneDNN's blocked layout, which can be multiplied but not read by row."""

    is_copy = True

    def __init__(self, place: Place = as_given, skinny_gemm: SkinnyGemm | None = None) -> None:
        self._place = place
        self._kernel = skinny_gemm
        self._packed: torch.Tensor | None = None
        self._bias_O: torch.Tensor | None = None
        self._arrive: Arrive | None = None
        self._skinny: Product | None = None
        self._max_rows = 0 if skinny_gemm is None else skinny_gemm.max_rows
        self.nbytes = 0

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.nbytes = weight_OI.nbytes
        self._packed, self._arrive = self._place(torch.ops.mkldnn._reorder_linear_weight(weight_OI))
        self._bias_O = bias_O
        if self._kernel is not None:
            self._skinny = self._kernel.bind(self._packed, bias_O, weight_OI.shape[0])

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        if self._skinny is not None and 0 < x_TI.shape[0] <= self._max_rows:
            return self._skinny(x_TI)
        return torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")


def plain(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
    """A MakeMethod of DenseMethods."""
    return DenseMethod(place)


def packed(skinny_gemm: SkinnyGemm | None) -> MakeMethod:
    """Returns the MakeMethod of PackedMethods with that kernel."""

    def make(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
        packs = all(weight.packs for weight in weights)
        return PackedMethod(place, skinny_gemm) if packs else DenseMethod(place)

    return make


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this build and CPU pack matrices of that dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32
