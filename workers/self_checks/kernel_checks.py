"""Checks each compiled CPU kernel against its torch twin, at three shapes each, in the dtype that CPUs serve in. Those
that a device has too are checked there by device_checks.py.

The twin computes the same bf16 inputs in float32, so an error above TOLERANCE is a wrong result, not rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertMethod, ExpertParams, StackedExperts
from tandem.parallel.linear_methods import MakeMethod, as_given, plain
from tandem.parallel.params import Param, Scheme, Source
from tandem.parallel.quantization.int8 import Int8Method, W8A8Method
from tandem.parallel.quantization.schemes import Inputs, Int8Rows
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.kernels.cpu import cpu_build
from tandem.workers.kernels.cpu.cpu_int8_gemm import int8_methods, multiplies_int8, w8a8_methods
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.expert_ops import ExpertOps, RouterWeights, TorchExperts
from tandem.workers.kernels.fused_ops import FusedOps, TorchFusedOps
from tandem.workers.kernels.invariant.row_gemm import row_methods
from tandem.workers.kernels.kv_store import LARGEST, SCALE_DTYPE, LayerKV, TorchKVStore, as_indexable
from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables, TorchLora
from tandem.workers.kernels.sampling_ops import Draws, TorchSampling
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.spec.arch import Activation, AttentionParams, Mla, Moe
from tandem.workers.planning.adapter_room import row_stride
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform, multiplies_by_row
from tandem.workers.self_checks.outcome import Check, NotHere, relative_error, require

BF16 = torch.bfloat16
TOLERANCE = 0.02
"""The most difference, of the largest value: five roundings to bf16."""
BLOCK = 16
NORMS = ((1, 1024), (7, 2048), (64, 4096))
GEMMS = ((1, 1024, 1024), (7, 2048, 1000), (64, 512, 4096))
"""Rows, inputs and outputs."""


class Here(NamedTuple):
    """A platform, made when a check runs, and the dtype that is checked on it."""

    make: Callable[[], Platform]
    dtype: torch.dtype = BF16

    @property
    def platform(self) -> Platform:
        return self.make()

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor on its device, seeded by the shape."""
        made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        return made.to(self.platform.device, dtype or self.dtype)

    def no_kernel(self, otherwise: str = "this machine has no such kernel", instead: str = "torch computes") -> NotHere:
        """Return the words for a kernel that is missing. otherwise: why, where kernels are compiled. instead: what
        computes."""
        return NotHere(f"{self.platform.obstacle(self.dtype) or otherwise}; {instead}")


CPU: Final = Here(lambda: CpuPlatform())


def kernel_checks() -> list[Check]:
    """Returns the checks of all kernels for CPUs."""
    runs: dict[str, Callable[[], str]] = {
        "compiled kernels": _compiled,
        **shared_checks(CPU),
        "kernel KV quantization": partial(_kv_store, ((1, 2, 128), (33, 8, 64), (100, 4, 128))),
        "kernel skinny GEMM": _skinny_gemm,
        "kernel row GEMM": _row_gemm,
        "kernel int8 GEMM": _int8_gemm,
    }
    return [Check(*row) for row in runs.items()]


def shared_checks(here: Here) -> dict[str, Callable[[], str]]:
    """Returns the checks of the kernels that every device has, by name."""
    forms = (None, *map(Int8Rows, Inputs)) if here is CPU else (None,)
    return {
        "kernel add_rms_norm": partial(_fused, here, _add_rms_norm, NORMS),
        "kernel norm_rotate": partial(_fused, here, _norm_rotate, ((1, 10, 128), (7, 4, 64), (64, 40, 128))),
        "kernel add_layer_norm": partial(_fused, here, _add_layer_norm, NORMS),
        "kernel activate": partial(_fused, here, _activate, ((1, 3000), (7, 6144), (64, 8192))),
        "kernel silu_mul": partial(_fused, here, _silu_mul, ((1, 3072), (7, 6144), (64, 8192))),
        "kernel decode attention": partial(
            _attention, here, 1, (([5], 4, 2), ([300, 1, 17], 8, 8), ([129] * 8, 16, 2))
        ),
        "kernel chunk attention": partial(_attention, here, 9, (([9], 4, 2), ([70, 33], 8, 8), ([300], 16, 2))),
        "kernel latent attention": partial(_latents, here, (([5], 4, 1), ([300, 1, 17], 16, 1), ([129] * 4, 40, 4))),
        "kernel experts": partial(_experts, here, forms, ((1, 1024, 768), (7, 512, 1000), (200, 256, 512))),
        "kernel sampling": partial(_sampling, here, ((1, 1000), (7, 32_000), (8, 151_936))),
        "kernel grouped LoRA": partial(_lora, here, ((1, 1024, 1024), (7, 2048, 512), (64, 512, 3072))),
    }


