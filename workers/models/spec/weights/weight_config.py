"""The WeightPlan of a checkpoint: of config.json's quantization_config, or of the files that older ones have beside it,
and of --quantization. Torch-free."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.parallel.quantization.weight_plan import AT_LOAD, DENSE, WeightPlan
from tandem.workers.models.spec.weights.auto_round import auto_round
from tandem.workers.models.spec.weights.block_formats import bitsandbytes
from tandem.workers.models.spec.weights.compressed_tensors import compressed_tensors
from tandem.workers.models.spec.weights.fields import UNQUANTIZED, Fields
from tandem.workers.models.spec.weights.float_formats import fbgemm_fp8, fp8, modelopt, mxfp4
from tandem.workers.models.spec.weights.gguf import gguf
from tandem.workers.models.spec.weights.word_formats import awq, gptq

FLAG: Final = "--quantization"
WHERE: Final = "config.json: quantization_config"
READERS: Final[Mapping[str, Callable[[Fields], WeightPlan]]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
    "gguf": gguf,
}
"""The readers of the rest of a quantization_config, by its quant_method."""
BESIDE: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files beside config.json that older quantized checkpoints have, and their quant_method."""
NAMES: Final[Mapping[str, str]] = {
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "auto-round": "auto-round",
    "inc": "auto-round",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "gguf": "gguf",
}
"""Values of --quantization that name what a checkpoint holds, and its quant_method."""


def stored_plan(config: Mapping[str, Any]) -> WeightPlan:
    """Returns the plan of config.json's keys. UnsupportedModelError for what is not read, by name."""
    given = config.get("quantization_config")
    if not given:
        return DENSE
    fields = Fields(given, WHERE)
    by_keys = (
        "bitsandbytes" if fields.get("load_in_4bit") or fields.get("load_in_8bit") else ""
    )  # as older ones have it
    method = fields.text("quant_method", by_keys)
    if method not in READERS:
        raise UnsupportedModelError(
            f"{WHERE} with quant_method {method!r} is not supported; read are {', '.join(READERS)}; {UNQUANTIZED}",
            "MODEL",
        )
    plan = READERS[method](fields)
    fields.done()
    return plan


def with_files_beside(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns config.json's keys with a quantization_config that stands in a file of its own."""
    if config.get("quantization_config"):
        return config
    for name, method in BESIDE.items():
        file = folder / name
        if not file.exists():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{file} is not read: {error}", "MODEL") from error
        return {**config, "quantization_config": {"quant_method": method, **Fields(found, str(file)).all()}}
    return config


def plan_of_folder(folder: Path, overrides: Mapping[str, Any], quantization: str | None) -> WeightPlan:
    """Returns the plan of a folder's weights. SettingsError as stored_plan() and chosen_plan() raise it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{folder / 'config.json'} is not read: {error}", "MODEL") from error
    return chosen_plan(stored_plan({**with_files_beside(config, folder), **overrides}), quantization)


def chosen_plan(stored: WeightPlan, quantization: str | None) -> WeightPlan:
    """Returns the plan of weights with --quantization. SettingsError where the checkpoint holds others."""
    if quantization is None:
        return stored
    if not stored.rules and quantization in AT_LOAD:
        return replace(AT_LOAD[quantization], departures=stored.departures)
    if stored.method is not None and NAMES.get(quantization) == stored.method:
        return stored
    if stored.method is None:
        words = f"{quantization}: the checkpoint's weights are not quantized; {', '.join(AT_LOAD)} are made of such"
        raise SettingsError(words, FLAG)
    raise SettingsError(
        f"{quantization}: the checkpoint is quantized already, with {stored.method} ({stored.words}); without the flag "
        "it is served as it is",
        FLAG,
    )
