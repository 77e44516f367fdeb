"""Decode speed with 100, 75, 50 and 25 % of the layers' bytes on the device, the rest streaming from host memory.

    python -m benchmarks.weight_stream [--threads N] [--batch 1 16] [--copiers thread inline] [--model qwen3-0.6b]

Steps of a resident decoder and of those that stream alternate in the same run (A-B), each beginning in turn. The floor
of a step is what its bytes and operations take at rates measured beside it, the best of several ways: the streamed
bytes at the bandwidth of copies, and the greater of weights and KV at read bandwidth and operations at the rate of a
large product. A CPU has no copy engine and one memory, so the two add up where all cores compute; with a core to spare
(--threads) the floor is the greater of them. Beside it: the shares of the resident step and the copies as they ran
alone, of both together and of the longer of them. At 100 % nothing streams, and both decoders are the same. A turn
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
from pathlib import Path

import psutil
import torch

from benchmarks.decode_step import build, floor_s, make_batch, make_kv
from benchmarks.machine import OtherCpu, best_seconds, measure_machine
from benchmarks.models import SHAPES
from offload.placement import LayerPlacement, place_layers
from offload.weight_copiers import InlineCopier, ThreadCopier
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
RESIDENT = "resident"
COPIERS = {"thread": ThreadCopier, "inline": InlineCopier}


@dataclass(frozen=True)
class Line:
    """One budget and batch size. Times are medians, milliseconds; other_cpu is the share others took meanwhile."""

    budget: float
    streamed_layers: int
    streamed_bytes: int
    copier: str
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
    for layer in decoder.stream.in_turn(range(decoder.num_local_layers)):
        decoder.stream.arrive(layer)
    return time.perf_counter() - start


class Machine:
    """What this machine can do at best. Bandwidths are measured turn by turn, beside the steps that are held against
    them: they change by a half from one minute to the next. beside: a core is free to copy while the others compute."""

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
        """Bytes per second that are read, and copied (each counted once), now: the best of several ways."""
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

    def floor_s(self, spec: ArchSpec, batch: ForwardBatch, streamed_bytes: int, read: float, copy: float) -> float:
        """What a step takes whose bytes and operations go at these rates (bytes per second). Where one memory and all
        cores serve both, the streamed bytes are moved first and computed with after."""
        machine = argparse.Namespace(bandwidth_gb_s=read / 1e9, gflop_s=self.flop_per_s / 1e9)
        compute, copies = floor_s(spec, batch, 2, torch.bfloat16, machine), streamed_bytes / copy
        return max(compute, copies) if self.beside else compute + copies


class Contest:
    """Steps of the resident decoder and of each that streams, bare copies, and the machine's rates, turn by turn. Who
    begins changes with every turn."""

    def __init__(
        self, spec: ArchSpec, resident: Decoder, streaming: dict[str, Decoder], rows: int, context: int
    ) -> None:
        self.spec, self.batch = spec, make_batch(1, [context] * rows)
        kv = make_kv(spec, int(self.batch.block_table_RN.max()) + 1, torch.bfloat16).tensors
        self.streaming = streaming
        self.runs = {name: Run(decoder, self.batch, kv) for name, decoder in {RESIDENT: resident, **streaming}.items()}
        self.copies_s: dict[str, list[float]] = {name: [] for name in streaming}
        self.floors_s: list[float] = []
        self.rates: list[tuple[float, float]] = []
        self.shares: list[float] = []
        for run in self.runs.values():
            for _ in range(3):  # till steps are repeated
                run.turn()

    def turn(self, machine: Machine, until_s: float) -> None:
        """Counts, unless others took the machine meanwhile and it is not `until_s` yet."""
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
        copy = max(copy, *(moved / seconds for seconds in copies.values()))  # a floor is below whatever was seen
        self.rates.append((read, copy))
        self.floors_s.append(machine.floor_s(self.spec, self.batch, moved, read, copy))
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
            floor_ms=middle(self.floors_s) * 1e3,
            read_gb_s=middle(read for read, _ in self.rates) / 1e9,
            memcpy_gb_s=middle(copy for _, copy in self.rates) / 1e9,
            other_cpu=statistics.mean(self.shares),
        )


def measure(contest: Contest, placement: LayerPlacement, machine: Machine, options: argparse.Namespace) -> list[Line]:
    """Turns until `--seconds` of each one's steps were counted."""
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
        own = [line for line in lines if line.batch == rows and line.copier == lines[0].copier]
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
    parser.add_argument("--copiers", nargs="+", choices=sorted(COPIERS), help="default: the one that a rank would take")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps counted per line")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds per line to wait for a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec, resident, _ = build(options.model, torch.bfloat16, [torch.bfloat16])
    layer_bytes = 2 * spec.layer_parameters
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
