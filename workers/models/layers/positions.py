"""Rotary positions: the angles of every kind of RoPE scaling; kernels/fused_ops.py rotates by them.

RoPE after Su et al. 2021 (RoFormer), halves layout: dims i and i + D/2 form a pair. The decoder computes the angles
once per step and every rotating layer applies them. Other layouts are turned into this one when weights are loaded
(RopeSpec.head_order); elements that do not rotate have the angle 0. T tokens, D head dim, F = D / 2 frequencies.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.workers.models.spec.arch import RopeKind, RopeSpec


@dataclass(frozen=True, slots=True)
class Angles:
    """The angles of a step under one rope: cos_T1D, and sin_T1D with rotate-half's sign folded in (-sin for the first
    half, +sin for the second)."""

    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor


class RotaryPositions:
    """The angles of positions under one RopeSpec, a pure function of each position.

    `dynamic` (NTK by length) uses each position's own length, p + 1, in place of the sequence's, so that chunked
    prefill does not change results. It equals transformers within the trained context, and beyond it token by token.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._rope = rope
        self._dim = rope.dim or head_dim
        self._still = (head_dim - self._dim) // 2
        self._frequencies_F = frequencies(rope, self._dim).to(device)
        self._amplitude = amplitude(rope)

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Returns the angles in `dtype`, computed in float32."""
        phase_TF = positions_T[:, None].float() * self._frequencies_of(positions_T)
        cos_TF = (phase_TF.cos() * self._amplitude).to(dtype)
        sin_TF = (phase_TF.sin() * self._amplitude).to(dtype)
        if self._still:
            cos_TF, sin_TF = F.pad(cos_TF, (0, self._still), value=1.0), F.pad(sin_TF, (0, self._still))
        return Angles(torch.cat((cos_TF, cos_TF), -1)[:, None], torch.cat((-sin_TF, sin_TF), -1)[:, None])

    def _frequencies_of(self, positions_T: torch.Tensor) -> torch.Tensor:
        """[F], or [T, F] when they depend on the position."""
        rope = self._rope
        if rope.kind is not RopeKind.DYNAMIC:
            return self._frequencies_F
        length_T = (positions_T + 1).clamp(min=rope.trained_context).double()
        stretch_T = rope.factor * length_T / rope.trained_context - (rope.factor - 1)
        base_T = rope.theta * stretch_T ** (self._dim / (self._dim - 2))
        exponent_F = torch.arange(0, self._dim, 2, device=positions_T.device) / self._dim
        return (base_T[:, None] ** -exponent_F.double()).float()


def amplitude(rope: RopeSpec) -> float:
    """Returns the factor on cos and sin: 1, or the attention temperature of YaRN (Peng et al. 2023, section 3.4) and
    LongRoPE (Ding et al. 2024)."""
    if rope.kind is RopeKind.LONGROPE:
        if rope.attention_factor is not None:
            return rope.attention_factor
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.trained_context))
    if rope.kind is not RopeKind.YARN:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Returns [F] float32, radians per position, on the CPU."""
    plain_F = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind is RopeKind.LINEAR:
        return plain_F / rope.factor
    if rope.kind is RopeKind.LONGROPE:
        return plain_F / torch.tensor(rope.factors)
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(plain_F, rope)
    if rope.kind is RopeKind.YARN:
        return _yarn(plain_F, rope, head_dim)
    return plain_F


def _llama3(plain_F: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended by turns in the context."""
    turns_F = rope.trained_context * plain_F / (2 * math.pi)
    blend_F = (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_F = blend_F.clamp(0, 1)
    return (1 - blend_F) * plain_F / rope.factor + blend_F * plain_F


def _yarn(plain_F: torch.Tensor, rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """YaRN: dims that turn often are kept, those that turn rarely are interpolated, a linear ramp between."""

    def dim_of_turns(turns: float) -> float:
        wavelength = rope.trained_context / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dim_of_turns(rope.beta_fast), dim_of_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    interpolate_F = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    return plain_F / rope.factor * interpolate_F + plain_F * (1 - interpolate_F)
