"""quantization_config of GPTQ and AWQ, to a WeightPlan. Torch-free."""

import re
from dataclasses import replace
from typing import Final

from tandem.parallel.quantization.layouts.packed_words import AwqGemm, Gptq
from tandem.parallel.quantization.schemes import Coded
from tandem.parallel.quantization.weight_plan import Rule, WeightPlan
from tandem.workers.models.spec.weights.fields import Fields
from tandem.workers.models.spec.weights.names import KV_SCALES, beginning, containing, rules_but_for, targeted

GPTQ_BITS: Final = (2, 3, 4, 8)
UNPACKED: Final = (r".*\.shared_expert_gate",)
"""Layers with fewer outputs than a word has codes, which these producers leave as they are."""
ROUNDED: Final = ("bits", "group_size", "sym")
"""Keys of auto-round that each layer may have of its own."""
MADE_WITH: Final = (
    *("damp_percent", "true_sequential", "static_groups", "model_name_or_path", "model_file_base_name", "batch_size"),
    *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "dataset"),
    *("tokenizer", "use_cuda_fp16", "use_exllama", "max_input_length", "exllama_config", "cache_block_outputs"),
    *("meta", "backend", "disable_exllama", "damp_auto_increment", "mse"),
    *(
        "parallel_packing",
        "format_version",
        "adapter",
        "rotation",
        "act_group_aware",
        "hessian",
        "pack_dtype",
        "method",
    ),
    *("gptaq", "offload_to_disk", "offload_to_disk_path", "failsafe", "act_sort", "vram_strategy", "quant_method"),
)
"""Keys that say how GPTQ found its codes, or what computes with them: they change nothing that is stored."""


def gptq(fields: Fields) -> WeightPlan:
    """Reads a config of GPTQ: by AutoGPTQ, GPTQModel, or auto-round in their form."""
    fields.ignore(*MADE_WITH)
    form = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), fields.get("format", "gptq"))
    fields.ignore("format", "is_marlin_format")
    bits = fields.one_of("bits", GPTQ_BITS, 4)
    scheme = _gptq(
        bits,
        fields.whole("group_size", 128),
        ordered=fields.flag("desc_act"),
        symmetric=fields.flag("sym", True),
        minus_one=form == "gptq",
    )
    rules = (*_dynamic(fields, scheme), *_of_all(fields, scheme))
    return WeightPlan(rules, "gptq", (".g_idx", *KV_SCALES), head=fields.flag("lm_head"))


def _of_all(fields: Fields, scheme: Coded) -> tuple[Rule, ...]:
    """Returns the rules of all layers, or of those that modules_in_block_to_quantize lists."""
    listed = fields.get("modules_in_block_to_quantize")
    if listed is None:
        return rules_but_for(UNPACKED, scheme)
    names = [name for each in listed for name in ([each] if isinstance(each, str) else each)]
    return (Rule(f".*\\.(?:{'|'.join(re.escape(str(name)) for name in names)})", scheme),)


def _gptq(bits: int, group_size: int, *, ordered: bool, symmetric: bool, minus_one: bool) -> Coded:
    group = None if group_size == -1 else group_size
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
                own.whole("group_size", -1 if layout.group is None else layout.group),
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
    if (version := fields.text("version", "gemm")) != "gemm":
        raise fields.refused("version", version, "read: gemm, as AutoAWQ packs with version='GEMM'")
    for name in ("bits", "w_bit"):
        fields.one_of(name, (4,), 4)
    for name in ("zero_point",):
        fields.one_of(name, (True,), True)
    size = fields.whole("group_size", fields.whole("q_group_size", 128))
    group = None if size == -1 else size
    scheme = Coded(group=group, zeros=True, layout=AwqGemm(group))
    dense = containing(fields.texts("modules_to_not_convert"))
    return WeightPlan(rules_but_for((*dense, *UNPACKED), scheme), "awq", KV_SCALES, head=fields.flag("lm_head"))


def auto_round(fields: Fields) -> WeightPlan:
    """Reads a config of auto-round, which packs as GPTQ or AWQ do."""
    packing = fields.one_of("packing_format", ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq"))
    read, given = awq if packing == "auto_round:auto_awq" else gptq, {key: fields.get(key) for key in ROUNDED}
    plan = read(Fields(given, fields.where))
    fields.one_of("data_type", ("int",), "int")
    fields.ignore(*(key for key in fields.all() if key != "extra_config"))  # they say how codes were found
    own = []
    if (extra := fields.within("extra_config")) is not None:
        for name in extra.all():
            changes = extra.within(name) or Fields({}, extra.where)
            kept = {key: changes.get(key, given[key]) for key in ROUNDED}
            is_dense = changes.whole("bits", 16) >= 16
            scheme = None if is_dense else read(Fields(kept, f"{extra.where}.{name}")).of("")
            own.append(Rule(targeted(name), scheme))
    return replace(plan, method="auto-round", rules=(*own, *plan.rules))
