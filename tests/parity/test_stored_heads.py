"""A stored head that is not the embedding's table, where config.json or the family says that it is: transformers keeps
it, and so do we. Every family that ties by default, several ranks, int8, streamed layers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.parallel.context import ParallelContext
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import FAMILIES
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.own_heads import save_own_head
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import BY_NAME, load_peer

MakeDecoder = Callable[..., Decoder]
BY_DEFAULT = (
    *("smollm3", "cohere", "gemma", "gemma2", "gemma3", "gpt2", "bloom", "starcoder2", "opt", "falcon-groups", "mpt"),
)
IDS = prompt_ids(20, 200)
STEPS = [[(0, IDS[:12])], [(0, IDS[12:])]]


def theirs_of(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return load_peer(folder)(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(
    ("name", "by_default"),
    [("llama-gqa", False), ("llama-many-files", False), ("qwen2", False), *((name, True) for name in BY_DEFAULT)],
)
def test_logits_are_those_of_the_stored_head(
    name: str, by_default: bool, tmp_path: Path, make_decoder: MakeDecoder
) -> None:
    folder = save_own_head(BY_NAME[name], tmp_path, by_default=by_default)
    ours = PagedRows(make_decoder(folder), 1, len(IDS)).step([(0, IDS)], all_logits=True)
    theirs = theirs_of(folder)
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_every_family_that_ties_by_default_is_here(tmp_path: Path) -> None:
    tied = {family.architecture for family in FAMILIES if family.defaults.get("tie_word_embeddings")}
    made = {load_spec(save_own_head(BY_NAME[name], tmp_path, by_default=True)).architecture for name in BY_DEFAULT}
    assert made == tied


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "changes"),
    [(2, 1, {}), (2, 2, {"streamed": (0, 1)}), (2, 1, {"quantization": "int8"}), (1, 2, {"load_format": "dummy"})],
    ids=str,
)
def test_ranks_share_the_stored_head(
    ranks: RankProcesses, tmp_path: Path, tp_size: int, pp_size: int, changes: dict[str, object]
) -> None:
    folder = save_own_head(BY_NAME["qwen2"], tmp_path)

    def case(tp: int, pp: int) -> DecoderCase:
        return DecoderCase(folder, tp, pp, STEPS, num_rows=1, max_len=24, **changes)  # type: ignore[arg-type]

    alone = run_case(case(1, 1), ParallelContext.single())
    results = ranks.call(run_case, tp_size, pp_size, case(tp_size, pp_size))[-tp_size:]
    assert alone is not None and all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], alone, rtol=0, atol=2e-5 * float(alone.abs().max()))
    if changes.get("load_format") != "dummy":
        theirs = theirs_of(folder)[[11, 19]]
        rounding = 0.2 if "quantization" in changes else 2e-5
        assert (results[0] - theirs).abs().max() <= rounding * theirs.abs().max()


def test_an_equal_head_is_the_embeddings_table(tmp_path: Path) -> None:
    """Read once and held once, as where none is stored."""
    folder = save_own_head(BY_NAME["qwen2"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for head in (tensors["lm_head.weight"], tensors["model.embed_tokens.weight"].clone()):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        spec = load_spec(folder)
        peer = load_peer(folder)
        assert spec.tie_word_embeddings == (peer.get_output_embeddings().weight is peer.get_input_embeddings().weight)
        decoder = build_decoder(
            spec, ParallelContext.single(), folder=folder, dtype=torch.float16, platform=CpuPlatform()
        )
        size = sum(2 * tensor.numel() for name, tensor in tensors.items() if name != "lm_head.weight")
        assert decoder.weight_bytes == size + (0 if spec.tie_word_embeddings else 2 * tensors["lm_head.weight"].numel())
