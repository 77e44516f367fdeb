"""quantization_config of compressed-tensors (llm-compressor) to a WeightPlan. Torch-free."""

from typing import Final

from tandem.parallel.params import Scheme
from tandem.parallel.quantization.layouts.float_codes import Fp4Rows, Fp8Rows
from tandem.parallel.quantization.layouts.integer_rows import IntegerRows
from tandem.parallel.quantization.layouts.packed_words import PackedRows
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
from tandem.parallel.quantization.weight_plan import Rule, WeightPlan
from tandem.workers.models.spec.weights.fields import Fields
from tandem.workers.models.spec.weights.names import KV_SCALES, KV_SCALES_UNUSED, by_precision, targeted

IGNORED: Final = (".weight_shape", ".input_scale", ".input_zero_point", ".input_global_scale", *KV_SCALES)
FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)
STATIC_INPUTS: Final = (
    "the checkpoint's scales of inputs are not used: inputs are rounded token by token, each with a scale of its own"
)
WIDE_INPUTS: Final = "inputs are not rounded to {kind}, as the checkpoint says: CPUs do not multiply that faster"


def compressed_tensors(fields: Fields) -> WeightPlan:
    """Reads a config of compressed-tensors."""
    fields.ignore("quantization_status", "global_compression_ratio", "version", "quant_method", "producer")
    form, remarks = fields.one_of("format", FORMATS, "dense"), dict[str, None]()
    sparsity = fields.within("sparsity_config")
    if sparsity is not None:
        sparsity.one_of("format", ("dense",), "dense")
    for key in ("transform_config", "moe_sparsity_config"):
        if fields.get(key):
            raise fields.refused(key, "given", "which is not applied")
    if fields.get("kv_cache_scheme"):
        remarks[KV_SCALES_UNUSED] = None
    ignored = tuple(Rule(targeted(name), None) for name in fields.texts("ignore"))
    by_target: dict[str, Scheme | None] = {}  # of a target in two groups the last counts
    groups = fields.within("config_groups")
    for name in () if groups is None else groups.all():
        assert groups is not None
        group = groups.within(name)
        if group is None:
            continue
        own = str(group.one_of("format", FORMATS, form))
        scheme = _scheme(group, own, remarks)
        by_target |= dict.fromkeys(group.texts("targets"), scheme)
        group.done()
    rules = (Rule(targeted(target), by_target[target]) for target in sorted(by_target, key=by_precision))
    return WeightPlan((*ignored, *rules), "compressed-tensors", IGNORED, tuple(remarks))


def _scheme(group: Fields, form: str, remarks: dict[str, None]) -> Scheme | None:
    """Returns the scheme of a group; remarks: takes lines about what is done otherwise than it says."""
    weights, inputs = group.within("weights"), group.within("input_activations")
    if group.get("output_activations"):
        raise group.refused("output_activations", "given", "which are not rounded")
    if weights is None:
        return None
    kind, bits = weights.one_of("type", ("int", "float"), "int"), weights.whole("num_bits", 8)
    size, block = weights.group("group_size", -1), weights.block("block_structure")
    unsaid = "tensor" if weights.get("group_size") is None else "channel" if size is None else "group"
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block", "tensor_group"), unsaid)
    order, symmetric = weights.get("actorder"), weights.flag("symmetric", True)
    for key in ("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        weights.ignore(key)
    weights.done()
    rounds = _inputs(inputs, remarks)
    columns = size if strategy in ("group", "tensor_group") else block[1] if strategy == "block" and block else None
    rows = {"tensor": 0, "block": block[0] if block else 1}.get(strategy, 1)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        is_nv = form.startswith("nv")
        layout = Fp4Rows("weight_packed", columns or 16, "weight_global_scale" if is_nv else None)
        return Coded(Codes.E2M1, 4, columns or 16, narrow=is_nv, inputs=rounds, layout=layout)
    if kind == "float":
        if bits != 8:
            raise weights.refused("num_bits", bits, "of floats, read: 8")
        rounds = Inputs.FP8 if inputs is not None else rounds
        return Coded(Codes.E4M3, 8, columns, inputs=rounds, layout=Fp8Rows(rows, columns))
    if not 2 <= bits <= 8:
        raise weights.refused("num_bits", bits, "read: 2 to 8")
    if form == "pack-quantized":
        ordered = order in ("group", "dynamic", True) and columns is not None
        packed = PackedRows(bits, columns, ordered, symmetric)
        return Coded(bits=bits, group=columns, zeros=not symmetric, ordered=ordered, inputs=rounds, layout=packed)
    layout_of_bytes = IntegerRows(rows, columns, symmetric=symmetric)
    if columns is None and symmetric:
        return Int8Rows(rounds, layout_of_bytes)
    return Coded(bits=8, group=columns, zeros=not symmetric, inputs=rounds, layout=layout_of_bytes)


def _inputs(inputs: Fields | None, remarks: dict[str, None]) -> Inputs:
    """Returns how inputs are multiplied."""
    if inputs is None:
        return Inputs.AS_THEY_ARE
    kind, bits = inputs.one_of("type", ("int", "float"), "int"), inputs.whole("num_bits", 8)
    if kind == "float":
        remarks[WIDE_INPUTS.format(kind=f"fp{bits}")] = None
        return Inputs.AS_THEY_ARE
    if bits != 8:
        raise inputs.refused("num_bits", bits, "read: 8")
    if not inputs.get("dynamic") or not inputs.flag("symmetric", True):
        remarks[STATIC_INPUTS] = None
    return Inputs.INT8
