"""What --batch-invariant cannot be kept with is refused by name, before anything starts."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig

from tandem import LLM
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.parallel.context import ParallelContext
from tandem.parallel.params import Param, Source
from tandem.parallel.quantization.schemes import Int8Rows
from tandem.workers.kernels.cpu import cpu_int8_gemm
from tandem.workers.models.spec.arch import Mla
from tandem.workers.planning.invariance import check_batch_invariant
from tandem.workers.planning.resolve import fingerprint, read_spec
from tandem.workers.platforms import cpu_invariant
from tests.support.tiny_models import BASE, BY_NAME

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo" / "model"


def refusal(folder: Path, device: str = "cpu", **flags: Any) -> str | None:
    settings = build_settings(str(folder), {"batch_invariant": True, **flags}).engine
    try:
        check_batch_invariant(settings, read_spec(settings), device)
    except SettingsError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("device", "flags", "words"),
    [
        ("cpu", {}, None),
        ("cpu", {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8", "enable_lora": True}, None),
        ("cpu", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "cpu_offload_gb": 1}, None),
        ("cuda", {}, "--device cuda: it is for ranks on CPU"),
        ("cpu", {"dtype": "float16"}, "--dtype float16; bfloat16 and float32 have the kernels"),
        ("cpu", {"enable_lora": True, "max_lora_rank": 24}, "adapters of --max-lora-rank 24, which is no multiple"),
    ],
)
def test_settings(device: str, flags: dict[str, Any], words: str | None) -> None:
    found = refusal(DEMO, device, **flags)
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-gqa", None),
        ("mistral-window", None),
        ("deepseek_v2", None),
        ("mixtral", None),
        ("gemma2", None),
        ("bloom", None),
        ("qwen3-untied", None),
        ("llama-rope-dynamic", "rope_scaling of type dynamic"),
    ],
)
def test_models(name: str, words: str | None, tmp_path: Path) -> None:
    tiny = BY_NAME[name]
    config = AutoConfig.for_model(tiny.model_type, **{**BASE, **tiny.changes})
    kinds = {"llama": "Llama", "mistral": "Mistral", "deepseek_v2": "DeepseekV2", "mixtral": "Mixtral",
             "gemma2": "Gemma2", "bloom": "Bloom", "qwen3": "Qwen3"}  # fmt: skip
    config.architectures = [f"{kinds[tiny.model_type]}ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = refusal(tmp_path)
    assert found is None if words is None else words in str(found)


def test_latents_wider_than_the_kernel(tmp_path: Path) -> None:
    tiny = BY_NAME["deepseek_v2"]
    changes = {**BASE, **tiny.changes, "kv_lora_rank": 1024, "architectures": ["DeepseekV2ForCausalLM"]}
    AutoConfig.for_model(tiny.model_type, **changes).save_pretrained(tmp_path)
    assert "latents and keys of 1040 elements; the kernel takes 1024" in str(refusal(tmp_path))


@pytest.mark.parametrize(
    ("form", "tp_size", "words"),
    [
        ("int8", 1, None),
        ("int8", 2, "--quantization int8 of model.layers.0.mlp.down_proj.weight, which has 46 inputs on a rank"),
        ("w8a8", 2, None),
    ],
)
def test_int8_layers_that_the_kernel_does_not_take(tmp_path: Path, form: str, tp_size: int, words: str | None) -> None:
    changes = {**BASE, **BY_NAME["llama-gqa"].changes, "intermediate_size": 92, "architectures": ["LlamaForCausalLM"]}
    AutoConfig.for_model("llama", **changes).save_pretrained(tmp_path)
    found = refusal(tmp_path, quantization=form, tensor_parallel_size=tp_size)
    assert found is None if words is None else words in str(found)


def test_an_engine_does_not_start() -> None:
    with pytest.raises(SettingsError, match="it is not to be had with --dtype float16") as refused:
        LLM("demo", batch_invariant=True, dtype="float16")
    assert refused.value.flag == "--batch-invariant"


@pytest.mark.parametrize(
    "missing", ["cpu_invariant_library", "cpu_library", "cpu_lora_library", "cpu_experts_library", "multiplies_int8"]
)
def test_a_machine_without_a_kernel(missing: str) -> None:
    """torch would compute instead, and otherwise for other rows."""
    weight = Param(name="w.weight", shape=(64, 64), role="w", source=Source(("w.weight",)), scheme=Int8Rows())
    ALONE, platform = ParallelContext.single(), cpu_invariant.InvariantCpuPlatform()
    asked = {
        "cpu_invariant_library": lambda: platform.linear((), ALONE, dtype=torch.float32),
        "cpu_library": lambda: platform.fused_ops(torch.float32),
        "cpu_lora_library": lambda: platform.lora_ops(torch.float32),
        "cpu_experts_library": lambda: platform.experts(torch.float32),
        "multiplies_int8": lambda: platform.linear((weight,), ALONE, dtype=torch.float32),
    }
    with (
        mock.patch.object(cpu_int8_gemm if missing == "multiplies_int8" else cpu_invariant, missing, return_value=None),
        pytest.raises(SettingsError, match="kernel") as refused,
    ):
        asked[missing]()
    assert refused.value.flag == "--batch-invariant"
    with pytest.raises(SettingsError, match="heads of 264 elements"):
        platform.attention(torch.float32, 264)
    with pytest.raises(SettingsError, match="latents and keys of 1040 elements"):
        platform.latent_attention(torch.float32, Mla(16, None, kv_rank=976, nope_dim=128, rope_dim=64, v_dim=128))


def test_kv_of_the_usual_mode_is_not_taken_from_disk() -> None:
    usual = build_settings(str(DEMO), {}).engine
    invariant = replace(usual, model=replace(usual.model, batch_invariant=True))
    assert fingerprint(DEMO, usual) != fingerprint(DEMO, invariant)
