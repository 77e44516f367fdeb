"""Learned sinks of attention heads (gpt-oss): the backends against transformers' eager attention, and a decoder whose
checkpoint has them, alone and on two ranks."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tandem.parallel.context import ParallelContext
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.decoder import Decoder, attention_of, build_decoder
from tandem.workers.models.spec.arch import ArchSpec, AttentionParams
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform
from tests.parity.test_attention import backends
from tests.support.attention_check import random_batch
from tests.support.decoder_ranks import RankProcesses
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.reference_attention import ReferenceAttention
from tests.support.tiny_models import load_peer

HEADS, KV_HEADS, DIM = 6, 2, 24


def peer_attention(
    q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, sinks_N: torch.Tensor, window: int | None
) -> torch.Tensor:
    """transformers' attention of gpt-oss for the last T of J positions."""
    tokens, context = len(q_TND), len(k_JKD)
    layer = nn.Module()
    layer.sinks, layer.num_key_value_groups = nn.Parameter(sinks_N), HEADS // KV_HEADS
    distance_TJ = torch.arange(context - tokens, context)[:, None] - torch.arange(context)
    seen_TJ = (distance_TJ >= 0) & (distance_TJ < (window or context))
    mask = torch.zeros(1, 1, tokens, context).masked_fill_(~seen_TJ, float("-inf"))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_JKD, v_JKD))
    return eager_attention_forward(layer.eval(), q, k, v, mask, scaling=DIM**-0.5)[0][0].detach()


@pytest.mark.parametrize("window", [None, 1, 20])
def test_every_backend_equals_transformers(window: int | None) -> None:
    lens = [(1, 70), (33, 33), (20, 61), (1, 1)]
    batch = random_batch(random.Random(0), 16, [queries for queries, _ in lens], [length for _, length in lens])
    generator = torch.Generator().manual_seed(0)
    contexts = [torch.randn(2, length, KV_HEADS, DIM, generator=generator) for _, length in lens]
    sinks_N = torch.linspace(-2, 4, HEADS)
    q_TND = torch.randn(batch.num_tokens, HEADS, DIM, generator=generator)
    kv = LayerKV(*torch.zeros(2, int(batch.block_table_RN.max()) + 1, 16, KV_HEADS, DIM))
    expected = []
    for row, (own, (_, length)) in enumerate(zip(q_TND.split([n for n, _ in lens]), lens, strict=True)):
        slots = torch.tensor([int(batch.block_table_RN[row, j // 16]) * 16 + j % 16 for j in range(length)])
        for plane, side in zip((kv.keys, kv.values), contexts[row], strict=True):
            plane.flatten(0, 1)[slots] = side
        expected.append(peer_attention(own, *contexts[row], sinks_N, window))
    k_TKD, v_TKD = (torch.cat([side[i][-n:] for side, (n, _) in zip(contexts, lens, strict=True)]) for i in range(2))
    params = AttentionParams(DIM**-0.5, window, sinks=tuple(sinks_N.tolist()))
    for backend in (ReferenceAttention(), *backends(torch.float32, DIM)):
        ours = backend.prepare(batch).attend(q_TND, k_TKD, v_TKD, kv, params)
        torch.testing.assert_close(ours, torch.cat(expected), rtol=0, atol=1e-5)


def with_sinks(spec: ArchSpec) -> ArchSpec:
    layers = tuple(replace(layer, attention=replace(layer.attention, sinks=True)) for layer in spec.layers)  # type: ignore[type-var, call-arg]
    return replace(spec, layers=layers)


def logits_with_sinks(folder: Path, ids: list[int], context: ParallelContext) -> torch.Tensor:
    """A whole prompt, then as many tokens one by one."""
    spec = with_sinks(load_spec(folder))
    attention = attention_of(spec, CpuPlatform(), torch.float32)
    decoder: Decoder = build_decoder(
        spec, context, folder=folder, dtype=torch.float32, platform=CpuPlatform(), attention=attention
    )
    rows = PagedRows(decoder, 1, len(ids))
    half = len(ids) // 2
    return torch.cat(
        [rows.step([(0, ids[:half])], all_logits=True), *(rows.step([(0, [each])]) for each in ids[half:])]
    )


def peer_logits(folder: Path, ids: list[int], sinks: dict[int, torch.Tensor]) -> torch.Tensor:
    """A Llama whose layers attend as gpt-oss does."""

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("eager_with_sinks", attend)
    model = load_peer(folder)
    for layer, sinks_N in sinks.items():
        model.model.layers[layer].self_attn.sinks = nn.Parameter(sinks_N)
    model.set_attn_implementation("eager_with_sinks")
    mask = torch.full((1, 1, len(ids), len(ids)), float("-inf")).triu_(1)
    with torch.inference_mode():
        return model(torch.tensor([ids]), attention_mask=mask).logits[0]


def test_a_decoder_reads_and_shards_them(
    ranks: RankProcesses, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    original, folder = tiny_folder("llama-gqa"), tmp_path / "sinks"
    shutil.copytree(original, folder)
    spec = load_spec(folder)
    sinks = {layer: torch.linspace(-2, 3, spec.layers[0].attention.num_heads) - layer for layer in range(4)}
    tensors = load_file(folder / "model.safetensors")
    added = {f"model.layers.{layer}.self_attn.sinks": values for layer, values in sinks.items()}
    save_file(tensors | added, folder / "model.safetensors")
    ids = prompt_ids(24, spec.vocab_size)
    expected = peer_logits(original, ids, sinks)
    alone = logits_with_sinks(folder, ids, ParallelContext.single())
    sharded, other = ranks.call(logits_with_sinks, 2, 1, folder, ids)
    assert len(other) == 0, "whole logits are on the rank that samples"
    for ours in (alone, sharded):
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
