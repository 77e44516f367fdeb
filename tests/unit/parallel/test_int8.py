"""Int8 weights: their parameters and bytes, and the integers and scales that are made of a weight."""

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param, Scheme, Shard, Source
from tandem.parallel.quantization import int8
from tandem.parallel.quantization.int8 import Int8Method, W8A8Method, exact_product, quantize_inputs
from tandem.parallel.quantization.schemes import Int8Rows
from tandem.parallel.quantization.weight_plan import AT_LOAD, DENSE

SOURCE = Source(("m.up.weight",))


def weight_of(shape: tuple[int, int], shard: Shard, scheme: Scheme | None = Int8Rows()) -> Param:
    return Param(name="m.up.weight", shape=shape, role="up", source=SOURCE, shard=shard, merge="up", scheme=scheme)


def made(weight_OI: torch.Tensor, kind: type[Int8Method] = Int8Method) -> Int8Method:
    outputs, inputs = weight_OI.shape
    method = kind((weight_of((outputs, inputs), Shard()),), ParallelContext.single())
    method.take(weight_OI, None)
    return method


@pytest.mark.parametrize("name", ["int8", "w8a8"])
@pytest.mark.parametrize(("dim", "rank_bytes"), [(0, 12 * 40 + 12 * 4), (1, 24 * 20 + 24 * 4)])
def test_a_weight_becomes_integers_and_scales(name: str, dim: int, rank_bytes: int) -> None:
    scheme = AT_LOAD[name].of("m.up")
    weight = weight_of((24, 40), Shard("tp", dim=dim), scheme)
    assert scheme is not None and scheme.layout is None
    integers, scales = scheme.parts(weight)
    assert (integers.name, integers.dtype, integers.local_shape(Mesh(2))) == (
        "m.up.qweight", "int8", weight.local_shape(Mesh(2)),
    )  # fmt: skip
    assert (scales.name, scales.dtype, scales.local_shape(Mesh(2))) == (
        "m.up.scale", "float32", (12,) if dim == 0 else (24,),
    )  # fmt: skip
    assert weight.held_bytes(Mesh(2), 2) == rank_bytes
    assert weight_of((24, 40), Shard("tp", dim=dim), None).held_bytes(Mesh(2), 2) == 24 * 40
    assert DENSE.of("m.up") is None and not DENSE.schemes


def test_integers_and_scales_by_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    weight[7], weight[8, 1:], weight[9] = 0, 0, 1e-42
    for pieces in (int8.PIECE_ELEMENTS, 64 * 30):
        monkeypatch.setattr(int8, "PIECE_ELEMENTS", pieces)
        method = made(weight)
        assert method.weight_OI.dtype is torch.int8 and method.nbytes == 200 * 34
        for row in range(200):
            largest = float(weight[row].abs().max())
            assert method.scale_O[row] == torch.tensor(largest) / 127
            if largest > 1e-30:
                exact = (weight[row].double() / float(method.scale_O[row])).round().clamp(-127, 127)
                assert (method.weight_OI[row] - exact).abs().max() <= 1  # a quotient half way, in float32
                error = (method.weight_OI[row] * method.scale_O[row] - weight[row]).abs().max()
                assert error <= 0.5001 * method.scale_O[row]
        assert not method.weight_OI[7].any() and method.apply(torch.ones(1, 30))[0, 7] == 0
        assert method.weight_OI[8, 0].abs() == 127


def test_the_dtype_of_the_checkpoint_does_not_matter_where_numbers_are_equal() -> None:
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    first, second = made(weight), made(weight.float())
    assert torch.equal(first.weight_OI, second.weight_OI) and torch.equal(first.scale_O, second.scale_O)


def test_rounded_inputs_and_exact_sums() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 3000, generator=generator)
    x[3] = 0
    codes, scales = quantize_inputs(x)
    assert codes.abs().amax(1).tolist() == [127, 127, 127, 0, 127]
    assert (codes * scales - x).abs().max() <= 0.501 * scales.max()
    weight = torch.randint(-127, 128, (9, 3000), generator=generator)
    assert torch.equal(exact_product(codes, weight.to(torch.int8)), codes.long() @ weight.T)
    method = made(torch.randn(9, 3000, generator=generator), W8A8Method)
    expected = (codes.double() @ method.weight_OI.double().T) * scales * method.scale_O
    torch.testing.assert_close(method.apply(x).double(), expected.double(), rtol=1e-6, atol=1e-6)
