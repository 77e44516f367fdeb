"""Coordinates of ranks, and the ranges that they own: every element once, except what is replicated on purpose."""

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import DenseMethod, PackedMethod, can_pack
from tandem.parallel.mesh import Mesh, layer_range
from tandem.parallel.params import WHOLE, Param, Shard, Source
from tandem.workers.kernels.invariant.row_gemm import RowMethod
from tandem.workers.platforms.cpu import CpuPlatform, multiplies_by_row


def test_tp_is_the_inner_axis() -> None:
    meshes = [Mesh(tp_size=2, pp_size=3, rank=rank) for rank in range(6)]
    assert [(mesh.tp_rank, mesh.pp_rank) for mesh in meshes] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert all(mesh.rank_at(mesh.tp_rank, mesh.pp_rank) == mesh.rank for mesh in meshes)
    assert meshes[0].tp_group(2) == [4, 5]


@pytest.mark.parametrize("num_layers", [1, 4, 7, 28, 30])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 5])
def test_stages_cover_the_layers_evenly(num_layers: int, pp_size: int) -> None:
    if pp_size > num_layers:
        pytest.skip("refused by ArchSpec.check_parallel")
    ranges = [layer_range(num_layers, stage, pp_size) for stage in range(pp_size)]
    assert [layer for stage in ranges for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the last stage has the head besides"


def spans(shard: Shard, size: int, num_ranks: int) -> list[tuple[int, int]]:
    found = [shard.span(size, rank, num_ranks) for rank in range(num_ranks)]
    assert {span.total for span in found} == {size}
    return [(span.start, span.length) for span in found]


def test_spans() -> None:
    assert spans(WHOLE, 5, 2) == [(0, 5), (0, 5)]
    assert spans(Shard("tp"), 12, 3) == [(0, 4), (4, 4), (8, 4)]
    assert spans(Shard("tp", pads=True), 10, 4) == [(0, 3), (3, 3), (6, 3), (9, 3)]
    kv = Shard("tp", unit=8, replicate=True)
    assert spans(kv, 32, 2) == [(0, 16), (16, 16)]
    assert spans(kv, 16, 4) == [(0, 8), (0, 8), (8, 8), (8, 8)]


def test_a_parameter_is_cut_along_one_dimension() -> None:
    param = Param(name="o.weight", shape=(6, 8), role="o", source=Source(("o.weight",)), shard=Shard("tp", dim=1))
    assert param.stem == "o"
    assert [param.local_shape(Mesh(2, 1, rank)) for rank in (0, 1)] == [(6, 4), (6, 4)]
    assert param.local_elements(Mesh(2, 1, 1)) == 24
    assert (param.span(1, Mesh(2, 1, 1)).start, param.span(0, Mesh(2, 1, 1)).length) == (4, 6)


def test_rows_of_fused_and_interleaved_tensors() -> None:
    assert list(Source(("qkv",), start=8).stored(2, 3)) == [(10, 3)]
    by_heads = Source(("qkv",), start=4, run=4, stride=12)  # k of q, k, v per head, heads of 4
    assert list(by_heads.stored(0, 8)) == [(4, 4), (16, 4)]
    assert list(by_heads.stored(6, 4)) == [(18, 2), (28, 2)]
    assert list(by_heads.stored(4, 0)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
def test_packed_and_plain_matrices_give_equal_products(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 32), (48,), (rows, 32)))
    expected = x.float() @ weight.float().T + bias.float()
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    made = CpuPlatform().linear((), ParallelContext.single(), dtype=dtype)
    for method in (made, DenseMethod()):
        method.take(weight, bias)
        torch.testing.assert_close(method.apply(x).float(), expected, rtol=0, atol=tolerance)
        assert method.nbytes == weight.nbytes
    by_row = multiplies_by_row(dtype)
    assert isinstance(made, RowMethod) == by_row and isinstance(made, PackedMethod) == (can_pack(dtype) and not by_row)
