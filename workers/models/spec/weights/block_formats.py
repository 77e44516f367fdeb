"""quantization_config of bitsandbytes to a WeightPlan. Torch-free."""

from typing import Final

from tandem.parallel.params import Scheme
from tandem.parallel.quantization.layouts.integer_rows import IntegerRows
from tandem.parallel.quantization.layouts.nested_blocks import FourBits
from tandem.parallel.quantization.schemes import Coded, Codes, Int8Rows
from tandem.parallel.quantization.weight_plan import WeightPlan
from tandem.parallel.stored.idle_tensors import Idle
from tandem.workers.models.spec.weights.fields import Fields
from tandem.workers.models.spec.weights.names import by_transformers, rules_but_for

BLOCK: Final = 64
STEPS: Final = 127
IGNORED: Final = (".quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")


def bitsandbytes(fields: Fields) -> WeightPlan:
    """Reads a config of bitsandbytes: NF4 or FP4, with or without double quantization, or int8.

    Int8 is our own form exactly. The outliers that llm_int8_threshold sets apart need nothing of their own: inputs keep
    16 bits.
    """
    fields.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
    fields.ignore("bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload")
    fields.ignore("llm_int8_has_fp16_weight", "llm_int8_threshold", "_load_in_4bit", "_load_in_8bit", "quant_method")
    kind = fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    nested, names = fields.flag("bnb_4bit_use_double_quant"), fields.get("llm_int8_skip_modules")
    scheme: Scheme
    if fields.flag("load_in_4bit"):
        codes = Codes(kind)
        scheme = Coded(codes, 4, BLOCK, layout=FourBits(codes, BLOCK, nested))
    elif fields.flag("load_in_8bit"):
        scheme = Int8Rows(layout=IntegerRows(scale="SCB", steps=STEPS))
    else:
        raise fields.refused("load_in_4bit", False, "and load_in_8bit is not true")
    fields.flag("load_in_8bit")
    dense = () if names is None else by_transformers(fields.texts("llm_int8_skip_modules"))
    rules = rules_but_for(dense, scheme)
    return WeightPlan(rules, "bitsandbytes", IGNORED, head=names is not None, idle=((".weight_format", Idle.ZEROS),))
