"""The recipe "add a model family" of CONTRIBUTING.md, followed with an invented one.

It has other keys and names, q, k and v in one tensor by heads, LayerNorms and no gate. Its checkpoint is a GPT-2 in
disguise, and transformers is the judge.
"""

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.parallel.context import ParallelContext
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.arch import NormKind
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family import Family, PositionKind
from tandem.workers.models.spec.family_rows import families
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.parameter_names import FusedQkv, ParameterNames, Role
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import BY_NAME, load_peer, save_tiny_model

INVENTED = Family(
    architecture="InventedForCausalLM",
    keys={"hidden_size": "width", "num_layers": "depth", "num_heads": "heads", "num_kv_heads": "heads",
          "mlp_width": "inner", "context": "reach", "activation": "bend", "norm_eps": "tiny"},
    qkv_bias=True,
    o_bias=True,
    mlp_bias="has_biases",
    norm=NormKind.LAYER,
    gated=False,
    positions=PositionKind.LEARNED,
    names=ParameterNames(
        stems=MappingProxyType({
            Role.EMBEDDING: "words", Role.POSITIONS: "places", Role.ATTENTION_NORM: "first", Role.QKV: "mixed",
            Role.O: "out", Role.MLP_NORM: "second", Role.UP: "up", Role.DOWN: "down", Role.FINAL_NORM: "last",
            Role.HEAD: "head",
        }),
        layer_prefix="floor.{layer}.",
        base_prefix="",
        fused_qkv=FusedQkv.BY_HEAD,
    ),
    defaults={"bend": "gelu_new", "has_biases": True, "tie_word_embeddings": True},
)  # fmt: skip
NAMES = {
    "wte": "words", "wpe": "places", "ln_f": "last", "ln_1": "first", "attn.c_attn": "mixed", "attn.c_proj": "out",
    "ln_2": "second", "mlp.c_fc": "up", "mlp.c_proj": "down",
}  # fmt: skip


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, INVENTED))


def disguise(gpt2: Path, target: Path) -> Path:
    """The same weights under the invented names, matrices turned, q, k and v by heads."""
    config = json.loads((gpt2 / "config.json").read_text())
    heads, hidden = config["n_head"], config["n_embd"]
    tensors = {}
    for name, tensor in load_file(gpt2 / "model.safetensors").items():
        rest = name.removeprefix("transformer.")
        layer, _, stem = rest.removeprefix("h.").partition(".") if rest.startswith("h.") else ("", "", rest)
        stem, _, kind = stem.rpartition(".")
        if layer and kind == "weight" and tensor.ndim == 2:
            tensor = tensor.T
        if stem == "attn.c_attn":
            tensor = tensor.unflatten(0, (3, heads, hidden // heads)).transpose(0, 1).flatten(0, 2)
        tensors[f"{f'floor.{layer}.' if layer else ''}{NAMES[stem]}.{kind}"] = tensor.contiguous()
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    invented = {
        "architectures": ["InventedForCausalLM"], "vocab_size": config["vocab_size"], "width": hidden, "heads": heads,
        "depth": config["n_layer"], "reach": config["n_positions"], "inner": 4 * hidden,
        "tiny": config["layer_norm_epsilon"],
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(invented))
    return target


@pytest.mark.usefixtures("registered")
def test_a_family_is_a_row_of_data(tmp_path: Path) -> None:
    gpt2 = save_tiny_model(BY_NAME["gpt2"], tmp_path)
    folder = disguise(gpt2, tmp_path / "invented")
    spec = load_spec(folder)
    assert parameters_of(spec).num_elements == load_peer(gpt2).num_parameters()
    decoder = build_decoder(spec, ParallelContext.single(), folder=folder, dtype=torch.float32, platform=CpuPlatform())
    ids = prompt_ids(30, 200)
    ours = PagedRows(decoder, 1, 30).step([(0, ids)], all_logits=True)
    with torch.inference_mode():
        theirs = load_peer(gpt2)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
