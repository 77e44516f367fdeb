"""quantization_config to a WeightPlan: rules by layer, values that are refused by name, --quantization beside it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.configs.platform_facts import CUDA, PLATFORM_FACTS
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param, Scheme, Source
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
from tandem.parallel.quantization.weight_plan import DENSE, WeightPlan
from tandem.workers.models.spec.weights.names import KV_SCALES_UNUSED
from tandem.workers.models.spec.weights.weight_config import NAMES, READERS, chosen_plan, plan_of_folder, stored_plan
from tandem.workers.planning.resolve import check_weights
from tests.support import quantized as forms

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FORMATS = {True: "gptq", False: "gptq_v2"}
ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}
Q, GATE, HEAD = "model.layers.11.self_attn.q_proj", "model.layers.3.mlp.gate", "lm_head"


def plan_of(**config: Any) -> WeightPlan:
    return stored_plan({"quantization_config": config})


def scheme_at(plan: WeightPlan, module: str) -> Coded | Int8Rows:
    scheme = plan.of(module)
    assert isinstance(scheme, Coded | Int8Rows)
    return scheme


def tensors(group: dict[str, Any], form: str = "pack-quantized", **more: Any) -> WeightPlan:
    return plan_of(**{**forms.tensors_config(form, group), **more})


def test_gptq() -> None:
    plan = plan_of(**GPTQ, sym=True, desc_act=True, damp_percent=0.01, meta={"quantizer": ["gptqmodel:7"]})
    scheme = scheme_at(plan, Q)
    assert isinstance(scheme, Coded) and (scheme.bits, scheme.group, scheme.zeros, scheme.ordered) == (
        4,
        128,
        False,
        True,
    )
    assert not plan.head and plan_of(**GPTQ, lm_head=True).head
    assert not scheme_at(plan_of(**{**GPTQ, "group_size": -1}, desc_act=True), Q).apart, "one group has no order"


def test_gptq_of_layers_by_themselves() -> None:
    dynamic = {"-:.*mlp\\.gate$": {}, "+:.*\\.11\\..*": {"bits": 8, "group_size": 32}, ".*down_proj": {"sym": False}}
    plan = plan_of(**GPTQ, sym=True, dynamic=dynamic)
    assert plan.of(GATE) is None
    changed, other = scheme_at(plan, Q), scheme_at(plan, "model.layers.0.mlp.up_proj")
    assert isinstance(changed, Coded) and (changed.bits, changed.group, changed.zeros) == (8, 32, False)
    assert isinstance(other, Coded) and (other.bits, other.group) == (4, 128)
    down = scheme_at(plan, "model.layers.1.mlp.down_proj")
    assert isinstance(down, Coded) and down.zeros


def test_awq_leaves_out_what_a_name_contains() -> None:
    plan = plan_of(**AWQ, modules_to_not_convert=["visual", "layers.11.self_attn"])
    assert plan.of(Q) is None and plan.of("model.layers.1.self_attn.q_proj") is not None


@pytest.mark.parametrize(
    ("ignore", "dense", "others"),
    [
        (["lm_head"], [HEAD], [Q, GATE]),
        (["re:.*mlp\\.gate$"], [GATE], [Q, "model.layers.3.mlp.gate_proj"]),
        ([Q], [Q], ["model.layers.1.self_attn.q_proj"]),
        (["re:model.layers.1.*"], [Q], [GATE]),
    ],
)
def test_compressed_tensors_ignore(ignore: list[str], dense: list[str], others: list[str]) -> None:
    plan = tensors(forms.group_of(4, 128, symmetric=True), ignore=ignore)
    assert all(plan.of(module) is None for module in dense) and all(plan.of(module) is not None for module in others)


def test_gptq_of_some_layers_and_auto_round() -> None:
    plan = plan_of(**GPTQ, modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]])
    assert plan.of(Q) is not None and plan.of("model.layers.0.mlp.down_proj") is None
    extra = {Q: {"bits": 16}, "model.layers.3.mlp.down_proj": {"bits": 8, "group_size": -1}}
    given = {"bits": 4, "group_size": 128, "sym": True, "packing_format": "auto_round:auto_gptq", "data_type": "int"}
    plan = plan_of(
        quant_method="auto-round", **given, extra_config=extra, block_name_to_quantize="model.layers", iters=200
    )
    changed = scheme_at(plan, "model.layers.3.mlp.down_proj")
    assert plan.of(Q) is None and isinstance(changed, Coded) and (changed.bits, changed.group) == (8, None)
    assert scheme_at(plan, GATE) == scheme_at(plan_of(**GPTQ, sym=True), GATE)


def test_auto_round_says_of_layers_what_differs_alone() -> None:
    """As 0.16.1 writes them: a key that a layer has in common stands nowhere, names may be expressions, and the head
    is in no block."""
    down = "model.layers.3.mlp.down_proj"
    extra = {".*k_proj.*": {"bits": 8}, down: {"group_size": 64}, ".*down_proj.*": {"bits": 16}, HEAD: {"bits": 8}}
    plan = plan_of(**ROUND, extra_config=extra, autoround_version="0.16.1", act_bits=16)
    down_scheme, key = scheme_at(plan, down), scheme_at(plan, "model.layers.3.self_attn.k_proj")
    assert isinstance(down_scheme, Coded) and (down_scheme.bits, down_scheme.group) == (4, 64), "its name comes first"
    assert isinstance(key, Coded) and (key.bits, key.group) == (8, 128)
    assert plan.of("model.layers.1.mlp.down_proj") is None
    head = plan.of_head(HEAD)
    assert isinstance(head, Coded) and head.bits == 8 and plan_of(**ROUND).of_head(HEAD) is None
    assert plan.remarks == () and "inputs are not rounded" in plan_of(**ROUND, act_bits=8).remarks[0]


@pytest.mark.parametrize(("packing", "minus_one"), [("auto_round", False), ("auto_round:auto_gptq", True)])
def test_auto_round_stores_zeros_as_they_are_in_its_own_form(packing: str, minus_one: bool) -> None:
    plan = plan_of(**{**ROUND, "sym": False, "packing_format": packing})
    assert scheme_at(plan, Q) == scheme_at(plan_of(**GPTQ, sym=False, checkpoint_format=FORMATS[minus_one]), Q)


def test_auto_round_writes_gptq_and_awq_with_keys_of_its_own() -> None:
    """And, of symmetric ones, zero_point false, though zeros are stored."""
    own = {"provider": "auto-round", "autoround_version": "0.16.1", "data_type": "int", "enable_quanted_input": False}
    assert plan_of(**GPTQ, **own).rules == plan_of(**GPTQ).rules
    given = {**AWQ, "zero_point": False, "sym": True, "to_quant_block_names": "model.layers"}
    assert plan_of(**given, **own).rules == plan_of(**AWQ).rules


def test_awq_leaves_out_what_an_expression_matches() -> None:
    plan = plan_of(**AWQ, modules_to_not_convert=[".*layers\\.[01]{2}\\..*"])
    assert plan.of(Q) is None and plan.of("model.layers.2.self_attn.q_proj") is not None


def test_compressed_tensors_names_come_before_expressions_in_whatever_group() -> None:
    """And of one target in two groups the last counts, as in compressed-tensors."""
    eight, four = (forms.group_of(bits, 32, symmetric=True) for bits in (8, 4))
    groups = {"a": {**eight, "targets": ["re:.*q_proj", "Linear"]}, "b": {**four, "targets": [Q, "Linear"]}}
    plan = plan_of(**{**forms.tensors_config("pack-quantized", {}), "config_groups": groups})
    found = [scheme_at(plan, module) for module in (Q, "model.layers.1.self_attn.q_proj", GATE)]
    assert [scheme.bits for scheme in found if isinstance(scheme, Coded)] == [4, 8, 4]


@pytest.mark.parametrize(("order", "ordered"), [("group", True), ("dynamic", True), ("weight", False), (None, False)])
def test_compressed_tensors_orders(order: str | None, ordered: bool) -> None:
    scheme = scheme_at(tensors(forms.group_of(4, 128, symmetric=True, actorder=order)), Q)
    assert isinstance(scheme, Coded) and scheme.ordered is ordered


def test_scales_of_kv_caches_have_several_names() -> None:
    plan = tensors(forms.group_of(4, 128, symmetric=True), kv_cache_scheme={"num_bits": 8, "type": "float"})
    stem = "model.layers.0.self_attn"
    for name in ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale"):
        assert f"{stem}.{name}".endswith(plan.ignored), name


def test_compressed_tensors_groups_by_name_come_before_those_by_class() -> None:
    groups = {
        "group_0": {**forms.group_of(4, 128, symmetric=True)},
        "group_1": {**forms.group_of(8, None, symmetric=True), "targets": ["re:.*q_proj"], "format": "int-quantized"},
    }
    plan = plan_of(**{**forms.tensors_config("mixed-precision", {}), "config_groups": {
        "group_0": {**groups["group_0"], "format": "pack-quantized"}, "group_1": groups["group_1"],
    }})  # fmt: skip
    assert isinstance(scheme_at(plan, Q), Int8Rows) and isinstance(scheme_at(plan, GATE), Coded)


@pytest.mark.parametrize(
    ("inputs", "expected", "says"),
    [
        (None, Inputs.AS_THEY_ARE, ""),
        ({"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True, "strategy": "token"}, Inputs.INT8, ""),
        (
            {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"},
            Inputs.INT8,
            "scales of inputs are not",
        ),
        ({"num_bits": 8, "type": "float", "dynamic": True}, Inputs.AS_THEY_ARE, "not rounded to fp8"),
        ({"num_bits": 4, "type": "float", "dynamic": "local"}, Inputs.AS_THEY_ARE, "not rounded to fp4"),
    ],
)
def test_compressed_tensors_inputs(inputs: dict[str, Any] | None, expected: Inputs, says: str) -> None:
    group = {**forms.group_of(8, None, symmetric=True), "input_activations": inputs}
    plan = tensors(group, "int-quantized")
    assert scheme_at(plan, Q).inputs is expected
    assert [says in remark for remark in plan.remarks] == ([True] if says else [])


def test_transformers_names_of_layers_that_are_not_converted() -> None:
    plan = plan_of(
        quant_method="fp8",
        weight_block_size=[128, 128],
        modules_to_not_convert=["model.layers.1", "mlp.gate", "q_norm"],
    )
    assert plan.of("model.layers.1.self_attn.q_proj") is None and plan.of(GATE) is None
    assert plan.of(Q) is not None and plan.of("model.layers.3.mlp.gate_proj") is not None
    scheme = scheme_at(plan, Q)
    assert isinstance(scheme, Coded) and (scheme.codes, scheme.group) == (Codes.E4M3, 128)


def test_modelopt_names_with_stars() -> None:
    given = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    plan = plan_of(quant_method="modelopt", quantization={**given, "exclude_modules": ["lm_head", "model.layers.1*"]})
    assert plan.of(HEAD) is None and plan.of(Q) is None and plan.of(GATE) is not None
    assert KV_SCALES_UNUSED in plan.remarks


def test_scales_of_nvfp4_are_a_byte_each_as_the_checkpoint_has_them() -> None:
    """Of 64 outputs and 128 inputs: codes, scales of 8 groups of an output, and one of each output."""
    modelopt = plan_of(quant_method="modelopt", quantization={"quant_algo": "NVFP4", "group_size": 16})
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    for plan in (modelopt, tensors({"targets": ["Linear"], "weights": weights}, "nvfp4-pack-quantized")):
        scheme = scheme_at(plan, Q)
        weight = Param(name="x.weight", shape=(64, 128), role="x", source=Source(("x.weight",)), scheme=scheme)
        assert weight.held_bytes(Mesh(), 2) == 64 * (128 // 2 + 8 + 4)


def test_bitsandbytes_leaves_the_head_out_unless_it_is_told_otherwise() -> None:
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert not plan_of(**four).head
    plan = plan_of(**four, llm_int8_skip_modules=["self_attn"])
    assert plan.head and plan.of("model.layers.0.mlp.up_proj") is not None
    assert plan_of(quant_method="bitsandbytes", load_in_8bit=True).words == "int8"
    assert plan_of(load_in_8bit=True).method == "bitsandbytes", "older ones do not say it"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "torchao"}, r"quant_method 'torchao' is not supported; read are gptq, .*; take the model"),
        ({**GPTQ, "bits": 5}, "bits is 5, read: 2, 3, 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', read: gptq, gptq_v2"),
        ({**GPTQ, "invented": 3}, "invented is 3, which is not known"),
        ({**GPTQ, "dynamic": {".*": {"bits": 4, "invented": 1}}}, r"dynamic\..*: invented is 1, which is not known"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv', read: gemm"),
        ({**GPTQ, "group_size": 0}, "group_size is 0, want a positive integer, or -1"),
        ({**GPTQ, "group_size": "128"}, "group_size is '128', want an integer"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True, read: False"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard', which is not applied"),
        ({**GPTQ, "adapter": {"name": "lora"}}, "adapter is .*, which is not applied"),
        ({**GPTQ, "modules_in_block_to_quantize": "q_proj"}, "modules_in_block_to_quantize is 'q_proj', want a list"),
        ({**ROUND, "packing_format": "auto_round:fp8"}, "packing_format is 'auto_round:fp8', read: auto_round:auto_g"),
        ({**ROUND, "rotation_configs": [{"hadamard_type": "hadamard"}]}, "rotation_configs is .*, which is not known"),
        ({**ROUND, "data_type": "mx_fp"}, "data_type is 'mx_fp', read: int"),
        ({"quant_method": "modelopt", "quant_algo": None}, "quant_algo is None, read: FP8, NVFP4"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is .0, 128., want two positive"),
        (forms.tensors_config("pack-quantized", forms.group_of(4, 0, symmetric=True)), "group_size is 0, want a posi"),
        (
            forms.tensors_config("pack-quantized", {"targets": [], "weights": {"group_size": [1]}}),
            "is .1., want an int",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .128., want two positive integers"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', read: FP8, NVFP4"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is False, and load_in_8bit is not true"),
        (forms.tensors_config("marlin-24", {}), "format is 'marlin-24', read: pack-quantized"),
        ({**forms.tensors_config("dense", {}), "transform_config": {"a": 1}}, "transform_config is 'given'"),
        ([], "quantization_config is .*, want an object"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: Any, words: str) -> None:
    if config == []:
        config = ["gptq"]
    with pytest.raises(UnsupportedModelError, match=words) as refused:
        stored_plan({"quantization_config": config})
    assert refused.value.flag == "MODEL"


def test_older_checkpoints_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert plan_of_folder(tmp_path, {}, None) == DENSE
    (tmp_path / "quant_config.json").write_text(
        json.dumps({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"})
    )
    scheme = scheme_at(plan_of_folder(tmp_path, {}, None), Q)
    assert isinstance(scheme, Coded) and scheme.group == 64
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 32, "desc_act": False}))
    assert scheme_at(plan_of_folder(tmp_path, {}, None), Q) == scheme_at(
        plan_of(**{**GPTQ, "bits": 3, "group_size": 32}), Q
    )
    assert plan_of_folder(tmp_path, {"quantization_config": {**AWQ}}, "awq").method == "awq", "what the user gives wins"


@pytest.mark.parametrize(
    ("stored", "flag", "words"),
    [
        (GPTQ, "gptq_marlin", None),
        (GPTQ, "auto_gptq", None),
        (AWQ, "awq", None),
        (AWQ, "auto_awq", None),
        (ROUND, "auto-round", None),
        (ROUND, "inc", None),
        (GPTQ, "inc", r"inc: the checkpoint is quantized already, with gptq \(int4\); without the flag"),
        (None, "inc", "inc: the checkpoint's weights are not quantized"),
        (AWQ, "gptq", r"gptq: the checkpoint is quantized already, with awq \(int4\); without the flag"),
        (GPTQ, "int8", r"int8: the checkpoint is quantized already, with gptq \(int4\)"),
        (None, "int8", None),
        (None, "fp8", None),
        (None, "awq", "awq: the checkpoint's weights are not quantized; int8, w8a8, int4, w4a8, nf4, fp8 are made of"),
    ],
)
def test_a_flag_says_what_the_folder_holds(stored: dict[str, Any] | None, flag: str, words: str | None) -> None:
    plan = DENSE if stored is None else plan_of(**stored)
    if words is None:
        assert (chosen_plan(plan, flag) == plan) == (stored is not None)
        return
    with pytest.raises(SettingsError, match=words) as refused:
        chosen_plan(plan, flag)
    assert refused.value.flag == "--quantization"


def test_names_are_of_methods_that_are_read() -> None:
    assert set(NAMES.values()) <= {*READERS}
    plans = [plan_of(**GPTQ), plan_of(**GPTQ, sym=False), plan_of(**AWQ), DENSE]
    assert len({plan.digest() for plan in plans}) == 4
    assert plan_of(**GPTQ).unstored().schemes[0].layout is None


def test_a_device_without_such_products_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        weights = plan_of(**GPTQ)

    for device in PLATFORM_FACTS:
        check_weights(Spec, device)  # type: ignore[arg-type]
    monkeypatch.setitem(PLATFORM_FACTS, "cuda", replace(CUDA, quantizations=()))
    with pytest.raises(SettingsError, match=r"quantized with gptq \(int4\), which ranks with --device cuda do not"):
        check_weights(Spec, "cuda")  # type: ignore[arg-type]


def test_schemes_have_words() -> None:
    words = {
        form.name: stored_plan({"quantization_config": form.config}).words for form in (*forms.floats(), forms.awq())
    }
    assert words["awq-32"] == "int4" and words["bnb8"] == "int8" and words["fbgemm"] == "fp8"
    assert words["ct-mxfp4"] == "fp4"
    scheme: Scheme = Coded(Codes.NF4, inputs=Inputs.INT8)
    assert scheme.words == "nf4 a8"
