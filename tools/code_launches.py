"""CODE_LAUNCHES: calls of the kernels for quantized weights as layers make them, on CPU tensors, for
tools/check_kernels.py."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple


class CodeLaunch(NamedTuple):
    """Products with weights of one scheme: a linear layer's, and those of experts if there are some. scheme: Coded's
    fields by name; None: Int8Rows, and its `rounds`."""

    dtype: str
    outputs: int
    inputs: int
    scheme: Mapping[str, Any]
    rows: tuple[int, ...] = (1, 17, 64)
    experts: int = 0
    biased: bool = False


CODE_SHAPES = (
    CodeLaunch("bfloat16", 1024, 4096, {"group": 128}, experts=8),
    CodeLaunch("bfloat16", 4096, 4096, {"group": 128, "zeros": True}, biased=True),
    CodeLaunch("bfloat16", 2880, 2880, {"codes": "E2M1", "group": 32}, experts=32, biased=True),
    CodeLaunch("bfloat16", 1024, 4096, {"codes": "E2M1", "group": 16, "narrow": True}, experts=8),
    CodeLaunch("bfloat16", 1024, 4096, {"codes": "NF4", "group": 64}),
    CodeLaunch("bfloat16", 1024, 4096, {"codes": "E4M3", "bits": 8, "group": None}),
    CodeLaunch("bfloat16", 1024, 4096, {"codes": "E4M3", "bits": 8, "group": 128}, experts=128),
    CodeLaunch("bfloat16", 1024, 4096, {}, experts=8),
    CodeLaunch("bfloat16", 1000, 1000, {"rounds": True}, rows=(1, 64)),
    CodeLaunch("bfloat16", 1000, 1000, {"bits": 8, "group": 128, "zeros": True}, rows=(1, 64)),
    CodeLaunch("float16", 1000, 1080, {"group": 40, "zeros": True, "ordered": True}, experts=8),
    CodeLaunch("float16", 1024, 1000, {"group": None}, rows=(1, 64)),
    CodeLaunch("float16", 1024, 1024, {"codes": "FP4", "group": 64}, rows=(1, 64)),
    CodeLaunch("float16", 1024, 1024, {"codes": "FP4", "group": 16}, rows=(1, 64)),
    CodeLaunch("bfloat16", 1024, 1000, {"codes": "NF4", "group": 40}, rows=(1, 64)),
    CodeLaunch("float32", 1024, 1024, {"group": 128, "zeros": True}, rows=(1, 64)),
    CodeLaunch("float32", 1000, 1080, {"codes": "E2M1", "group": 16}, rows=(1, 64), experts=4),
    CodeLaunch("float32", 1000, 1000, {"rounds": True}, rows=(1, 64)),
)
"""Each dtype; each kind of codes, of four bits and of eight; scales by step, part, list and output; with and without
zeros, biases and an order; tiles of few rows and of many; steps that divide inputs and ones that do not."""


def launch_codes(shape: CodeLaunch) -> None:
    """Multiplies as a layer does, then as experts do."""
    import torch

    from tandem.parallel.context import ParallelContext
    from tandem.parallel.expert_methods import ExpertParams, Groups
    from tandem.parallel.params import Param, Source
    from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
    from tandem.workers.kernels.triton.codes.triton_code_gemm import MANY_FROM
    from tandem.workers.kernels.triton.codes.triton_code_inputs import rounded_to_e4m3
    from tandem.workers.kernels.triton.codes.triton_coded import (
        TritonCodedMethod,
        TritonCodeExperts,
        TritonInt8Method,
    )
    from tools.kernel_launches import multiprocessors

    dtype, given = getattr(torch, shape.dtype), dict(shape.scheme)
    rounds = given.pop("rounds", False)
    if given:
        codes = Codes[given.pop("codes", "INTEGERS")]
        scheme: Any = Coded(codes, **given)
        make: Any = partial(TritonCodedMethod, dtype, multiprocessors=multiprocessors())
    else:
        scheme = Int8Rows(Inputs.INT8 if rounds else Inputs.AS_THEY_ARE)
        make = partial(TritonInt8Method, dtype, rounds=rounds, multiprocessors=multiprocessors())

    def param(*size: int) -> Param:
        scheme_of = scheme if len(size) == 2 else None
        return Param(name="x.weight", shape=size, role="x", source=Source(("x.weight",)), merge="x", scheme=scheme_of)

    weight, bias_O = param(shape.outputs, shape.inputs), torch.zeros(shape.outputs, dtype=dtype)
    method = make((weight,), ParallelContext.single())
    method.take(torch.zeros(weight.shape, dtype=dtype), bias_O if shape.biased else None)
    for rows in shape.rows:
        method.apply(torch.zeros(rows, shape.inputs, dtype=dtype))
    rounded_to_e4m3(torch.zeros(2, shape.inputs, dtype=dtype))
    if not shape.experts:
        return
    small = param(64, shape.inputs)
    one = ExpertParams((small,), (param(64),) if shape.biased else ())
    experts = TritonCodeExperts(dtype, make, [one] * shape.experts, ParallelContext.single())
    for slot in experts.slots():
        slot.accept(torch.zeros(slot.params[0].shape, dtype=dtype))
    for tokens in (1, MANY_FROM * shape.experts):
        order, ends = torch.zeros(2 * tokens, dtype=torch.int32), torch.zeros(shape.experts, dtype=torch.int32)
        groups = Groups(order, order, ends, 2)
        for gathers in (True, False):
            x = torch.zeros((1 if gathers else 2) * tokens, shape.inputs, dtype=dtype)
            experts.apply(x, groups, gathers=gathers)


CODE_LAUNCHES: Mapping[str, Callable[[], None]] = {
    f"codes {number}": partial(launch_codes, shape) for number, shape in enumerate(CODE_SHAPES)
}
