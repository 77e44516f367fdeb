"""Latent attention of every backend against its definition: absorbed and expanded, in pieces, padded, quantized."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.workers.attention.chunks import Gatherer, SdpaChunks
from tandem.workers.attention.latents import latent_chunks
from tandem.workers.attention.latents.latent_chunks import LatentChunks, absorbs
from tandem.workers.attention.latents.torch_latents import PaddedLatents, TorchLatents
from tandem.workers.attention.row_layout import Chunk
from tandem.workers.kernels.kv_store import TorchKVStore
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.layers.latent_layer import Heads
from tandem.workers.models.spec.arch import Mla
from tests.left_to import rest_in_parity
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.reference_attention import ReferenceAttention
from tests.support.tiny_models import BY_NAME, save_tiny_model

DEEPSEEK = Mla(num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
PROMPTS = [prompt_ids(length, 200, seed=length) for length in (61, 40, 5)]
TinyFolder = Callable[[str], Path]
MakeDecoder = Callable[..., Decoder]


def steps(decoder: Decoder, kv_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Logits of chunks, drafts and decodes of three rows."""
    rows = PagedRows(decoder, 3, 80, kv_dtype=kv_dtype)
    work = [
        [(0, PROMPTS[0][:40]), (1, PROMPTS[1][:18])],
        [(1, PROMPTS[1][18:]), (0, PROMPTS[0][40:]), (2, PROMPTS[2])],
        [(0, [5]), (2, [6, 7, 8]), (1, [9])],
        [(0, [3]), (1, [4]), (2, [5])],
    ]
    return torch.cat([rows.step(each, all_logits=True) for each in work])


@pytest.mark.parametrize("always", [None, True, False], ids=["counted", "absorbed", "expanded"])
@pytest.mark.parametrize("bytes_at_once", [None, 40_000, 4096], ids=["at once", "heads in parts", "in pieces"])
@pytest.mark.parametrize(
    ("name", "is_bounded"),
    rest_in_parity(
        itertools.product(["deepseek_v3", "deepseek_v2-lite"], [False, True]),
        lambda name, is_bounded: is_bounded == (name == "deepseek_v3"),
    ),
)
def test_every_way_equals_the_definition(
    name: str, bytes_at_once: int | None, is_bounded: bool, always: bool | None, tiny_folder: TinyFolder,
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tiny_folder(name)
    truth = steps(make_decoder(folder, attention=ReferenceAttention()))
    if always is not None:
        monkeypatch.setattr(latent_chunks, "absorbs", lambda *_: always)
    if bytes_at_once is not None:
        monkeypatch.setattr(latent_chunks, "GATHER_BYTES", bytes_at_once)
    found = steps(make_decoder(folder, attention=TorchLatents(is_bounded=is_bounded)))
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-5 * float(truth.abs().max()))


