"""The uses of kernels in a model: attention of each kind of layer, and the products of its experts.

Each is run as layers run it, over caches and weights of random numbers that no cache of the device holds. Called where
Triton is (workers/platforms/cuda_tuner.py). E experts of a rank, I inputs, O outputs, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import torch

from tandem.parallel.expert_methods import Groups
from tandem.parallel.linear_methods import as_given, plain
from tandem.workers.attention.triton_paged import CHUNKS, DECODES, Multiprocessors, takes
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.kernels.kv_store import LARGEST, LayerKV
from tandem.workers.kernels.triton import tiles
from tandem.workers.kernels.triton.triton_attention import Kept, Rows, attend_chunks, chunk_tiles
from tandem.workers.kernels.triton.triton_decode import WorkLists, attend_decodes, decode_tiles
from tandem.workers.kernels.triton.triton_experts import MANY_FROM, multiply_groups
from tandem.workers.models.spec.arch import AttentionParams, Gqa, Moe
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams
from tandem.workers.tuning.call_timer import CALLS
from tandem.workers.tuning.trials import Run, Tile, Tunable
from tandem.workers.tuning.tuned_start import TunedModel


class Load(NamedTuple):
    """Equal rows: how many, their queries in the step, and their tokens in all."""

    rows: int
    queries: int
    length: int

    @property
    def name(self) -> str:
        chunk = f"{self.queries} queries at " if self.queries > 1 else ""
        return f"{self.rows} x {chunk}{self.length}"


class Loads(NamedTuple):
    """Steps that kernels are timed on. experts: tokens of steps, for few rows of an expert and for many, where more are
    taken if these are too few. cache_bytes: of keys and values, more than a device's own caches hold."""

    decodes: Sequence[Load]
    chunks: Sequence[Load]
    experts: tuple[Sequence[int], Sequence[int]]
    cache_bytes: int


USUAL: Final = Loads(
    decodes=(Load(1, 1, 8192), Load(32, 1, 1024), Load(128, 1, 512)),
    chunks=(Load(1, 512, 4096), Load(4, 128, 1024)),
    experts=((1, 16), (512, 2048)),
    cache_bytes=2**28,
)


def tunables_of(
    model: TunedModel, device: torch.device, multiprocessors: Multiprocessors, loads: Loads = USUAL
) -> list[Tunable]:
    """Returns each use of a rank once."""
    layers = parameters_of(model.spec).layers
    found = [*_attention(model, layers, device, multiprocessors, loads), *_experts(model, layers, device, loads)]
    return list({tunable.use: tunable for tunable in reversed(found)}.values())[::-1]


# ---- attention ----


