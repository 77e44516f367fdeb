"""KVCache in every storage dtype: sizes, planes, and that cleaning and copying blocks reach the scales."""

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.offload.copies.kv_copies import BlockCopier, CpuCopier, StreamCopier, bytes_per_slot
from tandem.offload.kv.disk_io import read_block, write_block
from tandem.workers.kernels.kv_store import as_indexable
from tandem.workers.models.spec.kv_layout import KVLayout, Plane, described
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tandem.workers.rank.kv_cache import KVCache, block_bytes

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 3, 5, 4, 2, 16
LAYOUTS = [KVLayout.keys_and_values(HEADS, DIM)] * LAYERS
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=DTYPES, ids=str)
def kv(request: pytest.FixtureRequest) -> KVCache:
    """Every byte of block b of plane p is 10 * p + b + 1."""
    cache = KVCache.allocate(LAYOUTS, BLOCKS, BLOCK_SIZE, request.param, CpuPlatform())
    assert not any(as_indexable(plane).any() for plane in cache.planes)
    for place, plane in enumerate(cache.planes):
        for block in range(BLOCKS):
            plane[block].view(torch.uint8).fill_(10 * place + block + 1)
    return cache


def first_bytes(kv: KVCache) -> list[list[int]]:
    """Per plane the byte that fills each block; all bytes of a block are equal."""
    rows = [plane.view(torch.uint8).flatten(1) for plane in kv.planes]
    assert all((row == row[:, :1]).all() for row in rows)
    return [row[:, 0].tolist() for row in rows]


def test_planes_are_all_memory_in_layer_order(kv: KVCache) -> None:
    scaled = kv.dtype in (torch.int8, torch.float8_e4m3fn)
    assert len(kv.planes) == LAYERS * (4 if scaled else 2)
    assert all(plane.shape[0] == BLOCKS and plane[0].is_contiguous() for plane in kv.planes)
    assert sum(plane.nbytes for plane in kv.planes) == kv.nbytes
    for layer, each in enumerate(kv.tensors.layers):
        sides = [each.keys, each.values] + ([each.key_scales, each.value_scales] if scaled else [])
        mine = kv.planes[layer * len(sides) : (layer + 1) * len(sides)]
        assert [plane.data_ptr() for plane in mine] == [side.data_ptr() for side in sides if side is not None]


def test_a_block_has_as_many_bytes_as_it_says(kv: KVCache) -> None:
    assert kv.nbytes == BLOCKS * block_bytes(LAYOUTS, BLOCK_SIZE, kv.dtype)


def test_copies_read_before_they_write_and_take_the_scales_along(kv: KVCache) -> None:
    kv.copy([(0, 1), (1, 2)])
    assert first_bytes(kv) == [[10 * p + b + 1 for b in (0, 0, 1, 3, 4)] for p in range(len(kv.planes))]


def test_cleared_blocks_are_zero_in_every_plane(kv: KVCache) -> None:
    kv.clear([1, 3])
    assert first_bytes(kv) == [[10 * p + 1, 0, 10 * p + 3, 0, 10 * p + 5] for p in range(len(kv.planes))]


def test_a_block_comes_back_from_host_memory_whole(kv: KVCache) -> None:
    """Scales travel with their codes, and a slot has as many bytes as a block says it has."""
    size = block_bytes(LAYOUTS, BLOCK_SIZE, kv.dtype)
    assert bytes_per_slot(kv.planes) == size
    before = first_bytes(kv)
    copier = CpuCopier(kv.layers, torch.zeros(3, size, dtype=torch.uint8))
    copier.store([4, 1], [0, 2])
    kv.clear([1, 4])
    layers: list[int] = []
    copier.load([0, 2], [4, 1], layers.append)
    assert layers == list(range(LAYERS))
    assert first_bytes(kv) == before


def test_quantized_blocks_take_about_half_of_bf16() -> None:
    def size(dtype: torch.dtype) -> int:
        return block_bytes([KVLayout.keys_and_values(8, 128)] * 28, 16, dtype)

    assert size(torch.int8) == size(torch.float8_e4m3fn)
    assert size(torch.int8) / size(torch.bfloat16) == pytest.approx(132 / 256)


# ---- layouts ----

