"""Paged attention on CPU: share of the roofline of decodes and prefill chunks, and what windows, soft-caps, ALiBi,
sinks, head sizes and groups cost beside the plain case.

    python -m benchmarks.kernels.cpu_attention [--repeats 7] [--most-mib 2048] [--out FILE]      make bench-attention

One thread, bf16, times in CPU seconds of that thread, so that other processes on the machine cost no time but what they
take of caches and memory. Ways of one case are called in turn, and with them a plain read of as many bytes or a matmul;
figures are medians. Roofline of decodes: bytes of the keys and values that are seen over the rate of that read. Of
chunks: multiplications and additions of the scores that are seen and of their values over the rate of the matmul, in
bf16 or float32, whichever is faster.
Other head sizes and groups are called in turn with heads of 128 in groups of two, and compared by byte or operation. A
decode has other blocks in each turn, as layers have. other_cpu is the share of the machine that others took meanwhile.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import OtherCpu
from benchmarks.record import RESULTS, write_record
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.platforms.cpu import CpuPlatform

BLOCK, WIDTH, GROUP = 16, 1024, 2
"""Tokens of a block; elements of a token's keys; query heads of a KV head."""
WINDOW, SOFTCAP = 512, 50.0
MATMUL_OPERATIONS = 2 * 1024**3
SETS = 8
"""Most sets of blocks that a decode takes turns with."""


@dataclass(frozen=True)
class Case:
    """Rows of `queries` tokens at the end of `context` positions. head_dim: of as many KV heads as fit WIDTH."""

    rows: int
    context: int
    queries: int = 1
    head_dim: int = 128
    group: int = GROUP

    @property
    def kv_heads(self) -> int:
        return WIDTH // self.head_dim

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def seen(self, window: int | None) -> int:
        """Pairs of a query and a position that it attends to, of one head."""
        ends = range(self.context - self.queries + 1, self.context + 1)
        return self.rows * sum(min(end, window or end) for end in ends)

    def num_bytes(self, window: int | None) -> int:
        """Keys and values that are seen, in bf16."""
        positions = min(self.context, (window or self.context) + self.queries - 1)
        return self.rows * positions * self.kv_heads * self.head_dim * 2 * 2

    def num_operations(self, window: int | None) -> int:
        return 4 * self.heads * self.head_dim * self.seen(window)


def variants(case: Case) -> dict[str, AttentionParams]:
    """The kinds of scores, the plain one first."""
    plain, heads = AttentionParams(case.head_dim**-0.5), case.heads
    return {
        "plain": plain,
        f"window {WINDOW}": replace(plain, window=WINDOW),
        "soft-cap": replace(plain, softcap=SOFTCAP),
        "ALiBi": replace(plain, slopes=tuple(2.0 ** -(8 * (n + 1) / heads) for n in range(heads))),
        "sinks": replace(plain, sinks=(0.5,) * heads),
    }


