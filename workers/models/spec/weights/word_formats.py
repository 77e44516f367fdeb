"""quantization_config of GPTQ and AWQ, to a WeightPlan. Torch-free."""

import re
from typing import Final

from tandem.parallel.quantization.layouts.packed_words import AwqGemm, Gptq
from tandem.parallel.quantization.schemes import Coded
from tandem.parallel.quantization.weight_plan import Rule, WeightPlan
from tandem.parallel.stored.idle_tensors import Idle
from tandem.workers.models.spec.weights.fields import Fields
from tandem.workers.models.spec.weights.names import (
    KV_SCALES,
    KV_SCALES_UNUSED,
    beginning,
    by_transformers,
    containing,
    rules_but_for,
)

GPTQ_BITS: Final = (2, 3, 4, 8)
UNPACKED: Final = (r".*\.shared_expert_gate",)
"""Layers with fewer outputs than a word has codes, which these producers leave as they are."""
IDLE: Final = ((".g_idx", Idle.IN_TURN), (".bias", Idle.ZEROS))
"""Tensors that AutoGPTQ writes for every layer, whether its model has biases and orders or not."""
MADE_WITH: Final = (
    *("damp_percent", "true_sequential", "static_groups", "model_name_or_path", "model_file_base_name", "batch_size"),
    *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "dataset"),
    *("tokenizer", "use_cuda_fp16", "use_exllama", "max_input_length", "exllama_config", "cache_block_outputs"),
    *("meta", "backend", "disable_exllama", "damp_auto_increment", "mse"),
    *(
        "parallel_packing",
        "format_version",
        "act_group_aware",
        "hessian",
        "pack_dtype",
        "method",
    ),
    *("gptaq", "offload_to_disk", "offload_to_disk_path", "failsafe", "act_sort", "vram_strategy", "quant_method"),
)
"""Keys that say how GPTQ found its codes, or what computes with them: they change nothing that is stored."""


TUNED_WITH: Final = (
    *(
        "provider",
        "autoround_version",
        "amp",
        "enable_minmax_tuning",
        "enable_norm_bias_tuning",
        "enable_quanted_input",
    ),
    *(
        "gradient_accumulate_steps",
        "iters",
        "lr",
        "low_gpu_mem_usage",
        "minmax_lr",
        "nsamples",
        "seqlen",
        "scale_dtype",
    ),
    *("supported_types", "quant_block_list", "to_quant_block_names", "block_name_to_quantize", "batch_size", "backend"),
    *("act_data_type", "act_group_size", "act_sym", "act_dynamic", "static_kv_granularity"),
    "static_attention_granularity",
)
"""Keys that say how auto-round found codes, in whichever form it has written them."""
WIDE: Final = 16
"""Bits of what is not quantized."""
INPUTS_KEPT: Final = "inputs are not rounded, as the checkpoint says: that would lose accuracy and save nothing here"


def gptq(fields: Fields) -> WeightPlan:
    """Reads a config of GPTQ: by AutoGPTQ, GPTQModel, or auto-round in their form."""
    fields.ignore(*MADE_WITH)
    remarks = rounding_keys(fields)
    form = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), fields.get("format", "gptq"))
    fields.ignore("format")
    fields.one_of("is_marlin_format", (False,), False)
    for key in ("rotation", "adapter"):
        if fields.get(key):
            raise fields.refused(key, fields.get(key), "which is not applied")
    bits = fields.one_of("bits", GPTQ_BITS, 4)
    scheme = _gptq(
        bits,
        fields.group("group_size", 128),
        ordered=fields.flag("desc_act"),
        symmetric=fields.flag("sym", True),
        minus_one=form == "gptq",
    )
    rules = (*_dynamic(fields, scheme), *_of_all(fields, scheme))
    return WeightPlan(rules, "gptq", KV_SCALES, remarks, head=fields.flag("lm_head"), idle=IDLE)


def rounding_keys(fields: Fields) -> tuple[str, ...]:
    """Reads the keys of auto-round, which writes the forms of GPTQ and AWQ too; returns lines about what is done
    otherwise than they say."""
    fields.ignore(*TUNED_WITH)
    fields.one_of("data_type", ("int",), "int")
    kept = (INPUTS_KEPT,) if fields.whole("act_bits", WIDE) < WIDE else ()
    return (*kept, KV_SCALES_UNUSED) if fields.get("static_kv_dtype") or fields.get("static_attention_dtype") else kept


def _of_all(fields: Fields, scheme: Coded) -> tuple[Rule, ...]:
    """Returns the rules of all layers, or of those that modules_in_block_to_quantize lists."""
    listed = fields.get("modules_in_block_to_quantize")
    if listed is None:
        return rules_but_for(UNPACKED, scheme)
    if not isinstance(listed, list | tuple):
        raise fields.refused("modules_in_block_to_quantize", listed, "want a list of names")
    names = [name for each in listed for name in (each if isinstance(each, list | tuple) else [each])]
    return (Rule(f".*\\.(?:{'|'.join(re.escape(str(name)) for name in names)})", scheme),)


def _gptq(bits: int, group: int | None, *, ordered: bool, symmetric: bool, minus_one: bool) -> Coded:
    ordered = ordered and group is not None
    layout = Gptq(bits, group, ordered, symmetric, minus_one)
    return Coded(bits=bits, group=group, zeros=not symmetric, ordered=ordered, layout=layout)


def _dynamic(fields: Fields, scheme: Coded) -> tuple[Rule, ...]:
    """Returns the rules of GPTQModel's `dynamic`: -:expression leaves layers dense, others change their form."""
    found, layout = [], scheme.layout
    assert isinstance(layout, Gptq)
    if (dynamic := fields.within("dynamic")) is None:
        return ()
    for key in dynamic.all():
        pattern = beginning(key.removeprefix("-:").removeprefix("+:"))
        if key.startswith("-:"):
            dynamic.ignore(key)
            found.append(Rule(pattern, None))
        elif (own := dynamic.within(key)) is not None:
            own.ignore(*MADE_WITH)
            changed = _gptq(
                own.one_of("bits", GPTQ_BITS, layout.bits),
                own.group("group_size", layout.group or -1),
                ordered=own.flag("desc_act", layout.ordered),
                symmetric=own.flag("sym", layout.symmetric),
                minus_one=layout.minus_one,
            )
            own.done()
            found.append(Rule(pattern, changed))
    return tuple(found)


def awq(fields: Fields) -> WeightPlan:
    """Reads a config of AWQ: by AutoAWQ, version gemm, under either of the names that its keys have."""
    fields.ignore(
        "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "quant_method", "desc_act"
    )
    fields.ignore("sym")
    remarks = rounding_keys(fields)
    if (version := fields.text("version", "gemm")) != "gemm":
        raise fields.refused("version", version, "read: gemm, as AutoAWQ packs with version='GEMM'")
    for name in ("bits", "w_bit"):
        fields.one_of(name, (4,), 4)
    fields.flag("zero_point", True)  # auto-round says whether all are the middle: they are stored in any case
    group = fields.group("group_size" if fields.get("group_size") is not None else "q_group_size", 128)
    scheme = Coded(group=group, zeros=True, layout=AwqGemm(group))
    names = fields.texts("modules_to_not_convert")
    dense = (*containing(names), *by_transformers(names))
    rules = rules_but_for((*dense, *UNPACKED), scheme)
    return WeightPlan(rules, "awq", KV_SCALES, remarks, head=fields.flag("lm_head"))
