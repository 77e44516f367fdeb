"""The recipe "add an attention backend" of CONTRIBUTING.md, followed with an invented one.

It attends to what the cache held before the step and to the step's own keys and values beside it, and leaves soft-caps
and ALiBi to the general backend.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import AttentionStep
from tandem.workers.attention.chunks import Gatherer
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.general import GeneralAttention
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_windows
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.platforms import replaced
from tests.support.tiny_models import BY_NAME, GROUPED, TinyModel, save_tiny_model


class InventedAttention:
    """The backend. Its steps are not replayed."""

    name = "invented"

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return InventedStep(batch, GeneralAttention(batch, Gatherer(TorchKVStore())))

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return None


@dataclass(frozen=True)
class InventedStep:
    batch: ForwardBatch
    general: GeneralAttention

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        if not params.is_plain:
            return self.general.attend(q_TND, k_TKD, v_TKD, kv, params)
        batch, rows = self.batch.of_group(kv.group), []
        for row, start in enumerate(accumulate(batch.query_lens_list[:-1], initial=0)):
            queries, length = batch.query_lens_list[row], batch.seq_lens_list[row]
            own, before = slice(start, start + queries), length - queries
            blocks = batch.block_table_RN[row].long()
            k_JKD, v_JKD = (
                torch.cat((plane[blocks].flatten(0, 1)[:before], mine[own]))
                for plane, mine in ((kv.keys, k_TKD), (kv.values, v_TKD))
            )
            seen_TJ = torch.arange(length) <= torch.arange(before, length)[:, None]
            if params.window is not None:
                seen_TJ &= torch.arange(length) > torch.arange(before, length)[:, None] - params.window
            group = q_TND.shape[1] // k_JKD.shape[1]
            scores_NTJ = torch.einsum("tnd,jnd->ntj", q_TND[own], k_JKD.repeat_interleave(group, 1)) * params.scale
            weights_NTJ = scores_NTJ.masked_fill(~seen_TJ, float("-inf")).softmax(-1)
            rows.append(torch.einsum("ntj,jnd->tnd", weights_NTJ, v_JKD.repeat_interleave(group, 1)))
        return torch.cat(rows)


def _attention(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> InventedAttention:
    return InventedAttention()


def text(platform: Platform, folder: Path) -> tuple[Decoder, list[int], torch.Tensor]:
    """Greedy tokens of a prompt in two chunks beside another row, and the last logits."""
    spec = load_spec(folder)
    windows = kv_windows(spec, 80)
    decoder = build_decoder(
        spec, ParallelContext.single(), folder=folder, dtype=torch.float32, platform=platform, windows=windows
    )
    rows, prompt = PagedRows(decoder, 2, 80, windows=windows), prompt_ids(40, 200)
    rows.step([(0, prompt[:25]), (1, prompt[:7])])
    tokens = [int(rows.step([(0, prompt[25:])])[0].argmax())]
    while len(tokens) < 12:
        tokens.append(int(rows.step([(1, [len(tokens)]), (0, tokens[-1:])])[1].argmax()))
    return decoder, tokens, rows.step([(0, tokens[-1:])])


@pytest.mark.parametrize("tiny", [BY_NAME["mistral-window"], BY_NAME["gemma2"], GROUPED], ids=lambda tiny: tiny.name)
def test_a_backend_is_a_class_that_a_platform_chooses(tmp_path: Path, tiny: TinyModel) -> None:
    folder = save_tiny_model(tiny, tmp_path)
    (decoder, ours, logits), (_, theirs, expected) = (
        text(platform, folder) for platform in (replaced(CpuPlatform(), attention=_attention), CpuPlatform())
    )
    assert decoder._attention.name == "invented" and ours == theirs
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
