"""--quantization int4, w4a8, nf4 and fp8 compute what transformers does with the rounded weights: on one rank and on
several, which have the same codes; with adapters, streamed, drafted. Their bytes are those of a plan.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.configs.errors import SettingsError
from tandem.offload.weights.layer_placement import spread
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import Linear
from tandem.parallel.mesh import Mesh
from tandem.parallel.quantization.coded import CodedMethod
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.weight_plan import AT_LOAD
from tandem.workers.kernels.cpu import cpu_code_gemm
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.platforms.cpu import CpuPlatform
from tests.left_to import rest_in_parity
from tests.support.adapters import save_random_adapter
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.dequantized import save_dequantized
from tests.support.lora_ranks import AdaptedCase, run_adapted
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.rounded_parts import rounded_by_parts
from tests.support.tiny_models import load_peer

TinyFolder = Callable[[str], Path]
IDS = prompt_ids(40, 200)
STEPS = [[(0, IDS[:30]), (1, IDS[:7])], [(0, [5]), (1, [9])]]
WEIGHTS = pytest.mark.parametrize("form", ["int4", "nf4", "fp8"])
EACH = pytest.mark.parametrize("form", ["int4", "w4a8", "nf4", "fp8"])
ALL = pytest.mark.parametrize("form", sorted(AT_LOAD))


def check_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def check_near_but_for_ties(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Half of the rows of logits are near. Ranks add in another order, and a sum that this moves past the middle
    between two integers changes an input by a whole step, and with it the rest of its text; which sums do so depends
    on the CPU. Inputs that are rounded by other parts change every row."""
    near = (found - expected).abs().amax(1) <= 2e-5 * float(expected.abs().max())
    assert int(near.sum()) * 2 >= len(found), near


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the differences, as a share of that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def built(folder: Path, form: str, mesh: Mesh = Mesh(), load_format: Any = "safetensors") -> Decoder:
    """A rank's decoder; asserts that it holds the bytes that are planned."""
    spec = load_spec(folder, quantization=form)
    context = ParallelContext(mesh)
    decoder = build_decoder(
        spec, context, folder=folder, dtype=torch.float32, platform=CpuPlatform(), load_format=load_format
    )
    assert rank_weights(spec, mesh, 4, CpuPlatform().packs(torch.float32)).total_bytes == decoder.weight_bytes
    return decoder


def logits_of(folder: Path, form: str) -> torch.Tensor:
    rows = PagedRows(built(folder, form), 1, 40)
    return torch.cat([rows.step([(0, part)], all_logits=True) for part in (IDS[:30], IDS[30:39], IDS[39:])])


OF_OTHERS = {("qwen3", "fp8"), ("gpt2", "int4"), ("mixtral", "nf4"), ("mixtral", "w4a8")}
"""Models and forms in make test beside every form of the first model."""


@pytest.mark.parametrize(
    ("name", "form"),
    rest_in_parity(
        itertools.product(["llama-mqa-biased", "qwen3", "gpt2", "mixtral"], ["int4", "w4a8", "nf4", "fp8"]),
        lambda *case: case[0] == "llama-mqa-biased" or case in OF_OTHERS,
    ),
)
def test_logits_equal_those_of_transformers_with_rounded_weights(
    form: str, name: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Biases, a tied head, matrices that are stored turned around, experts. w4a8's inputs lose up to a step of 127."""
    found = logits_of(tiny_folder(name), form)
    with torch.inference_mode():
        theirs = load_peer(save_dequantized(tiny_folder(name), tmp_path / name, form))(torch.tensor([IDS])).logits[0]
        dense = load_peer(tiny_folder(name))(torch.tensor([IDS])).logits[0]
    if form == "w4a8":
        assert 1e-4 < distance(found, theirs) < distance(found, dense) / 2
        return
    check_near(found, theirs)
    assert (found - dense).abs().max() > 1e-3 * dense.abs().max(), "nothing was rounded"


@WEIGHTS
def test_the_twin_computes_alike(form: str, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = logits_of(tiny_folder("llama-gqa"), form)
    monkeypatch.setattr(cpu_code_gemm, "code_gemm", lambda dtype, planes: None)
    check_near(logits_of(tiny_folder("llama-gqa"), form), compiled)


def codes_of(folder: Path, form: str, context: ParallelContext) -> list[CodedWeight]:
    """The codes of each linear layer of this rank, in order, as the twin holds them."""
    spec, found = load_spec(folder, quantization=form), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_code_gemm, "code_gemm", lambda dtype, planes: None)
        decoder = build_decoder(spec, context, folder=folder, dtype=torch.float32, platform=CpuPlatform())
    for linear in decoder.linears():
        if isinstance(linear, Linear) and isinstance(linear._method, CodedMethod):
            found.append(linear._method.rows(slice(0, linear._method._shape[0])))
    return found


@WEIGHTS
def test_ranks_that_share_groups_round_them_alike(form: str, ranks: RankProcesses, tiny_folder: TinyFolder) -> None:
    """32 and 48 inputs of a rank are less than a group, but for fp8's, which has all inputs. Codes and scales are
    exactly one rank's: qkv, o, up and down of each layer."""
    folder = tiny_folder("llama-mha-tied")
    whole, halves = codes_of(folder, form, ParallelContext.single()), ranks.call(codes_of, 2, 1, folder, form)
    assert len(whole) >= 16
    for place in (1, 3, 5, 7):
        both = [half[place] for half in halves]
        assert torch.equal(torch.cat([half.codes_OI for half in both], 1), whole[place].codes_OI)
        parts = [half.dense_OI() for half in both]
        assert torch.equal(torch.cat(parts, 1), whole[place].dense_OI())


CUTS = {
    ("qwen3", 2, 2, False): ("int4", "w8a8"),
    ("mixtral", 2, 1, False): ("nf4", "w4a8"),
    ("mixtral", 2, 1, True): ("fp8", "int8"),
}
"""Forms in make test."""


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size", "experts", "form"),
    rest_in_parity(
        ((*cut, form) for cut in CUTS for form in sorted(AT_LOAD)), lambda *case: case[-1] in CUTS[case[:-1]]
    ),
)
def test_ranks_equal_one_rank(
    form: str, name: str, tp_size: int, pp_size: int, experts: bool, ranks: RankProcesses, tiny_folder: TinyFolder
) -> None:
    def case(tp_size: int, pp_size: int, **more: Any) -> DecoderCase:
        given = {"num_rows": 2, "max_len": 40, "quantization": form, **more}
        return DecoderCase(tiny_folder(name), tp_size, pp_size, STEPS, **given)

    results = ranks.call(run_case, tp_size, pp_size, case(tp_size, pp_size, expert_parallel=experts))[-tp_size:]
    rounds = form in ("w4a8", "w8a8")  # ranks that share a row of inputs scale their own parts
    with rounded_by_parts(tp_size, whole_experts=experts) if rounds else nullcontext():
        alone = run_case(case(1, 1), ParallelContext.single())
    assert alone is not None and all(torch.equal(result, results[0]) for result in results)
    if rounds:
        check_near_but_for_ties(results[0], alone)
    else:
        check_near(results[0], alone)


