"""One decode step of a decoder, without engine or sampling: milliseconds per batch size, and the share of the floor.

    python -m benchmarks.decode_step --model qwen3-0.6b --batch 1 8 16 32 --context 300
    python -m benchmarks.decode_step --batch 16 --profile          # where the time goes, by operator
    python -m benchmarks.decode_step --prompt 1024                 # one prompt of that length in one step instead

Weights are random, made in memory. The floor is the greater of the bytes that a step must read (weights once, every
row's KV once) over the bandwidth, and its operations over the matmul rate. Say which other load the machine had.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES
from parallel.context import ParallelContext
from workers.attention.backend import KVTensors
from workers.attention.select import select_attention
from workers.models.decoder import Decoder, build_decoder
from workers.models.forward_batch import ForwardBatch
from workers.models.registry import load_spec
from workers.models.spec import ArchSpec

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def build(shape: str, dtype: torch.dtype, streamed: Sequence[int] = ()) -> tuple[ArchSpec, Decoder]:
    """A random decoder of a known shape, with some layers in host memory."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        spec = load_spec(folder)
    attention = select_attention(CPU, dtype, spec.head_dim)
    decoder = build_decoder(
        spec,
        ParallelContext.single(),
        folder=Path(),
        dtype=dtype,
        device=CPU,
        attention=attention,
        load_format="dummy",
        progress=True,
        streamed=streamed,
    )
    return spec, decoder


def make_batch(query_len: int, seq_lens: list[int]) -> ForwardBatch:
    """Rows that each compute their last `query_len` tokens; block tables are shuffled over one pool."""
    width = -(-max(seq_lens) // BLOCK_SIZE)
    shuffled = torch.randperm(len(seq_lens) * width, generator=torch.Generator().manual_seed(0))
    table = shuffled.view(len(seq_lens), width).int()
    positions = [torch.arange(length - query_len, length) for length in seq_lens]
    slots = [table[row, p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE for row, p in enumerate(positions)]
    count = len(seq_lens)
    return ForwardBatch(
        input_ids_T=torch.randint(3, 1000, (count * query_len,)),
        positions_T=torch.cat(positions),
        slot_mapping_T=torch.cat(slots),
        query_starts=torch.arange(0, count * query_len + 1, query_len, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RN=table,
        logits_rows_S=torch.arange(1, count + 1) * query_len - 1,
        query_lens_list=[query_len] * count,
        seq_lens_list=seq_lens,
        block_size=BLOCK_SIZE,
    )


def make_kv(spec: ArchSpec, num_blocks: int, dtype: torch.dtype) -> KVTensors:
    shape = (num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    keys, values = ([torch.zeros(shape, dtype=dtype) for _ in range(spec.num_layers)] for _ in "kv")
    return KVTensors(keys, values, BLOCK_SIZE)


def floor_s(spec: ArchSpec, batch: ForwardBatch, element: int, options: argparse.Namespace) -> float:
    """Seconds that no implementation can go below at the given bandwidth and matmul rate."""
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_layers * spec.layer_parameters
    kv_bytes = sum(batch.seq_lens_list) * spec.kv_bytes_per_token(dtype_bytes=element)
    step_bytes = (body + head) * element + kv_bytes
    flop = 2 * (body * batch.num_tokens + head * len(batch.logits_rows_S))
    return float(max(step_bytes / options.bandwidth_gb_s, flop / options.gflop_s) / 1e9)


def measure(step: Callable[[], object], seconds: float) -> list[float]:
    """Times of single calls, after three to warm up, until `seconds` have passed."""
    for _ in range(3):
        step()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def report(spec: ArchSpec, decoder: Decoder, batch: ForwardBatch, options: argparse.Namespace) -> None:
    dtype = getattr(torch, options.dtype)
    kv = make_kv(spec, int(batch.block_table_RN.max()) + 1, dtype)

    @torch.inference_mode()
    def step() -> object:
        return decoder.forward(batch, kv, None)

    with OtherCpu() as other:
        times = measure(step, options.seconds)
    least = floor_s(spec, batch, dtype.itemsize, options)
    median = statistics.median(times)
    print(
        f"{len(batch.seq_lens_list):3d} rows x {max(batch.query_lens_list)} tokens, context {options.context}: "
        f"median {median * 1e3:8.2f} ms, best {min(times) * 1e3:8.2f} ms, {batch.num_tokens / median:8.1f} tok/s, "
        f"floor {least * 1e3:6.2f} ms = {least / median:.0%} (best {least / min(times):.0%}), "
        f"other_cpu {other.share:.2f}",
        flush=True,
    )
    if options.profile:
        with torch.profiler.profile() as profile:
            step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--spread", type=float, default=0.0, help="rows' contexts differ by this share, up and down")
    parser.add_argument("--prompt", type=int, help="one row of this many tokens instead of decodes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent per line")
    parser.add_argument("--bandwidth-gb-s", type=float, default=78.6, help="what the machine reads at best")
    parser.add_argument("--gflop-s", type=float, default=865.0, help="what its matmul does at best")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec, decoder = build(options.model, getattr(torch, options.dtype))
    print(f"{options.model} {options.dtype}, {options.threads} threads, {decoder.weight_bytes / 1e9:.3f} GB of weights")
    if options.prompt:
        report(spec, decoder, make_batch(options.prompt, [options.prompt]), options)
        return
    for rows in options.batch:
        steps = [2 * row / max(1, rows - 1) - 1 for row in range(rows)]
        seq_lens = [int(options.context * (1 + options.spread * step)) for step in steps]
        report(spec, decoder, make_batch(1, seq_lens), options)


if __name__ == "__main__":
    main()
