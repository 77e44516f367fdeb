"""The cost of sampling in a decode step: milliseconds with all fields, with each alone and without each, beside greedy.

    python -m benchmarks.engine.sampling
    python -m benchmarks.engine.sampling --batch 1 32 --threads 1 --cpu-time    # on a machine that others use
    python -m benchmarks.engine.sampling --torch    # the twin without kernels too
    python -m benchmarks.engine.sampling --device cuda --batch 1 32 256 --vocab 128256

A case is one sample() of a step: logits processors, truncation and draw for every row. Cases alternate call by call
(A-B-A-B), each on a fresh copy of the same random logits, with rows whose output grows by a token each time. Printed
are the best time of each case, what it adds to greedy, and that as a share of --step-ms, a decode step of the same
batch (benchmarks.engine.decode_step). The roofline is the bytes of the logits, read once, over --bandwidth-gb-s; on a
GPU the bandwidth is measured, and a case takes what its host and its device take one after the other.
"""

import argparse
import time
from collections.abc import Callable
from copy import copy

import numpy as np
import torch

from benchmarks.machine import OtherCpu
from benchmarks.record import RESULTS, note, write_record
from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.messages.step import RowInit, RowSampling, StepPlan
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.row_table import RowTable
from tandem.workers.sampling.sampler import sample
from tandem.workers.self_checks.device_checks import device_rates

FIELDS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.8, "seed": 7},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.01},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.3},
    "presence_penalty": {"presence_penalty": 0.2},
    "logit_bias": {"logit_bias": tuple((1000 * i, 1.5) for i in range(20))},
    "min_tokens": {"min_tokens": 10**6, "stop_token_ids": (5, 6)},
    "bad_words": {"bad_words_token_ids": tuple((i,) if i % 2 else (i, i + 1, i + 2) for i in range(100, 120))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, 100_000, 2))},
}
TRUNCATION = ("top_k", "top_p", "min_p")
"""Fields that do something to a random row only."""
BESIDE = ("allowed_token_ids",)
"""Fields that leave little to do for others: measured alone and in a case of their own, not among all."""


class Case:
    """One step's sampling over a row table of its own."""

    def __init__(self, name: str, sampling: RowSampling, options: argparse.Namespace, rows: int, platform: Platform):
        self.name, self._platform = name, platform
        self.best_ms = float("inf")
        room = options.prompt + options.repeats + 2
        self._table = RowTable(rows, room, 16, options.vocab)
        tokens = np.random.default_rng(0).integers(0, options.vocab, (rows, options.prompt)).tolist()
        half = options.prompt // 2
        inits = [
            RowInit(row=row, token_ids=tokens[row], prompt_len=half, num_computed=0, sampling=sampling)
            for row in range(rows)
        ]
        self._table.apply(StepPlan(step_id=1, work=[], new_rows=inits))
        self._rows = np.arange(rows)

    def run(self, logits: torch.Tensor, clock: Callable[[], float]) -> None:
        """Times one step, and appends its tokens."""
        table = self._table
        positions = table.num_known[self._rows].copy()
        begin = clock()
        drawn = sample(logits, self._rows, positions, table.sampling, table.history, self._platform)
        self._platform.accelerator.synchronize()
        sampled = drawn.collect()
        self.best_ms = min(self.best_ms, (clock() - begin) * 1e3)
        assert not any(sampled.failed)
        table.reserve(self._rows)
        table.fill(self._rows, sampled.token_ids)


def in_torch(platform: Platform) -> Platform:
    """The same platform with the twin without kernels."""
    twin = copy(platform)
    twin.sampling_ops = TorchSampling  # type: ignore[method-assign]
    return twin


def cases_of(options: argparse.Namespace, rows: int) -> list[Case]:
    """Greedy, all fields, all but one, one alone; with --torch also all fields by the twin."""
    platform = open_platform(settings_of(options), rank=0, ranks_on_node=1)

    def case(name: str, fields: list[str], where: Platform = platform) -> Case:
        merged = {key: value for field in fields for key, value in FIELDS[field].items()}
        return Case(name, RowSampling(**{"temperature": 0.0, **merged}), options, rows, where)

    among = [field for field in FIELDS if field not in BESIDE]
    found = [case("greedy", []), case("all", among), case("all and allowed_token_ids", list(FIELDS))]
    found += [case(f"all but {field}", [f for f in among if f != field]) for field in among]
    found += [case(field, ["temperature", field] if field in TRUNCATION else [field]) for field in FIELDS]
    if options.torch:
        twin = in_torch(platform)
        found += [case("greedy, torch twin", [], twin), case("all, torch twin", among, twin)]
    return found


def settings_of(options: argparse.Namespace) -> EngineSettings:
    threads = options.threads if options.device == "cpu" else None
    device = DeviceSettings(device=options.device, cpu_threads=threads)
    return EngineSettings(model=ModelSettings(model=""), device=device)


def report(options: argparse.Namespace, rows: int) -> dict[str, float]:
    """Prints a line per case; returns the best times in milliseconds."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    cases = [case for case in cases_of(options, rows) if not options.cases or case.name in ("greedy", *options.cases)]
    host = torch.randn(rows, options.vocab, generator=torch.Generator().manual_seed(0)) * options.spread
    base = host.to(options.device)
    logits = torch.empty_like(base)
    with OtherCpu() as other, torch.inference_mode():
        for _ in range(options.repeats):
            for case in cases:
                case.run(logits.copy_(base), clock)
    greedy = cases[0].best_ms
    roofline = base.nbytes / options.bandwidth_gb_s / 1e6
    print(
        f"{rows} rows x {options.vocab} tokens, {options.threads} threads: roofline of one pass {roofline:.2f} ms, "
        f"other_cpu {other.share:.2f}",
        flush=True,
    )
    for case in cases:
        added = case.best_ms - greedy
        print(
            f"  {case.name:28s} {case.best_ms:7.2f} ms  {added:+7.2f} ms to greedy, {added / options.step_ms:+6.1%} of "
            f"a step of {options.step_ms:g} ms, {case.best_ms / roofline:5.1f}x the roofline"
        )
        note(
            case="sampling", rows=rows, vocab=options.vocab, name=case.name, best_ms=case.best_ms, roofline_ms=roofline
        )
    return {case.name: case.best_ms for case in cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens; default: Qwen3's")
    parser.add_argument("--prompt", type=int, default=600, help="tokens a row has, half of them output")
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of the logits")
    parser.add_argument("--cases", nargs="+", help='only these, by the names that are printed, such as "all"')
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of all threads, for a machine that is busy")
    parser.add_argument("--step-ms", type=float, default=100.0, help="a decode step without sampling")
    parser.add_argument("--bandwidth-gb-s", type=float, default=78.6, help="best read rate of the CPU's memory")
    parser.add_argument("--torch", action="store_true", help="times the torch twin too")
    options = parser.parse_args()
    if options.device == "cuda":
        platform = open_platform(settings_of(options), rank=0, ranks_on_node=1)
        options.bandwidth_gb_s = device_rates(platform).memory_bytes_per_s / 1e9
    torch.set_num_threads(options.threads)
    found = {str(rows): report(options, rows) for rows in options.batch}
    name = "sampling" if options.device == "cpu" else "gpu-sampling"
    write_record(RESULTS / f"{name}.json", options, best_ms=found)


if __name__ == "__main__":
    main()
