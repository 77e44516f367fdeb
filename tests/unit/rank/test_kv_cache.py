"""KVCache in every storage dtype: sizes, planes, and that cleaning and copying blocks reach the scales."""

import pytest
import torch

from tandem.offload.copies.kv_copies import CpuCopier, bytes_per_slot
from tandem.workers.kernels.kv_store import as_indexable
from tandem.workers.platforms.cpu import cpu_platform
from tandem.workers.rank.kv_cache import KVCache, block_bytes

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 3, 5, 4, 2, 16
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=DTYPES, ids=str)
def kv(request: pytest.FixtureRequest) -> KVCache:
    """Every byte of block b of plane p is 10 * p + b + 1."""
    cache = KVCache.allocate(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, request.param, cpu_platform())
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
    scaled = kv.slab.dtype in (torch.int8, torch.float8_e4m3fn)
    assert len(kv.planes) == LAYERS * (4 if scaled else 2)
    assert all(plane.shape[0] == BLOCKS and plane[0].is_contiguous() for plane in kv.planes)
    assert sum(plane.nbytes for plane in kv.planes) == kv.nbytes
    for layer, each in enumerate(kv.tensors.layers):
        sides = [each.keys, each.values] + ([each.key_scales, each.value_scales] if scaled else [])
        mine = kv.planes[layer * len(sides) : (layer + 1) * len(sides)]
        assert [plane.data_ptr() for plane in mine] == [side.data_ptr() for side in sides if side is not None]


def test_a_block_has_as_many_bytes_as_it_says(kv: KVCache) -> None:
    assert kv.nbytes == BLOCKS * block_bytes(LAYERS, BLOCK_SIZE, HEADS, DIM, kv.slab.dtype)


def test_copies_read_before_they_write_and_take_the_scales_along(kv: KVCache) -> None:
    kv.copy([(0, 1), (1, 2)])
    assert first_bytes(kv) == [[10 * p + b + 1 for b in (0, 0, 1, 3, 4)] for p in range(len(kv.planes))]


def test_cleared_blocks_are_zero_in_every_plane(kv: KVCache) -> None:
    kv.clear([1, 3])
    assert first_bytes(kv) == [[10 * p + 1, 0, 10 * p + 3, 0, 10 * p + 5] for p in range(len(kv.planes))]


def test_a_block_comes_back_from_host_memory_whole(kv: KVCache) -> None:
    """Scales travel with their codes, and a slot has as many bytes as a block says it has."""
    size = block_bytes(LAYERS, BLOCK_SIZE, HEADS, DIM, kv.slab.dtype)
    assert bytes_per_slot(kv.planes) == size
    before = first_bytes(kv)
    copier = CpuCopier(kv.planes, LAYERS, torch.zeros(3, size, dtype=torch.uint8))
    copier.store([4, 1], [0, 2])
    kv.clear([1, 4])
    layers: list[int] = []
    copier.load([0, 2], [4, 1], layers.append)
    assert layers == list(range(LAYERS))
    assert first_bytes(kv) == before


def test_quantized_blocks_take_about_half_of_bf16() -> None:
    def size(dtype: torch.dtype) -> int:
        return block_bytes(28, 16, 8, 128, dtype)

    assert size(torch.int8) == size(torch.float8_e4m3fn)
    assert size(torch.int8) / size(torch.bfloat16) == pytest.approx(132 / 256)
