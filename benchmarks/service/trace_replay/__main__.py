"""Replay of traces with KV tiers below the device (`kv`) or LoRA adapters (`lora`), and measurements beside it.

    python -m benchmarks.service.trace_replay kv [--parts trace return crossover] [--trace FILE] [--quick]
    python -m benchmarks.service.trace_replay lora [--parts speed memory waits zipf peer] [--quick]

Of kv: turns of conversations whose KV is --scale times the device's, with each set of tiers; one turn over HTTP with
its prefix in host memory beside a new one; the same in process, by length of the prefix. Of lora: decode tokens/s by
active adapters; adapters in a GiB; TTFT with more adapters than room, with steps of given times and with a model;
transformers with peft. JSON: out/benchmarks.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.models import MODELS
from benchmarks.record import RESULTS, write_record
from benchmarks.service.trace_replay import lora_plot
from benchmarks.service.trace_replay.crossover import run_crossover
from benchmarks.service.trace_replay.kv_trace import VARIANTS, run_trace
from benchmarks.service.trace_replay.lora_batches import run_memory, run_peer, run_speed
from benchmarks.service.trace_replay.lora_queueing import run_waits
from benchmarks.service.trace_replay.lora_zipf import run_zipf
from benchmarks.service.trace_replay.returning_turn import run_returning_turn

Part = Callable[[argparse.Namespace, Console], object]
KV: dict[str, Part] = {"trace": run_trace, "return": run_returning_turn, "crossover": run_crossover}
LORA: dict[str, Part] = {
    "speed": run_speed, "memory": run_memory, "waits": run_waits, "zipf": run_zipf, "peer": run_peer,
}  # fmt: skip
PARTS = {"kv": KV, "lora": LORA}
LARGE, SMALL = "qwen3-0.6b", "llama-135m"
REPLAYS = ("trace", "zipf")
"""Parts that run many requests, and so default to the small model."""
LEAST_PREFIX = 64
SIZES: dict[str, dict[str, tuple[object, object]]] = {
    "kv": {"turns": (200, 60), "repeats": (7, 3), "prefix": (1024, 512)},
    "lora": {"tokens": (48, 16), "repeats": (5, 2), "requests": (300, 40), "adapters": ([8, 64, 512], [8, 32])},
}
"""Defaults of options, without and with --quick."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, parts in PARTS.items():
        command = commands.add_parser(name)
        command.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
        command.add_argument("--quick", action="store_true", help="the demo model, and few and short runs")
        command.add_argument(
            "--model", help=f"{MODELS} (default: {SMALL} for {' and '.join(REPLAYS)}, else {LARGE}; --quick: demo)"
        )
        command.add_argument("--threads", type=int, default=os.cpu_count() or 1)
        command.add_argument("--out", type=Path, default=RESULTS, help="folder of the results, and of the disk tier")
        (_add_kv if name == "kv" else _add_lora)(command)
    options = parser.parse_args(arguments)
    for name, (full, quick) in SIZES[options.command].items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if options.command == "kv" and options.prefix < LEAST_PREFIX:
        parser.error(f"--prefix: at least {LEAST_PREFIX}")
    if options.command == "lora" and options.rate is not None and options.rate <= 0:
        parser.error(f"--rate: above 0, not {options.rate:g}")
    if options.command == "kv" and options.trace and not options.trace.is_file():
        parser.error(f"--trace: no file {options.trace}")
    return options


def _add_kv(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trace", type=Path, help="a trace in Mooncake's form (default: a generated one)")
    command.add_argument("--turns", type=int, help="at least so many turns of the trace (default: 200)")
    command.add_argument("--scale", type=float, default=4.0, help="KV of all turns over KV of the device")
    command.add_argument("--load", type=float, default=1.0, help="arriving tokens over those of an uncached engine")
    command.add_argument("--longest", type=int, default=62, help="most blocks of a prompt of a chosen conversation")
    command.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="of the trace part")
    command.add_argument("--in-process", action="store_true", help="the rank in this process; turns wait for steps")
    command.add_argument(
        "--prefix", type=int, help="known tokens: of return, and the most of crossover (default: 1024)"
    )
    command.add_argument("--repeats", type=int, help="of return and of each length of crossover (default: 7)")
    command.add_argument("--patience", type=float, default=3.0, help="seconds that a turn waits for a quiet machine")
    command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    command.add_argument("--seed", type=int, default=0, help="chooses the conversations")


def _add_lora(command: argparse.ArgumentParser) -> None:
    command.add_argument("--adapters", type=int, nargs="+", help="of each line of zipf (default: 8 64 512)")
    command.add_argument("--requests", type=int, help="of each line of zipf (default: 300)")
    command.add_argument(
        "--room", type=int, default=8, help="adapters that the device has room for in zipf (default: 8)"
    )
    command.add_argument("--rate", type=float, help="arrivals a second in zipf (default: half of the capacity)")
    command.add_argument("--tokens", type=int, help="of each row of speed and peer (default: 48)")
    command.add_argument("--repeats", type=int, help="A-B pairs of speed (default: 5)")


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Runs the chosen parts and writes a file for each; their records by part."""
    records: dict[str, object] = {}
    for part in options.parts:
        model = "demo" if options.quick else SMALL if part in REPLAYS else LARGE
        own = argparse.Namespace(**vars(options) | {"model": options.model or model})
        records[part] = PARTS[options.command][part](own, console)
        write_record(options.out / f"{options.command}-{part}.json", own, **{part: records[part]})
    if options.command == "lora":
        lora_plot.plot(records, options.out / "lora.png")
    return records


if __name__ == "__main__":
    run(parse_arguments(), Console())
