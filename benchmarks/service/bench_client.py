"""`tandem bench serve` beside vLLM's own client on the same load, in turns: medians of what both say, and their CPU.

    python -m benchmarks.service.bench_client [--peer "vllm bench serve"] [--model llama-135m] [--pairs 5]

--peer is the command of vLLM's client, in an environment of its own; without it our client runs alone. Both get the
same flags and the same seed, so the same prompts at the same times, and the service has no prefix cache, which would
answer the second faster. Two loads: a rate below the capacity, and so many at a time. Figures are those that each
client writes into its JSON file. Client and service share the machine. --paced: a service that answers by the clock
in its place, whose times are known and do not depend on what others do on the machine. JSON goes to out/benchmarks.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import OtherCpu, wait_until_quiet
from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.service.paced_service import FIRST_S, NEXT_S, PacedService
from benchmarks.service.serving import TANDEM, Service

FIGURES = ("median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms", "output_throughput")
"""Compared, with a bar for the first two and the last."""
BARRED = ("median_ttft_ms", "median_tpot_ms", "output_throughput")
BAR = 0.05


Served = Service | PacedService


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=shlex.split, default=[], help='such as "vllm bench serve"')
    parser.add_argument("--model", default="llama-135m", help=MODELS)
    parser.add_argument("--paced", action="store_true", help="load a service that answers by the clock")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second of the first load")
    parser.add_argument("--concurrency", type=int, default=8, help="of the second load")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="of the rank")
    parser.add_argument("--quiet-s", type=float, default=60.0, help="longest wait for other processes to rest")
    return parser.parse_args()


def load_flags(options: argparse.Namespace, folder: Path, service: Served, seed: int) -> dict[str, list[str]]:
    """The flags of each load, the same for both clients."""
    common = ["--base-url", service.url, "--model", str(folder), "--served-model-name", service.model_name]
    common += ["--num-prompts", str(options.num_prompts), "--seed", str(seed), "--disable-tqdm", "--temperature", "0"]
    common += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    common += ["--random-range-ratio", "0.5", "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
    return {
        f"{options.rate:g} requests/s": [*common, "--request-rate", f"{options.rate:g}"],
        f"{options.concurrency} at a time": [*common, "--max-concurrency", str(options.concurrency)],
    }


def run_client(command: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """The JSON file of one run, with the CPU seconds of the client's process, its start included."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--result-dir", folder, "--result-filename", "found.json"]
        before = os.times()
        done = subprocess.run([*command, *flags, *where], capture_output=True, text=True, check=False)
        after = os.times()
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {name: found[name] for name in (*FIGURES, "completed", "failed", "total_output_tokens")} | {"cpu_s": cpu_s}


def idle_cpu_s(command: Sequence[str]) -> float:
    """CPU seconds of a client that only says its help: its imports."""
    before = os.times()
    subprocess.run([*command, "--help"], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def compare(options: argparse.Namespace, console: Console, service: Served, folder: Path) -> dict[str, Any]:
    """The runs of each client by load, in turns; the first of a pair is each in its turn."""
    clients = {"tandem": [*TANDEM, "bench", "serve"]} | ({"vllm": options.peer} if options.peer else {})
    runs: dict[str, Any] = {"idle_cpu_s": {name: idle_cpu_s(command) for name, command in clients.items()}}
    for pair in range(options.pairs):
        order = list(clients.items())[:: 1 if pair % 2 == 0 else -1]
        for load, flags in load_flags(options, folder, service, seed=pair).items():
            for name, command in order:
                wait_until_quiet(options.quiet_s)
                with OtherCpu() as other:
                    found = run_client(command, flags)
                runs.setdefault(load, {}).setdefault(name, []).append(found | {"other_cpu": other.share})
                said = "  ".join(f"{figure} {found[figure]:.1f}" for figure in FIGURES)
                console.print(f"[{pair}] {load:16s} {name:7s} {said}  cpu {found['cpu_s']:.2f} s")
    return runs


def medians(runs: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By load and client, the median of each figure over its runs."""
    return {
        load: {
            name: {figure: statistics.median(run[figure] for run in each) for figure in (*FIGURES, "cpu_s")}
            for name, each in by_client.items()
        }
        for load, by_client in runs.items()
        if load != "idle_cpu_s"
    }


def show(console: Console, found: Mapping[str, dict[str, dict[str, float]]]) -> bool:
    """Prints the medians beside each other; returns whether all bars hold."""
    holds = True
    for load, by_client in found.items():
        table = Table("figure", *by_client, "ratio", title=load)
        for figure in (*FIGURES, "cpu_s"):
            values = [each[figure] for each in by_client.values()]
            ratio = values[0] / values[-1]
            if figure in BARRED:
                holds &= abs(ratio - 1) <= BAR
            table.add_row(figure, *(f"{value:.2f}" for value in values), f"{ratio:.3f}")
        console.print(table)
    console.print(f"medians of {', '.join(BARRED)} within {BAR:.0%}: {'holds' if holds else 'MISSED'}")
    return holds


def main() -> None:
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 180)
    folder = find_model(options.model)
    flags = ["--device", "cpu", "--cpu-threads", str(options.threads), "--max-model-len", "1024"]
    flags += ["--no-enable-prefix-caching"]
    served = PacedService() if options.paced else Service(str(folder), flags, RESULTS / "bench-client.log")
    with served as service:
        runs = compare(options, console, service, folder)
    found = medians(runs)
    holds = show(console, found)
    options.peer = bool(options.peer)
    truth = {"median_ttft_ms": 1e3 * FIRST_S, "median_tpot_ms": 1e3 * NEXT_S} if options.paced else None
    file = RESULTS / f"bench-client{'-paced' if options.paced else ''}.json"
    write_record(file, options, runs=runs, medians=found, holds=holds, truth=truth)


if __name__ == "__main__":
    main()