def test_what_is_expanded_at_once_is_bounded(
    tiny_folder: TinyFolder, make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs too, where a context of keys and values that were cached takes no memory of its own."""
    monkeypatch.setattr(latent_chunks, "absorbs", lambda *_: False)
    monkeypatch.setattr(latent_chunks, "GATHER_BYTES", 8192)
    taken: list[int] = []
    expand = Heads.expand

    def noted(heads: Heads, latents_JE: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        made = expand(heads, latents_JE, part)
        taken.append(sum(each.untyped_storage().nbytes() for each in made))
        return made

    monkeypatch.setattr(Heads, "expand", noted)
    steps(make_decoder(tiny_folder("deepseek_v3")))
    assert 0 < max(taken) <= 8192


def test_heads_that_do_not_fit_at_once_attend_in_parts(
    tiny_folder: TinyFolder, make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("deepseek_v3")
    truth = steps(make_decoder(folder, attention=ReferenceAttention()))
    monkeypatch.setattr(latent_chunks, "absorbs", lambda *_: False)
    monkeypatch.setattr(latent_chunks, "GATHER_BYTES", 40_000)
    parts: set[tuple[int, int]] = set()
    expand = Heads.expand

    def noted(heads: Heads, latents_JE: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        parts.add((part.start, part.stop))
        return expand(heads, latents_JE, part)

    monkeypatch.setattr(Heads, "expand", noted)
    found = steps(make_decoder(folder))
    assert {(0, 2), (2, 4)} <= parts
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-5 * float(truth.abs().max()))


@pytest.mark.parametrize(
    ("tokens", "context", "is_gathered", "on_device", "at_once"),
    [
        (512, 512, False, True, 36),  # 16 MiB of 512 positions of 448 elements: what is made, then the key
        (2048, 2048, False, True, 9),
        (512, 14_000, True, False, 1),
        (512, 15_000, True, False, 0),  # the latents alone take more than 16 MiB
        (15_000, 15_000, False, False, 1),  # but these are not gathered
        (20_000, 20_000, False, False, 0),
        (64, 2048, True, True, 9),
        (65, 2048, True, True, 0),  # 128 heads' scores take more than 64 MiB
        (65, 2048, True, False, 9),
    ],
)
def test_as_many_heads_attend_at_once_as_memory_allows(
    tokens: int, context: int, is_gathered: bool, on_device: bool, at_once: int
) -> None:
    chunks = LatentChunks(Gatherer(TorchKVStore()), SdpaChunks(), keeps_scores=on_device)
    chunk = Chunk(0, tokens, torch.zeros(1, dtype=torch.int32) if is_gathered else None, context)
    own = torch.empty(1, dtype=torch.bfloat16).expand(tokens, DEEPSEEK.num_heads, DEEPSEEK.key_dim)
    assert chunks.heads_at_once(chunk, own, DEEPSEEK) == at_once


def test_the_way_is_counted() -> None:
    assert all(absorbs(DEEPSEEK, 1, context) for context in (1, 100, 10**5))
    assert absorbs(DEEPSEEK, 100, 10**4) and absorbs(DEEPSEEK, 160, 10**5)
    assert not absorbs(DEEPSEEK, 180, 10**5) and not absorbs(DEEPSEEK, 1000, 1000)


def test_padded_decodes_equal_the_definition(tiny_folder: TinyFolder, make_decoder: MakeDecoder) -> None:
    """What a graph captures: rows of other lengths, padded tokens behind them."""

    class Padded(TorchLatents):
        def prepare(self, batch):  # type: ignore[no-untyped-def]
            if max(batch.query_lens_list) > 3:
                return super().prepare(batch)
            return PaddedLatents(batch, TorchKVStore())

    folder = tiny_folder("deepseek_v3")
    found, truth = (steps(make_decoder(folder, attention=each)) for each in (Padded(), ReferenceAttention()))
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-5 * float(truth.abs().max()))


@pytest.mark.parametrize(("kv_dtype", "bound"), [(torch.int8, 0.08), (torch.float8_e4m3fn, 0.3)], ids=["int8", "fp8"])
def test_quantized_latents(kv_dtype: torch.dtype, bound: float, tmp_path: Path, make_decoder: MakeDecoder) -> None:
    """Backends agree on what was stored, which is as near to what was not quantized as heads' keys and values are
    (test_kv_quant_logits.py). Without experts: a rounding that changes which of them compute says nothing of the
    cache."""
    tiny = BY_NAME["deepseek_v3"]
    folder = save_tiny_model(replace(tiny, changes={**tiny.changes, "first_k_dense_replace": 2}), tmp_path)
    found, truth = (
        steps(make_decoder(folder, attention=each), kv_dtype) for each in (TorchLatents(), ReferenceAttention())
    )
    off = (found - truth).abs() > 1e-4 * truth.abs().max()  # a last bit may decide which of two codes is stored
    assert off.float().mean() < 0.05 and (found - truth).norm() < 2e-3 * truth.norm()
    exact = steps(make_decoder(folder, attention=ReferenceAttention()))
    assert 0 < (truth - exact).norm() / exact.norm() < bound
