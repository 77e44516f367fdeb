"""Codes that are made of dense weights: compiled ones are the twin's bit for bit, each is the nearest, and where ranks
cut groups they agree on the whole matrix's.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param, Shard, Source, Span
from tandem.parallel.quantization.code_tables import table_of
from tandem.parallel.quantization.rounding import group_ends, round_to_codes, shared_groups
from tandem.parallel.quantization.schemes import Coded, Codes
from tandem.parallel.quantization.weight_plan import AT_LOAD
from tandem.workers.kernels.cpu.weight_blocks import CpuRounding, code_rounding

SCHEMES = {
    "int4": AT_LOAD["int4"].of("m"),
    "nf4": AT_LOAD["nf4"].of("m"),
    "fp8": AT_LOAD["fp8"].of("m"),
    "symmetric": Coded(group=32),
    "3 bits": Coded(bits=3, group=24, zeros=True),
    "8 bits": Coded(bits=8, group=None, zeros=True),
    "2 bits": Coded(bits=2, group=100),
    "fp4": Coded(Codes.FP4, group=40),
    "ordered": Coded(group=48, ordered=True),
}
EACH = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
WHOLE, CUT = Span(200, 0, 200), Span(600, 170, 200)


def weight_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of all kinds: zeros, one sign, one large weight, halves between codes."""
    weight = torch.randn(37, 200, generator=torch.Generator().manual_seed(0))
    weight[3], weight[4], weight[5, 7], weight[6] = 0, weight[4].abs(), 50.0, torch.arange(200) / 8
    return weight.to(dtype)


@EACH
@pytest.mark.parametrize("columns", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_codes_are_the_twins(scheme: Coded, columns: Span, dtype: torch.dtype) -> None:
    compiled = code_rounding()
    if not isinstance(compiled, CpuRounding):
        pytest.skip("this machine compiles no kernels")
    for weight in (weight_of(dtype), weight_of(dtype)[:, ::2].repeat(1, 2), weight_of(dtype).T.contiguous().T):
        ours, twins = (round_to_codes(weight, scheme, columns, **given) for given in ({"rounding": compiled}, {}))
        assert torch.equal(ours.codes_OI, twins.codes_OI) and torch.equal(ours.scale_OG, twins.scale_OG)
        assert scheme.zeros == (ours.zero_OG is not None)
        assert ours.zero_OG is None or (twins.zero_OG is not None and torch.equal(ours.zero_OG, twins.zero_OG))


@EACH
def test_each_code_is_the_nearest(scheme: Coded) -> None:
    weight, found = weight_of(), round_to_codes(weight_of(), scheme, WHOLE)
    table = table_of(scheme)
    values = (torch.arange(2.0**scheme.bits) if table is None else table.nan_to_num(0.0)).double()
    scale_OI = found.scale_OG.double()[:, found.group_of_I]
    zero_OI = 0.0 if found.zero_OG is None else found.zero_OG.double()[:, found.group_of_I]
    least_OI = torch.full_like(scale_OI, torch.inf)
    for value in values:
        least_OI = torch.minimum(least_OI, (weight - (value - zero_OI) * scale_OI).abs())
    error_OI = (found.dense_OI().double() - weight).abs()
    assert bool((error_OI <= least_OI + 1e-5 * weight.abs().amax(1, keepdim=True)).all())
    assert not found.dense_OI()[3].any()


@EACH
def test_ranks_with_parts_of_groups_have_the_codes_of_the_whole(scheme: Coded) -> None:
    """Four ranks, whose 50 inputs are cut within all groups but those of 100."""
    whole, weight = round_to_codes(weight_of(), scheme, WHOLE), weight_of()
    param = Param(name="m.weight", shape=(37, 200), role="m", source=Source(("m.weight",)), shard=Shard("tp", dim=1))
    shares = [shared_groups(param, scheme, ParallelContext(Mesh(4, 1, rank))) for rank in range(4)]
    assert None not in shares and shared_groups(param, Coded(group=25), ParallelContext(Mesh(4, 1, 1))) is None
    bounds = [Told() for _ in range(4)]
    for _ in range(2):  # each rank tells its own, then hears the largest of all
        parts = [
            round_to_codes(
                weight[:, 50 * rank : 50 * rank + 50], scheme, Span(200, 50 * rank, 50),
                share=bounds[rank].share(bounds, scheme, rank),
            )
            for rank in range(4)
        ]  # fmt: skip
    assert torch.equal(torch.cat([part.codes_OI for part in parts], 1), whole.codes_OI)
    assert torch.equal(torch.cat([part.dense_OI() for part in parts], 1), whole.dense_OI())


class Told:
    """What a rank told in each of its calls, by the whole matrix's groups."""

    def __init__(self) -> None:
        self.numbers: list[torch.Tensor] = []

    def share(self, every: list["Told"], scheme: Coded, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        first = 0 if scheme.ordered or scheme.group is None else 50 * rank // scheme.group
        count, call, again = scheme.num_groups(200), iter(range(2)), bool(self.numbers)

        def told(mine_OG: torch.Tensor) -> torch.Tensor:
            place = next(call)
            if not again:
                self.numbers.append(torch.nn.functional.pad(mine_OG, (first, count - first - mine_OG.shape[1])))
                return mine_OG
            return torch.stack([other.numbers[place] for other in every]).amax(0)[:, first : first + mine_OG.shape[1]]

        return told


def test_scales_in_e4m3_lose_little() -> None:
    weight, wide = weight_of(), Coded(Codes.E2M1, group=16)
    found = [round_to_codes(weight, scheme, WHOLE) for scheme in (wide, replace(wide, narrow=True))]
    assert found[1].scale_OG.dtype is torch.float8_e4m3fn and found[1].outer_O is not None
    errors = [float((one.dense_OI() - weight)[8:].square().mean()) for one in found]
    assert errors[0] < errors[1] < 1.1 * errors[0]


def test_the_twin_takes_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SCHEMES["int4"]
    assert isinstance(scheme, Coded)
    whole = round_to_codes(weight_of(), scheme, WHOLE)
    monkeypatch.setattr("tandem.parallel.quantization.int8.PIECE_ELEMENTS", 200)
    tall = weight_of().repeat(4, 1)
    assert torch.equal(round_to_codes(tall, scheme, WHOLE).codes_OI, whole.codes_OI.repeat(4, 1))
    assert group_ends(replace(scheme, group=None), CUT).tolist() == [200]
