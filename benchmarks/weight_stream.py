"""Decode speed with 100, 75, 50 and 25 % of the layers' bytes on the device, the rest streaming from host memory.

    python -m benchmarks.weight_stream [--threads N] [--batch 1 16] [--model qwen3-0.6b]

Steps of a resident decoder and of one that streams alternate in the same run (A-B). The floor of a step is what its
bytes and operations take at rates measured beside it: the streamed bytes at the bandwidth of memcpy, and the greater of
weights and KV at read bandwidth and operations at the rate of a large product. A CPU has no copy engine and one memory,
so the two add up where all cores compute; with a core to spare (--threads) the floor is the greater of them. Beside it:
the shares of the resident step and the copies as they ran alone, of both together and of the longer of them. A turn
waits for a quiet moment and is dropped when other processes took over 10 % of the machine meanwhile, until --patience
is over: then all count, as other_cpu says. JSON and a plot go to out/benchmarks.
"""

import argparse
import ctypes
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks.decode_step import CPU, build, floor_s, make_batch, make_kv
from benchmarks.machine import OtherCpu, best_seconds, measure_machine
from benchmarks.models import SHAPES
from offload.placement import LayerPlacement, place_layers
from offload.weight_copiers import make_copier
from workers.attention.backend import KVTensors
from workers.models.decoder import Decoder
from workers.models.forward_batch import ForwardBatch
from workers.models.spec import ArchSpec
from workers.rank.memory import available_cores

RESULTS = Path(__file__).resolve().parents[1] / "out" / "benchmarks"
BUDGETS = (1.0, 0.75, 0.5, 0.25)
STEPS_A_TURN = 3
QUIET = 0.1
PROBE_BYTES = 2**29


@dataclass(frozen=True)
class Line:
    """One budget and batch size. Times are medians, milliseconds; other_cpu is the share others took meanwhile."""

    budget: float
    streamed_layers: int
    streamed_bytes: int
    batch: int
    resident_ms: float
    streamed_ms: float
    copy_ms: float
    floor_ms: float
    read_gb_s: float
    memcpy_gb_s: float
    other_cpu: float

    @property
    def longer_ms(self) -> float:
        return max(self.copy_ms, self.resident_ms)

    @property
    def sum_ms(self) -> float:
        return self.copy_ms + self.resident_ms

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.streamed_ms * 1e3


class Run:
    """A decoder, a batch and its KV; `turn` times a few steps."""

    def __init__(self, decoder: Decoder, batch: ForwardBatch, kv: KVTensors) -> None:
        self._decoder, self._batch, self._kv = decoder, batch, kv
        self.times_s: list[float] = []

    @torch.inference_mode()
    def turn(self) -> list[float]:
        times_s = []
        for _ in range(STEPS_A_TURN):
            start = time.perf_counter()
            self._decoder.forward(self._batch, self._kv, None)
            times_s.append(time.perf_counter() - start)
        return times_s

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_s) * 1e3


def copy_seconds(decoder: Decoder) -> float:
    """Moving all streamed layers once, in order, with nothing else to do."""
    start = time.perf_counter()
    for _ in decoder.stream.in_turn(range(decoder.num_local_layers)):
        pass
    return time.perf_counter() - start


class Machine:
    """What this machine can do at best. Bandwidths are measured turn by turn, beside the steps that are held against
    them: they change by a half from one minute to the next. beside: a core is free to copy while the others compute."""

    def __init__(self, threads: int) -> None:
        self.flop_per_s = measure_machine(threads).bf16_flop_per_s
        self.beside = threads < available_cores()
        self._source = torch.ones(PROBE_BYTES // 4)
        self._target = torch.zeros_like(self._source)
        self._matrix, self._vector = self._source.view(-1, 4096), torch.ones(4096)

    def rates(self) -> tuple[float, float]:
        """Bytes per second that are read, and copied (each counted once), now: the better of two ways each."""
        source, target = self._source, self._target
        reads = (best_seconds(source.sum, 2), best_seconds(lambda: torch.mv(self._matrix, self._vector), 2))
        one_thread = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), PROBE_BYTES)
        copies = (best_seconds(one_thread, 2), best_seconds(lambda: target.copy_(source), 2))
        return PROBE_BYTES / min(reads), PROBE_BYTES / min(copies)

    def floor_s(self, spec: ArchSpec, batch: ForwardBatch, streamed_bytes: int, rates: tuple[float, float]) -> float:
        """What a step takes whose bytes and operations go at these rates. Where one memory and all cores serve both,
        the streamed bytes are moved first and computed with after."""
        read, copy = rates
        machine = argparse.Namespace(bandwidth_gb_s=read / 1e9, gflop_s=self.flop_per_s / 1e9)
        compute, copies = floor_s(spec, batch, 2, torch.bfloat16, machine), streamed_bytes / copy
        return max(compute, copies) if self.beside else compute + copies


