"""Results do not depend on how tokens are split into steps, rows and blocks (float32)."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.workers.models.decoder import Decoder
from tests.left_to import rest_in_parity
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.tiny_models import SHALLOW

TinyFolder = Callable[[str], Path]
MakeDecoder = Callable[..., Decoder]
NAMES = [
    "llama-gqa",
    "llama-rope-dynamic",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "smollm3",
    "gemma2",
    "gpt2",
    "bloom",
]
LENGTH = 61
CLOSE = {"rtol": 0.0, "atol": 2e-4}
FAMILIES = (
    *("phi3-longrope", "cohere", "gpt_neox", "opt", "gptj", "falcon-alibi", "mpt", "gemma3", "stablelm-parallel"),
    *("qwen2_moe", "mixtral", "granitemoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmo2"),
)
"""Of the shallow models, those in make test: one for each kind of attention, rope and MLP."""
CHUNKS = [(7, 1, 16, 37), (1,) * LENGTH, (60, 1), (3, 58)]


@pytest.fixture(params=NAMES)
def decoder(request: pytest.FixtureRequest, tiny_folder: TinyFolder, make_decoder: MakeDecoder) -> Decoder:
    return make_decoder(tiny_folder(request.param))


OFTEN = {1: ("llama-rope-dynamic", "gemma2", "bloom"), 2: ("mistral-window",), 3: ("gpt2",)}
"""Models that make test has beyond the first way of cutting a prompt, by the way."""


@pytest.mark.parametrize(
    ("decoder", "chunks"),
    rest_in_parity(
        itertools.product(NAMES, CHUNKS),
        lambda name, chunks: not CHUNKS.index(chunks) or name in OFTEN[CHUNKS.index(chunks)],
    ),
    indirect=["decoder"],
    ids=str,
)
def test_chunked_prompt_equals_whole_prompt(decoder: Decoder, chunks: tuple[int, ...]) -> None:
    check_chunks(decoder, chunks)


@pytest.mark.parametrize(
    ("name", "chunks"),
    rest_in_parity(
        itertools.product([*SHALLOW, "mixtral"], CHUNKS),
        lambda name, chunks: name in FAMILIES and chunks == CHUNKS[0],
    ),
    ids=str,
)
def test_every_family_in_chunks(
    name: str, chunks: tuple[int, ...], tiny_folder: TinyFolder, make_decoder: MakeDecoder
) -> None:
    """And with its blocks shuffled or in order."""
    decoder = make_decoder(tiny_folder(name))
    check_chunks(decoder, chunks)
    check_shuffled(decoder, 3)


def check_chunks(decoder: Decoder, chunks: tuple[int, ...]) -> None:
    ids = prompt_ids(LENGTH, 200)
    whole = PagedRows(decoder, 1, LENGTH).step([(0, ids)], all_logits=True)
    rows, start, parts = PagedRows(decoder, 1, LENGTH), 0, []
    for size in chunks:
        parts.append(rows.step([(0, ids[start : start + size])], all_logits=True))
        start += size
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_shuffled_blocks_equal_contiguous_ones(decoder: Decoder, block_size: int) -> None:
    check_shuffled(decoder, block_size)


def check_shuffled(decoder: Decoder, block_size: int) -> None:
    ids = prompt_ids(LENGTH, 200)
    results = []
    for shuffle in (True, False):
        rows = PagedRows(decoder, 1, LENGTH, block_size=block_size, shuffle=shuffle)
        results.append(
            torch.cat([rows.step([(0, ids[:40])]), rows.step([(0, ids[40:60])]), rows.step([(0, ids[60:])])])
        )
    assert torch.equal(*results)


def test_rows_of_one_step_do_not_meet(decoder: Decoder) -> None:
    """Prompts, chunks with a prefix and decodes of very different lengths share steps; each row is as if alone."""
    prompts = [prompt_ids(length, 200, seed=length) for length in (61, 40, 33, 5, 2, 50, 1)]
    alone = [PagedRows(decoder, 1, LENGTH).step([(0, ids)])[0] for ids in prompts]
    rows = PagedRows(decoder, len(prompts), LENGTH)
    rows.step([(row, ids[: len(ids) // 2]) for row, ids in enumerate(prompts) if len(ids) > 1])
    decodes = [(row, ids[len(ids) // 2 : -1]) for row, ids in enumerate(prompts) if len(ids) // 2 < len(ids) - 1]
    rows.step(decodes[::-1])
    mixed = rows.step([(row, ids[-1:]) for row, ids in enumerate(prompts)])
    torch.testing.assert_close(mixed, torch.stack(alone), **CLOSE)


def test_decodes_and_chunks_interleave(decoder: Decoder) -> None:
    """Row order in the step is free: decode, chunk, decode, whole prompt."""
    prompts = [prompt_ids(length, 200, seed=length) for length in (30, 45, 12, 20)]
    alone = [PagedRows(decoder, 1, LENGTH).step([(0, ids)])[0] for ids in prompts]
    rows = PagedRows(decoder, len(prompts), LENGTH)
    rows.step([(2, prompts[2][:-1]), (0, prompts[0][:-1]), (1, prompts[1][:19])])
    mixed = rows.step([(0, prompts[0][-1:]), (1, prompts[1][19:]), (2, prompts[2][-1:]), (3, prompts[3])])
    torch.testing.assert_close(mixed, torch.stack(alone), **CLOSE)
