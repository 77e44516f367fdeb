"""Steps of attention over latents: what a layer hands over, in any widths, over a cache that is NaN beside its rows."""

from typing import NamedTuple

import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.kernels.kv_store import LayerKV, encode
from tandem.workers.models.spec.arch import AttentionParams, Mla


def mla(heads: int, kv_rank: int, nope: int, rope: int, v_dim: int) -> Mla:
    return Mla(num_heads=heads, q_rank=None, kv_rank=kv_rank, nope_dim=nope, rope_dim=rope, v_dim=v_dim)


class Inputs(NamedTuple):
    """What a layer hands over: its projections, queries, the step's latents and a cache that has them."""

    heads: LatentHeads
    q_TND: torch.Tensor
    latents_T1E: torch.Tensor
    kv: LayerKV

    @classmethod
    def random(cls, spec: Mla, batch: ForwardBatch, dtype: torch.dtype, storage: torch.dtype) -> "Inputs":
        """Slots of no row are NaN, where the cache can tell: nothing beyond a context may be read, or it shows."""
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        weight = noise(spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_rank) * spec.kv_rank**-0.5
        q_TND = noise(batch.num_tokens, spec.num_heads + 1, spec.key_dim)[:, 1:]  # strided
        blocks, size = int(batch.block_table_RN.max()) + 2, batch.block_size
        latents = torch.full((blocks * size, 1, spec.head_dim), float("nan"), dtype=dtype)
        for row, length in enumerate(batch.seq_lens_list):
            position = torch.arange(length)
            slots = batch.block_table_RN[row, position // size] * size + position % size
            latents[slots] = noise(length, 1, spec.head_dim)
        plane, scales = encode(latents, storage)
        planes = [plane.view(blocks, size, 1, -1)]
        kv = LayerKV.of(planes, [] if scales is None else [scales.view(blocks, size, 1)])
        return cls(LatentHeads(spec, lambda: weight), q_TND, latents[batch.slot_mapping_T], kv)

    def wide(self) -> "Inputs":
        """The same numbers in float32."""
        weight, kv = self.heads.of_heads().float().flatten(0, 1), self.kv
        if not kv.scales:
            kv = LayerKV.of([kv.keys.float()], [])
        heads = LatentHeads(self.heads.spec, lambda: weight)
        return Inputs(heads, self.q_TND.float(), self.latents_T1E.float(), kv)

    def attend(self, backend: LatentBackend, batch: ForwardBatch) -> torch.Tensor:
        step, spec = backend.prepare(batch), self.heads.spec
        return step.attend_latent(
            self.q_TND, self.latents_T1E, self.kv, AttentionParams(spec.key_dim**-0.5), self.heads
        )
