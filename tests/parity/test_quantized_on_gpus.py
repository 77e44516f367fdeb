"""Quantized checkpoints on the platform of GPUs, over the host's memory: with torch's twins, and with Triton's kernels
in its interpreter, in a process of their own. Bytes are those that a plan counts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Place, as_given
from tandem.parallel.mesh import Mesh
from tandem.workers.kernels.expert_ops import ExpertOps
from tandem.workers.kernels.triton.codes.scheme_methods import SchemeMethods
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.platforms.cpu import HostAccelerator
from tests.support import quantized as forms
from tests.support.interpreted import INTERPRETED, computes, run_in_interpreter, starts
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.platforms import GpuOnHost
from tests.support.quantized import Format, save_quantized

pytest.importorskip("triton")

TinyFolder = Callable[[str], Path]
IDS = prompt_ids(40, 200)
MODELS = [
    ("llama-mqa-biased", forms.gptq(order=True)),
    ("llama-mqa-biased", forms.packed(3, 32, sym=False)),
    ("llama-mqa-biased", forms.bytes_of(a8=True)),
    ("mixtral", forms.gptq()),
    ("gpt_oss", forms.mxfp4()),
    ("deepseek_v3", forms.fp8((16, 16))),
]
EACH = pytest.mark.parametrize(("model", "form"), MODELS, ids=[f"{model}-{form.name}" for model, form in MODELS])


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


class QuantizedByTriton(GpuOnHost):
    """Multiplies quantized weights by Triton's kernels; the rest by twins."""

    def _of_schemes(self) -> SchemeMethods:
        from tandem.workers.kernels.triton.triton_attention import H100, Multiprocessors

        if self._schemes is None:
            self._schemes = SchemeMethods(self.device, Multiprocessors(2, H100.shared_bytes), has_triton=True)
        return self._schemes

    def experts(self, dtype: torch.dtype, place: Place = as_given) -> ExpertOps:
        from functools import partial

        from tandem.workers.kernels.triton.codes.triton_coded import code_experts
        from tandem.workers.kernels.triton.triton_experts import TritonExperts

        make = partial(self.linear, dtype=dtype)
        return TritonExperts(make, place, self.device, self.tiles, partial(code_experts, dtype, make))


def built(folder: Path, platform: GpuOnHost) -> Decoder:
    """A decoder; asserts that it holds the bytes that are planned."""
    spec = load_spec(folder)
    decoder = build_decoder(
        spec, ParallelContext.single(), folder=folder, dtype=torch.float32, platform=platform, load_format="safetensors"
    )
    assert rank_weights(spec, Mesh(), 4, platform.packs(torch.float32)).total_bytes == decoder.weight_bytes
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    rows = PagedRows(decoder, 1, 40)
    return torch.cat([rows.step([(0, part)], all_logits=True) for part in (IDS[:30], IDS[30:39], IDS[39:])])


@pytest.fixture
def platform() -> GpuOnHost:
    return (QuantizedByTriton if INTERPRETED else GpuOnHost)(HostAccelerator())


@computes
@EACH
def test_models_compute_as_with_the_twins(
    model: str, form: Format, platform: GpuOnHost, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    quantized, _ = save_quantized(tiny_folder(model), tmp_path, form)
    found = logits_of(built(quantized, platform))
    expected = logits_of(built(quantized, GpuOnHost(HostAccelerator())))
    assert isinstance(platform, QuantizedByTriton)
    bound = 2e-2 if form.rounds_inputs else 2e-5  # a last bit may round an input otherwise, and then all that follows
    torch.testing.assert_close(found, expected, rtol=0, atol=bound * float(expected.abs().max()))


@pytest.mark.skipif(INTERPRETED, reason="it asks for no kernel")
def test_without_triton_logits_are_those_of_the_weights(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    model, form = MODELS[0]
    folders = save_quantized(tiny_folder(model), tmp_path, form)
    found, dense = (logits_of(built(folder, GpuOnHost(HostAccelerator()))) for folder in folders)
    torch.testing.assert_close(found, dense, rtol=0, atol=2e-5 * float(dense.abs().max()))
