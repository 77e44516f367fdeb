"""What `tandem quantize` writes beside codes: figures are those of the files, experts have a form that others read, and
a folder is gone on with, or found complete, only for the model that it was made of.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.cluster.cli.quality.quantize import _lines
from tandem.configs.errors import SettingsError
from tandem.workers.gguf.gguf_folder import gguf_folder
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tests.support.gguf_files import save_gguf
from tests.support.packed_models import quantized, random_ids, tensors_in, undone
from tests.support.tiny_models import BY_NAME, load_peer, save_tiny_model

TinyFolder = Callable[[str], Path]


def settings(method: str, bits: float = 4, **more: Any) -> QuantizeSettings:
    return QuantizeSettings(method=method, bits=bits, **{"group_size": 32, "symmetric": True, **more})


def logprobs(folder: Path, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    with torch.inference_mode():
        logits = load_peer(folder)(torch.tensor([ids])).logits[0, :-1].double().numpy()
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # type: ignore[no-any-return]


def test_the_figures_are_those_of_the_files(tmp_path: Path) -> None:
    """Of norms, biases, the head and ignored layers too, which have bf16 after a scale was divided out of them."""
    source, ids = save_tiny_model(BY_NAME["llama-mqa-biased"], tmp_path, dtype=torch.bfloat16), random_ids(25)[-1]
    judged = quantized(source, tmp_path / "out", settings("awq", ignore=("re:.*gate_proj",), head=True))["judged"]
    own, ref = logprobs(undone(tmp_path / "out", tmp_path / "undone"), ids), logprobs(source, ids)
    assert judged["perplexity"] == pytest.approx(np.exp(-np.mean([own[i, ids[i + 1]] for i in range(31)])), rel=1e-5)
    against, kl = judged["against"], (np.exp(ref) * (ref - own)).sum(-1)
    assert against["mean_kl"] == pytest.approx(kl.mean(), rel=1e-4)
    assert against["max_kl"] == pytest.approx(kl.max(), rel=1e-4)
    assert against["agreement"] == (own.argmax(-1) == ref.argmax(-1)).mean()
    assert against["perplexity"] == pytest.approx(np.exp(-np.mean([ref[i, ids[i + 1]] for i in range(31)])), rel=1e-5)


def test_layers_that_gptq_cannot_round_are_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Inputs that are always 0 have sums without an inverse."""
    shutil.copytree(tiny_folder("llama-gqa"), source := tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].zero_()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    report = quantized(source, tmp_path / "out", settings("gptq"), count=2)
    rows = [one for layer in report["layers"] for one in layer["linears"]]
    without = [one for one in rows if one["no_inverse"]]
    assert [name.rpartition(".")[2] for one in without for name in one["layers"]][:3] == ["q_proj", "k_proj", "v_proj"]
    assert all(("layers.1.self_attn" in one["layers"][0]) == (one["rounded"] == "nearest") for one in rows)
    assert any("no inverse: 4, such as model.layers.1.self_attn.q_proj" in line for line in _lines(report, source))


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(("model", "bits"), [("qwen3_moe", 4), ("mixtral", 5.5), ("qwen2_moe", 4.5)])
def test_all_experts_have_one_form_which_is_that_of_linear_layers(
    model: str, bits: float, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """transformers undoes all experts by one form, which it takes from the group of `Linear`: of others its weights
    would be wrong without a word. vLLM wants one for a layer's."""
    report = quantized(tiny_folder(model), tmp_path / "out", settings("rtn", bits))
    rows = [one for layer in report["layers"] for one in layer["linears"]]
    forms = {(one["bits"], one["group"]) for one in rows if any(".experts." in name for name in one["layers"])}
    groups = config_of(tmp_path / "out")["config_groups"].values()
    (linear,) = (one["weights"] for one in groups if one["targets"] == ["Linear"])
    assert forms == {(linear["num_bits"], linear["group_size"])}
    assert not any(".experts." in target for one in groups for target in one["targets"])


@pytest.mark.parametrize(
    ("model", "left_out"), [("phi3", "self_attn.qkv_proj"), ("qwen3_moe", "mlp.experts.1.up_proj")]
)
def test_layers_of_gguf_that_are_left_out_are_written_as_the_family_has_them(
    model: str, left_out: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """A fused tensor, and a part of a stack."""
    file, plain = save_gguf(tiny_folder(model), tmp_path / "m.gguf", lambda name: "F16")
    name = f"model.layers.1.{left_out}"
    quantized(gguf_folder(file), tmp_path / "out", settings("rtn", ignore=(name,)), count=2)
    found, expected = tensors_in(tmp_path / "out"), tensors_in(plain)
    assert torch.equal(found[f"{name}.weight"].float(), expected[f"{name}.weight"])
    assert f"{name.replace('layers.1', 'layers.0')}.weight_packed" in found


def test_a_head_is_left_out_by_the_name_that_transformers_has(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    quantized(tiny_folder("gpt_neox"), tmp_path / "out", settings("rtn"))
    assert {"embed_out", "lm_head"} <= set(config_of(tmp_path / "out")["ignore"])
    with pytest.raises(SettingsError, match="the head is stored as embed_out"):
        quantized(tiny_folder("gpt_neox"), tmp_path / "head", settings("rtn", head=True))


def test_a_run_that_ends_while_it_tidies_up_is_complete(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tiny_folder("llama-gqa"), tmp_path / "out"

    def broken(path: Path) -> None:
        for one in path.iterdir():
            if one.name != "text.json":
                one.unlink()
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", broken)
        with pytest.raises(SettingsError, match="the same command goes on"):
            quantized(folder, out, settings("rtn"), count=2)
    report = quantized(folder, out, settings("rtn"), count=2)
    assert report == json.loads((out / "quantize_report.json").read_text())
    assert not [one for one in out.iterdir() if one.is_dir()]


def test_another_model_in_the_same_place_is_refused(tmp_path: Path) -> None:
    wide = replace(BY_NAME["llama-gqa"], changes={"vocab_size": 20_000, "num_hidden_layers": 1})
    folder = save_tiny_model(wide, tmp_path)
    quantized(folder, tmp_path / "out", settings("rtn"), count=2)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) * 5 // 8] ^= 1
    file.write_bytes(data)
    with pytest.raises(SettingsError, match="weights"):
        quantized(folder, tmp_path / "out", settings("rtn"), count=2)
