"""Checkpoints that others have quantized: logits are those of transformers with the weights that codes stand for, on
one rank and on several; bytes are those that a plan counts.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.configs.errors import SettingsError
from tandem.offload.weights.layer_placement import spread
from tandem.parallel.checkpoint import LoadFormat
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.weights.names import KV_SCALES_UNUSED
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.platforms.cpu import CpuPlatform
from tests.left_to import rest_in_parity
from tests.support import quantized as forms
from tests.support.adapters import save_random_adapter
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.lora_ranks import AdaptedCase, run_adapted
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.quantized import Format, save_quantized
from tests.support.tiny_models import TinyModel, load_peer, save_tiny_model

TinyFolder = Callable[[str], Path]
IDS = prompt_ids(40, 200)
STEPS = [[(0, IDS[:30]), (1, IDS[:7])], [(0, [5]), (1, [9])]]
FORMS = {
    form.name: form
    for form in (
        forms.gptq(),
        forms.gptq(sym=True),
        forms.gptq(v2=True),
        forms.gptq(2, 32),
        forms.gptq(3, 32),
        forms.gptq(8, None, sym=True),
        forms.gptq(order=True),
        forms.gptq(3, 16, order=True, v2=True),
        forms.awq(),
        forms.awq(16),
        forms.packed(),
        forms.packed(4, None, sym=False),
        forms.packed(3, 32, sym=False),
        forms.packed(8, 16),
        forms.packed(order=True, sym=False),
        forms.bytes_of(),
        forms.bytes_of(group=32, sym=False),
        forms.bytes_of(a8=True),
        *forms.floats(),
    )
}
EACH = pytest.mark.parametrize("name", FORMS)


def check_near(found: torch.Tensor, expected: torch.Tensor, share: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=share * float(expected.abs().max()))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the differences, as a share of that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def built(
    folder: Path, mesh: Mesh = Mesh(), load_format: LoadFormat = "safetensors", quantization: str | None = None
) -> Decoder:
    """A rank's decoder; asserts that it holds the bytes that are planned."""
    spec = load_spec(folder, quantization=quantization)
    decoder = build_decoder(
        spec, ParallelContext(mesh), folder=folder, dtype=torch.float32, platform=CpuPlatform(), load_format=load_format
    )
    assert rank_weights(spec, mesh, 4, CpuPlatform().packs(torch.float32)).total_bytes == decoder.weight_bytes
    return decoder


def logits_of(folder: Path, quantization: str | None = None) -> torch.Tensor:
    """Logits of a prompt in chunks."""
    rows = PagedRows(built(folder, quantization=quantization), 1, 40)
    return torch.cat([rows.step([(0, part)], all_logits=True) for part in (IDS[:30], IDS[30:39], IDS[39:])])


