"""The recipe "read another quantized checkpoint" of CONTRIBUTING.md, followed with an invented one: signs in bytes, and
one size per output, in tensors called `sign` and `size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tandem.configs.errors import UnsupportedModelError
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.schemes import Coded
from tandem.parallel.quantization.stored_parts import ALL, part_of
from tandem.parallel.quantization.weight_plan import WeightPlan
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.weights import weight_config
from tandem.workers.models.spec.weights.fields import Fields
from tandem.workers.models.spec.weights.names import rules_but_for
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.quantized import Format, Packed, save_quantized
from tests.support.tiny_models import BY_NAME, save_tiny_model


@dataclass(frozen=True, slots=True)
class Signs:
    """The invented layout: 0, 1 and 2 are the signs."""

    def stored(self, weight: Param) -> tuple[Param, ...]:
        size = part_of(weight, "size", columns=ALL, reshaped=True)
        return size, part_of(weight, "sign", dtype="uint8", stored=("U8",))

    def coded(self, weight: Param, found: Sequence[torch.Tensor], mesh: Mesh) -> CodedWeight:
        table = torch.tensor([-1.0, 0.0, 1.0, 0.0])
        return CodedWeight(found[1].clone(), found[0].float().clone(), 2, found[1].shape[1], table=table)


def signs(fields: Fields) -> WeightPlan:
    """Reads the invented config."""
    scheme = Coded(bits=2, group=None, layout=Signs())
    return WeightPlan(rules_but_for((".*" + fields.text("but", "nothing"),), scheme), "signs", head=False)


def pack(weight: torch.Tensor) -> Packed:
    size = weight.abs().mean(1)
    return {"sign": (weight.sign() + 1).to(torch.uint8), "size": size}, weight.sign() * size[:, None]


def test_a_checkpoint_is_a_layout_and_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = Format("signs", {"quant_method": "signs", "but": "o_proj"}, pack)
    quantized, plain = save_quantized(save_tiny_model(BY_NAME["phi3"], tmp_path), tmp_path, form, ("o_proj",))
    with pytest.raises(UnsupportedModelError, match="quant_method 'signs' is not supported"):
        load_spec(quantized)
    monkeypatch.setitem(weight_config.READERS, "signs", signs)  # type: ignore[arg-type]

    def logits(folder: Path, mesh: Mesh = Mesh()) -> torch.Tensor:
        spec, context = load_spec(folder), ParallelContext(mesh)
        decoder = build_decoder(spec, context, folder=folder, dtype=torch.float32, platform=CpuPlatform())
        assert rank_weights(spec, mesh, 4, CpuPlatform().packs(torch.float32)).total_bytes == decoder.weight_bytes
        return PagedRows(decoder, 1, 30).step([(0, prompt_ids(30, 200))], all_logits=True)

    expected = logits(plain)
    torch.testing.assert_close(logits(quantized), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
