"""TargetModel: the model whose tokens are guessed, run over whole answers through the decoder that serves it.

So each form of weights that is served can be a target. B answers of up to W tokens, T tokens of all of them, H hidden
size, V vocabulary, N rows that are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import torch

from tandem.configs.schema import Device, EngineSettings
from tandem.offload.weights.weight_stream import WeightStream
from tandem.parallel.context import ParallelContext
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.distill.answers import Answer
from tandem.workers.models.decoder import Decoder, attention_of
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.planning.resolve import read_spec, resolve_dtype
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.kv_cache import KVCache

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class AnswerStates:
    """What the target computes of several answers, padded at their ends. ids_BW: their tokens. taps_BWH: behind the
    layers that were asked for, side by side, the residual stream, float32. final_BWH: behind the final norm.
    lens_B: tokens. chains_BW: the tokens that a guess may start behind: those of the answers but the last."""

    ids_BW: torch.Tensor
    taps_BWH: torch.Tensor
    final_BWH: torch.Tensor
    chains_BW: torch.Tensor


class TappedDecoder(Decoder):
    """A decoder that shows what its layers pass on."""

    def states(
        self, batch: ForwardBatch, kv: KVTensors, taps: Sequence[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Runs a step; returns the residual stream before each of the layers `taps`, which count from 0, and the hidden
        states behind the final norm, all [T, H]."""
        embedded_TH = self._embedded(batch)
        assert embedded_TH is not None, "all layers are here"
        inputs, found = self._inputs(batch, kv, embedded_TH), {}
        branch_TH: torch.Tensor | None = None
        for place, (layer, layer_kv) in enumerate(zip(self._layers, inputs.kv.layers, strict=True)):
            if place in taps:
                residual_TH = inputs.residual_TH
                found[place] = residual_TH.clone() if branch_TH is None else residual_TH + branch_TH
            branch_TH = layer(branch_TH, inputs, layer_kv)
        assert branch_TH is not None, "a model has layers"
        everywhere = torch.arange(batch.num_tokens, device=branch_TH.device)
        return [found[place] for place in taps], self.normed(branch_TH, inputs.residual_TH, everywhere)

    def token_rows(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Returns rows [N, H] of the embedding, as they are stored."""
        assert self._embedding is not None
        return self._embedding(ids_N)

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows [N, H] of the head, float32, whatever form it has: products with unit vectors."""
        assert self._head is not None
        return self._head(torch.eye(self._hidden_size, dtype=self._dtype, device=ids.device))[:, ids].T.contiguous()

    def final_norm_weight(self, device: torch.device) -> torch.Tensor:
        """Returns what the final norm multiplies a vector of ones by, [H], float32; for an RMSNorm its weight."""
        assert self._final_norm is not None
        return self._final_norm.alone(torch.ones(1, self._hidden_size, dtype=self._dtype, device=device))[0].float()


class TargetModel:
    """The target, loaded. taps: layers before which the residual stream is taken."""

    def __init__(self, settings: EngineSettings, platform: Platform | None = None) -> None:
        self.spec: ArchSpec = read_spec(settings)
        self.platform = platform or open_platform(settings, 0, 1)
        device: Device = "cpu" if self.platform.device.type == "cpu" else "cuda"
        dtype = getattr(torch, resolve_dtype(settings, self.spec, device))
        attention = attention_of(self.spec, self.platform, dtype)
        context, stream = ParallelContext.single(), WeightStream((), None)
        self.decoder = TappedDecoder(self.spec, context, attention, self.platform, dtype, stream)
        source = SafetensorsSource(open_checkpoint(Path(settings.model.model), self.spec), self.platform.read_ahead)
        self.decoder.load(source, dtype=dtype, device=self.platform.device, progress=False)
        self.dtype = dtype
        self._kv: tuple[int, KVTensors] | None = None

    @torch.inference_mode()
    def states(self, answers: Sequence[Answer], taps: Sequence[int]) -> AnswerStates:
        """Runs answers. The tensors are no inference tensors: gradients may pass beside them."""
        lens = [len(one.ids) for one in answers]
        batch = _batch([one.ids for one in answers], self.platform.device)
        found, final_TH = self.decoder.states(batch, self._cache(lens), taps)
        most, size = max(lens), self.spec.hidden_size
        with torch.inference_mode(mode=False):
            device = self.platform.device
            ids_BW = torch.zeros(len(lens), most, dtype=torch.int64, device=device)
            chains_BW = torch.zeros(len(lens), most, dtype=torch.bool, device=device)
            taps_BWH = torch.zeros(len(lens), most, len(taps) * size, device=device)
            final_BWH = torch.zeros(len(lens), most, size, device=device)
            for row, (answer, part) in enumerate(zip(answers, _parts(lens), strict=True)):
                ids_BW[row, : lens[row]] = torch.tensor(answer.ids)
                chains_BW[row, answer.start : lens[row] - 1] = True
                for place, tap_TH in enumerate(found):
                    taps_BWH[row, : lens[row], place * size : (place + 1) * size] = tap_TH[part]
                final_BWH[row, : lens[row]] = final_TH[part]
            return AnswerStates(ids_BW, taps_BWH, final_BWH, chains_BW)

    def logits(self, final_NH: torch.Tensor) -> torch.Tensor:
        """Returns logits [N, V], float32, of hidden states behind the final norm."""
        with torch.inference_mode():
            logits_NV = self.decoder.logits(final_NH.to(self.platform.device, self.dtype), None)
        return logits_NV.clone()

    def _cache(self, lens: Sequence[int]) -> KVTensors:
        """Returns memory for the KV of rows of these lengths, which nothing reads later."""
        blocks = sum(-(-one // BLOCK_SIZE) for one in lens)
        if self._kv is None or self._kv[0] < blocks:
            layouts = self.decoder.kv_layouts
            cache = KVCache.allocate(layouts, blocks, BLOCK_SIZE, self.dtype, self.platform)
            self._kv = blocks, cache.tensors
        return self._kv[1]


def _parts(lens: Sequence[int]) -> list[slice]:
    """Returns where rows of these lengths are, one behind the other."""
    starts = [0, *accumulate(lens)]
    return [slice(*pair) for pair in pairwise(starts)]


def _batch(rows: Sequence[Sequence[int]], device: torch.device) -> ForwardBatch:
    """Returns whole rows as one step, each with blocks of its own."""
    lens = [len(row) for row in rows]
    blocks = [-(-one // BLOCK_SIZE) for one in lens]
    first = [0, *accumulate(blocks)]
    places = [torch.arange(one) for one in lens]
    slots = [place + start * BLOCK_SIZE for place, start in zip(places, first, strict=False)]
    table_RN = torch.tensor(first[:-1])[:, None].repeat(1, max(blocks))
    for row, count in enumerate(blocks):
        table_RN[row, :count] += torch.arange(count)
    return ForwardBatch(
        input_ids_T=torch.tensor([token for row in rows for token in row], device=device),
        positions_T=torch.cat(places).to(device),
        slot_mapping_T=torch.cat(slots).to(device),
        query_starts=torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table_RN=table_RN.to(torch.int32).to(device),
        logits_rows_S=torch.empty(0, dtype=torch.int64, device=device),
        query_lens_list=lens,
        seq_lens_list=lens,
        block_size=BLOCK_SIZE,
    )
