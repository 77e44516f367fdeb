"""Where an adapter's rows lie: every row whole in one page, no two overlap, memory follows the true rank; and what the
slab holds of it is what the file says, bit for bit."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.parallel.linear import LinearPart
from tandem.parallel.params import Span
from tandem.workers.lora.device.host_copy import make_shard
from tandem.workers.lora.device.layout import ShardShape, pack
from tandem.workers.lora.device.slab import AdapterSlab
from tandem.workers.lora.peft.peft_folder import Shape, adapted_linears, read_adapter
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.adapter_room import ALIGNED_ELEMENTS
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
CPU = torch.device("cpu")
MAX_RANK = 16


def linears_of(spec: ArchSpec) -> dict[str, Shape]:
    return {name: shape for name, shape in adapted_linears(spec).items() if not shape.is_table}


def shape_of(sizes: list[tuple[int, int]], max_rank: int) -> ShardShape:
    parts = [LinearPart(str(n), Span(i, 0, i), Span(o, 0, o)) for n, (i, o) in enumerate(sizes)]
    return ShardShape.of(parts, max_rank)


sections = st.tuples(st.integers(1, 70), st.integers(1, 300), st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(st.lists(sections, min_size=1, max_size=8), st.randoms())
def test_rows_are_whole_and_apart(drawn: list[tuple[int, int, int]], rng: random.Random) -> None:
    shape = shape_of([(inputs, outputs) for inputs, outputs, _ in drawn], 9)
    packing = pack(shape, np.array([rank for *_, rank in drawn]))
    pages = rng.sample(range(100, 400), packing.num_pages)
    starts = packing.starts([*pages, 7], shape.page_elements)
    taken: set[int] = set()
    for section, (inputs, outputs, rank) in enumerate(drawn):
        for side, length in enumerate((inputs, outputs)):
            assert (starts[side, section, rank:] == -1).all()
            for start in starts[side, section, :rank].tolist():
                row = range(start, start + length)
                assert start % ALIGNED_ELEMENTS == 0 and row[0] // shape.page_elements == row[-1] // shape.page_elements
                assert row[0] // shape.page_elements in pages and not taken.intersection(row)
                taken.update(row)


def test_memory_follows_the_true_rank() -> None:
    """0.6B shapes: rank 8 on q and v takes what its numbers take, within a page and 2 %; rank 16 on all the same."""
    qkv_o = [(1024, 2048), (1024, 1024), (1024, 1024), (2048, 1024)]
    shape = shape_of([*qkv_o, (1024, 3072), (1024, 3072), (3072, 1024)] * 28, 64)
    for ranks in ([8, 0, 8, 0, 0, 0, 0], [16] * 7, [4, 0, 4, 0, 0, 0, 0], [1] * 7):
        elements = 28 * sum(rank * sum(size) for rank, size in zip(ranks, shape.lengths_2S.T[:7].tolist(), strict=True))
        pages = pack(shape, np.array(ranks * 28)).num_pages
        assert elements <= pages * shape.page_elements <= 1.02 * elements + shape.page_elements, ranks
    assert shape.most_pages == pack(shape, np.full(7 * 28, 64)).num_pages
    assert pack(shape, np.zeros(7 * 28, np.int64)).num_pages == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (0, 2), (1, 2)])
def test_the_slab_holds_this_ranks_part_of_every_number(dtype: torch.dtype, tp_rank: int, tp_size: int) -> None:
    spec = load_spec(DEMO / "model")
    parts = []
    for name, whole in linears_of(spec).items():
        by_rows = name.endswith(("o_proj", "down_proj"))
        full = (Span(whole.inputs, 0, whole.inputs), Span(whole.outputs, 0, whole.outputs))
        cut = full[not by_rows].total // tp_size
        own = Span(full[not by_rows].total, tp_rank * cut, cut)
        parts.append(LinearPart(name, own if by_rows else full[0], full[1] if by_rows else own))
    shape = ShardShape.of(parts, MAX_RANK)
    adapters = [read_adapter(DEMO / "adapters" / name, spec, MAX_RANK) for name in ("pirate", "shout")]
    copies = [make_shard(adapter, shape, dtype, HostAccelerator()) for adapter in adapters]
    assert copies[1].num_pages == 2 * copies[0].num_pages
    slab = AdapterSlab(shape, 3 * copies[1].num_pages, dtype, CpuPlatform())
    pages = random.Random(1).sample(range(3 * copies[1].num_pages), 3 * copies[0].num_pages)
    slab.put(copies[0], pages, 0)
    slab.put(copies[1], pages[copies[0].num_pages :], 3)  # tables grow, slot 0 stays
    flat = slab.slab_PE.view(-1)
    for slot, adapter in ((0, adapters[0]), (3, adapters[1])):
        for section, (part, module) in enumerate(zip(parts, adapter.facts.modules, strict=True)):
            tables = slab.tables[section]
            assert part.name == module.name and int(tables.ranks[slot]) == module.rank
            assert float(tables.scales[slot]) == module.scale and slab.slots_of[section] == {0, 3}
            a, b = (
                torch.from_numpy(adapter.bytes_of(t).copy()).view(torch.bfloat16).view(t.shape).to(dtype)
                for t in (module.a, module.b)
            )
            for rows, whole, own in ((tables.a_rows, a, part.inputs), (tables.b_rows, b.T, part.outputs)):
                for start, row in zip(rows[slot, : module.rank].tolist(), whole, strict=True):
                    assert torch.equal(flat[start : start + own.length], row[own.start : own.start + own.length])
    assert int(slab.tables[0].ranks[1]) == 0 and tables.a_rows.is_contiguous()


def test_a_slot_that_is_used_again_forgets_what_was_there() -> None:
    spec = load_spec(DEMO / "model")
    parts = [
        LinearPart(name, Span(s.inputs, 0, s.inputs), Span(s.outputs, 0, s.outputs))
        for name, s in linears_of(spec).items()
    ]
    shape = ShardShape.of(parts, MAX_RANK)
    copy = make_shard(
        read_adapter(DEMO / "adapters" / "pirate", spec, MAX_RANK), shape, torch.float32, HostAccelerator()
    )
    slab = AdapterSlab(shape, copy.num_pages, torch.float32, CpuPlatform())
    slab.put(copy, range(copy.num_pages), 1)
    ranks_S = copy.ranks_S.copy()
    ranks_S[::2] = 0
    fewer = type(copy)(copy.pages_NE[:0], pack(shape, np.zeros_like(ranks_S)), np.zeros_like(ranks_S), copy.scales_S)
    slab.put(fewer, [], 1)
    assert not any(slab.slots_of) and not slab.tables[0].ranks.any() and (slab.tables[0].a_rows == -1).all()