def measure(
    spec: ArchSpec,
    resident: Decoder,
    decoder: Decoder,
    placement: LayerPlacement,
    rows: int,
    machine: Machine,
    options: argparse.Namespace,
) -> Line:
    """Resident steps, streamed steps and bare copies in turns until `--seconds` of steps were counted."""
    batch = make_batch(1, [options.context] * rows)
    kv = make_kv(spec, int(batch.block_table_RN.max()) + 1, torch.bfloat16).tensors
    ours, theirs = Run(decoder, batch, kv), Run(resident, batch, kv)
    theirs.turn(), ours.turn(), copy_seconds(decoder)
    copies_s, shares, floors_s, seen = [], [], [], []
    until = time.perf_counter() + options.patience
    while sum(ours.times_s) + sum(theirs.times_s) < options.seconds:
        while psutil.cpu_percent(interval=0.2) > 100 * QUIET and time.perf_counter() < until:
            time.sleep(0.3)
        with OtherCpu() as other:
            turns = theirs.turn(), ours.turn(), copy_seconds(decoder)
            rates = machine.rates()
        if other.share < QUIET or time.perf_counter() > until:
            theirs.times_s += turns[0]
            ours.times_s += turns[1]
            copies_s.append(turns[2])
            shares.append(other.share)
            floors_s.append(machine.floor_s(spec, batch, decoder.stream.host_bytes, rates))
            seen.append(rates)
    return Line(
        budget=placement.device_bytes / (placement.num_layers * placement.layer_bytes),
        streamed_layers=len(placement.streamed),
        streamed_bytes=decoder.stream.host_bytes,
        batch=rows,
        resident_ms=theirs.median_ms,
        streamed_ms=ours.median_ms,
        copy_ms=statistics.median(copies_s) * 1e3,
        floor_ms=statistics.median(floors_s) * 1e3,
        read_gb_s=statistics.median(read for read, _ in seen) / 1e9,
        memcpy_gb_s=statistics.median(copy for _, copy in seen) / 1e9,
        other_cpu=statistics.mean(shares),
    )


def describe(line: Line) -> str:
    rate = line.streamed_bytes / line.copy_ms / 1e6 if line.streamed_layers else 0.0
    return "  ".join(
        (
            f"{line.budget:4.0%} on the device, {line.streamed_layers:2d} stream",
            f"batch {line.batch:2d} {line.tokens_per_s:7.1f} tok/s, step {line.streamed_ms:7.2f} ms",
            f"resident {line.resident_ms:7.2f} ms",
            f"copies {line.copy_ms:6.2f} ms ({rate:4.1f} GB/s)",
            f"floor {line.floor_ms:7.2f} ms = {line.floor_ms / line.streamed_ms:.2f}",
            f"(reads {line.read_gb_s:4.1f}, memcpy {line.memcpy_gb_s:4.1f} GB/s)",
            f"of both {line.sum_ms / line.streamed_ms:.2f}, of the longer {line.longer_ms / line.streamed_ms:.2f}",
            f"other_cpu {line.other_cpu:.2f}",
        )
    )


def plot(lines: list[Line], file: Path) -> None:
    """Tokens/s over the budget: reached, and at the floor."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len({line.batch for line in lines}), figsize=(9, 3.5), squeeze=False)
    for axis, rows in zip(axes[0], sorted({line.batch for line in lines}), strict=True):
        own = [line for line in lines if line.batch == rows]
        budgets = [line.budget * 100 for line in own]
        axis.plot(budgets, [line.tokens_per_s for line in own], "o-", label="reached")
        axis.plot(
            budgets,
            [rows / line.floor_ms * 1e3 for line in own],
            "--",
            label="floor: bytes and operations at measured rates",
        )
        axis.plot(
            budgets, [rows / line.sum_ms * 1e3 for line in own], ":", label="resident step + copies as they run alone"
        )
        axis.set(title=f"batch {rows}", xlabel="% of the layers' bytes on the device", ylabel="tok/s", ylim=(0, None))
        axis.invert_xaxis()
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that compute; fewer spare a core")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps counted per line")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds per line to wait for a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine(options.threads)
    free = "a core is" if machine.beside else "no core is"
    print(f"products {machine.flop_per_s / 1e9:.0f} GFLOP/s; {free} free to copy while layers compute")
    spec, resident, _ = build(options.model, torch.bfloat16, [torch.bfloat16])
    lines = []
    for budget in BUDGETS:
        layer_bytes = 2 * spec.layer_parameters
        placement = place_layers(spec.num_layers, layer_bytes, int((1 - budget) * spec.num_layers * layer_bytes))
        _, decoder, _ = build(
            options.model, torch.bfloat16, [torch.bfloat16], placement.streamed, make_copier(CPU, machine.beside)
        )
        for rows in options.batch:
            lines.append(measure(spec, resident, decoder, placement, rows, machine, options))
            print(describe(lines[-1]), flush=True)
        decoder.close()
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"weight-stream-{options.model}-{options.threads}-threads"
    record = {
        "options": vars(options),
        "torch": torch.__version__,
        "flop_per_s": machine.flop_per_s,
        "lines": [asdict(line) for line in lines],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1))
    plot(lines, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
