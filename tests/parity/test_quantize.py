"""`tandem quantize`: what it writes is read as transformers has the weights that the codes stand for; scales of inputs
change no outputs; methods come in the order that their papers say; a run that was killed writes the same bytes.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.configs.errors import SettingsError
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.quantize.layer_walk import LayerWalk, OpenLayer
from tandem.workers.quantize.quantize_run import open_source, quantize
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tandem.workers.quantize.rounding.folds import folds_of
from tandem.workers.quantize.rounding.scale_search import apply_fold
from tests.parity.test_quantized_checkpoints import check_near, distance, logits_of
from tests.support.dequantized import save_dequantized
from tests.support.packed_models import quantized, random_ids, undone
from tests.support.paged_rows import prompt_ids
from tests.support.tiny_models import load_peer

TinyFolder = Callable[[str], Path]
IDS = prompt_ids(40, 200)
STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "stories260K"


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def small(method: str, bits: float = 4, **more: Any) -> QuantizeSettings:
    return QuantizeSettings(method=method, bits=bits, **{"group_size": 32, "symmetric": False, **more})


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama-mqa-biased", small("gptq", 3)),
        ("llama-many-files", small("gptq", act_order=False, symmetric=True)),
        ("llama-gqa", small("gptq", 4.5, head=True)),  # of 8 bits
        ("phi3", small("awq", head=True)),  # q, k and v in one tensor
        ("bloom", small("gptq", 2)),  # q, k and v in turn, head by head
        ("gptj", small("rtn", 8, symmetric=True, group_size=None)),  # heads' elements in another order
        ("gemma", small("awq")),  # norms are stored less one
        ("cohere", small("awq", 4.5)),  # one norm for attention and MLP
        ("olmo2", small("awq")),  # no norm whose output is multiplied
        ("qwen3", small("gptq", 5.5)),
        ("qwen2_moe", small("awq")),
        ("mixtral", small("gptq")),
        ("deepseek_v3", small("awq", ignore=("re:.*o_proj",))),
    ],
    ids=lambda given: getattr(given, "method", given),
)
def test_logits_are_those_of_transformers_with_the_weights_that_codes_stand_for(
    model: str, settings: QuantizeSettings, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    output, folder = tmp_path / "quantized", tiny_folder(model)
    report = quantized(folder, output, settings)
    theirs = load_peer(undone(output, tmp_path / "undone"))(torch.tensor([IDS])).logits[0]
    check_near(logits_of(output), theirs)
    assert report["judged"]["against"]["mean_kl"] > 0
    rows = [one for layer in report["layers"] for one in layer["linears"]]
    found = sum(one["bits"] for one in rows) / len(rows)
    assert settings.bits - 0.7 <= found <= max(settings.bits, 4) + 0.7


FOLDED = (
    "llama-mqa-biased", "gemma2", "phi3", "bloom", "cohere", "stablelm-parallel", "opt", "opt-post", "falcon",
    "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v2-lite",
)  # fmt: skip


@pytest.mark.parametrize("model", FOLDED)
def test_scales_of_inputs_change_no_outputs(model: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(model)
    walk = LayerWalk(folder, load_spec(folder), CpuPlatform(), 24)
    (hidden,) = walk.embedded(torch.tensor(random_ids(1, 24)))
    for index, spec in enumerate(walk.spec.layers):
        layer = OpenLayer(walk, index)
        before = layer.run(hidden.clone())
        folds = list(folds_of(spec, layer.params, layer.linears))
        for fold in folds:
            given = 0.3 + 2 * torch.rand(fold.linears[0].inputs, generator=torch.Generator().manual_seed(index))
            dtype = torch.bfloat16 if fold.norm else torch.float32
            apply_fold(fold, fold.shared(given), layer.values, dtype)
        check_near(layer.run(hidden.clone()), before)
        assert folds
        hidden = before


def planted(folder: Path, target: Path) -> Path:
    """The model with an outlier: one input of q, k and v, and of gate and up, times 50, its weights divided by it."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("input_layernorm.weight", "attention_layernorm.weight"))]:
        tensors[name][7] *= 50
        stem, first = name.rpartition(".")[0].rpartition(".")[0], "input" in name
        for other in ("q_proj", "k_proj", "v_proj") if first else ("gate_proj", "up_proj"):
            tensors[f"{stem}.{'self_attn' if first else 'mlp'}.{other}.weight"][:, 7] /= 50
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def test_smoothquant_takes_outliers_away_that_w8a8_suffers_from(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = planted(tiny_folder("llama-gqa"), tmp_path / "planted")
    dense = logits_of(folder)
    check_near(dense, logits_of(tiny_folder("llama-gqa")))
    quantized(folder, tmp_path / "smooth", small("smoothquant", 8))
    smooth, plain = distance(logits_of(tmp_path / "smooth"), dense), distance(logits_of(folder, "w8a8"), dense)
    assert smooth < 0.3 * plain
    weights = load_peer(save_dequantized(folder, tmp_path / "weights"))(torch.tensor([IDS])).logits[0]
    assert distance(logits_of(folder, "int8"), weights) < 0.01 * plain, "int8 keeps 16 bits of its inputs"


def test_inputs_are_rounded_as_vllm_rounds_them(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """In steps of 1/127 of a token's largest. compressed-tensors, by itself, takes steps of 1/127.5: another rounding
    of each input, as far from ours as int8 inputs are from exact ones."""
    quantized(tiny_folder("llama-mqa-biased"), tmp_path / "out", small("smoothquant", 8))
    plain, found = undone(tmp_path / "out", tmp_path / "undone"), logits_of(tmp_path / "out")
    of_steps = {steps: distance(found, logits_with_rounded_inputs(plain, steps)) for steps in (127, 127.5)}
    assert of_steps[127] < 0.02 < of_steps[127.5]  # a last bit may round an input otherwise, and all that follows


def logits_with_rounded_inputs(folder: Path, steps: float) -> torch.Tensor:
    """Of transformers, whose linear layers but the head round their inputs token by token."""

    def rounded(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        scale = given[0].abs().amax(-1, keepdim=True) / steps
        return ((given[0] / scale).round().clamp(-128, 127) * scale,)

    model = load_peer(folder)
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(rounded)
    return model(torch.tensor([IDS])).logits[0]  # type: ignore[no-any-return]


def digest(folder: Path) -> dict[str, str]:
    names = [*folder.glob("*.safetensors"), *folder.glob("*.json")]
    return {
        one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in names if one.name != "quantize_report.json"
    }


KILLED = """
import os, signal, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tandem.workers.quantize import quantize_run
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tests.support.dequantized import save_dequantized
from tests.support.packed_models import quantized
write, left = quantize_run.WorkFolder.{method}, [{count}]
def last(*given, **words):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*given, **words)
quantize_run.WorkFolder.{method} = last
settings = QuantizeSettings(method="gptq", bits=4.5, group_size=32, symmetric=False)
quantized(Path(sys.argv[1]), Path(sys.argv[2]), settings)
"""


@pytest.mark.parametrize(("method", "count"), [("hidden", 12), ("save", 3), ("remove", 0)])
def test_a_run_that_was_killed_goes_on_and_writes_the_same_bytes(
    method: str, count: int, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder, settings = tiny_folder("llama-gqa"), small("gptq", 4.5)
    program = KILLED.format(method=method, count=count)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    found = subprocess.run([sys.executable, "-c", program, str(folder), str(killed)], env={**os.environ})
    assert found.returncode == -signal.SIGKILL and (killed / "unfinished").is_dir()
    quantized(folder, killed, settings)
    quantized(folder, whole, settings)
    assert digest(killed) == digest(whole) and not (killed / "unfinished").exists()


def test_a_second_run_at_the_same_time_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, refused = tiny_folder("llama-gqa"), []

    def say(line: str) -> None:
        if line.startswith("layer 1"):
            with pytest.raises(SettingsError, match="another process is writing"):
                quantized(folder, tmp_path, small("rtn"))
            refused.append(line)

    quantized(folder, tmp_path, small("rtn"), say=say)
    assert refused and not (tmp_path / "unfinished").exists()


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not beside the repository")
def test_methods_come_in_their_order(tmp_path: Path) -> None:
    text = STORIES.parents[1] / "text" / "tinystories_train_head.jsonl"
    found = {}
    for name, settings in {
        "rtn sym": small("rtn", 3, symmetric=True),
        "rtn": small("rtn", 3),
        "awq": small("awq", 3),
        "gptq": small("gptq", 3),
        "gptq 8": small("gptq", 8),
    }.items():
        own = replace(settings, calib=str(text), calib_tokens=4096, length=256)
        report = quantize(open_source("stories", STORIES), own, tmp_path / name, CpuPlatform(), lambda _: None)
        found[name] = report["judged"]["against"]["mean_kl"]
    assert found["gptq 8"] < found["gptq"] < found["rtn"] < found["rtn sym"]
    assert found["awq"] < found["rtn"]


def test_the_report_says_what_was_done(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    report = quantized(tiny_folder("mixtral"), tmp_path / "out", small("gptq"), count=2)
    rows = [one for layer in report["layers"] for one in layer["linears"]]
    few = [one for one in rows if one["few_tokens"]]
    assert few and all(one["rounded"] == "nearest" and "experts" in one["layers"][0] for one in few)
    assert report == json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert report["bytes"] < report["source_bytes"]
    unscaled = quantized(tiny_folder("olmo2"), tmp_path / "awq", small("awq"))["layers"][0]["folds"]
    left = {module.rpartition(".")[2] for fold in unscaled if not fold["scaled"] for module in fold["layers"]}
    assert left == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
