"""Time that grouped LoRA adds to a decode step on CPU, without the rest of the decoder, beside its roofline.

    python -m benchmarks.kernels.lora_kernels         # 16 and 64 adapters of rank 8 on q and v, rank 16 on all
    python -m benchmarks.kernels.lora_kernels --twin  # the torch twin beside it
    python -m benchmarks.kernels.lora_kernels --runs  # tiles and matmuls by the length of a prefill chunk

The roofline is the bytes of all adapters in use over the read bandwidth, measured here, in milliseconds. A buffer
larger than any cache is read before each step, as a real step reads its weights, so adapters come from memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.machine import QUIET, OtherCpu, measure_machine, wait_until_quiet
from benchmarks.models import SHAPES
from tandem.workers.kernels.cpu.cpu_build import cpu_lora_library
from tandem.workers.kernels.cpu.cpu_lora import CpuLora
from tandem.workers.kernels.lora_ops import AdapterRows, LoraOps, ProjectionTables, TorchLora
from tandem.workers.platforms.cpu import CpuPlatform

CPU = torch.device("cpu")
PAGE_BYTES = 65536
MAX_RANK = 64
FLUSH_BYTES = 128 * 2**20
STEPS_A_TURN = 3
RUNS = (8, 16, 24, 32, 48, 64, 128, 512)


@dataclass(frozen=True)
class LoraLayer:
    """A merged linear of the decoder: its inputs, the outputs of its projections, and whether each has adapters."""

    inputs: int
    outputs: tuple[int, ...]
    targets: tuple[bool, ...]


@dataclass(frozen=True)
class Layer:
    """One merged linear of one decoder layer, with its tensors for a step."""

    projections: list[ProjectionTables]
    x_TI: torch.Tensor
    y_TO: torch.Tensor


@dataclass(frozen=True)
class Case:
    """Rows of a step, distinct adapters among them, and their rank; everywhere: on all linears, else on q and v."""

    rows: int
    active: int
    rank: int
    everywhere: bool

    def __str__(self) -> str:
        where = "all linears" if self.everywhere else "q and v"
        return f"{self.rows:3d} rows, {self.active:2d} adapters, rank {self.rank:2d} on {where:11s}"


CASES = (Case(16, 1, 8, False), Case(16, 16, 8, False), Case(64, 64, 8, False), Case(16, 16, 16, True))


def lora_layers_of(shape: str, everywhere: bool) -> list[LoraLayer]:
    """The merged linears of a layer that have adapters: all four, or the first alone for q and v."""
    facts = {name: int(value) for name, value in SHAPES[shape].items() if isinstance(value, int)}
    hidden, mlp, dim = facts["hidden_size"], facts["intermediate_size"], facts["head_dim"]
    q, kv = facts["num_attention_heads"] * dim, facts["num_key_value_heads"] * dim
    qkv = LoraLayer(hidden, (q, kv, kv), (True, everywhere, True))
    others = [
        LoraLayer(q, (hidden,), (True,)),
        LoraLayer(hidden, (mlp, mlp), (True, True)),
        LoraLayer(mlp, (hidden,), (True,)),
    ]
    return [qkv, *others] if everywhere else [qkv]


class Pages:
    """Places rows in a slab of pages in shuffled order; an adapter's rows fill one page after another."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self.page = PAGE_BYTES // dtype.itemsize
        count = elements * 5 // 4 // self.page + 2
        self.slab = torch.empty(count * self.page, dtype=dtype).uniform_(-0.05, 0.05)
        self._free = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        self._at = self._end = 0

    def place(self, length: int) -> int:
        """The element at which a row of `length` elements begins."""
        if self._at + length > self._end:
            self._at = self._free.pop() * self.page
            self._end = self._at + self.page
        self._at += length
        return self._at - length


def tables_of(lora_layer: LoraLayer, case: Case) -> list[ProjectionTables]:
    """The projections of one merged linear, before their rows are placed."""
    projections = []
    for at, (width, has) in enumerate(zip(lora_layer.outputs, lora_layer.targets, strict=True)):
        a_rows, b_rows = (torch.full((case.active, MAX_RANK), -1) for _ in range(2))
        ranks = torch.full((case.active,), case.rank if has else 0, dtype=torch.int32)
        start = sum(lora_layer.outputs[:at])
        projections.append(
            ProjectionTables(a_rows, b_rows, ranks, torch.ones(case.active), lora_layer.inputs, width, start)
        )
    return projections


def make_layers(shape: str, case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, list[Layer], int]:
    """The slab, every merged linear of every layer, and the bytes of all adapters in use.

    Layers share x and y, as the activations of a real step share warm memory.
    """
    num_layers = int(str(SHAPES[shape]["num_hidden_layers"]))
    layers = []
    for lora_layer in lora_layers_of(shape, case.everywhere):
        x_TI = torch.randn(case.rows, lora_layer.inputs).to(dtype)
        y_TO = torch.zeros(case.rows, sum(lora_layer.outputs), dtype=dtype)
        layers.append([Layer(tables_of(lora_layer, case), x_TI, y_TO) for _ in range(num_layers)])
    in_order = [layer for of_one in zip(*layers, strict=True) for layer in of_one]
    projections = [projection for layer in in_order for projection in layer.projections]
    elements = sum((s.inputs + s.outputs) * int(s.ranks.sum()) for s in projections)
    pages = Pages(elements, dtype)
    for slot in range(case.active):
        for projection in projections:
            for rows, length in ((projection.a_rows, projection.inputs), (projection.b_rows, projection.outputs)):
                for k in range(int(projection.ranks[slot])):
                    rows[slot, k] = pages.place(length)
    return pages.slab, in_order, elements * dtype.itemsize


