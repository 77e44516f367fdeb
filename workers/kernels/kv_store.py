"""Storage of KV: unchanged, cast, or quantized with one scale per token and KV head; a Protocol and its torch twin.

    scale = max |x| / L;  code = x / scale, rounded to nearest;  x' = code * scale     L = 127 (int8), 448 (fp8 e4m3)

Scales are float32: every bf16 and fp32 value has one, where fp16 scales would overflow at |x| = 8.3e6 to save 1.5 % of
the bytes at head dim 128. A zero vector has scale 0. A vector with NaN or an infinity has scale NaN, so it reads back
as NaN. Called by workers/attention and workers/rank/kv_cache.py; compiled for CPUs in cpu_kv_quant.py. T tokens, K KV
heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch

LARGEST: Final[Mapping[torch.dtype, float]] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_DTYPE: Final = torch.float32
NOT_KNOWN: Final = -1
"""Stands for how much of a block a draft has read, where it comes from a file, or from a process before this one."""


class LayerKV:
    """One layer's cache: planes [num_blocks, block_size, K, D], each of its own K and D, and where quantized their
    scales [num_blocks, block_size, K]. keys, values: the first plane and the last, which may be the same one. group:
    whose block table the layer uses (docs/decisions/037-kv-groups.md)."""

    __slots__ = ("group", "key_scales", "keys", "planes", "scales", "value_scales", "values")

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        self.keys, self.values, self.key_scales, self.value_scales = keys, values, key_scales, value_scales
        self.planes: Sequence[torch.Tensor] = (keys, values)
        self.scales = tuple(scales for scales in (key_scales, value_scales) if scales is not None)
        self.group = 0

    @classmethod
    def of(cls, planes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], group: int = 0) -> "LayerKV":
        """scales: of the planes, in order; none where the cache is not quantized."""
        kv = cls(planes[0], planes[-1], *((scales[0], scales[-1]) if scales else ()))
        kv.planes, kv.scales, kv.group = tuple(planes), tuple(scales), group
        return kv


class KVStore(Protocol):
    """Writes to a cache and reads from it; the storage dtype is the cache's."""

    def write(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        """Stores the tokens' K and V at their slots (block id * block size + offset)."""
        ...

    def gather(
        self, cache: torch.Tensor, scales: torch.Tensor | None, block_ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Fills `out` [blocks, block_size, K, D], in its own dtype, with the given blocks (int64) of keys or values;
        returns it."""
        ...


class TorchKVStore:
    """The twin, for any device and dtype."""

    def write(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        both = ((k_TKD, kv.keys, kv.key_scales), (v_TKD, kv.values, kv.value_scales))
        for x_TKD, cache, scales in both[: 1 if kv.values is kv.keys else 2]:
            stored_TKD, scales_TK = encode(x_TKD, cache.dtype)
            as_indexable(cache).view(-1, *cache.shape[2:]).index_copy_(0, slots_T, as_indexable(stored_TKD))
            if scales is not None and scales_TK is not None:
                scales.view(-1, scales.shape[2]).index_copy_(0, slots_T, scales_TK)

    def gather(
        self, cache: torch.Tensor, scales: torch.Tensor | None, block_ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        if cache.dtype is out.dtype:
            return torch.index_select(cache, 0, block_ids, out=out)
        stored = as_indexable(cache).index_select(0, block_ids).view(cache.dtype)
        return out.copy_(decode(stored, None if scales is None else scales[block_ids], out.dtype))


def encode(x_TKD: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns x as `storage`, and its scales [T, K] where that dtype needs them."""
    largest = LARGEST.get(storage)
    if largest is None:
        return x_TKD.to(storage), None
    wide_TKD = x_TKD.float()
    most_TK1 = wide_TKD.abs().amax(dim=-1, keepdim=True)
    scale_TK1 = (most_TK1 / largest).masked_fill_(~most_TK1.isfinite(), float("nan"))
    codes_TKD = (wide_TKD / scale_TK1).nan_to_num_(0.0, 0.0, 0.0).clamp_(-largest, largest)
    if storage is torch.int8:
        codes_TKD.round_()
    return codes_TKD.to(storage), scale_TK1.squeeze(-1)


def decode(stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns a cache's content [.., K, D] in `dtype`; the product with the scales is computed in float32."""
    if scales is None:
        return stored.to(dtype)
    return (stored.float() * scales[..., None]).to(dtype)


def as_indexable(x: torch.Tensor) -> torch.Tensor:
    """Returns the same memory in a dtype that torch can index, fill and compare, which it cannot for fp8."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