INVENTED = [
    KVLayout((Plane(1, 24),)),
    KVLayout((Plane(2, 16), Plane(2, 8))),
    KVLayout((Plane(1, 24),)),
    KVLayout((Plane(3, 8), Plane(1, 16), Plane(3, 8))),
]
"""One plane, as latent attention would have; two of different width; three."""


@pytest.fixture(params=DTYPES, ids=str)
def invented(request: pytest.FixtureRequest) -> KVCache:
    """Random bytes everywhere."""
    cache = KVCache.allocate(INVENTED, BLOCKS, BLOCK_SIZE, request.param, CpuPlatform())
    generator = torch.Generator().manual_seed(0)
    for plane in cache.planes:
        plane.view(torch.uint8).copy_(torch.randint(0, 255, plane.view(torch.uint8).shape, generator=generator))
    return cache


def bytes_of(kv: KVCache, blocks: list[int]) -> list[torch.Tensor]:
    return [plane.view(torch.uint8)[blocks].clone() for plane in kv.planes]


def test_a_cache_has_the_planes_of_its_layouts(invented: KVCache) -> None:
    scaled = invented.dtype in (torch.int8, torch.float8_e4m3fn)
    kind = {torch.float8_e4m3fn: "fp8_e4m3"}.get(invented.dtype, str(invented.dtype).removeprefix("torch."))
    for layout, kv, memory in zip(INVENTED, invented.tensors.layers, invented.layers, strict=True):
        assert [plane.shape[2:] for plane in kv.planes] == [(plane.heads, plane.dim) for plane in layout.planes]
        assert len(kv.scales) == (len(layout.planes) if scaled else 0)
        assert kv.keys is kv.planes[0] and kv.values is kv.planes[-1]
        assert bytes_per_slot(memory) == BLOCK_SIZE * layout.token_bytes(kind)
    assert invented.nbytes == BLOCKS * block_bytes(INVENTED, BLOCK_SIZE, invented.dtype)
    starts = {plane.data_ptr() for plane in invented.planes}
    assert len(starts) == len(invented.planes), "no two share memory"


def test_a_copy_and_cleaning_reach_every_plane_of_a_layout(invented: KVCache) -> None:
    source = bytes_of(invented, [0])
    invented.copy([(0, 3)])
    assert all(map(torch.equal, bytes_of(invented, [3]), source))
    invented.clear([3])
    invented.clear_slots(np.arange(BLOCK_SIZE, 2 * BLOCK_SIZE))
    assert not any(plane.any() for plane in bytes_of(invented, [1, 3]))
    assert all(map(torch.equal, bytes_of(invented, [0]), source))


@pytest.mark.parametrize("copier", [CpuCopier, partial(StreamCopier, HostAccelerator())], ids=["cpu", "stream"])
def test_any_layout_comes_back_from_host_and_disk_bit_for_bit(
    invented: KVCache, copier: Callable[..., BlockCopier], tmp_path: Path
) -> None:
    layout = blake2b(described(INVENTED).encode(), digest_size=16).digest()
    slab = torch.zeros(3, block_bytes(INVENTED, BLOCK_SIZE, invented.dtype), dtype=torch.uint8)
    before, layers = bytes_of(invented, [4, 1]), []
    copies = copier(invented.layers, slab)
    copies.store([4, 1], [0, 2])
    for slot in (0, 2):
        write_block(tmp_path, bytes([slot]) * 16, layout, memoryview(slab[slot].numpy()))
    invented.clear([1, 4])
    slab.zero_()
    for slot in (0, 2):
        read_block(tmp_path, bytes([slot]) * 16, layout, memoryview(slab[slot].numpy()))
    copies.load([0, 2], [2, 3], layers.append)
    assert layers == list(range(len(INVENTED)))
    assert all(map(torch.equal, bytes_of(invented, [2, 3]), before))


def test_stored_bytes_of_other_planes_are_not_read() -> None:
    """As many bytes of a token, in other planes."""
    one, two = [KVLayout((Plane(1, 32),))] * 2, [KVLayout.keys_and_values(1, 16)] * 2
    assert block_bytes(one, 4, torch.float32) == block_bytes(two, 4, torch.float32)
    assert len({described(layouts) for layouts in (one, two, one[:1], [*one, *two], [one[0], two[0]] * 2)}) == 5
    assert described(one) == "2x0:1*32" and described(INVENTED[1:2]) == "1x0:2*16+2*8"
