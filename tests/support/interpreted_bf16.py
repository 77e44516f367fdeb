"""bf16 in Triton's interpreter, which keeps it as integers of 16 bits and would add and multiply those."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.interpreted import INTERPRETED


def computes_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the interpreter widen bf16 to float32 for arithmetic, round each result once, and sum products in float32."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    binary_op, create_dot = InterpreterBuilder.binary_op, InterpreterBuilder.create_dot

    def in_wide(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return binary_op(self, lhs, rhs, op)
        with np.errstate(all="ignore"):
            found = torch.from_numpy(np.asarray(op(_wide(lhs.data), _wide(rhs.data)), dtype=np.float32))
        return TensorHandle(found.bfloat16().view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle(_wide(one.data), tl.float32) for one in (a, b))
        return create_dot(self, a, b, *more)

    monkeypatch.setattr(InterpreterBuilder, "binary_op", in_wide)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def _wide(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)