def _compiled() -> str:
    """Fails where a C compiler is there and does not compile them: torch computes then, slower."""
    library = cpu_build.cpu_library(BF16)
    words = cpu_build.compiler_words()
    require(not words, f"the C compiler says: {words}")
    if library is None:
        raise NotHere(f"{cpu_build.obstacle(BF16) or 'there are none for this machine'}; torch computes, slower")
    return "for this CPU"


def _worst(errors: Sequence[float]) -> str:
    """Returns the worst error in words; CheckFailed when it is too large, or NaN."""
    worst = max(errors, key=lambda error: error if error == error else float("inf"))
    require(worst <= TOLERANCE, f"differs from its torch twin by {worst:.2g} of the largest value")
    return f"{len(errors)} shapes, largest difference {worst:.1g}"


def _fused(here: Here, compare: Callable[..., float], shapes: Sequence[Sequence[int]]) -> str:
    ops = here.platform.fused_ops(here.dtype)
    if type(ops) is TorchFusedOps:
        raise here.no_kernel()
    return _worst([compare(here, ops, *shape) for shape in shapes])


def _beside_twin(ops: FusedOps, name: str, *args: Any, **more: Any) -> float:
    """Return the error of an operation's result, and of the residual where it adds to it."""
    wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
    expected = getattr(TorchFusedOps(), name)(*wide, **more)
    error = relative_error(getattr(ops, name)(*args, **more), expected)
    return max(error, relative_error(args[1], wide[1])) if name.startswith("add_") else error


def _add_rms_norm(here: Here, ops: FusedOps, rows: int, width: int) -> float:
    x, residual = here.noise(rows, width), here.noise(rows, width)
    return _beside_twin(ops, "add_rms_norm", x, residual, here.noise(width), 1e-6)


def _norm_rotate(here: Here, ops: FusedOps, tokens: int, heads: int, dim: int) -> float:
    qk, weight, phase = (
        here.noise(tokens, heads, dim),
        here.noise(heads, dim),
        here.noise(tokens, 1, dim, dtype=torch.float32),
    )
    return _beside_twin(ops, "norm_rotate", qk, weight, 1e-6, phase.cos().to(here.dtype), phase.sin().to(here.dtype))


def _add_layer_norm(here: Here, ops: FusedOps, rows: int, width: int) -> float:
    x, residual, weight = here.noise(rows, width), here.noise(rows, width), here.noise(width)
    return _beside_twin(ops, "add_layer_norm", x, residual, weight, weight.flip(0), 1e-6)


def _activate(here: Here, ops: FusedOps, rows: int, width: int) -> float:
    """Every activation, alone and gated."""
    kinds = product(Activation, (False, True))
    return max(_beside_twin(ops, "activate", here.noise(rows, width), kind, gated=gated) for kind, gated in kinds)


def _silu_mul(here: Here, ops: FusedOps, rows: int, width: int) -> float:
    return _beside_twin(ops, "silu_mul", here.noise(rows, width))


