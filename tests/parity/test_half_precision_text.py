"""Greedy text in bfloat16 and float16: transformers' own of the same dtype, up to near-ties.

A near-tie is a position at which the reference's best two logits are closer than the tolerance, which is a number of
unit round-offs of the dtype times the largest logit there. The reference's text is followed: at each position our
choice is compared, then the reference's token goes on, so that one near-tie does not end the comparison.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tests.parity.test_decoder_logits import STORIES
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import BY_NAME, ONE_OF_EACH, TINY_MODELS, load_peer

PROMPTS, PROMPT_LEN, OUTPUT_LEN = 6, 45, 40
TINY_ROUND_OFFS = 48
"""The tiny checkpoints' wide weights grow one rounding to a tenth of the largest logit in bfloat16."""
ROUTED = {"mixtral", "qwen2_moe", "qwen3_moe", "granitemoe"}
"""Types of which a rounding may choose another expert, and so another text: test_decoder_logits.py has them."""
ROUTED_IN_BF16 = ("deepseek_v2", "deepseek_v3", "gpt_oss")
"""Types of which only the roundings of bfloat16 are large enough for that."""
TRAINED_ROUND_OFFS = 8
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
TinyFolder = Callable[[str], Path]
MakeDecoder = Callable[..., Decoder]


class Reference(NamedTuple):
    """transformers' greedy continuation of all prompts: tokens [N, OUTPUT_LEN] and the logits they come from."""

    tokens: torch.Tensor
    logits_NPV: torch.Tensor


def reference(folder: Path, prompts: list[list[int]], dtype: torch.dtype) -> Reference:
    model = load_peer(folder, dtype)
    model.generation_config.eos_token_id = None
    inputs = torch.tensor(prompts)
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=OUTPUT_LEN,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Reference(out.sequences[:, PROMPT_LEN:], torch.stack(out.logits, dim=1).float())


def choices(decoder: Decoder, prompts: list[list[int]], told: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Our most likely token at each position of the text that `told` is."""
    rows = PagedRows(decoder, len(prompts), PROMPT_LEN + OUTPUT_LEN, dtype)
    chosen = [rows.step(list(enumerate(prompts))).argmax(-1)]
    for position in range(OUTPUT_LEN - 1):
        chosen.append(rows.step([(row, [int(told[row, position])]) for row in range(len(prompts))]).argmax(-1))
    return torch.stack(chosen, dim=1)


def check(folder: Path, make_decoder: MakeDecoder, dtype: torch.dtype, round_offs: int) -> float:
    """Returns the share of positions that are no near-ties: there the token is the reference's, and at a near-tie it is
    one that the reference gives almost as much."""
    vocab_size = load_spec(folder).vocab_size
    prompts = [prompt_ids(PROMPT_LEN, vocab_size, seed=seed) for seed in range(PROMPTS)]
    told = reference(folder, prompts, dtype)
    ours = choices(make_decoder(folder, dtype), prompts, told.tokens, dtype)
    tolerance = round_offs * torch.finfo(dtype).eps / 2 * told.logits_NPV.abs().amax(-1)
    best = told.logits_NPV.topk(2).values
    clear = best[..., 0] - best[..., 1] > tolerance
    assert torch.equal(ours[clear], told.tokens[clear])
    missed = best[..., 0] - told.logits_NPV.gather(-1, ours[..., None])[..., 0]
    assert (missed <= tolerance).all()
    return clear.float().mean().item()


@DTYPES
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(tiny.name, marks=() if tiny.name in ONE_OF_EACH else pytest.mark.parity)
        for tiny in TINY_MODELS
        if tiny.model_type not in ROUTED
    ],
)
def test_tiny_checkpoints_write_what_transformers_writes(
    name: str, dtype: torch.dtype, tiny_folder: TinyFolder, make_decoder: MakeDecoder
) -> None:
    if dtype is torch.bfloat16 and BY_NAME[name].model_type in ROUTED_IN_BF16:
        pytest.skip("a rounding chooses another expert")
    share = check(tiny_folder(name), make_decoder, dtype, TINY_ROUND_OFFS)
    print(f"compared: {share:.0%} of {PROMPTS * OUTPUT_LEN} positions")
    assert share > (0.1 if dtype is torch.bfloat16 else 0.6), "enough was compared"


@DTYPES
@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not beside the repository")
def test_a_trained_checkpoint_writes_what_transformers_writes(dtype: torch.dtype, make_decoder: MakeDecoder) -> None:
    share = check(STORIES, make_decoder, dtype, TRAINED_ROUND_OFFS)
    print(f"compared: {share:.0%} of {PROMPTS * OUTPUT_LEN} positions")
    assert share > (0.5 if dtype is torch.bfloat16 else 0.8), "enough was compared"
