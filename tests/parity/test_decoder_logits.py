"""The decoder against transformers: every registered family, every rope scaling, biases, tying, windows, head layouts.

float32: logits within 2e-5 of the largest one, 64 greedy tokens identical. bf16 and fp16: no further from float32 truth
than twice transformers' own error in that dtype.
"""

import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import supported_architectures
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.reference_attention import ReferenceAttention
from tests.support.tiny_models import LLAMA3, TINY_MODELS, greedy_after, load_peer

NAMES = [tiny.name for tiny in TINY_MODELS]
STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "stories260K"
PROMPT_LEN, OUTPUT_LEN = 45, 64
TinyFolder = Callable[[str], Path]
MakeDecoder = Callable[..., Decoder]


@lru_cache(maxsize=1)
def peer_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, for the questions to it that follow each other."""
    return load_peer(folder, dtype)


def peer_logits(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        return peer_of(folder, dtype)(torch.tensor([ids])).logits[0].float()


def peer_greedy(folder: Path, ids: list[int], told: list[int]) -> list[int]:
    """`told`, where that is what transformers writes behind `ids`; EOS does not stop it. Generating it costs as much as
    all else of a test, and tells more where a rope changes with the length alone."""
    model, count = peer_of(folder), len(told)
    if not changes_with_length(model.config):
        return greedy_after(model, ids, told)
    model.generation_config.eos_token_id = None
    inputs = torch.tensor([ids])
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return list(out[0, len(ids) :].tolist())


def changes_with_length(config: Any) -> bool:
    """Whether a token's rotation depends on how many follow."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type")) in ("dynamic", "longrope")


def check_folder(folder: Path, make_decoder: MakeDecoder) -> None:
    """Logits of a whole prompt, and a greedy continuation, in float32."""
    ids = prompt_ids(PROMPT_LEN, load_spec(folder).vocab_size)
    decoder = make_decoder(folder)
    ours = PagedRows(decoder, 1, PROMPT_LEN).step([(0, ids)], all_logits=True)
    theirs = peer_logits(folder, ids)
    assert ours.shape == theirs.shape and ours.dtype is torch.float32
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    rows = PagedRows(decoder, 1, PROMPT_LEN + OUTPUT_LEN)
    told = rows.greedy(0, ids, OUTPUT_LEN)
    assert len(told) == OUTPUT_LEN and told == peer_greedy(folder, ids, told)


@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_transformers(name: str, tiny_folder: TinyFolder, make_decoder: MakeDecoder) -> None:
    check_folder(tiny_folder(name), make_decoder)


def renamed(folder: Path, target: Path, name_of: Callable[[str], str], extra: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with other names of tensors, and with more of them."""
    target.mkdir()
    tensors = {name_of(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | extra, target / "model.safetensors")
    shutil.copy(folder / "config.json", target)
    return target


@pytest.mark.parametrize(
    ("name", "prefix", "head", "extra"),
    [
        ("gpt2", "transformer.", None, ["h.0.attn.bias", "h.3.attn.masked_bias"]),
        ("llama-mha-tied", "model.", None, ["layers.0.self_attn.rotary_emb.inv_freq"]),
        ("llama-mha-tied", "", "model.embed_tokens.weight", []),
        ("gemma2", "", "model.embed_tokens.weight", []),
        ("deepseek_v3", "", None, ["model.layers.2.enorm.weight", "model.layers.2.eh_proj.weight"]),
    ],
)
def test_checkpoints_as_they_are_published(
    name: str, prefix: str, head: str | None, extra: list[str], tiny_folder: TinyFolder, tmp_path: Path,
    make_decoder: MakeDecoder,
) -> None:  # fmt: skip
    """Without the prefix of the base model, a tied table under the head's name alone, with buffers that can be derived,
    and with layers that guess further tokens."""
    original = tiny_folder(name)

    def name_of(stored: str) -> str:
        return "lm_head.weight" if stored == head else stored.removeprefix(prefix)

    folder = renamed(original, tmp_path / name, name_of, {each: torch.zeros(1) for each in extra})
    ids = prompt_ids(20, 200)
    ours, theirs = (
        PagedRows(make_decoder(each), 1, 20).step([(0, ids)], all_logits=True) for each in (folder, original)
    )
    assert torch.equal(ours, theirs)


ADDED: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
}


@pytest.mark.parametrize("kind", ADDED)
def test_rope_scaling_that_a_user_has_added_to_config(
    kind: str, tiny_folder: TinyFolder, tmp_path: Path, make_decoder: MakeDecoder
) -> None:
    """As model cards advise: beside the rope_parameters that transformers has saved."""
    folder = Path(shutil.copytree(tiny_folder("llama-gqa"), tmp_path / "llama"))
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "default"
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": ADDED[kind]}))
    ids = prompt_ids(PROMPT_LEN, 200)
    ours = PagedRows(make_decoder(folder), 1, PROMPT_LEN).step([(0, ids)], all_logits=True)
    theirs = peer_logits(folder, ids)
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    assert (ours - peer_logits(tiny_folder("llama-gqa"), ids)).abs().max() > 1e-3 * theirs.abs().max()


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not beside the repository")
def test_a_trained_checkpoint_equals_transformers(make_decoder: MakeDecoder) -> None:
    check_folder(STORIES, make_decoder)


@pytest.mark.parametrize(
    "name",
    ["llama-mqa-biased", "mistral-window", "qwen2", "qwen3", "smollm3", "mixtral", "gemma2", "gpt2", "bloom"],
)
def test_half_precision_is_as_near_as_transformers(
    name: str, tiny_folder: TinyFolder, make_decoder: MakeDecoder
) -> None:
    folder = tiny_folder(name)
    ids = prompt_ids(PROMPT_LEN, load_spec(folder).vocab_size)
    truth = peer_logits(folder, ids)
    for dtype in (torch.bfloat16, torch.float16):
        ours = PagedRows(make_decoder(folder, dtype), 1, PROMPT_LEN, dtype).step([(0, ids)], all_logits=True)
        theirs = peer_logits(folder, ids, dtype)
        assert (ours - truth).square().mean().sqrt() <= 2 * (theirs - truth).square().mean().sqrt(), dtype


def test_every_registered_family_is_here(tiny_folder: TinyFolder) -> None:
    made = {load_spec(tiny_folder(tiny.name)).architecture for tiny in TINY_MODELS}
    assert made == set(supported_architectures())


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3"])
def test_reference_attention_gives_the_same_logits(
    name: str, tiny_folder: TinyFolder, make_decoder: MakeDecoder
) -> None:
    folder = tiny_folder(name)
    ids = prompt_ids(PROMPT_LEN, 200)
    fast, exact = (
        PagedRows(make_decoder(folder, attention=attention), 1, PROMPT_LEN).step([(0, ids)], all_logits=True)
        for attention in (None, ReferenceAttention())
    )
    torch.testing.assert_close(fast, exact, rtol=0, atol=1e-4)
