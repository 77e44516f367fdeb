"""Tiles of Triton's kernels: candidates for each use of a kernel, the default first, and what has been chosen of them.

A use is a kernel with what its speed depends on and a model fixes: dtypes, sizes of heads or weights. It never holds
the rows or lengths of a step, but for experts, whose tiles have always been of two kinds: few rows each, or many. So a
choice does not change what a row's attention sums, whatever is computed beside it. workers/tuning measures and
chooses; a use that nobody has measured has its default. Imports no Triton.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import torch

SIZES: Final = (128, 256)
"""Elements of a head: the most that a size of tiles is for."""


class Tile(NamedTuple):
    """Queries times heads of a KV head, and positions, that a program multiplies at once; its warps and the depth of
    its pipeline."""

    rows: int
    positions: int
    warps: int
    stages: int


class DecodeTile(NamedTuple):
    """The same for decodes. length: positions of a part, a multiple of `positions`. programs: the most of a
    multiprocessor; registers may let fewer run at once: others find no item left then."""

    rows: int
    positions: int
    warps: int
    stages: int
    length: int = 512
    programs: int = 3


class ExpertTile(NamedTuple):
    """Rows, outputs and inputs that a program multiplies at once, its warps and the depth of its pipeline."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int = 3


AttentionClass = tuple[int, int, bool]
"""The bytes of a query's element, the most elements of a head, and whether the cache is quantized, whose elements are
converted in registers."""
CHUNKS: Final[Mapping[AttentionClass, Sequence[Tile]]] = {
    (2, 128, False): (
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 32, 8, 3),
        Tile(64, 32, 4, 3),
    ),
    (2, 256, False): (Tile(64, 32, 8, 3), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    (2, 128, True): (Tile(32, 32, 4, 3), Tile(32, 32, 4, 2), Tile(32, 32, 8, 3)),
    (2, 256, True): (Tile(16, 32, 4, 3), Tile(16, 32, 4, 2), Tile(32, 32, 8, 2)),
    (4, 128, False): (Tile(16, 16, 8, 3), Tile(16, 16, 8, 2), Tile(16, 16, 4, 3)),
    (4, 128, True): (Tile(16, 16, 8, 3),),
}  # fmt: skip
"""Tiles of chunks of prompts. Larger ones spill registers; `make check-kernels CANDIDATES=1` compiles all of them."""
DECODES: Final[Mapping[AttentionClass, Sequence[DecodeTile]]] = {
    (2, 128, False): (
        DecodeTile(16, 64, 4, 3), DecodeTile(16, 64, 4, 3, 256), DecodeTile(16, 64, 4, 3, 1024),
        DecodeTile(16, 64, 4, 3, 512, 2), DecodeTile(16, 64, 4, 4, 512, 2), DecodeTile(16, 32, 4, 4, 512, 4),
        DecodeTile(16, 32, 2, 4, 512, 4), DecodeTile(16, 128, 4, 2, 512, 2), DecodeTile(16, 64, 8, 3),
    ),
    (2, 256, False): (
        DecodeTile(16, 16, 4, 4), DecodeTile(16, 16, 4, 4, 256), DecodeTile(16, 16, 4, 4, 1024),
        DecodeTile(16, 32, 4, 3), DecodeTile(16, 32, 8, 3),
    ),
    (2, 128, True): (
        DecodeTile(16, 32, 4, 4), DecodeTile(16, 32, 4, 4, 256), DecodeTile(16, 32, 4, 4, 1024),
        DecodeTile(16, 32, 4, 3), DecodeTile(16, 64, 8, 3), DecodeTile(16, 32, 4, 4, 512, 4),
    ),
    (2, 256, True): (
        DecodeTile(16, 32, 4, 3), DecodeTile(16, 32, 4, 3, 256), DecodeTile(16, 32, 4, 3, 1024),
        DecodeTile(16, 32, 8, 3),
    ),
    (4, 128, False): (DecodeTile(16, 16, 4, 3), DecodeTile(16, 16, 4, 3, 256), DecodeTile(16, 16, 4, 3, 1024)),
    (4, 128, True): (DecodeTile(16, 16, 4, 3),),
}  # fmt: skip
SHORT_DECODES: Final = (DecodeTile(16, 16, 4, 4), DecodeTile(16, 16, 4, 4, 256), DecodeTile(16, 16, 4, 4, 1024))
"""Tiles of fp16 decodes over quantized caches for heads of up to 128 elements, on devices with fewer registers."""
FEW: Final[Mapping[int, Sequence[ExpertTile]]] = {
    2: (
        ExpertTile(16, 64, 128, 4), ExpertTile(16, 64, 128, 4, 4), ExpertTile(16, 128, 64, 4),
        ExpertTile(16, 32, 128, 4), ExpertTile(16, 64, 256, 4, 2), ExpertTile(16, 128, 128, 8),
    ),
    4: (ExpertTile(16, 32, 32, 4), ExpertTile(16, 64, 32, 4), ExpertTile(16, 32, 64, 4, 2)),
}  # fmt: skip
MANY: Final[Mapping[int, Sequence[ExpertTile]]] = {
    2: (
        ExpertTile(64, 128, 64, 8), ExpertTile(128, 128, 64, 8), ExpertTile(128, 128, 32, 8),
        ExpertTile(64, 128, 64, 4), ExpertTile(64, 64, 64, 4), ExpertTile(64, 256, 32, 8),
        ExpertTile(64, 128, 64, 8, 4),
    ),
    4: (ExpertTile(32, 64, 16, 8), ExpertTile(32, 64, 16, 4), ExpertTile(32, 32, 16, 4)),
}  # fmt: skip
"""Tiles of experts by the bytes of an element, with few rows each and with many. In fp32 any that fill the tensor cores
spill registers."""

Use = tuple[object, ...]
"""The kernel, and what its speed depends on."""
T = TypeVar("T", Tile, DecodeTile, ExpertTile)


def attention_class(element_bytes: int, dim: int, is_quantized: bool) -> AttentionClass:
    """Returns the class of a layer's tiles. dim: elements of a key or a value, whichever has more."""
    return element_bytes, next((size for size in SIZES if dim <= size), 0), is_quantized


def attention_use(kernel: str, dtype: torch.dtype, dim: int, group: int, kv_dtype: torch.dtype) -> Use:
    """Returns the use of a layer. group: query heads of a KV head."""
    return kernel, dtype, "head", dim, "group", group, "cache", kv_dtype


def experts_use(dtype: torch.dtype, experts: int, outputs: int, inputs: int, *, has_many: bool) -> Use:
    """Returns the use of a projection of a layer's experts. has_many: they have MANY rows each."""
    rows = "many" if has_many else "few"
    return "grouped_product", dtype, "experts", experts, "outputs", outputs, "inputs", inputs, "rows", rows


def words(use: Use) -> str:
    """Returns a use as files, messages and tables have it."""
    return " ".join(str(part).removeprefix("torch.") for part in use)


class TunedTiles:
    """The tiles that were chosen for a device: their numbers, by the words of a use. Does not change."""

    def __init__(self, chosen: Mapping[str, Sequence[int]] | None = None) -> None:
        self.chosen = dict(chosen or {})
        self._numbers: dict[Use, Sequence[int] | None] = {}

    def pick(self, use: Use, default: T) -> T:
        """Returns the tile of a use."""
        if not self.chosen:
            return default
        if use not in self._numbers:
            self._numbers[use] = self.chosen.get(words(use))
        numbers = self._numbers[use]
        return default if numbers is None else type(default)(*numbers)
