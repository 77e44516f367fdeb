"""gpt-oss's mixture of experts, from its checkpoint's form, equals transformers': interleaved gate and up, biases, a
clamped activation, a router with a bias and a softmax over the experts that it chooses."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from tandem.parallel.checkpoint import load
from tandem.parallel.linear_methods import as_given, plain
from tandem.parallel.mesh import Mesh
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.models.layers.moe import MixtureOfExperts
from tandem.workers.models.spec.arch import Activation, ClampedSwiglu, Moe, Scoring
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.parameter_names import LLAMA_STEMS, ParameterNames, Role
from tandem.workers.models.spec.parameters import parameters
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.tiny_models import BY_NAME, save_tiny_model

ALONE = SimpleNamespace(all_reduce=lambda part: part)
"""Ranks' parts are added up by the test."""
HIDDEN, WIDTH, EXPERTS = 64, 48, 6
NAMES = ParameterNames(
    stems={
        **LLAMA_STEMS,
        Role.ROUTER: "mlp.router",
        Role.GATE_UP: "mlp.experts.gate_up_proj",
        Role.DOWN: "mlp.experts.down_proj",
    },
    interleaved_experts=True,
)


def their_mlp() -> GptOssMLP:
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=3,
        num_hidden_layers=1,
    )  # fmt: skip
    config._experts_implementation = "eager"
    mlp = GptOssMLP(config)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=1.0)  # so that what is clamped matters
    return mlp.float().eval()


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "twin"])
def test_the_layer_equals_theirs(compiled: bool, tmp_path: Path) -> None:
    theirs = their_mlp()
    tensors = {f"model.layers.0.mlp.{name}": value for name, value in theirs.state_dict().items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    moe = Moe(
        EXPERTS, 3, WIDTH, Activation.SILU, scoring=Scoring.TOP_SOFTMAX, router_bias=True, expert_bias=True,
        swiglu=ClampedSwiglu(theirs.experts.alpha, theirs.experts.limit),
    )  # fmt: skip
    tiny = load_spec(save_tiny_model(BY_NAME["mixtral"], tmp_path / "tiny"))
    spec = replace(tiny, hidden_size=HIDDEN, layers=(replace(tiny.layers[0], mlp=moe),))
    platform = CpuPlatform()
    make = partial(platform.linear, dtype=torch.float32)
    ops = platform.experts(torch.float32) if compiled else TorchExperts(plain, as_given)
    params = parameters(spec, NAMES).layers[0]
    x = torch.randn(37, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(x[None])[0].view(37, HIDDEN)
    for ranks, whole_experts in ((1, False), (2, False), (2, True)):
        out, held = torch.zeros_like(x), 0
        for rank in range(ranks):
            mesh = Mesh(tp_size=ranks, rank=rank, expert_parallel=whole_experts)
            context: Any = SimpleNamespace(mesh=mesh, tp_rank=rank, tp_size=ranks, tp=ALONE)
            layer = MixtureOfExperts(moe, params, context, platform.fused_ops(torch.float32), make, ops)
            slots = list(layer.slots())
            source = SafetensorsSource(StoredCheckpoint(tmp_path, [param for slot in slots for param in slot.params]))
            held += load(slots, source, dtype=torch.float32, device=torch.device("cpu"), progress=False, mesh=mesh)
            with torch.inference_mode():
                out += layer(x)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert ranks > 1 or held == sum(tensor.nbytes for tensor in tensors.values())