def _attention(here: Here, num_queries: int, cases: Sequence[tuple[list[int], int, int]]) -> str:
    """cases: context lengths of the rows, query heads, KV heads."""
    errors, params = [], AttentionParams(128**-0.5)
    for lens, heads, kv_heads in cases:
        backend = here.platform.attention(here.dtype, 128)
        if isinstance(backend, TorchAttention):
            raise here.no_kernel()
        batch = attention_batch(lens, num_queries, here.platform.device)
        tokens, blocks = batch.num_tokens, int(batch.block_table_RN.max()) + 1
        q, k, v = (
            here.noise(tokens, heads, 128),
            here.noise(tokens, kv_heads, 128),
            here.noise(tokens, kv_heads, 128).flip(0),
        )
        kv = LayerKV(
            here.noise(blocks, BLOCK, kv_heads, 128), here.noise(blocks, BLOCK, kv_heads, 128).flip(0).contiguous()
        )
        wide = LayerKV(kv.keys.float(), kv.values.float())
        TorchFusedOps().store(k.float(), v.float(), wide, batch.slot_mapping_T)
        expected = TorchAttention().prepare(batch).attend(q.float(), k.float(), v.float(), wide, params)
        here.platform.fused_ops(here.dtype).store(k, v, kv, batch.slot_mapping_T)
        ours = backend.prepare(batch).attend(q, k, v, kv, params)
        require(torch.equal(kv.keys.float(), wide.keys), "the step's keys are not in the cache")
        errors.append(relative_error(ours, expected))
    return _worst(errors)


