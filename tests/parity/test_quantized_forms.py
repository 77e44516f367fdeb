"""Each form of quantized checkpoints with what else can be asked for: ranks, whole experts, adapters, drafts, streamed
layers, tiers of KV, --batch-invariant. The table in docs/serving/quantized.md is made of these tests.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.parallel.context import ParallelContext
from tandem.workers.gguf.gguf_folder import gguf_folder
from tests.support import quantized as forms
from tests.support.adapters import save_random_adapter
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.gguf_files import save_gguf
from tests.support.lora_ranks import AdaptedCase, run_adapted
from tests.support.paged_rows import prompt_ids
from tests.support.quantized import Format, save_quantized
from tests.support.rounded_parts import rounded_by_parts
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tests.unit.text.test_gguf_vocabulary import of_bytes

IDS = prompt_ids(40, 200)
STEPS = [[(0, IDS[:30]), (1, IDS[:7])], [(0, [5]), (1, [9])]]
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round"}
FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
FORMS: dict[str, Format | None] = {
    "gptq": forms.gptq(4, 32, order=True),
    "awq": forms.awq(32),
    "auto-round": replace(forms.gptq(4, 32, v2=True), config=AUTO_ROUND),
    "ct int4": forms.packed(4, 32, sym=False),
    "ct w8a8": forms.bytes_of(a8=True),
    "ct nvfp4": next(form for form in forms.floats() if form.name == "ct-nvfp4"),
    "fp8 blocks": forms.fp8((32, 32)),
    "fbgemm_fp8": next(form for form in forms.floats() if form.name == "fbgemm"),
    "modelopt": forms.fp4("modelopt-nvfp4", FP4, outer="weight_scale_2", multiplies=True),
    "bnb nf4": forms.nf4(double=True),
    "bnb int8": forms.bnb8(),
    "mxfp4": forms.mxfp4(),
    "gguf": None,
}
SOON = ("awq", "bnb nf4", "gguf")
"""Forms that `make test` has; `make parity` has all."""
WIDE = {"intermediate_size": 128, "num_hidden_layers": 2}
"""Of a model whose rows are whole blocks of every form."""


def each(*but: str, soon: tuple[str, ...] = SOON) -> pytest.MarkDecorator:
    """Parameters of a test: all forms."""
    names = [name for name in FORMS if name not in but]
    late = {name: pytest.mark.parity for name in names if name not in soon}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=late.get(name, ())) for name in names])


def saved(name: str, folder: Path, target: Path) -> tuple[Path, Path]:
    """The model of a folder in a form, and with the weights that it stands for."""
    form = FORMS[name]
    if form is not None:
        return save_quantized(folder, target, form)
    target.mkdir(exist_ok=True)
    file, plain = save_gguf(folder, target / "m.gguf", lambda name: "Q4_1")
    return gguf_folder(file), plain


def tiny(name: str, target: Path) -> Path:
    """A tiny model that a form can store."""
    if name == "mxfp4":
        return save_tiny_model(BY_NAME["gpt_oss"], target)
    return save_tiny_model(replace(BY_NAME["llama-gqa"], name="wide", changes=WIDE), target)


def check_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the differences, as a share of that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def equal_on_ranks(folder: Path, ranks: RankProcesses, tp_size: int, pp_size: int, *, experts: bool = False) -> None:
    case = DecoderCase(folder, tp_size, pp_size, STEPS, num_rows=2, max_len=40, expert_parallel=experts)
    found = ranks.call(run_case, tp_size, pp_size, case)[-1]
    with rounded_by_parts(tp_size, whole_experts=experts):
        alone = run_case(replace(case, tp_size=1, pp_size=1, expert_parallel=False), ParallelContext.single())
    assert alone is not None
    check_near(found, alone)


@each()
def test_ranks(name: str, ranks: RankProcesses, tmp_path: Path) -> None:
    """-tp 2 -pp 2, beside one rank; where inputs are rounded, one that rounds by parts as ranks do."""
    quantized, _ = saved(name, tiny(name, tmp_path), tmp_path / "made")
    equal_on_ranks(quantized, ranks, 2, 2)


@each(soon=("awq", "gguf"))
def test_whole_experts(name: str, ranks: RankProcesses, tmp_path: Path) -> None:
    folder = tiny(name, tmp_path)
    if name != "mxfp4":
        folder = save_tiny_model(replace(BY_NAME["mixtral"], changes={**BY_NAME["mixtral"].changes, **WIDE}), tmp_path)
    quantized, _ = saved(name, folder, tmp_path / "made")
    equal_on_ranks(quantized, ranks, 2, 1, experts=True)


@each()
def test_adapters(name: str, ranks: RankProcesses, tmp_path: Path) -> None:
    """They are added as to the weights that codes stand for; where inputs are rounded, as to ours on one rank."""
    quantized, plain = saved(name, tiny(name, tmp_path), tmp_path / "made")
    adapter = save_random_adapter(plain, tmp_path / "a", rank=8)
    form = FORMS[name]
    rounds = form is not None and form.rounds_inputs

    def case(base: Path, tp_size: int = 1) -> AdaptedCase:
        return AdaptedCase(base, [adapter], [0, -1], STEPS, 40, tp_size=tp_size)

    with rounded_by_parts(2):
        expected = run_adapted(case(quantized if rounds else plain), ParallelContext.single())
    assert expected is not None
    found = ranks.call(run_adapted, 2, 1, case(quantized, 2))[0]
    if rounds:  # the last bit of an adapter's sum may round an input otherwise
        assert distance(found, expected) < 0.01
    else:
        check_near(found, expected)
    plainly = run_adapted(replace(case(quantized), slots=[-1, -1]), ParallelContext.single())
    assert plainly is not None and float((plainly - expected).abs().max()) > 1e-3, "the adapter changes something"


def tokens_of(model: Path, **flags: Any) -> list[list[int]]:
    given: dict[str, Any] = {"max_num_seqs": 4, "cpu_threads": 1, "max_model_len": 200, "dtype": "float32", **flags}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(model), **given) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in (IDS[:20] * 2, IDS[5:12])]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def served(name: str, target: Path) -> tuple[Path, Path]:
    """A form of the demo; of a model with experts and the demo's words for the form that only these have."""
    folder = DEMO_MODEL
    if name == "mxfp4":
        folder = tiny(name, target)
        for file in DEMO_MODEL.glob("tokenizer*"):
            shutil.copy(file, folder)
    if name != "gguf":
        return saved(name, folder, target / "made")
    file, plain = save_gguf(folder, target / "m.gguf", lambda name: "Q4_1", of_bytes(folder, "smollm"))
    return file, plain


@each(soon=())
def test_drafts_streamed_layers_and_tiers(name: str, tmp_path: Path) -> None:
    """Tokens are those of the weights that codes stand for; where inputs are rounded, those without all of it."""
    quantized, plain = served(name, tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    everything = {"speculative_config": drafts, "cpu_offload_gb": 0.01, "kv_offloading_size": 0.05}
    form = FORMS[name]
    expected = tokens_of(quantized if form is not None and form.rounds_inputs else plain)
    assert tokens_of(quantized, **everything) == expected


@each("fp8 blocks", "fbgemm_fp8", soon=())
def test_batch_invariant(name: str, tmp_path: Path) -> None:
    quantized, plain = served(name, tmp_path)
    form = FORMS[name]
    expected = tokens_of(quantized if form is not None and form.rounds_inputs else plain)
    assert tokens_of(quantized, batch_invariant=True) == expected


@pytest.mark.parametrize("name", ["fp8 blocks", "fbgemm_fp8"])
def test_batch_invariance_refuses_fp8(name: str, tmp_path: Path) -> None:
    quantized, _ = served(name, tmp_path)
    with pytest.raises(SettingsError, match="it is not to be had with fp8 weights, which no kernel multiplies"):
        LLM(str(quantized), batch_invariant=True)