def spread(rows: int, active: int) -> AdapterRows:
    """The adapters of rows: row r uses adapter r modulo `active`."""
    slots = [row % active for row in range(rows)]
    segments = [(row, row + 1, slot) for row, slot in enumerate(slots)]
    if active == 1:
        segments = [(0, rows, 0)]
    return AdapterRows(torch.tensor(slots, dtype=torch.int32), segments)


def stepper(ops: LoraOps, slab: torch.Tensor, layers: Sequence[Layer], slots: AdapterRows) -> Callable[[], None]:
    """One step over all layers. Each call is a new batch for the kernels."""

    @torch.inference_mode()
    def step() -> None:
        rows = AdapterRows(slots.slots_T, slots.segments)
        for layer in layers:
            ops.add(layer.y_TO, layer.x_TI, slab, layer.projections, rows)

    return step


def times_of(steps: Sequence[Callable[[], None]], options: argparse.Namespace) -> tuple[list[float], float]:
    """Median seconds of each step, called in turn with cold caches, and the share that other processes took meanwhile.

    Turns in which that share was over a tenth are dropped until --patience is over.
    """
    flush = torch.ones(FLUSH_BYTES // 4)
    times: list[list[float]] = [[] for _ in steps]
    shares: list[float] = []
    for step in [*steps, *steps]:
        step()
    until = time.perf_counter() + options.patience
    while len(shares) < options.turns:
        wait_until_quiet(until - time.perf_counter(), window_s=0.1)
        with OtherCpu() as other:
            turn = [timed(step, flush) for _ in range(STEPS_A_TURN) for step in steps]
        if other.share < QUIET or time.perf_counter() > until:
            shares.append(other.share)
            for at, own in enumerate(times):
                own += turn[at :: len(steps)]
    return [statistics.median(own) for own in times], statistics.mean(shares)


def timed(step: Callable[[], None], flush: torch.Tensor) -> float:
    flush.sum()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def report(case: Case, options: argparse.Namespace, read_bytes_per_s: float) -> None:
    slab, layers, adapter_bytes = make_layers(options.model, case, torch.bfloat16)
    slots = spread(case.rows, case.active)
    ops: list[LoraOps] = [CpuPlatform().lora_ops(torch.bfloat16)]
    if options.twin:
        ops.append(TorchLora())
    times_s, share = times_of([stepper(each, slab, layers, slots) for each in ops], options)
    roofline_ms = adapter_bytes / read_bytes_per_s * 1e3
    parts = [f"{case}: roofline {roofline_ms:6.2f} ms ({adapter_bytes / 2**20:5.1f} MiB)"]
    for each, time_s in zip(ops, times_s, strict=True):
        parts.append(f"{type(each).__name__} {time_s * 1e3:6.2f} ms = {roofline_ms / time_s / 1e3:.2f} of the roofline")
    print("  ".join([*parts, f"other_cpu {share:.2f}"]), flush=True)


def report_runs(options: argparse.Namespace) -> None:
    """Prints times of one adapter of rank 8, 16 or 64 on all linears, by the length of its run of tokens."""
    library = cpu_lora_library(torch.bfloat16)
    assert library is not None, "no C compiler"
    for rank in (8, 16, 64):
        for tokens in RUNS:
            slab, layers, _ = make_layers(options.model, Case(tokens, 1, rank, True), torch.bfloat16)
            both = [CpuLora(library, gemm_tokens=tokens + 1), CpuLora(library, gemm_tokens=1)]
            (tiles_s, gemm_s), share = times_of(
                [stepper(ops, slab, layers, spread(tokens, 1)) for ops in both], options
            )
            times = f"tiles {tiles_s * 1e3:7.2f} ms  matmuls {gemm_s * 1e3:7.2f} ms"
            print(f"rank {rank:2d}, run of {tokens:3d}: {times}  other_cpu {share:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=12, help=f"of {STEPS_A_TURN} steps, per line")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds per line to wait for a quiet machine")
    parser.add_argument("--twin", action="store_true", help="time the torch twin too")
    parser.add_argument(
        "--runs", action="store_true", help="tiles and matmuls by the length of a run of tokens, instead"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.runs:
        report_runs(options)
        return
    wait_until_quiet(options.patience)
    speed = measure_machine(options.threads)
    print(f"{options.model} bf16, {options.threads} threads, read {speed.read_bytes_per_s / 1e9:.1f} GB/s", flush=True)
    for case in CASES:
        report(case, options, speed.read_bytes_per_s)


if __name__ == "__main__":
    main()
