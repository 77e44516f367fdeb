"""Copies of KV blocks by streams: bit for bit what CpuCopier copies, in few calls, ordered with the layers' steps."""

import random
from collections.abc import Sequence

import pytest
import torch

from tandem.offload.copies import kv_copies
from tandem.offload.copies.kv_copies import CpuCopier, StreamCopier, bytes_per_slot
from tandem.workers.platforms.cpu import HostAccelerator
from tests.support.traced_accelerator import TracedAccelerator

BLOCKS = 60


def bytes_of(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def side_by_side() -> list[list[torch.Tensor]]:
    """Keys and values of eight layers in one memory."""
    slab = bytes_of(16, BLOCKS, 4, 8, seed=1)
    return [[slab[2 * layer], slab[2 * layer + 1]] for layer in range(8)]


def with_scales() -> list[list[torch.Tensor]]:
    """Codes in one memory, scales in another."""
    codes, scales = bytes_of(8, BLOCKS, 4, 8, seed=2), torch.randn(8, BLOCKS, 4)
    return [[codes[at], codes[at + 1], scales[at], scales[at + 1]] for at in range(0, 8, 2)]


def unlike() -> list[list[torch.Tensor]]:
    """Planes of several memories and distances, one of which lies behind another: blocks of no whole words."""
    some, others = bytes_of(6, BLOCKS, 3, seed=3), bytes_of(3, BLOCKS, 12, seed=4)
    return [
        [some[3], some[0]],
        [others[0], some[1], some[2], some[4]],
        [others[2]],
        [others[1], bytes_of(BLOCKS, 5, seed=5)],
    ]


LAYOUTS = pytest.mark.parametrize("make", [side_by_side, with_scales, unlike])


def snapshot(layers: Sequence[Sequence[torch.Tensor]], blocks: list[int]) -> list[list[torch.Tensor]]:
    return [[plane[blocks].clone() for plane in layer] for layer in layers]


@LAYOUTS
@pytest.mark.parametrize("group_bytes", [1, 40, 10**6])
@pytest.mark.parametrize("order", ["consecutive", "in runs", "shuffled"])
def test_blocks_are_what_one_by_one_copies_make_of_them(
    make: object, group_bytes: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers have arrived when their call comes, in order; blocks and slots of others are as they were."""
    assert callable(make)
    monkeypatch.setattr(kv_copies, "GROUP_BYTES", group_bytes)
    rng = random.Random(0)
    layers, count = make(), 45
    slots = list(range(7, 7 + count))
    if order == "in runs":
        slots = [*range(40, 60), *range(3, 20), 22, 21, *range(30, 36)]
    elif order == "shuffled":
        rng.shuffle(slots)
    planes = [plane for layer in layers for plane in layer]
    slabs = [bytes_of(BLOCKS, bytes_per_slot(planes), seed=9) for _ in range(2)]
    ours, one_by_one = StreamCopier(HostAccelerator(), layers, slabs[0]), CpuCopier(layers, slabs[1])
    blocks, targets = (rng.sample(range(BLOCKS), count) for _ in range(2))
    for copier in (ours, one_by_one):
        copier.store(blocks, slots)
    assert torch.equal(*slabs)
    before, kept = snapshot(layers, blocks), sorted({*range(BLOCKS)} - {*targets})
    others = snapshot(layers, kept)
    for plane in planes:
        plane[targets] = 0
    arrived: list[int] = []

    def on_layer(layer: int) -> None:
        arrived.append(layer)
        for found, wanted in zip(snapshot(layers, targets)[layer], before[layer], strict=True):
            assert torch.equal(found, wanted)

    ours.load(slots, targets, on_layer)
    assert arrived == list(range(len(layers)))
    for found, wanted in zip(snapshot(layers, kept), others, strict=True):
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("make", "stacks"), [(side_by_side, 1), (with_scales, 8)])
def test_calls_are_few(make: object, stacks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store: of 32 blocks at once, each kind of planes in one gather, and a copy for a run of slots. A load: a group
    of layers, of as many blocks as there is room for, in one call and a scatter for each kind of planes."""
    assert callable(make)
    layers = make()
    size = bytes_per_slot([plane for layer in layers for plane in layer])
    monkeypatch.setattr(kv_copies, "GROUP_BYTES", size // 4)
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        copier = StreamCopier(accelerator, layers, torch.zeros(BLOCKS, size, dtype=torch.uint8))
        accelerator.synchronize()  # its staging memory is there
        counts = accelerator.counts
        counts.clear()
        copier.store(list(range(50)), list(range(5, 55)))
        assert counts == {"operators": 2 * (stacks + 1), "uploads": 1, "synchronizations": 1, "reads on the host": 0}
        counts.clear()
        copier.load(list(range(5, 55)), list(range(50)), lambda layer: None)
        scatters = max(stacks, 4)
        assert counts == {"operators": 4 + scatters, "uploads": 1, "synchronizations": 1, "reads on the host": 0}
