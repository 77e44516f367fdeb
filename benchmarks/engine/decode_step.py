"""One decode step of a decoder, without engine and sampling: milliseconds by batch size, and the share of the roofline.

    python -m benchmarks.engine.decode_step --model qwen3-0.6b --batch 1 8 16 32 --context 300
    python -m benchmarks.engine.decode_step --batch 16 32 --context 2000 --kv-cache-dtype int8    # beside bf16 KV
    python -m benchmarks.engine.decode_step --eager    # replayed steps beside eager ones (workers/graphs/cpu_graphs.py)
    python -m benchmarks.engine.decode_step --positions 1 2 5    # steps that check drafts beside steps of one token

Caches, replayed and eager steps, and numbers of positions alternate call by call. The roofline is the greater of the
bytes that a step must read (weights and every row's KV once) over --bandwidth-gb-s, and its operations over --gflop-s.
Weights are random.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES
from tandem.offload.weights.weight_stream import Copier
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.parallel.quantization.weight_plan import DENSE, WeightPlan
from tandem.workers.attention.backend import AttentionBackend, AttentionStep, ListsBackend, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.decoder import Decoder, attention_of, build_decoder
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.kv_cache import KVCache, block_bytes

CPU = torch.device("cpu")
BLOCK_SIZE = 16
STORAGE = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


class Switch:
    """The attention of one decoder over several caches; kv_dtype chooses the cache of the next step."""

    name = "switch"

    def __init__(self, backends: dict[torch.dtype, AttentionBackend]) -> None:
        self._backends = backends
        self.kv_dtype = next(iter(backends))

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return self._backends[self.kv_dtype].prepare(batch)

    def replay_key(self, batch: ForwardBatch, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return self._backends[self.kv_dtype].replay_key(batch, kv, dtype)

    def prepare_replay(self, batch: ForwardBatch) -> ReplayableStep:
        return cast(ListsBackend, self._backends[self.kv_dtype]).prepare_replay(batch)


def build(
    shape: str,
    dtype: torch.dtype,
    kv_dtypes: list[torch.dtype],
    streamed: Sequence[int] = (),
    copier: Copier | None = None,
    weights: WeightPlan = DENSE,
    platform: Platform | None = None,
) -> tuple[ArchSpec, Decoder, Switch]:
    """A random decoder of a known shape, whose `streamed` layers are in host memory and moved by `copier`. platform:
    None: the usual one on CPU."""
    platform = platform or CpuPlatform()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        spec = replace(load_spec(folder), weights=weights)
    attention = Switch({kv: attention_of(spec, platform, dtype, kv) for kv in kv_dtypes})
    decoder = build_decoder(
        spec,
        ParallelContext.single(),
        folder=Path(),
        dtype=dtype,
        platform=platform,
        attention=attention,
        load_format="dummy",
        progress=True,
        streamed=streamed,
        copier=copier,
    )
    return spec, decoder, attention


def make_batch(query_len: int, seq_lens: list[int], *, checks_drafts: bool = False) -> ForwardBatch:
    """Rows that each compute their last `query_len` tokens; block tables are shuffled over one pool. checks_drafts:
    with logits of each of these tokens, not of the last alone."""
    width = -(-max(seq_lens) // BLOCK_SIZE)
    shuffled = torch.randperm(len(seq_lens) * width, generator=torch.Generator().manual_seed(0))
    table = shuffled.view(len(seq_lens), width).int()
    positions = [torch.arange(length - query_len, length) for length in seq_lens]
    slots = [table[row, p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE for row, p in enumerate(positions)]
    count = len(seq_lens)
    return ForwardBatch(
        input_ids_T=torch.randint(3, 250, (count * query_len,)),
        positions_T=torch.cat(positions),
        slot_mapping_T=torch.cat(slots),
        query_starts=torch.arange(0, count * query_len + 1, query_len, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RN=table,
        logits_rows_S=torch.arange(count * query_len) if checks_drafts else torch.arange(1, count + 1) * query_len - 1,
        query_lens_list=[query_len] * count,
        seq_lens_list=seq_lens,
        block_size=BLOCK_SIZE,
    )


def make_kv(spec: ArchSpec, num_blocks: int, dtype: torch.dtype) -> KVCache:
    """A cache with small numbers in every page; pages that were never written would all share one page of memory."""
    kv = KVCache.allocate(kv_layouts(spec, Mesh()), num_blocks, BLOCK_SIZE, dtype, CpuPlatform())
    for plane in kv.planes:
        plane.view(torch.uint8).fill_(60)  # bf16 0.0115, fp8 1.5, float32 scale 0.0115
    return kv


def roofline_s(
    spec: ArchSpec, batch: ForwardBatch, element: int, kv_dtype: torch.dtype, o: argparse.Namespace
) -> float:
    """The least seconds of a step at the given bandwidth and matmul rate."""
    head = spec.vocab_size * spec.hidden_size
    body = sum(param.num_elements for layer in parameters_of(spec).layers for param in layer)
    kv_bytes = sum(batch.seq_lens_list) * block_bytes(kv_layouts(spec, Mesh()), 1, kv_dtype)
    step_bytes = (body + head) * element + kv_bytes
    flop = 2 * (body * batch.num_tokens + head * len(batch.logits_rows_S))
    return float(max(step_bytes / o.bandwidth_gb_s, flop / o.gflop_s) / 1e9)


def measure(steps: list[Callable[[], object]], seconds: float, clock: Callable[[], float]) -> list[list[float]]:
    """Seconds of single calls of each step, in turn, after six that warm up, until each has had `seconds`."""
    for step in steps * 6:
        step()
    times: list[list[float]] = [[] for _ in steps]
    while min(map(sum, times)) < seconds or len(times[0]) < 5:
        for step, own in zip(steps, times, strict=True):
            start = clock()
            step()
            own.append(clock() - start)
    return times


def stepper(
    decoder: Decoder, attention: Switch, batch: ForwardBatch, kv: KVCache, replays: bool = True
) -> Callable[[], object]:
    """A step over one cache; an eager one takes and leaves no captured step."""

    @torch.inference_mode()
    def step() -> object:
        attention.kv_dtype = kv.dtype
        can_replay = decoder.graphs.can_replay
        decoder.graphs.can_replay = replays and can_replay
        output = decoder.forward(batch, kv.tensors, None)
        decoder.graphs.can_replay = can_replay and (decoder.graphs.can_replay or not replays)
        return output

    return step


def report(
    spec: ArchSpec, decoder: Decoder, attention: Switch, batch: ForwardBatch, options: argparse.Namespace
) -> None:
    """Prints a line per storage dtype, the unquantized cache first; with --eager two."""
    num_blocks = int(batch.block_table_RN.max()) + 1
    caches = [make_kv(spec, num_blocks, kv_dtype) for kv_dtype in kv_dtypes_of(options)]
    kinds = [(kv, replays) for kv in caches for replays in ([True, False] if options.eager else [True])]
    steps = [stepper(decoder, attention, batch, kv, replays) for kv, replays in kinds]
    with OtherCpu() as other:
        measured = measure(steps, options.seconds, time.process_time if options.cpu_time else time.perf_counter)
    first = statistics.median(measured[0])
    for (kv, replays), times in zip(kinds, measured, strict=True):
        least = roofline_s(spec, batch, getattr(torch, options.dtype).itemsize, kv.dtype, options)
        median = statistics.median(times)
        mode = (", replay" if replays else ", eager") if options.eager else ""
        kind = f"KV {str(kv.dtype).removeprefix('torch.')}{mode}"
        kv_words = f", {kind} {median / first:.2f}x" if len(kinds) > 1 else ""
        print(
            f"{len(batch.seq_lens_list):3d} rows x {max(batch.query_lens_list)} tokens, context {options.context}: "
            f"median {median * 1e3:8.2f} ms, best {min(times) * 1e3:8.2f} ms, {batch.num_tokens / median:8.1f} tok/s, "
            f"roofline {least * 1e3:6.2f} ms = {least / median:.0%} (best {least / min(times):.0%}), "
            f"other_cpu {other.share:.2f}{kv_words}",
            flush=True,
        )
    if options.profile:
        with torch.profiler.profile() as profile:
            steps[-1]()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))


def report_positions(
    spec: ArchSpec, decoder: Decoder, attention: Switch, seq_lens: list[int], options: argparse.Namespace
) -> None:
    """Prints a line per number of positions that each row computes, with logits of all of them."""
    batches = [make_batch(count, seq_lens, checks_drafts=True) for count in options.positions]
    kv = make_kv(spec, int(batches[0].block_table_RN.max()) + 1, getattr(torch, options.dtype))
    steps = [stepper(decoder, attention, batch, kv) for batch in batches]
    with OtherCpu() as other:
        measured = measure(steps, options.seconds, time.process_time if options.cpu_time else time.perf_counter)
    first = statistics.median(measured[0])
    for count, times in zip(options.positions, measured, strict=True):
        median = statistics.median(times)
        print(
            f"{options.model}: {len(seq_lens)} rows x {count} positions, context {options.context}: "
            f"median {median * 1e3:8.2f} ms, best {min(times) * 1e3:8.2f} ms, {median / first:.2f} times the first, "
            f"other_cpu {other.share:.2f}",
            flush=True,
        )


def kv_dtypes_of(options: argparse.Namespace) -> list[torch.dtype]:
    """The dtypes of the caches, the unquantized one first."""
    return [getattr(torch, options.dtype), *(STORAGE[name] for name in options.kv_cache_dtype)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--kv-cache-dtype", nargs="+", default=[], choices=sorted(STORAGE))
    parser.add_argument("--spread", type=float, default=0.0, help="rows' contexts differ by this share, up and down")
    parser.add_argument("--prompt", type=int, help="one row of this many tokens instead of decodes")
    parser.add_argument("--positions", type=int, nargs="+", help="tokens of each row, the last of them drafts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent per line")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of all threads: for --threads 1, when busy")
    parser.add_argument("--bandwidth-gb-s", type=float, default=78.6, help="best read rate of the machine")
    parser.add_argument("--gflop-s", type=float, default=865.0, help="best rate of its matmul")
    parser.add_argument("--eager", action="store_true", help="times eager steps too")
    parser.add_argument("--profile", action="store_true", help="prints the time of each operator")
    options = parser.parse_args()
    least = int(options.context * (1 - options.spread))
    for count in options.positions or ():
        if not 1 <= count <= least:
            parser.error(f"--positions {count} must be from 1 to the least context, {least}")
    torch.set_num_threads(options.threads)
    spec, decoder, attention = build(options.model, getattr(torch, options.dtype), kv_dtypes_of(options))
    print(f"{options.model} {options.dtype}, {options.threads} threads, {decoder.weight_bytes / 1e9:.3f} GB of weights")
    if options.prompt:
        report(spec, decoder, attention, make_batch(options.prompt, [options.prompt]), options)
        return
    for rows in options.batch:
        steps = [2 * row / max(1, rows - 1) - 1 for row in range(rows)]
        seq_lens = [int(options.context * (1 + options.spread * step)) for step in steps]
        if options.positions:
            report_positions(spec, decoder, attention, seq_lens, options)
        else:
            report(spec, decoder, attention, make_batch(1, seq_lens), options)


if __name__ == "__main__":
    main()