def theirs_of(folder: Path, form: Format) -> torch.Tensor:
    """transformers' logits; for forms that round inputs, of layers that do."""
    model = load_peer(folder)
    if form.rounds_inputs:
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(_rounded)
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def _rounded(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    scale = given[0].abs().amax(-1, keepdim=True) / 127
    return ((given[0] / scale).round() * scale,)


@EACH
def test_logits_equal_those_of_transformers_with_the_same_weights(
    name: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    form = FORMS[name]
    quantized, plain = save_quantized(tiny_folder("llama-mqa-biased"), tmp_path, form)
    found, theirs = logits_of(quantized), theirs_of(plain, form)
    if form.rounds_inputs:  # a last bit may round an input otherwise, and then all that follows
        assert distance(found, theirs) < 0.02
    else:
        check_near(found, theirs)


WILD = [
    ("phi3", forms.gptq(4, 16)),  # q, k and v in one tensor, whose words they share
    ("phi3", forms.awq(16)),
    ("phi3", forms.packed(4, 16, sym=False)),
    ("bloom", forms.gptq()),  # q, k and v in turn, head by head
    ("bloom", forms.packed(8, None)),
    ("gptj", forms.gptq(order=True)),  # heads' elements in another order
    ("cohere", forms.awq()),
    ("gpt2", forms.gptq(sym=True)),  # dense matrices are stored turned around
    ("qwen3", forms.packed()),  # a tied head
    ("mixtral", forms.gptq()),
    ("qwen2_moe", forms.gptq(4, 16)),
    ("qwen3_moe", forms.fp8()),
    ("deepseek_v3", forms.fp8((16, 16))),  # kv_b is multiplied by parts
    ("gpt_oss", forms.mxfp4()),  # stacks of experts, gate and up in turn
    ("phi3", forms.fp8((20, 36))),  # blocks that q, k and v share, and that no rank's part is a multiple of
]


@pytest.mark.parametrize(("model", "form"), WILD, ids=lambda given: getattr(given, "name", given))
def test_ways_that_layers_are_made_of_matrices(
    model: str, form: Format, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    quantized, plain = save_quantized(tiny_folder(model), tmp_path, form)
    check_near(logits_of(quantized), theirs_of(plain, form))
    for mesh in (Mesh(2, 1, 1), Mesh(2, 1, 1, True)) if load_spec(quantized).has_experts else (Mesh(2, 1, 1),):
        built(quantized, mesh)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_bitsandbytes_nf4(kind: str, double: bool, tmp_path: Path) -> None:
    even = TinyModel("even", kind, {"intermediate_size": 128, "num_hidden_layers": 2})
    form = forms.nf4(double=double)
    quantized, plain = save_quantized(save_tiny_model(even, tmp_path), tmp_path, form)
    check_near(logits_of(quantized), theirs_of(plain, form))
    built(quantized, Mesh(2, 1, 1))


DOUBLE_QUANTIZED = {
    "absmax": (lambda tensor: tensor[:-1], "has 63 elements, config.json makes it 64"),
    "nested_absmax": (lambda tensor: tensor[:0], "has 0 elements, config.json makes it 1"),
    "nested_quant_map": (lambda tensor: tensor[:100], "has 100 elements, config.json makes it 256"),
    "quant_state.bitsandbytes__nf4": (lambda tensor: tensor[:-1], "is not read: JSONDecodeError"),
}


@pytest.mark.parametrize("end", DOUBLE_QUANTIZED)
def test_scales_of_bitsandbytes_that_do_not_fit_are_refused(end: str, tmp_path: Path) -> None:
    """They are read whole, whatever their shapes."""
    even = TinyModel("even", "llama", {"num_hidden_layers": 1, "intermediate_size": 128})
    quantized, _ = save_quantized(save_tiny_model(even, tmp_path), tmp_path, forms.nf4(double=True))
    (change, words), name = DOUBLE_QUANTIZED[end], f"model.layers.0.self_attn.q_proj.weight.{end}"
    tensors = load_file(quantized / "model.safetensors")
    changed = {**tensors, name: change(tensors[name]).contiguous()}
    save_file(changed, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(SettingsError, match=f"tensor {name} {words}"):
        built(quantized)


CUT = ["gptq-3-32", "gptq_v2-3-16-order", "gptq-4-32-order", "awq-32", "packed-3-32", "packed-4-32-order", "bytes-32"]


IN_STAGES = ("gptq_v2-3-16-order", "packed-3-32", "bytes-32")
"""Forms that make test has over two stages of two ranks; the others over two ranks."""


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    rest_in_parity(
        ((name, 2, stages) for name in FORMS if name in CUT for stages in (1, 2)),
        lambda name, _, stages: (name in IN_STAGES) == (stages == 2),
    ),
)
def test_ranks_equal_one_rank(
    name: str, tp_size: int, pp_size: int, ranks: RankProcesses, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Groups, words and orders are cut where ranks are: 96 inputs in groups of 32 by two."""
    quantized, _ = save_quantized(tiny_folder("llama-gqa"), tmp_path, FORMS[name])

    def case(tp_size: int, pp_size: int) -> DecoderCase:
        return DecoderCase(quantized, tp_size, pp_size, STEPS, num_rows=2, max_len=40)

    found = ranks.call(run_case, tp_size, pp_size, case(tp_size, pp_size))[-1]
    alone = run_case(case(1, 1), ParallelContext.single())
    assert alone is not None
    check_near(found, alone)


@pytest.mark.parametrize(
    "name", rest_in_parity(((name,) for name in FORMS), lambda name: name in CUT or name.startswith(("ct", "fp8")))
)
def test_bytes_of_every_rank_are_those_of_a_plan(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    quantized, _ = save_quantized(tiny_folder("llama-gqa"), tmp_path, FORMS[name])
    for mesh in (Mesh(2, 1, 1), Mesh(4, 2, 7)):
        built(quantized, mesh)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("model", "form"), [("mixtral", forms.gptq(order=True)), ("gpt_oss", forms.mxfp4())])
def test_ranks_that_share_experts(
    model: str, form: Format, experts: bool, ranks: RankProcesses, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    quantized, _ = save_quantized(tiny_folder(model), tmp_path, form)
    case = DecoderCase(quantized, 2, 1, STEPS, num_rows=2, max_len=40, expert_parallel=experts)
    alone = run_case(replace(case, tp_size=1, expert_parallel=False), ParallelContext.single())
    assert alone is not None
    check_near(ranks.call(run_case, 2, 1, case)[0], alone)


def test_layers_that_a_config_ignores_stay_dense(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Among them one of three that share a product, whose biases are added to each; the head is in the form."""
    form = forms.packed(4, 32, sym=False)
    own = forms.group_of(4, 32, symmetric=False)
    config = forms.tensors_config("pack-quantized", own, ["re:.*self_attn.k_proj$", "model.layers.1.mlp.down_proj"])
    dense = ("self_attn.k_proj", "layers.1.mlp.down_proj")
    given = replace(form, config=config, head=True)
    quantized, plain = save_quantized(tiny_folder("llama-mqa-biased"), tmp_path, given, dense)
    check_near(logits_of(quantized), theirs_of(plain, given))
    built(quantized, Mesh(2, 1, 1))
    built(quantized, Mesh(1, 2, 1))


def test_groups_of_unlike_forms(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the bits of some layers, and some that are dense."""
    folder, form = tiny_folder("llama-mqa-biased"), forms.gptq()
    dynamic = {"-:.*\\.0\\.mlp\\.up_proj": {}, "+:.*v_proj": {"bits": 8, "group_size": 16, "sym": True}}

    def pack(weight: torch.Tensor) -> forms.Packed:
        return (forms.gptq(8, 16, sym=True) if len(weight) == 16 else form).pack(weight)  # k and v

    dynamic["+:.*k_proj"] = dynamic["+:.*v_proj"]
    given = replace(form, config={**form.config, "dynamic": dynamic}, pack=pack)
    quantized, plain = save_quantized(folder, tmp_path, given, ("layers.0.mlp.up_proj",))
    check_near(logits_of(quantized), theirs_of(plain, given))


@pytest.mark.parametrize("name", ["gptq-4-32-order", "awq-32", "bytes-None-sym-a8", "fp8-block-dynamic"])
def test_streamed_layers_and_bf16(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    quantized, plain = save_quantized(tiny_folder("llama-gqa"), tmp_path, FORMS[name])

    def run(folder: Path = quantized, **changes: Any) -> torch.Tensor:
        case = DecoderCase(folder, 1, 1, STEPS, num_rows=2, max_len=40, **changes)
        logits = run_case(case, ParallelContext.single())
        assert logits is not None
        return logits

    resident = run()
    assert torch.equal(run(streamed=spread(4, 3)), resident)
    usual = distance(run(plain, dtype=torch.bfloat16), run(plain))
    assert distance(run(dtype=torch.bfloat16), resident) < usual * (3 if FORMS[name].rounds_inputs else 1.3)


def test_adapters_are_added_to_quantized_weights(tiny_folder: TinyFolder, tmp_path: Path, ranks: RankProcesses) -> None:
    quantized, plain = save_quantized(tiny_folder("llama-gqa"), tmp_path, FORMS["gptq-4-32-order"])
    adapter = save_random_adapter(plain, tmp_path / "a", rank=8)

    def case(base: Path, tp_size: int = 1) -> AdaptedCase:
        return AdaptedCase(base, [adapter], [0, -1], STEPS, 40, tp_size=tp_size)

    expected = run_adapted(case(plain), ParallelContext.single())
    found = run_adapted(case(quantized), ParallelContext.single())
    assert found is not None and expected is not None
    check_near(found, expected)
    check_near(ranks.call(run_adapted, 2, 1, case(quantized, 2))[0], expected)


@pytest.mark.parametrize("name", ["gptq-4-32-order", "awq-32", "packed-3-32", "bytes-None-sym", "ct-nvfp4"])
def test_made_up_weights_are_held_as_stored_ones(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """load_format dummy needs the config alone, and holds the same bytes."""
    quantized, _ = save_quantized(tiny_folder("llama-gqa"), tmp_path, FORMS[name])
    (quantized / "model.safetensors").unlink()
    for mesh in (Mesh(), Mesh(2, 1, 1)):
        made = built(quantized, mesh, load_format="dummy")
        if mesh == Mesh():
            logits = PagedRows(made, 1, 40).step([(0, IDS)], all_logits=True)
            assert bool(logits.isfinite().all()) and float(logits.std()) > 0


def test_zeros_that_do_not_fit_the_config_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """gptq_v2 read as gptq: each zero would be one too large."""
    form = forms.gptq(sym=True, v2=True)
    wrong = {**form.config, "checkpoint_format": "gptq"}
    quantized, _ = save_quantized(tiny_folder("llama-gqa"), tmp_path, form, config=wrong)
    with pytest.raises(
        SettingsError, match=r"q_proj\.qzeros: config.json says sym, so each zero is 8, and here are \[9\]"
    ):
        built(quantized)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"desc_act": True, "group_size": 16}, "tensor .*qzeros has shape .*, config.json makes it"),
        ({"bits": 8}, "tensor .* has shape .*, config.json makes it"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(
    changes: dict[str, Any], words: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    form = forms.gptq()
    quantized, _ = save_quantized(tiny_folder("llama-gqa"), tmp_path, form, config={**form.config, **changes})
    with pytest.raises(SettingsError, match=words):
        built(quantized)


def test_tensors_that_change_nothing_may_be_there(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """AutoGPTQ wrote a bias of zeros and the groups of inputs for each layer, bitsandbytes writes its layout. Values
    that would change something are refused."""
    idle = torch.arange(64) // 32
    for form, end, value, other in (
        (FORMS["gptq-4-32"], "self_attn.o_proj.bias", torch.zeros(64), torch.ones(64)),
        (FORMS["gptq-4-32"], "self_attn.o_proj.g_idx", idle, idle.flip(0)),
        (FORMS["bnb8"], "self_attn.o_proj.weight_format", torch.zeros(1).byte(), torch.ones(1).byte()),
    ):
        quantized, plain = save_quantized(tiny_folder("llama-gqa"), tmp_path / end, form)
        tensors, name = load_file(quantized / "model.safetensors"), f"model.layers.1.{end}"
        save_file({**tensors, name: value}, quantized / "model.safetensors", {"format": "pt"})
        check_near(logits_of(quantized), theirs_of(plain, form))
        save_file({**tensors, name: other}, quantized / "model.safetensors", {"format": "pt"})
        with pytest.raises(SettingsError, match=f"{name} does not belong to the model.*it would change nothing as"):
            built(quantized)


def test_a_layer_that_is_dense_against_its_config_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """As auto-round 0.16.1 writes a head without tuning."""
    form = forms.gptq()
    config = {**form.config, "lm_head": True}
    quantized, _ = save_quantized(tiny_folder("llama-gqa"), tmp_path, form, config=config)
    with pytest.raises(
        SettingsError, match=r"lm_head\.weight does not belong .* its layer is stored dense, where config"
    ):
        built(quantized)


def test_blocks_that_cross_rows_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    quantized, _ = save_quantized(tiny_folder("llama-gqa"), tmp_path, forms.nf4(double=False))
    with pytest.raises(SettingsError, match=r"blocks of 64 cross its rows of 96 inputs.*model\.dequantize\(\)"):
        built(quantized)


def test_scales_of_a_kv_cache_are_not_read(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    form = FORMS["ct-fp8"]
    config = {**form.config, "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    quantized, plain = save_quantized(tiny_folder("llama-gqa"), tmp_path, form, config=config)
    tensors = load_file(quantized / "model.safetensors")
    tensors |= {f"model.layers.{layer}.self_attn.{name}_scale": torch.ones(1) for layer in range(4) for name in "kv"}
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    check_near(logits_of(quantized), theirs_of(plain, form))
    assert KV_SCALES_UNUSED in load_spec(quantized).remarks
