"""Coordinates of ranks, and the ranges that they own: every element once, except what is replicated on purpose."""

import pytest
import torch

from tandem.parallel.linear_methods import PackedMatrix, PlainMatrix, can_pack
from tandem.parallel.mesh import Mesh, layer_range
from tandem.parallel.params import even_range, kv_head_range, padded_range
from tandem.workers.platforms.cpu import cpu_platform


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


def test_ranges() -> None:
    assert [even_range(12, rank, 3) for rank in range(3)] == [(0, 4), (4, 4), (8, 4)]
    assert [padded_range(10, rank, 4) for rank in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 3)]
    assert [kv_head_range(4, rank, 2) for rank in range(2)] == [(0, 2), (2, 2)]
    assert [kv_head_range(2, rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
def test_packed_and_plain_matrices_give_equal_products(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 32), (48,), (rows, 32)))
    expected = x.float() @ weight.float().T + bias.float()
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    made = cpu_platform().matrices(dtype)(weight, bias)
    for matrix in (made, PlainMatrix(weight, bias)):
        torch.testing.assert_close(matrix(x).float(), expected, rtol=0, atol=tolerance)
        assert matrix.nbytes == weight.nbytes
    assert isinstance(made, PackedMatrix) == can_pack(dtype)
