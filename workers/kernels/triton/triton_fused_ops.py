"""FusedOps for GPUs in Triton: norms behind a sum, the way of q, k and v from their product to the cache, activations.

Formulas and layouts as in fused_ops.py, whose TorchFusedOps is the twin and computes what is too wide for these
kernels, norms of heads before the rotation, and what latents store. Each operation is one pass over its data in one
kernel. A program normalizes a whole row, which stays in registers: what else a row needs of all its elements (the
largest, for scales of 8-bit inputs) can be found there. Another one takes some heads of one token: it norms, rotates
and stores them, quantized with codes and scales that are the twin's bit for bit. Grids depend on shapes alone and slots
are read on the device, so a CUDA graph may hold them. bf16, fp16 and fp32, computed in float32; the twin also rounds
between the norm of heads and their rotation. Imported only where Triton is installed.

T tokens, H hidden size, S heads of q and k, K KV heads, D head dim, M MLP width.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.kv_store import LARGEST, LayerKV, as_indexable
from tandem.workers.kernels.triton.triton_lora import FP_FUSION
from tandem.workers.models.spec.arch import Activation

WIDEST: Final = 16384
"""Elements of a row that a program normalizes."""
WARP_ELEMENTS: Final = 256
"""Elements of such a row for each warp, of which there are 1 to 16. Fewer than 32 would be held by several threads, of
which some could read a sum that another has written."""
WIDEST_HEAD: Final = 512
HEADS: Final = 8
"""Heads of a token that a program takes."""
BLOCK: Final = 1024
"""Elements of a row that a program activates."""
ROUNDS_AT: Final = tl.constexpr(12582912.0)
"""1.5 * 2^23, to which a small number is added as a whole one: rounded to nearest, half to even."""


# ---- norms ----


@triton.jit
def add_norm(
    x, residual, weight, bias, out, eps,
    WIDTH: tl.constexpr, ADDS: tl.constexpr, CENTERED: tl.constexpr, WEIGHED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """residual[t] += x[t]; out[t] = its norm. Programs: rows."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    h = tl.arange(0, BLOCK)
    here = h < WIDTH
    own = tl.load(residual + start + h, mask=here, other=0.0)
    if ADDS:
        total = own.to(tl.float32) + tl.load(x + start + h, mask=here, other=0.0).to(tl.float32)
        own = total.to(own.dtype)
        tl.store(residual + start + h, own, mask=here)
    wide = own.to(tl.float32)
    if CENTERED:
        wide = tl.where(here, wide - tl.sum(wide, axis=0) / WIDTH, 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    if WEIGHED:
        wide *= tl.load(weight + h, mask=here, other=0.0).to(tl.float32)
    if BIASED:
        wide += tl.load(bias + h, mask=here, other=0.0).to(tl.float32)
    tl.store(out + start + h, wide.to(own.dtype), mask=here)


# ---- q, k and v ----


@triton.jit
def _fp8_codes(x):
    """The bits of e4m3, nearest, half to even, of numbers up to 448: what sm_80 has no instruction for. Normal ones
    lose 20 bits of a float's fraction; 16384 + x has a last place of 2^-9, as numbers below 2^-6 have."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _codes(x, scale, MOST: tl.constexpr, IS_FP8: tl.constexpr):
    """x / scale as the cache stores it; 0 where the scale is 0 or NaN."""
    scaled = tl.where(scale > 0, tl.div_rn(x, scale), 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -MOST), MOST)
    if IS_FP8:
        codes = _fp8_codes(scaled)
    else:
        codes = ((scaled + ROUNDS_AT) - ROUNDS_AT).to(tl.int8)
    return codes


@triton.jit
def _put(
    first, second, plane, scales, slot, k, here, f,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Stores halves of heads k at a slot of a plane. MOST: the largest code, 0 where elements are stored as they
    are."""
    place = slot * KV_HEADS + k
    at = plane + place[:, None] * DIM + f[None, :]
    inside = here[:, None] & (f < DIM // 2)[None, :]
    first, second = first.to(tl.float32), second.to(tl.float32)
    if MOST > 0:
        most = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        nothing = tl.sum(first * 0.0 + second * 0.0, axis=1)  # NaN where an element is infinite or NaN
        scale = tl.div_rn(most, tl.full(most.shape, MOST, tl.float32)) + nothing
        tl.store(scales + place, scale, mask=here)
        scale = tl.broadcast_to(scale[:, None], first.shape)
        tl.store(at, _codes(first, scale, MOST, IS_FP8), mask=inside)
        tl.store(at + DIM // 2, _codes(second, scale, MOST, IS_FP8), mask=inside)
    else:
        tl.store(at, first.to(plane.dtype.element_ty), mask=inside)
        tl.store(at + DIM // 2, second.to(plane.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_store(
    qk, v, out, weight, cos, sin, slots, keys, values, key_scales, value_scales, qk_stride, v_stride, first_tile, eps,
    QK_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
    MOST: tl.constexpr, IS_FP8: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """out[t] = heads of q and k, normed and rotated. Stores those of k, which are the last, and v. Programs: tokens,
    tiles of HEADS heads of q and k, then tiles of v. KV_HEADS 0: nothing is stored."""
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) + first_tile
    f = tl.arange(0, HALF)
    if tile * HEADS < QK_HEADS:
        s = tile * HEADS + tl.arange(0, HEADS)
        here = s < QK_HEADS
        inside = here[:, None] & (f < DIM // 2)[None, :]
        at = qk + t * qk_stride + s[:, None] * DIM + f[None, :]
        first, second = tl.load(at, mask=inside, other=0.0), tl.load(at + DIM // 2, mask=inside, other=0.0)
        if NORMED or ROTATED:
            a, b = first.to(tl.float32), second.to(tl.float32)
            if NORMED:
                scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
                own = weight + s[:, None] * DIM + f[None, :]
                a *= scale * tl.load(own, mask=inside, other=0.0).to(tl.float32)
                b *= scale * tl.load(own + DIM // 2, mask=inside, other=0.0).to(tl.float32)
            if ROTATED:
                low = (f < DIM // 2)[None, :]
                angle = t * DIM + f[None, :]
                cos_a = tl.load(cos + angle, mask=low, other=0.0).to(tl.float32)
                cos_b = tl.load(cos + angle + DIM // 2, mask=low, other=0.0).to(tl.float32)
                sin_a = tl.load(sin + angle, mask=low, other=0.0).to(tl.float32)
                sin_b = tl.load(sin + angle + DIM // 2, mask=low, other=0.0).to(tl.float32)
                a, b = a * cos_a + b * sin_a, b * cos_b + a * sin_b
            first, second = a.to(first.dtype), b.to(first.dtype)
            to = out + (t * QK_HEADS + s[:, None]) * DIM + f[None, :]
            tl.store(to, first, mask=inside)
            tl.store(to + DIM // 2, second, mask=inside)
        if KV_HEADS > 0:
            k = s - (QK_HEADS - KV_HEADS)
            slot = tl.load(slots + t)
            _put(first, second, keys, key_scales, slot, k, here & (k >= 0), f, KV_HEADS, DIM, MOST, IS_FP8)
    elif KV_HEADS > 0:
        k = (tile - (QK_HEADS + HEADS - 1) // HEADS) * HEADS + tl.arange(0, HEADS)
        inside = (k < KV_HEADS)[:, None] & (f < DIM // 2)[None, :]
        at = v + t * v_stride + k[:, None] * DIM + f[None, :]
        first, second = tl.load(at, mask=inside, other=0.0), tl.load(at + DIM // 2, mask=inside, other=0.0)
        slot = tl.load(slots + t)
        _put(first, second, values, value_scales, slot, k, k < KV_HEADS, f, KV_HEADS, DIM, MOST, IS_FP8)


# ---- activations ----


@triton.jit
def activate_rows(x, out, stride, WIDTH: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = activation(x[t]), or activation(gate) * up of x[t] = [gate | up]. KIND: a value of Activation. Programs:
    rows, blocks of elements."""
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = m < WIDTH
    own = tl.load(x + t * stride + m, mask=here, other=0.0)
    wide = own.to(tl.float32)
    if KIND == "silu":
        wide *= tl.sigmoid(wide)
    elif KIND == "gelu":
        wide *= 0.5 + 0.5 * tl.erf(wide * 0.7071067811865476)
    elif KIND == "gelu_pytorch_tanh":  # x * (1 + tanh(y)) / 2 = x * sigmoid(2 y)
        wide *= tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        tl.static_assert(KIND == "relu")
        wide = tl.where(wide < 0, 0.0, wide)
    done = wide.to(own.dtype)
    if GATED:
        up = tl.load(x + t * stride + WIDTH + m, mask=here, other=0.0)
        done = (done.to(tl.float32) * up.to(tl.float32)).to(own.dtype)
    tl.store(out + t * WIDTH + m, done, mask=here)


class TritonFusedOps(TorchFusedOps):
    """FusedOps by these kernels, and by the twin's operations where they do not suit."""

    def add_rms_norm(
        self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if residual_TH.shape[1] > WIDEST:
            return super().add_rms_norm(x_TH, residual_TH, weight_H, eps)
        return _add_norm(x_TH, residual_TH, weight_H, None, eps, centered=False)

    def add_layer_norm(
        self,
        x_TH: torch.Tensor | None,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor | None,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        if residual_TH.shape[1] > WIDEST:
            return super().add_layer_norm(x_TH, residual_TH, weight_H, bias_H, eps)
        return _add_norm(x_TH, residual_TH, weight_H, bias_H, eps, centered=True)

    def norm_rotate(
        self,
        qk_TSD: torch.Tensor,
        weight_SD: torch.Tensor | None,
        eps: float,
        cos_T1D: torch.Tensor | None,
        sin_T1D: torch.Tensor | None,
    ) -> torch.Tensor:
        if not _takes_heads(qk_TSD.shape[2]) or (weight_SD is None and cos_T1D is None):
            return super().norm_rotate(qk_TSD, weight_SD, eps, cos_T1D, sin_T1D)
        return _rotate_store(qk_TSD, qk_TSD[:, :0], weight_SD, eps, cos_T1D, sin_T1D, None, None)

    def rotate_store(
        self,
        qk_TSD: torch.Tensor,
        v_TKD: torch.Tensor,
        weight_SD: torch.Tensor | None,
        eps: float,
        cos_T1D: torch.Tensor | None,
        sin_T1D: torch.Tensor | None,
        kv: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        if not _takes_heads(qk_TSD.shape[2]):
            return super().rotate_store(qk_TSD, v_TKD, weight_SD, eps, cos_T1D, sin_T1D, kv, slots_T)
        return _rotate_store(qk_TSD, v_TKD, weight_SD, eps, cos_T1D, sin_T1D, kv, slots_T)

    def silu_mul(self, gate_up_TM: torch.Tensor) -> torch.Tensor:
        return self.activate(gate_up_TM, Activation.SILU, gated=True)

    def activate(self, x_TM: torch.Tensor, kind: Activation, *, gated: bool) -> torch.Tensor:
        assert x_TM.stride(1) == 1
        tokens, width = x_TM.shape[0], x_TM.shape[1] // (2 if gated else 1)
        out_TM = x_TM.new_empty(tokens, width)
        activate_rows[(tokens, triton.cdiv(width, BLOCK))](
            x_TM, out_TM, x_TM.stride(0), WIDTH=width, KIND=kind.value, GATED=gated, BLOCK=BLOCK,
            enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
        return out_TM


def _add_norm(
    x_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor | None,
    bias_H: torch.Tensor | None,
    eps: float,
    *,
    centered: bool,
) -> torch.Tensor:
    assert residual_TH.is_contiguous() and (x_TH is None or x_TH.is_contiguous())
    tokens, width = residual_TH.shape
    out_TH, block = torch.empty_like(residual_TH), max(WARP_ELEMENTS, triton.next_power_of_2(width))
    x, weight, bias = (out_TH if each is None else each for each in (x_TH, weight_H, bias_H))
    add_norm[(tokens,)](
        x, residual_TH, weight, bias, out_TH, eps, WIDTH=width, ADDS=x_TH is not None, CENTERED=centered,
        WEIGHED=weight_H is not None, BIASED=bias_H is not None, BLOCK=block,
        num_warps=min(16, block // WARP_ELEMENTS), enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    return out_TH


def _takes_heads(dim: int) -> bool:
    """Return whether rotate_store suits heads of this size, which it takes in halves."""
    return dim % 2 == 0 and dim <= WIDEST_HEAD


def _rotate_store(
    qk_TSD: torch.Tensor,
    v_TKD: torch.Tensor,
    weight_SD: torch.Tensor | None,
    eps: float,
    cos_T1D: torch.Tensor | None,
    sin_T1D: torch.Tensor | None,
    kv: LayerKV | None,
    slots_T: torch.Tensor | None,
) -> torch.Tensor:
    """Launches the kernel for all heads, or, where q and k stay as they are, for those that are stored."""
    (tokens, heads, dim), kv_heads = qk_TSD.shape, v_TKD.shape[1]
    assert qk_TSD.stride()[1:] == v_TKD.stride()[1:] == (dim, 1) and (cos_T1D is None) == (sin_T1D is None)
    none, storage = qk_TSD, None if kv is None else kv.keys.dtype
    planes = [none] * 4
    if kv is not None:
        assert kv.keys.is_contiguous() and kv.values.is_contiguous() and kv.keys.shape == kv.values.shape
        assert kv.keys.shape[2:] == (kv_heads, dim) and len(kv.scales) == (2 if storage in LARGEST else 0)
        planes = [as_indexable(kv.keys), as_indexable(kv.values), *(kv.scales or (none, none))]
    changes = weight_SD is not None or cos_T1D is not None
    out_TSD = qk_TSD.new_empty(qk_TSD.shape) if changes else qk_TSD
    first_tile = 0 if changes else (heads - kv_heads) // HEADS
    tiles = triton.cdiv(heads, HEADS) + triton.cdiv(kv_heads, HEADS) - first_tile
    weight, cos, sin, slots = (none if each is None else each for each in (weight_SD, cos_T1D, sin_T1D, slots_T))
    rotate_store[(tokens, tiles)](
        qk_TSD, v_TKD, out_TSD, weight, cos, sin, slots, *planes, qk_TSD.stride(0), v_TKD.stride(0), first_tile, eps,
        QK_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, NORMED=weight_SD is not None, ROTATED=cos_T1D is not None,
        MOST=LARGEST.get(storage, 0.0), IS_FP8=storage is torch.float8_e4m3fn, HEADS=HEADS,
        HALF=triton.next_power_of_2(dim // 2), enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    return out_TSD
