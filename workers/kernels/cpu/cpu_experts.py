"""ExpertOps compiled for CPUs: routing, sorting by expert, the grouped products and their sum, one call each.

Formulas as in expert_ops.py, whose TorchExperts is the twin and serves widths of partial vectors (of 16 elements). A
product reads the weights of experts that have tokens, once per 64 of their rows, and nothing of the others; threads
take blocks of 64 outputs as they get done with others. A row's result does not depend on its batch mates. Sums in
float32 (bf16: by VDPBF16PS where the CPU has it, which treats denormals as 0), or of integers as in cpu_int8_gemm.py,
rounded once. No call depends on what experts are chosen, so decode steps are replayed.

The layout of dense weights: [experts] blocks of 64 outputs, each [I / n][64][n], padded with zeros; n inputs are
multiplied at once: 2 in bf16 by VDPBF16PS, else 1. T tokens, E experts, K of them per token, P = T * K pairs, I
inputs, O outputs.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertMethod, ExpertParams, Groups, MakeForm, StackedExperts
from tandem.parallel.linear_methods import Bias, MakeMethod, Place, as_given
from tandem.parallel.params import Param, Scheme
from tandem.parallel.quantization.schemes import Coded, Inputs, Int8Rows
from tandem.workers.kernels.cpu.cpu_build import cpu_experts_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel
from tandem.workers.kernels.cpu.cpu_code_gemm import (
    CodeLayout,
    CpuCodedMethod,
    GroupedCodeGemm,
    grouped_code_gemm,
    multiplies,
    planes_of,
)
from tandem.workers.kernels.cpu.cpu_int8_gemm import (
    MOST_INPUTS,
    PLANES,
    QUAD,
    RoundedRows,
    grouped_int8_kernel,
    padded_bytes,
)
from tandem.workers.kernels.cpu.weight_blocks import in_blocks
from tandem.workers.kernels.expert_ops import ExpertOps, RouterWeights, TorchExperts
from tandem.workers.kernels.huge_pages import STACKS
from tandem.workers.models.spec.arch import ClampedSwiglu, Moe, Scoring

LANES = 16
SCORINGS = (Scoring.SOFTMAX, Scoring.TOP_SOFTMAX, Scoring.SIGMOID)
"""The order is that of cpu_experts.c."""


class _InHugePages(StackedExperts):
    """Experts whose stack a step reads from huge pages."""

    def _room(self, held: torch.Tensor) -> torch.Tensor:
        memory = STACKS.zeros(len(self._experts) * held.nbytes)
        return memory.view(held.dtype).view(len(self._experts), *held.shape)


class DenseBlocks:
    """One expert's weight in the kernel's layout: an ExpertForm. together: inputs that are multiplied at once."""

    def __init__(
        self, together: int, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given
    ) -> None:
        self._together = together
        self._place = place
        self.nbytes = 0

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        yield ParameterSlot(tuple(weights), self._take, self)

    def _take(self, weight_OI: torch.Tensor) -> None:
        self.nbytes = weight_OI.nbytes
        self._place(in_blocks(weight_OI, self._together))


class DenseExperts(_InHugePages):
    """The products with dense weights. kernel: grouped_gemm; together: inputs that it multiplies at once."""

    def __init__(
        self,
        kernel: Kernel,
        together: int,
        experts: Sequence[ExpertParams],
        context: ParallelContext,
        place: Place = as_given,
    ) -> None:
        super().__init__(partial(DenseBlocks, together), experts, context, place)
        self._kernel = kernel

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        weights, bias_EO = self.weights(), self._bias_EO
        assert x.stride(1) == 1 and x.dtype is weights.dtype and x.shape[1] == self.inputs
        y_PO = torch.empty(len(groups.order_P), self.outputs, dtype=x.dtype)
        self._kernel(
            weights.data_ptr(), weights.stride(0), x.data_ptr(), x.stride(0),
            None if bias_EO is None else bias_EO.data_ptr(), y_PO.data_ptr(), groups.order_P.data_ptr(),
            groups.ends_E.data_ptr(), len(weights), groups.top_k if gathers else 0, self.inputs, self.outputs,
            torch.get_num_threads(),
        )  # fmt: skip
        return y_PO


class Int8Experts(_InHugePages):
    """The products with int8 weights. kernel: grouped_int8_gemm; planes: bytes of an input."""

    def __init__(
        self,
        kernel: Kernel,
        planes: int,
        make: MakeForm,
        experts: Sequence[ExpertParams],
        context: ParallelContext,
        place: Place = as_given,
    ) -> None:
        super().__init__(make, experts, context, place)
        self._kernel, self._planes = kernel, planes

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        weights, bias_EO, pairs = self.weights(), self._bias_EO, len(groups.order_P)
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        y_PO = torch.empty(pairs, self.outputs, dtype=x.dtype)
        rounded = RoundedRows.room(pairs, self._planes, self.inputs)
        self._kernel(
            weights.data_ptr(), weights.stride(0), padded_bytes(self.outputs, self.inputs), x.data_ptr(), x.stride(0),
            None if bias_EO is None else bias_EO.data_ptr(), y_PO.data_ptr(), *rounded.arguments, self._planes,
            groups.order_P.data_ptr(), groups.ends_E.data_ptr(), len(weights),
            groups.top_k if gathers else 0, self.inputs, self.outputs, torch.get_num_threads(),
        )  # fmt: skip
        return y_PO


class CodeExperts(_InHugePages):
    """The products with weights that are codes. make: CpuCodedMethods."""

    def __init__(
        self,
        multiply: GroupedCodeGemm,
        make: MakeForm,
        experts: Sequence[ExpertParams],
        context: ParallelContext,
        place: Place = as_given,
    ) -> None:
        super().__init__(make, experts, context, place)
        self._multiply = multiply
        self._layout: CodeLayout | None = None

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        held_E = self.weights()
        assert self._layout is not None, "not loaded"
        return self._multiply(self._layout, held_E, x, self._bias_EO, groups, gathers=gathers)

    def _finish(self) -> None:
        form = self._forms[0]
        assert isinstance(form, CpuCodedMethod)
        self._layout = form.layout
        super()._finish()


class Products(NamedTuple):
    """The grouped products of a scheme. method: makes those of a projection. takes: by the number of its inputs."""

    method: Callable[[Sequence[ExpertParams], ParallelContext, Place], ExpertMethod]
    takes: Callable[[int], bool]


class CpuExperts:
    """The compiled operations. make: linear methods, for what no grouped product multiplies."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, make: MakeMethod, place: Place) -> None:
        self._twin = TorchExperts(make, place)
        self._library, self._dtype, self._make, self._place = library, dtype, make, place
        self._route = Kernel(
            library, "route", POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER,
            NUMBER, NUMBER, COUNT, COUNT, REAL, NUMBER, NUMBER, NUMBER, COUNT,
        )  # fmt: skip
        self._group = Kernel(
            library, "group_pairs", POINTER, NUMBER, NUMBER, NUMBER, POINTER, POINTER, POINTER, POINTER
        )
        self._swiglu = Kernel(library, "clamped_swiglu", POINTER, POINTER, NUMBER, NUMBER, REAL, REAL, COUNT)
        self._combine = Kernel(
            library, "combine", POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER, NUMBER,
            COUNT,
        )  # fmt: skip

    @property
    def has_products(self) -> bool:
        """True if the products with dense weights too are compiled."""
        return self._products(None) is not None

    def method(self, experts: Sequence[ExpertParams], context: ParallelContext) -> ExpertMethod:
        weights = [weight for expert in experts for weight in expert.weights]
        inputs, schemes = weights[0].span(1, context.mesh).length, {weight.scheme for weight in weights}
        scheme = weights[0].scheme
        is_apart = scheme is not None and scheme.apart and len(experts[0].weights) > 1
        products = self._products(scheme) if len(schemes) == 1 and not is_apart else None
        if products is None or not products.takes(inputs):
            return self._twin.method(experts, context)
        return products.method(experts, context, self._place)

    def _products(self, scheme: Scheme | None) -> Products | None:
        """Returns the grouped products of weights of one scheme; None where there are none."""
        if scheme is None:
            return _dense(self._library) if hasattr(self._library, "grouped_gemm") else None
        return GROUPED[type(scheme)](self._dtype, scheme, self._make) if type(scheme) in GROUPED else None

    def loads(self, num_experts: int) -> torch.Tensor:
        return self._twin.loads(num_experts)

    def route(self, x_TH: torch.Tensor, router: RouterWeights, spec: Moe) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, hidden = x_TH.shape
        if hidden % LANES or x_TH.stride(1) != 1:
            return self._twin.route(x_TH, router, spec)
        weight_TK = torch.empty(tokens, spec.top_k, dtype=torch.float32)
        expert_TK = torch.empty(tokens, spec.top_k, dtype=torch.int64)
        logits_TE = torch.empty(tokens, spec.num_experts, dtype=torch.float32)
        weight, bias, correction = (None if t is None else t.data_ptr() for t in router)
        groups = (0, 0, 0) if spec.groups is None else (spec.groups.count, spec.groups.taken, spec.groups.best)
        self._route(
            x_TH.data_ptr(), x_TH.stride(0), weight, bias, correction, logits_TE.data_ptr(), weight_TK.data_ptr(),
            expert_TK.data_ptr(), tokens, hidden, spec.num_experts, spec.top_k, SCORINGS.index(spec.scoring),
            int(spec.renormalize), spec.scale, *groups, torch.get_num_threads(),
        )  # fmt: skip
        return weight_TK, expert_TK

    def group(self, expert_TK: torch.Tensor, here: range, loads_E: torch.Tensor) -> Groups:
        pairs = expert_TK.numel()
        order_P, place_P = torch.empty(pairs, dtype=torch.int32), torch.empty(pairs, dtype=torch.int32)
        ends_E = torch.empty(len(here), dtype=torch.int32)
        self._group(
            expert_TK.data_ptr(), pairs, here.start, len(here), order_P.data_ptr(), place_P.data_ptr(),
            ends_E.data_ptr(), loads_E.data_ptr(),
        )  # fmt: skip
        return Groups(order_P, place_P, ends_E, expert_TK.shape[1])

    def clamped_swiglu(self, spec: ClampedSwiglu, gate_up_PM: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up_PM.shape[0], gate_up_PM.shape[1] // 2
        if width % LANES:  # torch would take the last elements of all rows otherwise than those before them
            halves = F.pad(gate_up_PM.unflatten(1, (2, width)), (0, -width % LANES))
            return self.clamped_swiglu(spec, halves.flatten(1))[:, :width].contiguous()
        assert gate_up_PM.is_contiguous()
        out_PM = torch.empty(rows, width, dtype=gate_up_PM.dtype)
        self._swiglu(
            gate_up_PM.data_ptr(), out_PM.data_ptr(), rows, width, spec.alpha, spec.limit, torch.get_num_threads()
        )
        return out_PM

    def combine(
        self,
        y_PH: torch.Tensor,
        weight_TK: torch.Tensor,
        groups: Groups,
        base_TH: torch.Tensor | None = None,
        gate_T1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (tokens, top_k), hidden = weight_TK.shape, y_PH.shape[1]
        if hidden % LANES:
            return self._twin.combine(y_PH, weight_TK, groups, base_TH, gate_T1)
        assert y_PH.is_contiguous() and (base_TH is None or base_TH.is_contiguous())
        assert gate_T1 is None or gate_T1.is_contiguous()
        out_TH = torch.empty(tokens, hidden, dtype=y_PH.dtype)
        base, gate = (None if t is None else t.data_ptr() for t in (base_TH, gate_T1))
        self._combine(
            y_PH.data_ptr(), weight_TK.data_ptr(), groups.place_P.data_ptr(), groups.ends_E[-1:].data_ptr(), base, gate,
            out_TH.data_ptr(), tokens, hidden, top_k, torch.get_num_threads(),
        )  # fmt: skip
        return out_TH


def cpu_experts(dtype: torch.dtype, make: MakeMethod, place: Place) -> ExpertOps:
    """Returns a layer's operations: compiled ones, or twins where there are no kernels for the dtype, this CPU or (of
    the products) the schemes of weights. make: linear methods. place: where the weights go."""
    library = cpu_experts_library(dtype)
    if library is None:
        return TorchExperts(make, place)
    return CpuExperts(library, dtype, make, place)


def _dense(library: ctypes.CDLL) -> Products:
    kernel = Kernel(
        library, "grouped_gemm", POINTER, NUMBER, POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER,
        NUMBER, NUMBER, COUNT,
    )  # fmt: skip
    together = ctypes.c_int.in_dll(library, "grouped_together").value
    return Products(partial(DenseExperts, kernel, together), lambda inputs: inputs % together == 0)


def _int8(dtype: torch.dtype, scheme: Int8Rows, make: MakeMethod) -> Products | None:
    kernel = grouped_int8_kernel(dtype)
    if kernel is None:
        return None
    planes = 1 if scheme.inputs is Inputs.INT8 else PLANES[dtype]
    return Products(
        partial(Int8Experts, kernel, planes, make), lambda inputs: inputs % QUAD == 0 and inputs <= MOST_INPUTS
    )


def _coded(dtype: torch.dtype, scheme: Coded, make: MakeMethod) -> Products | None:
    multiply = grouped_code_gemm(dtype, planes_of(dtype, scheme))
    return None if multiply is None else Products(partial(CodeExperts, multiply, make), partial(multiplies, scheme))


GROUPED: dict[type[Any], Callable[[torch.dtype, Any, MakeMethod], Products | None]] = {Int8Rows: _int8, Coded: _coded}
"""Grouped products by the class of the scheme."""