@EACH
def test_made_up_weights_have_the_bytes_of_a_plan(form: str, tiny_folder: TinyFolder) -> None:
    for name, mesh in (("llama-gqa", Mesh(4, 2, 7)), ("mixtral", Mesh(2, 1, 1)), ("mixtral", Mesh(2, 1, 1, True))):
        built(tiny_folder(name), form, mesh, "dummy")


@EACH
def test_adapters_are_added_to_rounded_weights(
    form: str, tiny_folder: TinyFolder, tmp_path: Path, ranks: RankProcesses
) -> None:
    folder = tiny_folder("llama-gqa")
    adapter = save_random_adapter(folder, tmp_path / "a", rank=8)

    def case(base: Path, tp_size: int = 1, **changes: Any) -> AdaptedCase:
        return AdaptedCase(base, [adapter], [0, -1], STEPS, 40, tp_size=tp_size, **changes)

    dense = run_adapted(case(save_dequantized(folder, tmp_path / "rounded", form)), ParallelContext.single())
    found = run_adapted(case(folder, quantization=form), ParallelContext.single())
    assert found is not None and dense is not None
    near = 0.1 if form == "w4a8" else 1e-5
    assert distance(found, dense) < near
    assert distance(ranks.call(run_adapted, 2, 1, case(folder, 2, quantization=form))[0], dense) < near


@EACH
def test_streamed_layers_equal_resident_ones(form: str, tiny_folder: TinyFolder) -> None:
    def logits(**changes: Any) -> torch.Tensor:
        given = {"num_rows": 2, "max_len": 40, "quantization": form, "dtype": torch.bfloat16, **changes}
        found = run_case(DecoderCase(tiny_folder("qwen3"), 1, 1, STEPS, **given), ParallelContext.single())
        assert found is not None
        return found

    resident = logits()
    assert bool(resident.isfinite().all()) and torch.equal(logits(streamed=spread(4, 3)), resident)


COMMON: dict[str, Any] = {"max_num_seqs": 4, "cpu_threads": 1, "max_model_len": 256, "dtype": "float32"}
PROMPTS = ["Once upon a time there was a little dog. The little dog", "Count from 3 to 9.", "One day"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens_of(**flags: Any) -> list[list[int]]:
    with LLM("demo", **COMMON, **flags) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@ALL
def test_drafts_tiers_and_streamed_layers_change_no_token(form: str) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    everything = {"speculative_config": drafts, "cpu_offload_gb": 0.01, "kv_offloading_size": 0.05}
    assert tokens_of(quantization=form, **everything) == tokens_of(quantization=form)


@pytest.mark.parametrize("form", ["int4", "w4a8", "nf4"])
def test_batch_invariant_tokens(form: str) -> None:
    """Log probabilities, which come of all logits, have the same bits alone and together."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    flags = {**COMMON, "enable_prefix_caching": False, "batch_invariant": True, "quantization": form}
    with LLM("demo", **flags) as llm:
        together = [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs for prompt in PROMPTS]
    assert together == alone


def test_batch_invariance_refuses_fp8() -> None:
    with pytest.raises(SettingsError, match="it is not to be had with fp8 weights, which no kernel multiplies"):
        LLM("demo", batch_invariant=True, quantization="fp8")
