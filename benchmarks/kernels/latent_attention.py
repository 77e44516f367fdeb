"""Attention over latents on CPU: share of the roofline of decodes and prefill chunks, beside torch operations.

    python -m benchmarks.kernels.latent_attention [--repeats 7] [--most-mib 2048] [--out FILE]   make bench-latents

DeepSeek's widths (latents of 512, keys of 64 that rotate, heads of 128) with the 16 heads of V2-Lite and the 128 of V3,
one thread, bf16, CPU seconds of that thread, as in cpu_attention.py. Products that absorb and release are included. The
roofline is the larger of two times: a plain read of the latents that are seen and of the heads' matrix, and a matmul,
in bf16 or float32, whichever is faster, of as many multiplications and additions as the way that is taken needs
(attention/latents/latent_chunks.py). Torch operations, which served decodes before there was a kernel and serve them
where there is no compiler, are called in turn.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cpu_attention import (
    BLOCK,
    MATMUL_OPERATIONS,
    Case,
    Memory,
    batches,
    in_turn,
    multiplying,
    reading,
)
from benchmarks.machine import OtherCpu
from benchmarks.record import RESULTS, write_record
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latents.cpu_latents import CpuLatents
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.attention.latents.latent_chunks import absorbs
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams, Mla
from tandem.workers.platforms.cpu import CpuPlatform

LITE, FULL = 16, 128
"""Heads of DeepSeek-V2-Lite and of V3."""
BESIDE_TORCH = 128 * 16 * 1024
"""Most pairs of a head and a position at which torch operations are called too: they take seconds."""


@dataclass(frozen=True)
class LatentCase:
    """Rows of `queries` tokens at the end of `context` positions."""

    heads: int
    rows: int
    context: int
    queries: int = 1

    @property
    def spec(self) -> Mla:
        return Mla(num_heads=self.heads, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)

    @property
    def as_heads(self) -> Case:
        """The rows alone, for their batches."""
        return Case(self.rows, self.context, self.queries)

    @property
    def latent_bytes(self) -> int:
        return self.rows * self.context * self.spec.head_dim * 2

    @property
    def num_bytes(self) -> int:
        """Latents that are seen and the heads' matrix, in bf16."""
        return self.latent_bytes + self.heads * 256 * 512 * 2

    @property
    def num_operations(self) -> int:
        spec, seen = self.spec, self.as_heads.seen(None)
        both = spec.kv_rank * (spec.nope_dim + spec.v_dim)
        if absorbs(spec, self.queries, self.context):
            each = self.rows * self.queries * both + seen * (2 * spec.kv_rank + spec.rope_dim)
        else:
            each = self.rows * self.context * both + seen * (spec.key_dim + spec.v_dim)
        return 2 * self.heads * each


def attending(
    backend: LatentBackend, steps: list[ForwardBatch], case: LatentCase, kv: LayerKV
) -> Callable[[int], object]:
    """Returns a function of the turn."""
    spec, tokens = case.spec, case.rows * case.queries
    q, latents = torch.randn(tokens, case.heads, spec.key_dim).bfloat16(), torch.randn(tokens, 1, 576).bfloat16()
    weight = (torch.randn(case.heads * 256, spec.kv_rank) / 16).bfloat16()
    heads, params = LatentHeads(spec, lambda: weight), AttentionParams(spec.key_dim**-0.5)

    def attend(turn: int) -> object:
        step = backend.prepare(steps[turn % len(steps)])
        return step.attend_latent(q, latents, kv, params, heads)

    return attend


def measured(case: LatentCase, memory: Memory, repeats: int) -> dict[str, Any]:
    spec, plane = case.spec, memory.planes[0]
    size = BLOCK * spec.head_dim
    kv = LayerKV.of([plane[: len(plane) // size * size].view(-1, BLOCK, 1, spec.head_dim)], [])
    steps = batches(case.as_heads, len(kv.keys))
    ours = CpuPlatform().latent_attention(torch.bfloat16, spec)
    assert isinstance(ours, CpuLatents), "there is no C compiler"
    ways: dict[str, Callable[[int], object]] = {
        "ours": attending(ours, steps, case, kv), "read": reading(memory, case.num_bytes),
        "bfloat16": multiplying(torch.bfloat16), "float32": multiplying(torch.float32),
    }  # fmt: skip
    if case.queries == 1 and case.heads * case.rows * case.context <= BESIDE_TORCH:
        ways["torch"] = attending(TorchLatents(), steps, case, kv)
    with OtherCpu() as other, torch.inference_mode():
        found = in_turn(ways, repeats)
    rate = MATMUL_OPERATIONS / min(found["bfloat16"], found["float32"])
    least = {"read": found["read"], "multiply": case.num_operations / rate}
    bound = max(least, key=lambda name: least[name])
    return {
        "heads": case.heads, "rows": case.rows, "context": case.context, "queries": case.queries,
        "ms": found["ours"] * 1e3, "bound": bound, "of_roofline": least[bound] / found["ours"],
        "read_gb_s": case.num_bytes / found["read"] / 1e9, "gflop_s": rate / 1e9,
        "torch_ms": found["torch"] * 1e3 if "torch" in found else None, "other_cpu": other.share,
    }  # fmt: skip


def shown(figure: Mapping[str, Any]) -> str:
    beside = f", torch operations {figure['torch_ms']:.2f} ms" if figure["torch_ms"] else ""
    return (
        f"{figure['heads']:3d} heads, {figure['rows']:2d} rows x {figure['queries']:4d} of {figure['context']:5d} "
        f"{figure['ms']:9.2f} ms, {figure['of_roofline']:.0%} of the roofline ({figure['bound']}; "
        f"{figure['read_gb_s']:.1f} GB/s, {figure['gflop_s']:.0f} GFLOP/s){beside}, other_cpu {figure['other_cpu']:.2f}"
    )


def cases(most_bytes: int) -> Iterator[LatentCase]:
    for heads, rows_of in ((LITE, (1, 4, 16, 64)), (FULL, (1, 16))):
        for rows in rows_of:
            for context in (128, 1024, 8192):
                if LatentCase(heads, rows, context).latent_bytes <= most_bytes:
                    yield LatentCase(heads, rows, context)
    for queries, context in ((128, 4096), (512, 512), (512, 4096), (2048, 2048)):
        yield LatentCase(LITE, 1, context, queries)
    yield LatentCase(FULL, 1, 2048, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--most-mib", type=int, default=2048, help="twice the MiB of latents; larger cases are left out"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "latent-attention.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = Memory(options.most_mib * 2**20)
    figures = []
    for case in cases(memory.planes[0].nbytes):
        figures.append(measured(case, memory, options.repeats))
        print(shown(figures[-1]), flush=True)
    pairs = skinny_gemm(torch.bfloat16) is not None
    write_record(options.out, options, figures=figures, multiplies_pairs=pairs)


if __name__ == "__main__":
    main()
