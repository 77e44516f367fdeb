"""Decode speed with 100, 75, 50 and 25 % of the layers' bytes on the device, the rest streaming from host memory.

    python -m benchmarks.engine.weight_stream [--threads N] [--batch 1 16] [--copiers thread inline] [--model NAME]

Steps of a resident decoder and of streaming ones alternate in one run. The roofline of a step is the streamed bytes at
the bandwidth of copies, plus the greater of weights and KV at read bandwidth and operations at the rate of a large
product, measured beside it; with a core to spare (--threads), the greater of the two. Turns in which other processes
took over 10 % of the machine are dropped until --patience is over. JSON and a plot go to out/benchmarks.
"""

import argparse
import ctypes
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.engine.decode_step import build, make_batch, make_kv, roofline_s
from benchmarks.machine import QUIET, OtherCpu, best_seconds, measure_machine
from benchmarks.models import SHAPES
from benchmarks.record import RESULTS, write_record
from tandem.configs.limits import available_cores
from tandem.offload.weights.layer_placement import LayerPlacement, place_layers
from tandem.offload.weights.weight_copiers import InlineCopier, ThreadCopier
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family_rows.families import parameters_of

BUDGETS = (1.0, 0.75, 0.5, 0.25)
STEPS_A_TURN = 3
PROBE_BYTES = 2**29
RESIDENT = "resident"
COPIERS = {"thread": ThreadCopier, "inline": InlineCopier}


@dataclass(frozen=True)
class Line:
    """One budget and batch size. Times are medians in milliseconds; other_cpu: share of the machine, 0 to 1."""

    budget: float
    streamed_layers: int
    streamed_bytes: int
    copier: str
    batch: int
    resident_ms: float
    streamed_ms: float
    copy_ms: float
    roofline_ms: float
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
    """Seconds to move all streamed layers once, in order, with nothing beside it."""
    start = time.perf_counter()
    for layer in decoder.stream.in_turn(range(decoder.num_local_layers)):
        decoder.stream.arrive(layer)
    return time.perf_counter() - start


