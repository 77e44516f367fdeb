"""GGUF files: logits are those of transformers with the weights that blocks stand for, on one rank and on several."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.gguf.gguf_folder import gguf_folder
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.gguf_files import save_gguf
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import TinyModel, load_peer, save_tiny_model

TinyFolder = Callable[[str], Path]
IDS = prompt_ids(40, 200)
STEPS = [[(0, IDS[:30]), (1, IDS[:7])], [(0, [5]), (1, [9])]]
WIDE = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EXPERTS = {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STRETCHED = {**LLAMA3, "rope_theta": 500000.0}
MODELS = {
    model.name: model
    for model in (
        TinyModel("wide", "llama", WIDE),
        TinyModel("rope-llama3", "llama", {"num_hidden_layers": 2, "head_dim": 16, "rope_parameters": STRETCHED}),
        TinyModel("gemma3-pattern", "gemma3_text", {
            "num_hidden_layers": 2, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        }),
        TinyModel("gemma2-plain", "gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24}),
        TinyModel("smollm3-default", "smollm3", {"attention_bias": True}),  # its fourth layer does not rotate
        TinyModel("qwen2_moe", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
        TinyModel("qwen3_moe", "qwen3_moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    )
}  # fmt: skip


def mixed(name: str) -> str:
    """As llama-quantize mixes kinds: some layers finer than others."""
    if "embed_tokens" in name or "lm_head" in name or "v_proj" in name:
        return "Q6_K"
    return "Q4_K"


def check_near(found: torch.Tensor, expected: torch.Tensor, share: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=share * float(expected.abs().max()))


def built(folder: Path, mesh: Mesh = Mesh()) -> Decoder:
    """A rank's decoder; asserts that it holds the bytes that are planned."""
    spec = load_spec(folder)
    decoder = build_decoder(spec, ParallelContext(mesh), folder=folder, dtype=torch.float32, platform=CpuPlatform())
    assert rank_weights(spec, mesh, 4, CpuPlatform().packs(torch.float32)).total_bytes == decoder.weight_bytes
    return decoder


def logits_of(folder: Path) -> torch.Tensor:
    """Logits of a prompt in chunks."""
    rows = PagedRows(built(folder), 1, 40)
    return torch.cat([rows.step([(0, part)], all_logits=True) for part in (IDS[:30], IDS[30:39], IDS[39:])])


def theirs_of(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return load_peer(folder)(torch.tensor([IDS])).logits[0]


CASES = [
    ("llama-gqa", "Q4_0"),
    ("llama-gqa", "Q8_0"),
    ("llama-gqa", "F16"),
    ("llama-mqa-biased", "Q4_1"),
    ("llama-mha-tied", "Q8_0"),  # the table is undone for ids, and multiplied as codes
    ("wide", "mixed"),
    ("mistral-window", "Q4_0"),
    ("rope-llama3", "Q4_1"),
    ("qwen2", "Q4_1"),
    ("qwen3", "Q8_0"),
    ("gemma", "BF16"),
    ("gemma2-plain", "Q4_0"),
    ("gemma3-pattern", "Q8_0"),
    ("phi3", "Q4_0"),
    ("phi3-longrope", "F16"),
    ("granite", "Q8_0"),
    ("smollm3-default", "Q4_1"),
    ("mixtral", "Q4_0"),
    ("qwen2_moe", "Q8_0"),
    ("qwen3_moe", "F16"),
    ("qwen3_moe", "Q4_1"),
]


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_logits_equal_those_of_transformers_with_the_same_weights(
    model: str, kind: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = save_tiny_model(MODELS[model], tmp_path) if model in MODELS else tiny_folder(model)
    more = {"gemma3.attention.sliding_window_pattern": 2} if model == "gemma3-pattern" else None
    file, plain = save_gguf(folder, tmp_path / "m.gguf", mixed if kind == "mixed" else lambda name: kind, more)
    check_near(logits_of(gguf_folder(file)), theirs_of(plain))


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (2, 2)])
@pytest.mark.parametrize(
    ("model", "kind"), [("wide", "mixed"), ("llama-mha-tied", "Q4_1"), ("phi3", "Q4_1"), ("mixtral", "Q4_0")]
)
def test_ranks_equal_one_rank(
    model: str, kind: str, tp_size: int, pp_size: int, ranks: RankProcesses, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Ranks cut blocks of 256 in the middle, and 96 inputs in blocks of 32 by two; the file is one of three."""
    folder = save_tiny_model(MODELS[model], tmp_path) if model in MODELS else tiny_folder(model)
    file, _ = save_gguf(folder, tmp_path / "m.gguf", mixed if kind == "mixed" else lambda name: kind, parts=3)
    made = gguf_folder(file)

    def case(tp_size: int, pp_size: int) -> DecoderCase:
        return DecoderCase(made, tp_size, pp_size, STEPS, num_rows=2, max_len=40)

    found = ranks.call(run_case, tp_size, pp_size, case(tp_size, pp_size))[-1]
    alone = run_case(case(1, 1), ParallelContext.single())
    assert alone is not None
    check_near(found, alone)
    for mesh in (Mesh(2), Mesh(2, 1, 1), Mesh(2, 2, 1)):
        built(made, mesh)
