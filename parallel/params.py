"""ShardSpec: the parts of checkpoint tensors that make up one parameter on this rank.

Each layer declares the ShardSpecs of its own parameters, and checkpoint.py reads only those slices. A parameter is the
concatenation, along dim 0, of slices of one or more checkpoint tensors (q, k and v; gate and up), so merged layers need
no second copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch


class Init(Enum):
    """The values of a parameter in a random checkpoint (load_format dummy)."""

    NORMAL = "normal"  # mean 0, deviation 0.02
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class Slice:
    """The range [start, start + length) along `dim` of the checkpoint tensor `name`, whose whole shape is `full_shape`.

    A slice may extend beyond the tensor (a vocabulary padded so that tp divides it); the rest is zeros.
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    length: int | None = None

    @property
    def end(self) -> int:
        return self.full_shape[self.dim] if self.length is None else self.start + self.length

    @property
    def present_end(self) -> int:
        """The end of the slice's part inside the tensor."""
        return max(self.start, min(self.end, self.full_shape[self.dim]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The slice's shape, padding included."""
        sizes = list(self.full_shape)
        sizes[self.dim] = self.end - self.start
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One parameter: its slices, stacked along dim 0."""

    slices: tuple[Slice, ...]
    init: Init = Init.NORMAL

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.slices[0].shape
        return (sum(part.shape[0] for part in self.slices), *first[1:])


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """A parameter to be loaded. `accept` takes the tensor in its final dtype and on its final device."""

    shard: ShardSpec
    accept: Callable[[torch.Tensor], None]


def whole(name: str, *shape: int, init: Init = Init.NORMAL) -> ShardSpec:
    """Returns the spec of a parameter that every rank holds whole."""
    return ShardSpec((Slice(name, shape),), init)


def even_range(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (start, length) of a rank's equal share; the caller has checked that world_size divides size."""
    assert size % world_size == 0, (size, world_size)
    share = size // world_size
    return rank * share, share


def padded_range(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (start, length) of a rank's share of `size` rounded up to a multiple of world_size."""
    share = -(-size // world_size)
    return rank * share, share


def kv_head_range(num_kv_heads: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns (first head, heads) of a rank. With more ranks than heads, world_size / num_kv_heads ranks share each
    head."""
    if world_size <= num_kv_heads:
        return even_range(num_kv_heads, rank, world_size)
    assert world_size % num_kv_heads == 0, (num_kv_heads, world_size)
    return rank // (world_size // num_kv_heads), 1