class Machine:
    """Best rates of this machine. Bandwidths are measured turn by turn beside the steps, because they change by a half
    from one minute to the next. beside: a core is free to copy while the others compute."""

    def __init__(self, threads: int, layer_bytes: int) -> None:
        self.flop_per_s = measure_machine(threads).bf16_flop_per_s
        self.beside = threads < available_cores()
        self._matrix, self._vector = torch.ones(PROBE_BYTES // 16384, 4096), torch.ones(4096)
        self._half, self._half_vector = torch.ones(PROBE_BYTES // 8192, 4096).bfloat16(), self._vector.bfloat16()
        self._buffers = torch.zeros(2, layer_bytes // 4)
        self._layers = self._matrix.view(-1)[: PROBE_BYTES // layer_bytes * (layer_bytes // 4)].view(
            -1, layer_bytes // 4
        )

    def rates(self) -> tuple[float, float]:
        """Bytes per second that are read and copied now, the best of several ways; a copied byte counts once."""
        flat = self._matrix.view(-1)
        reads = (
            lambda: torch.mv(self._matrix, self._vector),
            lambda: torch.nn.functional.linear(self._half_vector, self._half),
            flat.sum,
            lambda: torch.dot(flat, flat),
        )
        return (
            PROBE_BYTES / min(best_seconds(way, 2) for way in reads),
            self._layers.nbytes / min(best_seconds(way, 2) for way in (self._by_one_thread, self._by_all_threads)),
        )

    def _by_one_thread(self) -> None:
        for place, layer in enumerate(self._layers):
            ctypes.memmove(self._buffers[place % 2].data_ptr(), layer.data_ptr(), layer.nbytes)

    def _by_all_threads(self) -> None:
        for place, layer in enumerate(self._layers):
            self._buffers[place % 2].copy_(layer)

    def roofline_s(self, spec: ArchSpec, batch: ForwardBatch, streamed_bytes: int, read: float, copy: float) -> float:
        """The least seconds of a step at these rates, in bytes per second. Where one memory and all cores serve both,
        streamed bytes are moved first and computed with afterwards."""
        machine = argparse.Namespace(bandwidth_gb_s=read / 1e9, gflop_s=self.flop_per_s / 1e9)
        compute, copies = roofline_s(spec, batch, 2, torch.bfloat16, machine), streamed_bytes / copy
        return max(compute, copies) if self.beside else compute + copies


class Contest:
    """Steps of the resident decoder and of each streaming one, bare copies, and the machine's rates, turn by turn. A
    different decoder begins each turn."""

    def __init__(
        self, spec: ArchSpec, resident: Decoder, streaming: dict[str, Decoder], rows: int, context: int
    ) -> None:
        self.spec, self.batch = spec, make_batch(1, [context] * rows)
        kv = make_kv(spec, int(self.batch.block_table_RN.max()) + 1, torch.bfloat16).tensors
        self.streaming = streaming
        self.runs = {name: Run(decoder, self.batch, kv) for name, decoder in {RESIDENT: resident, **streaming}.items()}
        self.copies_s: dict[str, list[float]] = {name: [] for name in streaming}
        self.rooflines_s: list[float] = []
        self.rates: list[tuple[float, float]] = []
        self.shares: list[float] = []
        for run in self.runs.values():
            for _ in range(3):  # until steps are replayed
                run.turn()

    def turn(self, machine: Machine, until_s: float) -> None:
        """Runs one turn, and drops it if other processes were busy before `until_s`."""
        names = list(self.runs)
        first = len(self.shares) % len(names)
        with OtherCpu() as other:
            times = {name: self.runs[name].turn() for name in names[first:] + names[:first]}
            copies = {name: copy_seconds(decoder) for name, decoder in self.streaming.items()}
            read, copy = machine.rates()
        if other.share >= QUIET and time.perf_counter() < until_s:
            return
        for name, found in times.items():
            self.runs[name].times_s += found
        for name, seconds in copies.items():
            self.copies_s[name].append(seconds)
        moved = next(iter(self.streaming.values())).stream.host_bytes
        copy = max(
            copy, *(moved / seconds for seconds in copies.values())
        )  # the roofline is never above a measured rate
        self.rates.append((read, copy))
        self.rooflines_s.append(machine.roofline_s(self.spec, self.batch, moved, read, copy))
        self.shares.append(other.share)

    def line(self, name: str, placement: LayerPlacement) -> Line:
        middle = statistics.median
        return Line(
            budget=placement.device_bytes / (placement.num_layers * placement.layer_bytes),
            streamed_layers=len(placement.streamed),
            streamed_bytes=self.streaming[name].stream.host_bytes,
            copier=name,
            batch=len(self.batch.seq_lens_list),
            resident_ms=self.runs[RESIDENT].median_ms,
            streamed_ms=self.runs[name].median_ms,
            copy_ms=middle(self.copies_s[name]) * 1e3,
            roofline_ms=middle(self.rooflines_s) * 1e3,
            read_gb_s=middle(read for read, _ in self.rates) / 1e9,
            memcpy_gb_s=middle(copy for _, copy in self.rates) / 1e9,
            other_cpu=statistics.mean(self.shares),
        )


def measure(contest: Contest, placement: LayerPlacement, machine: Machine, options: argparse.Namespace) -> list[Line]:
    """Runs turns until `--seconds` of each decoder's steps were counted."""
    until = time.perf_counter() + options.patience
    while min(sum(run.times_s) for run in contest.runs.values()) < options.seconds:
        while psutil.cpu_percent(interval=0.2) > 100 * QUIET and time.perf_counter() < until:
            time.sleep(0.3)
        contest.turn(machine, until)
    return [contest.line(name, placement) for name in contest.streaming]


def describe(line: Line) -> str:
    rate = line.streamed_bytes / line.copy_ms / 1e6 if line.streamed_layers else 0.0
    return "  ".join(
        (
            f"{line.budget:4.0%} on the device, {line.streamed_layers:2d} stream ({line.copier})",
            f"batch {line.batch:2d} {line.tokens_per_s:7.1f} tok/s, step {line.streamed_ms:7.2f} ms",
            f"resident {line.resident_ms:7.2f} ms",
            f"copies {line.copy_ms:6.2f} ms ({rate:4.1f} GB/s)",
            f"roofline {line.roofline_ms:7.2f} ms = {line.roofline_ms / line.streamed_ms:.2f}",
            f"(reads {line.read_gb_s:4.1f}, memcpy {line.memcpy_gb_s:4.1f} GB/s)",
            f"of both {line.sum_ms / line.streamed_ms:.2f}, of the longer {line.longer_ms / line.streamed_ms:.2f}",
            f"other_cpu {line.other_cpu:.2f}",
        )
    )


def plot(lines: list[Line], file: Path) -> None:
    """Plots tokens/s over the budget, measured and at the roofline."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len({line.batch for line in lines}), figsize=(9, 3.5), squeeze=False)
    for axis, rows in zip(axes[0], sorted({line.batch for line in lines}), strict=True):
        own = [line for line in lines if line.batch == rows and line.copier == lines[0].copier]
        budgets = [line.budget * 100 for line in own]
        axis.plot(budgets, [line.tokens_per_s for line in own], "o-", label="measured")
        axis.plot(
            budgets,
            [rows / line.roofline_ms * 1e3 for line in own],
            "--",
            label="roofline: bytes and operations at measured rates",
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
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="computing threads; fewer than cores spare one for copies",
    )
    parser.add_argument("--copiers", nargs="+", choices=sorted(COPIERS), help="default: that of a rank")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps counted per line")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds per line to wait for a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec, resident, _ = build(options.model, torch.bfloat16, [torch.bfloat16])
    layer_bytes = 2 * sum(param.num_elements for param in parameters_of(spec).layers[0])
    machine = Machine(options.threads, layer_bytes)
    free = "a core is" if machine.beside else "no core is"
    print(f"products {machine.flop_per_s / 1e9:.0f} GFLOP/s; {free} free to copy while layers compute")
    kinds = options.copiers or ["thread" if machine.beside else "inline"]
    lines = []
    for budget in BUDGETS:
        placement = place_layers(spec.num_layers, layer_bytes, int((1 - budget) * spec.num_layers * layer_bytes))
        streaming = {
            kind: build(options.model, torch.bfloat16, [torch.bfloat16], placement.streamed, COPIERS[kind]())[1]
            for kind in kinds
        }
        for rows in options.batch:
            found = measure(Contest(spec, resident, streaming, rows, options.context), placement, machine, options)
            for line in found:
                print(describe(line), flush=True)
            lines += found
        for decoder in streaming.values():
            decoder.close()
    name = f"weight-stream-{options.model}-{options.threads}-threads"
    write_record(
        RESULTS / f"{name}.json", options, flop_per_s=machine.flop_per_s, lines=[asdict(line) for line in lines]
    )
    plot(lines, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
