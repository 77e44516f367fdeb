"""quantization_config of weights that are floats of eight or four bits, to a WeightPlan: FP8 by blocks or matrix,
fbgemm, ModelOpt, MXFP4. Torch-free."""

from typing import Final

from tandem.parallel.quantization.layouts.float_codes import Fp4Rows, Fp8Rows
from tandem.parallel.quantization.layouts.stacked_fp4 import StackedFp4
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs
from tandem.parallel.quantization.stored_parts import ALL
from tandem.parallel.quantization.weight_plan import Rule, WeightPlan
from tandem.workers.models.spec.weights.fields import Fields
from tandem.workers.models.spec.weights.names import (
    KV_SCALES,
    KV_SCALES_UNUSED,
    by_transformers,
    rules_but_for,
    with_stars,
)

INPUT_SCALES: Final = (".input_scale", ".activation_scale", ".input_scale_ub", *KV_SCALES)
STATIC: Final = "the checkpoint's scales of inputs are not used: inputs are not rounded to fp8 on a CPU"
NVFP4_GROUP: Final = 16
MXFP4_GROUP: Final = 32


def fp8(fields: Fields) -> WeightPlan:
    """Reads a config of fp8: by blocks as DeepSeek and Qwen3 publish it, by matrix as AutoFP8 does."""
    fields.ignore("fmt", "is_checkpoint_fp8_serialized", "quant_method", "dequantize", "modules_to_convert")
    scheme_of_inputs = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.one_of("scale_fmt", ("float", "ue8m0"), "float")
    fields.one_of("expert_dtype", ("fp8",), "fp8")
    rows, columns = fields.block("weight_block_size") or (ALL, None)
    layout = Fp8Rows(rows, columns)
    names = (*fields.texts("modules_to_not_convert"), *fields.texts("ignored_layers"))
    remarks = (STATIC,) if scheme_of_inputs == "static" else ()
    if fields.get("kv_cache_scheme"):
        remarks = (*remarks, KV_SCALES_UNUSED)
    rules = rules_but_for(by_transformers(names), Coded(Codes.E4M3, 8, columns, inputs=Inputs.FP8, layout=layout))
    return WeightPlan(rules, "fp8", INPUT_SCALES, remarks, head=False)


def fbgemm_fp8(fields: Fields) -> WeightPlan:
    """Reads a config of fbgemm_fp8, which has a scale for each output."""
    fields.ignore("activation_scale_ub", "quant_method")
    names = fields.texts("modules_to_not_convert")
    rules = rules_but_for(by_transformers(names), Coded(Codes.E4M3, 8, None, inputs=Inputs.FP8, layout=Fp8Rows()))
    return WeightPlan(rules, "fbgemm_fp8", INPUT_SCALES, head=False)


def modelopt(fields: Fields) -> WeightPlan:
    """Reads a config of ModelOpt, of config.json or of hf_quant_config.json, where it stands in `quantization`."""
    inside = fields.within("quantization") or fields
    fields.ignore("producer", "quant_method", "config_groups", "kv_cache_scheme")
    kind = inside.one_of("quant_algo", ("FP8", "NVFP4"))
    layout: Fp8Rows | Fp4Rows
    if kind == "FP8":
        scheme = Coded(Codes.E4M3, 8, None, inputs=Inputs.FP8, layout=Fp8Rows(ALL))
    else:
        group = inside.group("group_size", NVFP4_GROUP) or NVFP4_GROUP
        layout = Fp4Rows("weight", group, "weight_scale_2", multiplies=True)
        scheme = Coded(Codes.E2M1, 4, group, narrow=True, layout=layout)
    inside.ignore("group_size")
    names = (*inside.texts("exclude_modules"), *inside.texts("ignore"))
    remarks: tuple[str, ...] = (STATIC,)
    if inside.get("kv_cache_quant_algo") or fields.get("kv_cache_scheme"):
        remarks = (*remarks, KV_SCALES_UNUSED)
    inside.done()
    return WeightPlan(rules_but_for(with_stars(names), scheme), "modelopt", INPUT_SCALES, remarks)


def mxfp4(fields: Fields) -> WeightPlan:
    """Reads a config of MXFP4, as gpt-oss has it: experts only."""
    fields.ignore("quant_method", "dequantize", "modules_to_not_convert")
    scheme = Coded(Codes.E2M1, 4, MXFP4_GROUP, layout=StackedFp4())
    return WeightPlan((Rule(r".*\.experts(\..*)?", scheme),), "mxfp4", head=False)