@dataclass(frozen=True, slots=True)
class _Attention:
    """A kind of layer. heads: of q and of k."""

    model: TunedModel
    heads: tuple[int, int]
    dim: int
    params: AttentionParams
    device: torch.device
    multiprocessors: Multiprocessors

    def use(self, kernel: str) -> tiles.Use:
        group = self.heads[0] // self.heads[1]
        return tiles.attention_use(kernel, self.model.dtype, self.dim, group, self.model.kv_dtype)

    def prepare(self, kernel: str, loads: Sequence[Load], cache_bytes: int) -> dict[str, Run]:
        kv, kept = self._cache(cache_bytes), _KeptOfOne(self, kernel)
        return {load.name: self._run(kernel, kv, kept, load) for load in loads}

    def _run(self, kernel: str, kv: LayerKV, kept: "_KeptOfOne", load: Load) -> Run:
        """Each call has blocks of its own."""
        device, tokens, blocks = self.device, load.rows * load.queries, -(-load.length // self.model.block_size)
        q_TND = torch.randn((tokens, self.heads[0], self.dim), device=device).to(self.model.dtype)
        out_TND = torch.empty_like(q_TND)
        starts = torch.arange(load.rows + 1, dtype=torch.int32, device=device) * load.queries
        positions_T = torch.arange(load.length - load.queries, load.length, device=device).repeat(load.rows)
        tables = torch.randint(len(kv.keys), (CALLS, load.rows, blocks), dtype=torch.int32, device=device)
        lists = WorkLists(starts, positions_T, DECODES)

        def run(tile: Tile, call: int) -> torch.Tensor:
            rows = Rows(starts, positions_T, tables[call])
            if kernel == "attend_parts":
                attend_decodes(q_TND, kv, out_TND, rows, self.params, kept.with_tile(tile), lists)
            else:
                attend_chunks(q_TND, kv, out_TND, rows, self.params, kept.with_tile(tile), CHUNKS)
            return out_TND

        return run

    def _cache(self, num_bytes: int) -> LayerKV:
        kv_dtype, block_size = self.model.kv_dtype, self.model.block_size
        block_bytes = 2 * block_size * self.heads[1] * self.dim * kv_dtype.itemsize
        shape = (num_bytes // block_bytes, block_size, self.heads[1])
        if kv_dtype not in LARGEST:
            planes = [torch.randn((*shape, self.dim), device=self.device, dtype=kv_dtype) for _ in range(2)]
            return LayerKV.of(planes, [])
        planes = [_codes((*shape, self.dim), self.device).view(kv_dtype) for _ in range(2)]
        return LayerKV.of(planes, [torch.full(shape, 0.01, device=self.device) for _ in range(2)])


class _KeptOfOne:
    """A backend's memory, of the tile that is tried."""

    def __init__(self, layer: _Attention, kernel: str) -> None:
        self._multiprocessors = layer.multiprocessors
        self._use = tiles.words(layer.use(kernel))
        self._tile: Tile | None = None
        self._kept = Kept()

    def with_tile(self, tile: Tile) -> Kept:
        if tile != self._tile:
            self._tile, self._kept = tile, Kept(self._multiprocessors, tiles.TunedTiles({self._use: tile}))
        return self._kept


def _attention(
    model: TunedModel,
    layers: Sequence[LayerParams],
    device: torch.device,
    multiprocessors: Multiprocessors,
    loads: Loads,
) -> Iterator[Tunable]:
    """Yields decodes and chunks of each layer, those without a window first: they read more."""
    both = sorted(zip(model.spec.layers, layers, strict=True), key=lambda each: each[0].params.window is not None)
    for spec, own in both:
        attention = spec.attention
        if not isinstance(attention, Gqa) or not takes(model.dtype, attention.head_dim, model.kv_dtype):
            continue
        dim = attention.head_dim
        q, k = (own.weights[role].span(0, model.mesh).length // dim for role in (Role.Q, Role.K))
        slopes = None if spec.params.slopes is None else spec.params.slopes[:q]
        params = replace(spec.params, slopes=slopes, sinks=(0.0,) * q if attention.sinks else None)
        layer = _Attention(model, (q, k), dim, params, device, multiprocessors)
        of = tiles.attention_class(model.dtype.itemsize, dim, model.kv_dtype in LARGEST)
        for kernel, candidates, own_loads in (
            ("attend_parts", decode_tiles(of, model.dtype, multiprocessors), loads.decodes),
            ("attend_tiles", chunk_tiles(of, multiprocessors), loads.chunks),
        ):
            yield Tunable(layer.use(kernel), candidates, partial(layer.prepare, kernel, own_loads, loads.cache_bytes))


def _codes(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns bytes that are numbers as int8 and as e4m3, whose NaN has the bits 127 beside a sign."""
    sizes, signs = (torch.randint(most, shape, dtype=torch.uint8, device=device) for most in (120, 2))
    return sizes | signs << 7


# ---- experts ----


@dataclass(frozen=True, slots=True)
class _Projection:
    """A projection of a rank's experts. gathers: its inputs are rows of tokens, not of pairs."""

    sizes_EOI: tuple[int, int, int]
    top_k: int
    gathers: bool
    dtype: torch.dtype
    device: torch.device

    def prepare(self, steps: Sequence[int], *, has_many: bool) -> dict[str, Run]:
        weight_EOI = torch.randn(self.sizes_EOI, device=self.device, dtype=self.dtype)
        fewest = -(-MANY_FROM * self.sizes_EOI[0] // self.top_k)
        sizes = (max(tokens, fewest) if has_many else min(tokens, fewest - 1) for tokens in steps)
        return {f"{tokens} tokens": self._run(weight_EOI, tokens) for tokens in dict.fromkeys(sizes) if tokens}

    def _run(self, weight_EOI: torch.Tensor, tokens: int) -> Run:
        """Each call has other experts."""
        experts, _, inputs = self.sizes_EOI
        rows = tokens if self.gathers else tokens * self.top_k
        x = torch.randn((rows, inputs), device=self.device, dtype=self.dtype)
        groups = [self._groups(tokens, experts) for _ in range(CALLS)]

        def run(tile: Tile, call: int) -> torch.Tensor:
            own = tiles.ExpertTile(*tile)
            return multiply_groups(x, weight_EOI, None, groups[call], own, gathers=self.gathers)

        return run

    def _groups(self, tokens: int, experts: int) -> Groups:
        ops = TorchExperts(plain, as_given, self.device)
        chosen_TK = torch.rand((tokens, experts), device=self.device).topk(min(self.top_k, experts)).indices
        return ops.group(chosen_TK, range(experts), ops.loads(experts))


def _experts(model: TunedModel, layers: Sequence[LayerParams], device: torch.device, loads: Loads) -> Iterator[Tunable]:
    """Yields both projections of dense experts, with few rows each and with many; codes have tiles of their own
    (triton_code_gemm.py), which are not tuned."""
    for spec, own in zip(model.spec.layers, layers, strict=True):
        if not isinstance(spec.mlp, Moe):
            continue
        here = [each for each in own.experts if all(param.local_elements(model.mesh) for param in each)]
        for merge in ("up", "down"):
            weights, _ = here[0].merged(merge)
            if any(weight.scheme is not None for weight in weights):
                continue
            outputs = sum(weight.span(0, model.mesh).length for weight in weights)
            sizes = len(here), outputs, weights[0].span(1, model.mesh).length
            projection = _Projection(sizes, min(spec.mlp.top_k, len(here)), merge == "up", model.dtype, device)
            for has_many, table in ((False, tiles.FEW), (True, tiles.MANY)):
                use = tiles.experts_use(model.dtype, *sizes, has_many=has_many)
                prepare = partial(projection.prepare, loads.experts[has_many], has_many=has_many)
                yield Tunable(use, table[model.dtype.itemsize], prepare)
