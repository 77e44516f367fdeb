"""The recipe "add a linear method" of CONTRIBUTING.md, followed with an invented one: signs and one scale per output.

A model whose weights are all of one size per output loses nothing by it, so its logits are those of the dense model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.offload.weights.layer_placement import spread
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Arrive, LinearMethod, Place, as_given
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import WHOLE, Param
from tandem.parallel.quantization import weight_plan
from tandem.parallel.quantization.weight_plan import ANY, Rule, WeightPlan
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.platforms import cpu
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import BY_NAME, save_tiny_model

NAME = "signs"


@dataclass(frozen=True, slots=True)
class Signs:
    """One byte a sign."""

    layout: None = None
    apart: bool = False
    words: str = "signs"

    def parts(self, weight: Param) -> tuple[Param, ...]:
        by_output = weight.shard if weight.shard.dim == 0 else WHOLE
        return (
            replace(weight, name=f"{weight.stem}.signs", dtype="int8"),
            replace(weight, name=f"{weight.stem}.size", shape=weight.shape[:1], dtype="float32", shard=by_output),
        )

    def unstored(self) -> "Signs":
        return self


class SignsMethod(LinearMethod):
    is_copy = True

    def __init__(self, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> None:
        self._place = place
        self._arrive: Arrive | None = None
        self.nbytes = 0

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._size_O, self._bias_O = weight_OI.abs().amax(1), bias_O
        self._signs_OI, self._arrive = self._place(weight_OI.sign().to(torch.int8))
        self.nbytes = weight_OI.numel() + 4 * len(weight_OI)

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        y_TO = x_TI @ self._signs_OI.to(x_TI.dtype).T * self._size_O.to(x_TI.dtype)
        return y_TO if self._bias_O is None else y_TO + self._bias_O


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(weight_plan.AT_LOAD, NAME, WeightPlan((Rule(ANY, Signs()),)))
    monkeypatch.setitem(
        cpu.METHODS, Signs, cpu.SchemeProducts(lambda dtype, scheme: SignsMethod, lambda dtype, scheme: True)
    )


def save_signs(folder: Path) -> Path:
    """Makes every weight that takes the format one of two numbers per output."""
    table, tensors = parameters_of(load_spec(folder)), load_file(folder / "model.safetensors")
    for param in (table.head, *(matrix for layer in table.layers for matrix in layer.matrices)):
        weight = tensors[param.source.names[0]]
        tensors[param.source.names[0]] = weight.sign() * weight.abs().amax(1, keepdim=True) / 4
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.usefixtures("registered")
def test_a_linear_method_is_a_scheme_and_a_product(tmp_path: Path) -> None:
    folder = save_signs(save_tiny_model(BY_NAME["llama-mqa-biased"], tmp_path))
    ids = prompt_ids(30, 200)

    def build(quantization: str | None, streamed: tuple[int, ...] = ()) -> Decoder:
        return build_decoder(
            load_spec(folder, quantization=quantization), ParallelContext.single(), folder=folder,
            dtype=torch.float32, platform=CpuPlatform(), streamed=streamed,
        )  # fmt: skip

    def logits(decoder: Decoder) -> torch.Tensor:
        return PagedRows(decoder, 1, 30).step([(0, ids)], all_logits=True)

    dense, signs, streamed = build(None), build(NAME), build(NAME, spread(4, 4))
    torch.testing.assert_close(logits(signs), logits(dense), rtol=0, atol=2e-5 * float(logits(dense).abs().max()))
    assert torch.equal(logits(streamed), logits(signs))
    assert rank_weights(load_spec(folder, quantization=NAME), Mesh(), 4, True).total_bytes == signs.weight_bytes
    assert signs.weight_bytes < dense.weight_bytes
    streamed.close()