def _latents(here: Here, cases: Sequence[tuple[list[int], int, int]]) -> str:
    """cases: context lengths of the rows, heads, queries of a row. DeepSeek's widths."""
    errors, params, device = [], AttentionParams(192**-0.5), here.platform.device
    for lens, heads, num_queries in cases:
        spec = Mla(num_heads=heads, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
        backend = here.platform.latent_attention(here.dtype, spec)
        if isinstance(backend, TorchLatents):
            raise here.no_kernel()
        batch = attention_batch(lens, min(num_queries, *lens), device)
        tokens, blocks = batch.num_tokens, int(batch.block_table_RN.max()) + 1
        q, latents, weight = (
            here.noise(tokens, heads, 192),
            here.noise(tokens, 1, 576),
            here.noise(heads * 256, 512) / 16,
        )
        plane, outputs = here.noise(blocks, BLOCK, 1, 576), []
        for each, dtype in ((backend, here.dtype), (TorchLatents(), torch.float32)):
            step, wide = each.prepare(batch), [x.to(dtype) for x in (q, latents, weight, plane)]
            kv, projections = LayerKV.of(wide[3:], []), LatentHeads(spec, partial(wide.__getitem__, 2))
            outputs.append(step.attend_latent(wide[0], wide[1], kv, params, projections))
        errors.append(relative_error(*outputs))
    return _worst(errors)


def attention_batch(lens: Sequence[int], num_queries: int, device: torch.device = CpuPlatform.device) -> ForwardBatch:
    """Returns a step of rows with these contexts, each of which computes its last num_queries tokens; blocks in an
    order of their own."""
    counts = [-(-length // BLOCK) for length in lens]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    tables = ids.split(counts)
    table_RN = torch.stack([F.pad(table, (0, max(counts) - len(table)), value=int(table[0])) for table in tables])
    positions = [torch.arange(length - num_queries, length) for length in lens]
    slots = [
        table[position // BLOCK] * BLOCK + position % BLOCK for table, position in zip(tables, positions, strict=True)
    ]
    starts = list(accumulate([num_queries] * len(lens), initial=0))
    return ForwardBatch(
        input_ids_T=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        positions_T=torch.cat(positions).to(device),
        slot_mapping_T=torch.cat(slots).to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table_RN=table_RN.to(device, torch.int32),
        logits_rows_S=torch.tensor(starts[1:], device=device) - 1,
        query_lens_list=[num_queries] * len(lens),
        seq_lens_list=list(lens),
        block_size=BLOCK,
    )


def _kv_store(shapes: Sequence[tuple[int, int, int]]) -> str:
    """Codes and scales are equal to the twin's bit for bit, and so is what is read back."""
    for storage in LARGEST:
        for tokens, heads, dim in shapes:
            store = CpuKVStore.make(BF16, storage)
            if store is None:
                raise CPU.no_kernel()
            blocks = -(-tokens // BLOCK) + 1
            memory = (blocks, BLOCK, heads)
            ours, twin = (
                LayerKV(
                    torch.zeros(*memory, dim, dtype=storage), torch.zeros(*memory, dim, dtype=storage),
                    torch.zeros(memory, dtype=SCALE_DTYPE), torch.zeros(memory, dtype=SCALE_DTYPE),
                )
                for _ in range(2)
            )  # fmt: skip
            k, v = CPU.noise(tokens, heads, dim), CPU.noise(tokens, heads, dim).flip(0).contiguous()
            slots = torch.randperm(blocks * BLOCK, generator=torch.Generator().manual_seed(1))[:tokens]
            ids, out = torch.arange(blocks).flip(0), torch.empty(*memory, dim, dtype=BF16)
            store.write(k, v, ours, slots)
            TorchKVStore().write(k, v, twin, slots)
            for name in ("keys", "values", "key_scales", "value_scales"):
                a, b = (as_indexable(getattr(kv, name)) for kv in (ours, twin))
                require(torch.equal(a, b), f"{name} in {storage} differ from the torch twin's")
            read = store.gather(ours.keys, ours.key_scales, ids, out.clone())
            expected = TorchKVStore().gather(twin.keys, twin.key_scales, ids, out)
            require(torch.equal(read, expected), f"what is read from {storage} differs from the torch twin's")
    return f"{len(shapes)} shapes in {len(LARGEST)} types, equal bit for bit"


def _skinny_gemm() -> str:
    platform, gemm = CpuPlatform(), skinny_gemm(BF16)
    if gemm is None:
        instead = "the row GEMM" if multiplies_by_row(BF16) else "oneDNN" if platform.packs(BF16) else "torch"
        raise CPU.no_kernel("the CPU and its compiler must know AVX512-BF16", f"{instead} multiplies")
    for _, inputs, outputs in GEMMS:
        reordered = torch.ops.mkldnn._reorder_linear_weight(CPU.noise(outputs, inputs))
        require(gemm.bind(reordered, None, outputs) is not None, "the kernel does not know oneDNN's layout")
    return _products(partial(platform.linear, dtype=BF16))


def _row_gemm() -> str:
    library = cpu_build.cpu_invariant_library(BF16)
    if library is None:
        raise CPU.no_kernel()
    return _products(row_methods(library, None))


def _products(make: MakeMethod) -> str:
    errors = []
    for rows, inputs, outputs in GEMMS:
        x, weight, method = CPU.noise(rows, inputs), CPU.noise(outputs, inputs), make((), ParallelContext.single())
        method.take(weight, None)
        errors.append(relative_error(method.apply(x), x.float() @ weight.float().T))
    return _worst(errors)


def _int8_gemm() -> str:
    errors = []
    if not multiplies_int8(BF16):
        raise CPU.no_kernel("the CPU and its compiler must know AVX2", "torch multiplies int8 weights")
    for rows, inputs, outputs in GEMMS:
        x, weight = CPU.noise(rows, inputs), CPU.noise(outputs, inputs)
        column = Param(name="x.weight", shape=(outputs, inputs), role="x", source=Source(("x.weight",)), merge="x")
        for make, twin in ((int8_methods(BF16), Int8Method), (w8a8_methods(BF16), W8A8Method)):
            products = []
            for method in (make((column,), ParallelContext.single()), twin((column,), ParallelContext.single())):
                method.take(weight, None)
                products.append(method.apply(x))
            errors.append(relative_error(products[0], products[1].float()))
    return _worst(errors)


def _experts(here: Here, forms: Sequence[Scheme | None], shapes: Sequence[tuple[int, int, int]]) -> str:
    """8 experts, 3 of them for each token, of which the rank has 4, in every form of weights."""
    errors = []
    for form in forms:
        for tokens, inputs, outputs in shapes:
            platform = here.platform
            ours, wide = platform.experts(here.dtype), here.dtype if form else torch.float32
            twin = TorchExperts(partial(platform.linear, dtype=here.dtype) if form else plain, as_given)
            weights = [here.noise(outputs + expert, inputs)[expert:] for expert in range(4)]
            methods = _grouped(ours, weights, form), _grouped(twin, [weight.to(wide) for weight in weights], form)
            if not isinstance(methods[0], StackedExperts):
                raise here.no_kernel("the CPU and its compiler must know AVX512", "torch multiplies expert by expert")
            x, router = (
                here.noise(tokens, inputs),
                RouterWeights(here.noise(8, inputs, dtype=torch.float32) * inputs**-0.5),
            )
            sums, spec = [], Moe(num_experts=8, top_k=3, width=outputs, activation=Activation.SILU)
            for ops, method, given in zip((ours, twin), methods, (x, x.to(wide)), strict=True):
                weight, chosen = ops.route(given, router, spec)
                groups = ops.group(chosen, range(2, 6), torch.zeros(8, dtype=torch.int64, device=x.device))
                sums.append(ops.combine(method.apply(given, groups, gathers=True), weight, groups))
            errors.append(relative_error(sums[0], sums[1].float()))
    return _worst(errors)


def _grouped(ops: ExpertOps, weights: Sequence[torch.Tensor], form: Scheme | None) -> ExpertMethod:
    """Returns the method of experts with these weights, in that form."""
    source = Source(("x.weight",))
    param = Param(name="x.weight", shape=(*weights[0].shape,), role="x", source=source, merge="x", scheme=form)
    method = ops.method([ExpertParams((param,), ())] * len(weights), ParallelContext.single())
    for slot, weight in zip(method.slots(), weights, strict=True):
        slot.accept(weight)
    return method


def _sampling(here: Here, shapes: Sequence[tuple[int, int]]) -> str:
    """Best tokens and draws, with and without limits: those of the torch twin, to the last bit."""
    ops, drawn = here.platform.sampling_ops(), 0
    if type(ops) is TorchSampling:
        raise here.no_kernel()
    for rows, vocab in shapes:
        logits = here.noise(rows, vocab, dtype=torch.float32)
        best, greedy = ops.best(logits)
        twin = TorchSampling().best(logits)
        require(torch.equal(best, twin[0]) and torch.equal(greedy, twin[1]), "a best token is not its torch twin's")
        places = np.arange(rows)
        draws = Draws.of(
            places,
            temperature=np.full(rows, 0.8),
            top_k=places % 2 * 40,
            top_p=np.where(places % 3, 0.9, 1.0),
            min_p=np.where(places % 4, 0.01, 0.0),
            seed=places.astype(np.uint64),
            choice=places % 2,
        )
        chosen = []
        for each in (ops, TorchSampling()):
            arrays, ids = StepArrays(), greedy.clone()
            draw = each.prepare_draw(draws, arrays.send)
            arrays.arrive([torch.from_numpy(array).to(logits.device) for array in arrays.arrays])
            draw(logits.clone(), best, ids, torch.arange(rows, device=logits.device))
            chosen.append(ids)
        require(torch.equal(*chosen), "a token is drawn that its torch twin does not draw")
        drawn += rows
    return f"{len(shapes)} shapes, {drawn} draws"


def _lora(here: Here, shapes: Sequence[tuple[int, int, int]]) -> str:
    ops, errors = here.platform.lora_ops(here.dtype), []
    if type(ops) is TorchLora:
        raise here.no_kernel()
    for tokens, inputs, outputs in shapes:
        tables, slab = _adapters(here, inputs, outputs)
        segments = [(token, token + 1, token % 3) for token in range(tokens) if token % 4]
        slots = torch.tensor([-1 if token % 4 == 0 else token % 3 for token in range(tokens)], dtype=torch.int32)
        rows = AdapterRows(slots.to(slab.device), segments)
        x, y = here.noise(tokens, inputs) * inputs**-0.5, here.noise(tokens, outputs)
        wide = y.float()
        TorchLora().add(wide, x.float(), slab.float(), [tables], rows)
        ops.add(y, x, slab, [tables], rows)
        errors.append(relative_error(y, wide))
    return _worst(errors)


def _adapters(here: Here, inputs: int, outputs: int) -> tuple[ProjectionTables, torch.Tensor]:
    """Returns three adapters of ranks 8, 0 and 3 in one slab."""
    ranks, width = (8, 0, 3), row_stride(max(inputs, outputs))
    a_rows = torch.full((len(ranks), max(ranks)), -1, dtype=torch.int64)
    b_rows = a_rows.clone()
    for slot, rank in enumerate(ranks):
        a_rows[slot, :rank] = (torch.arange(rank) + 2 * slot * max(ranks)) * width
        b_rows[slot, :rank] = (torch.arange(rank) + (2 * slot + 1) * max(ranks)) * width
    device, scales = here.platform.device, torch.tensor([0.5, 1.0, 2.0])
    numbers = torch.tensor(ranks, dtype=torch.int32).to(device)
    tables = ProjectionTables(a_rows.to(device), b_rows.to(device), numbers, scales.to(device), inputs, outputs, 0)
    return tables, here.noise(6 * max(ranks), width)
