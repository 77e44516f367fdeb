"""TargetModel: the model whose tokens are guessed, run over whole answers through the decoder that serves it.

So each form of weights that is served can be a target. B answers of up to W tokens, T tokens of all of them, H hidden
size, V vocabulary, N rows that are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tandem.configs.schema import EngineSettings
from tandem.offload.weights.weight_stream import WeightStream
from tandem.parallel.context import ParallelContext
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.distill.own_answers import Answer
from tandem.workers.models.decoder import Decoder, attention_of
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.planning.resolve import read_spec, resolve_dtype
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.kv_cache import KVCache

BLOCK_SIZE: Final = 16
KEPT_BYTES: Final = 2**31
"""Memory for states of answers that have been run; later ones are run again whenever they are asked for."""


@dataclass(frozen=True, slots=True)
class AnswerStates:
    """The target's states along several answers, padded at their ends. ids_BW: their tokens. taps_BWH: behind the
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
        inputs, found = self._inputs(batch, kv, embedded_TH, ()), {}
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
        dtype = getattr(torch, resolve_dtype(settings, self.spec, self.platform.name))
        attention = attention_of(self.spec, self.platform, dtype)
        context, stream = ParallelContext.single(), WeightStream((), None)
        self.decoder = TappedDecoder(self.spec, context, attention, self.platform, dtype, stream)
        source = SafetensorsSource(open_checkpoint(Path(settings.model.model), self.spec), self.platform.read_ahead)
        self.decoder.load(source, dtype=dtype, device=self.platform.device, progress=False)
        self.dtype = dtype
        self._kv: tuple[int, KVTensors] | None = None
        self._kept: dict[tuple[int, tuple[int, ...]], tuple[Answer, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._kept_bytes = 0

    def states(self, answers: Sequence[Answer], taps: Sequence[int]) -> AnswerStates:
        """Runs answers, one by one, so that an answer's states do not depend on others; those that have been run, and
        kept, are not run again. taps: layers before which the residual stream is taken."""
        device, size, width = self.platform.device, self.spec.hidden_size, max(len(one.ids) for one in answers)
        ids_BW = torch.zeros(len(answers), width, dtype=torch.int64, device=device)
        chains_BW = torch.zeros_like(ids_BW, dtype=torch.bool)
        taps_BWH, final_BWH = (torch.zeros(*ids_BW.shape, count * size, device=device) for count in (len(taps), 1))
        for row, answer in enumerate(answers):
            count = len(answer.ids)
            ids_BW[row, :count] = torch.tensor(answer.ids)
            chains_BW[row, answer.start : count - 1] = True
            taps_BWH[row, :count], final_BWH[row, :count] = self._rows_of(answer, taps)
        return AnswerStates(ids_BW, taps_BWH, final_BWH, chains_BW)

    def logits(self, final_NH: torch.Tensor) -> torch.Tensor:
        """Returns logits [N, V], float32, of hidden states behind the final norm."""
        with torch.inference_mode():
            logits_NV = self.decoder.logits(final_NH.to(self.platform.device, self.dtype), None)
        return logits_NV.clone()

    @property
    def is_full(self) -> bool:
        """True if no further states are kept."""
        return self._kept_bytes >= KEPT_BYTES

    def _rows_of(self, answer: Answer, taps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns an answer's taps, side by side, and final hidden states, [T, ..], in the target's type."""
        if (kept := self._kept.get((id(answer), tuple(taps)))) is not None:
            return kept[1]
        with torch.inference_mode():
            batch, count = _batch(answer.ids, self.platform.device), len(answer.ids)
            found, final_TH = self.decoder.states(batch, self._cache(count), taps)
            taps_TH = torch.cat(found, -1) if found else final_TH[:, :0]
        if not self.is_full:
            self._kept_bytes += taps_TH.nbytes + final_TH.nbytes
            self._kept[id(answer), tuple(taps)] = answer, (taps_TH, final_TH)
        return taps_TH, final_TH

    def _cache(self, count: int) -> KVTensors:
        """Returns memory for the KV of so many tokens, which nothing reads later."""
        blocks = -(-count // BLOCK_SIZE)
        if self._kv is None or self._kv[0] < blocks:
            cache = KVCache.allocate(self.decoder.kv_layouts, blocks, BLOCK_SIZE, self.dtype, self.platform)
            self._kv = blocks, cache.tensors
        return self._kv[1]


def _batch(ids: Sequence[int], device: torch.device) -> ForwardBatch:
    """Returns one row as a step."""
    count, places_T = len(ids), torch.arange(len(ids), device=device)
    return ForwardBatch(
        input_ids_T=torch.tensor(ids, device=device),
        positions_T=places_T,
        slot_mapping_T=places_T,
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_table_RN=torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32, device=device)[None],
        logits_rows_S=torch.empty(0, dtype=torch.int64, device=device),
        query_lens_list=[count],
        seq_lens_list=[count],
        block_size=BLOCK_SIZE,
    )