@dataclass
class Memory:
    """One cache of as many bytes as the largest case needs, whose blocks the cases use in an order of their own."""

    num_bytes: int
    planes: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.planes = [torch.empty(self.num_bytes // 4, dtype=torch.bfloat16).normal_() for _ in "kv"]

    def layer(self, case: Case) -> LayerKV:
        shape = (-1, BLOCK, case.kv_heads, case.head_dim)
        size = BLOCK * case.kv_heads * case.head_dim
        keys, values = (plane[: len(plane) // size * size].view(shape) for plane in self.planes)
        return LayerKV(keys, values)


def batches(case: Case, num_blocks: int) -> list[ForwardBatch]:
    """Steps of the case over different blocks, as many as there are, up to SETS."""
    per_row = -(-case.context // BLOCK)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
    count = max(1, min(SETS, num_blocks // (case.rows * per_row)))
    tables = order[: count * case.rows * per_row].view(count, case.rows, per_row)
    return [_batch(case, table) for table in tables]


def _batch(case: Case, table_RN: torch.Tensor) -> ForwardBatch:
    tokens = case.rows * case.queries
    zeros = torch.zeros(tokens, dtype=torch.int64)
    return ForwardBatch(
        input_ids_T=zeros,
        positions_T=zeros,
        slot_mapping_T=zeros,
        query_starts=torch.arange(0, tokens + 1, case.queries, dtype=torch.int32),
        seq_lens=torch.full((case.rows,), case.context, dtype=torch.int32),
        block_table_RN=table_RN,
        logits_rows_S=zeros[: case.rows],
        query_lens_list=[case.queries] * case.rows,
        seq_lens_list=[case.context] * case.rows,
        block_size=BLOCK,
    )


def attending(
    backend: AttentionBackend, steps: list[ForwardBatch], case: Case, kv: LayerKV, params: AttentionParams
) -> Callable[[int], object]:
    """Returns a function of the turn."""
    tokens = case.rows * case.queries
    q, k, v = (torch.randn(tokens, n, case.head_dim).bfloat16() for n in (case.heads, case.kv_heads, case.kv_heads))

    def attend(turn: int) -> object:
        return backend.prepare(steps[turn % len(steps)]).attend(q, k, v, kv, params)

    return attend


def in_turn(ways: Mapping[str, Callable[[int], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each way, called in turn; short ones several times a turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    calls = {name: max(1, min(50, int(0.01 / max(_seconds(way, 0, 1), 1e-6)))) for name, way in ways.items()}
    for repeat in range(repeats):
        for name, way in ways.items():
            times[name].append(_seconds(way, repeat * calls[name], calls[name]))
    return {name: statistics.median(all_of) for name, all_of in times.items()}


def _seconds(way: Callable[[int], object], first: int, calls: int) -> float:
    start = time.thread_time()
    for turn in range(first, first + calls):
        way(turn)
    return (time.thread_time() - start) / calls


def reading(memory: Memory, num_bytes: int) -> Callable[[int], object]:
    """A plain read of that many bytes, of other memory in each turn."""
    words = memory.planes[0].view(torch.int64)
    size = max(1, min(num_bytes // 8, len(words)))
    places = len(words) // size
    return lambda turn: words[turn % places * size : (turn % places + 1) * size].sum()


def multiplying(dtype: torch.dtype) -> Callable[[int], object]:
    """A matmul of MATMUL_OPERATIONS."""
    square = torch.randn(1024, 1024).to(dtype)
    return lambda _: square @ square


def measured(
    case: Case, memory: Memory, params: Mapping[str, AttentionParams], repeats: int, *, twin: bool
) -> Iterator[dict[str, Any]]:
    """Yields a figure for each kind of score; of_plain: over the time of the first. twin: torch operations' too."""
    kv = memory.layer(case)
    steps, ours = batches(case, len(kv.keys)), CpuPlatform().attention(torch.bfloat16, case.head_dim)
    assert isinstance(ours, CpuAttention), "there is no C compiler"
    ways: dict[str, Callable[[int], object]] = {}
    for name, each in params.items():
        ways[name] = attending(ours, steps, case, kv, each)
        if twin:
            ways[f"twin {name}"] = attending(TorchAttention(), steps, case, kv, each)
    standard = replace(case, head_dim=128, group=GROUP)
    kv = memory.layer(standard)
    backend = CpuPlatform().attention(torch.bfloat16, standard.head_dim)
    ways["standard"] = attending(
        backend, batches(standard, len(kv.keys)), standard, kv, AttentionParams(standard.head_dim**-0.5)
    )
    decodes = case.queries == 1
    if decodes:
        ways["read"] = reading(memory, case.num_bytes(None))
    else:
        ways |= {"bfloat16": multiplying(torch.bfloat16), "float32": multiplying(torch.float32)}
    with OtherCpu() as other, torch.inference_mode():
        found = in_turn(ways, repeats)
    if decodes:
        rate = min(case.num_bytes(None), memory.num_bytes // 2) / found["read"]
    else:
        rate = MATMUL_OPERATIONS / min(found["bfloat16"], found["float32"])
    standard_work = standard.num_bytes(None) if decodes else standard.num_operations(None)
    for name, each in params.items():
        work = case.num_bytes(each.window) if decodes else case.num_operations(each.window)
        yield {
            "rows": case.rows, "context": case.context, "queries": case.queries, "head_dim": case.head_dim,
            "heads": case.heads, "kv_heads": case.kv_heads, "scores": name, "ms": found[name] * 1e3,
            "of_roofline": work / rate / found[name], "peer_rate": rate / 1e9,
            "of_plain": found[name] / found["plain"],
            "of_standard": found[name] / work / (found["standard"] / standard_work),
            "work_of_plain": work / (case.num_bytes(None) if decodes else case.num_operations(None)),
            "twin_ms": found[f"twin {name}"] * 1e3 if twin else None, "other_cpu": other.share,
        }  # fmt: skip


def shown(figure: Mapping[str, Any]) -> str:
    twin = f", torch operations {figure['twin_ms']:.2f} ms" if figure["twin_ms"] else ""
    unit = "GB/s" if figure["queries"] == 1 else "GFLOP/s"
    return (
        f"{figure['rows']:3d} rows x {figure['queries']:4d} of {figure['context']:5d}, {figure['heads']} heads of "
        f"{figure['head_dim']} over {figure['kv_heads']}, {figure['scores']:<10s} {figure['ms']:8.2f} ms, "
        f"{figure['of_roofline']:.0%} of the roofline ({figure['peer_rate']:.1f} {unit}), "
        f"{figure['of_plain']:.2f} of plain, {figure['of_standard']:.2f} of heads of 128"
        f"{twin}, other_cpu {figure['other_cpu']:.2f}"
    )


def cases(most_bytes: int) -> Iterator[tuple[Case, bool, bool]]:
    """Yields each case, whether with all kinds of scores, and whether beside torch operations."""
    for rows in (1, 4, 16, 64):
        for context in (128, 1024, 8192):
            if Case(rows, context).num_bytes(None) <= most_bytes:
                yield Case(rows, context), (rows, context) in ((1, 8192), (16, 1024)), (rows, context) == (16, 1024)
    for head_dim in (64, 80, 96, 112, 192, 256):
        yield Case(16, 1024, head_dim=head_dim), False, False
    for group in (1, 4, 7, 8):
        yield Case(16, 1024, group=group), False, False
    for queries, context in ((512, 512), (512, 4096), (2048, 2048)):
        yield Case(1, context, queries), True, context == 2048
    for head_dim in (64, 80, 256):
        yield Case(1, 2048, 2048, head_dim), False, False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--most-mib", type=int, default=2048, help="MiB of keys and values; larger cases are left out")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = Memory(options.most_mib * 2**20)
    figures = []
    for case, has_all, twin in cases(memory.num_bytes):
        params = variants(case) if has_all else {"plain": variants(case)["plain"]}
        for figure in measured(case, memory, params, options.repeats, twin=twin):
            figures.append(figure)
            print(shown(figure), flush=True)
    write_record(options.out, options, figures=figures, multiplies_pairs=skinny_gemm(torch.bfloat16) is not None)


if __name__ == "__main__":
    main()
