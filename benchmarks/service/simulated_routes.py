"""Routing policies on the virtual clock: hits and first tokens of each load, by policy and number of groups.

    python -m benchmarks.service.simulated_routes                       # 8 and 64 groups, every load, every policy
    python -m benchmarks.service.simulated_routes --trace FILE          # arrivals of a trace in Mooncake's form
    python -m benchmarks.service.simulated_routes --groups 8 --loads conversations --policies joint least-tokens

Each load is sent at --load of what the groups can compute of it without any prefix hit, so that numbers of groups can
be compared. Steps take the times of --step-times (default: a model of 8B on a large GPU, by its roofline). Prints a
table with the CPU seconds of each run, and says where the bars hold: joint against least-tokens on conversations, and
against the best policy on every load. JSON: out/benchmarks.
"""

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.record import RESULTS, write_record
from benchmarks.service.trace_replay.trace import read_trace
from tandem.cluster.routing.policies.policy_names import POLICIES
from tandem.cluster.simulator.loads import LOADS, SimulatedRequest, TraceRow, generated_rows, make_load
from tandem.cluster.simulator.setup import Setup
from tandem.cluster.simulator.simulated_group import GroupKind
from tandem.cluster.simulator.simulated_ranks import END, VOCAB_SIZE
from tandem.cluster.simulator.simulation import Simulation, few_collections
from tandem.cluster.simulator.steps.fitted_times import FittedTimes, WorkCosts, read_step_times
from tandem.configs.schema import EngineSettings, LoraSettings, ModelSettings, SchedulerSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.executor import ExecutorReady

ROOFLINE: Final = FittedTimes(
    alone=WorkCosts(step_s=0.009, decode_s=0.00005, prefill_token_s=0.00005, context_token_s=4e-9)
)
"""An 8B model: its weights read once a step, some 20,000 prompt tokens a second."""
TRACE_BLOCK: Final = 512
HIT_RATES, FIRST_TOKENS, NEAR_BEST = 2.3, 0.8, 1.05
"""Bars: least hits of joint over least-tokens' and most of its TTFT p50, on conversations; most of the best TTFT p50
elsewhere."""


class Cell(NamedTuple):
    """One run of the table."""

    load: str
    groups: int
    policy: str


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's form (default: a generated one)")
    parser.add_argument("--requests", type=int, default=120, help="of each load, for each group")
    parser.add_argument("--load", type=float, default=0.6, help="share of what the groups can compute without hits")
    parser.add_argument("--scale", type=float, default=0.25, help="multiplies the trace's lengths")
    parser.add_argument("--blocks", type=int, default=30_000, help="KV blocks of a group")
    parser.add_argument("--step-times", type=Path, help="file of times of steps (tandem simulate --save-step-times)")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def kind_of(options: argparse.Namespace) -> GroupKind:
    settings = EngineSettings(
        model=ModelSettings(model="none"),
        scheduler=SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=2048),
        lora=LoraSettings(enable_lora=True, max_loras=8, max_cpu_loras=16),
    )
    ready = ExecutorReady(
        num_blocks=options.blocks, pipeline_parallel_size=1, device="none", dtype="none", threads=0, weight_bytes=0,
        block_bytes=2**21, load_s=0.0, adapter_pages=8,
    )  # fmt: skip
    return GroupKind(settings=settings, facts=ModelFacts(131_072, VOCAB_SIZE, (END,), "none", "none"), ready=ready)


def load_of(options: argparse.Namespace, name: str, groups: int, times: FittedTimes) -> list[SimulatedRequest]:
    """The load, so fast that the groups are busy for --load of the time if they found nothing in a cache and decoded
    eight rows at a time."""
    count = options.requests * groups
    made = make_load(name, _rows(options, count), options.seed)[:count]
    step_s = times.alone.step_s / 8 + times.alone.decode_s
    work_s = sum(one.input_len * times.alone.prefill_token_s + one.output_len * step_s for one in made)
    span_s = max(1e-9, made[-1].at_s - made[0].at_s)
    factor = work_s / groups / options.load / span_s
    return [one._replace(at_s=(one.at_s - made[0].at_s) * factor) for one in made]


def _rows(options: argparse.Namespace, count: int) -> list[TraceRow]:
    if options.trace is None:
        return generated_rows(count, 10.0, options.seed)
    block = max(1, round(TRACE_BLOCK * options.scale))

    def scaled(length: int) -> int:
        return max(2, round(length * options.scale))

    return [
        TraceRow(row.time_s, scaled(row.input_length), scaled(row.output_length), row.block_ids, block)
        for row in read_trace(options.trace)[:count]
    ]


def run_cell(work: tuple[argparse.Namespace, Cell]) -> tuple[Cell, dict[str, float]]:
    """Runs one cell; the same in any process."""
    options, cell = work
    times = ROOFLINE if options.step_times is None else read_step_times(options.step_times)
    setup = Setup(
        kind=kind_of(options), times=times, load=load_of(options, cell.load, cell.groups, times), groups=cell.groups,
        policy=cell.policy, seed=options.seed, gateways=options.gateways,
    )  # fmt: skip
    began_s = time.process_time()
    simulation = Simulation(setup)
    with few_collections() as ended:
        figures = simulation.run(ended).figures
    return cell, {**figures, "cpu_s": time.process_time() - began_s}


def run(options: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    cells = [Cell(*one) for one in ((load, groups, policy) for groups in options.groups for load in options.loads
                                    for policy in options.policies)]  # fmt: skip
    found: dict[Cell, dict[str, float]] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, maxtasksperchild=1) as pool, tqdm(total=len(cells), unit="run") as bar:
        for cell, figures in pool.imap_unordered(run_cell, [(options, cell) for cell in cells]):
            found[cell] = figures
            bar.update()
    ordered = {cell: found[cell] for cell in cells}
    show(console, ordered)
    for line in verdicts(ordered):
        console.print(line)
    return [{**cell._asdict(), "figures": figures} for cell, figures in ordered.items()]


def show(console: Console, found: dict[Cell, dict[str, float]]) -> None:
    table = Table(
        "load", "groups", "policy", "hit rate", "TTFT p50 ms", "p99 ms", "ITL p99 ms", "goodput/s", "busy", "CPU s"
    )
    for (load, groups, policy), figures in found.items():
        table.add_row(
            load, str(groups), policy, f"{figures['hit_rate']:.3f}", f"{1e3 * figures['ttft_p50_s']:.1f}",
            f"{1e3 * figures['ttft_p99_s']:.0f}", f"{1e3 * figures['itl_p99_s']:.1f}", f"{figures['goodput']:.1f}",
            f"{figures['mean_busy']:.2f}", f"{figures['cpu_s']:.0f}",
        )  # fmt: skip
    console.print(table)


def verdicts(found: dict[Cell, dict[str, float]]) -> list[str]:
    """A line for each bar that these runs can say something of."""
    lines = []
    for load, groups in dict.fromkeys((cell.load, cell.groups) for cell in found):
        runs = {cell.policy: figures for cell, figures in found.items() if (cell.load, cell.groups) == (load, groups)}
        if "joint" not in runs or len(runs) < 2:
            continue
        joint, where = runs["joint"], f"{load}, {groups} groups"
        best = min(runs, key=lambda policy: runs[policy]["ttft_p50_s"])
        ratio = joint["ttft_p50_s"] / runs[best]["ttft_p50_s"]
        lines.append(f"{where}: joint's TTFT p50 is {ratio:.2f} of the best one's, {best}: {_said(ratio <= NEAR_BEST)}")
        if load in ("conversations", "trace") and "least-tokens" in runs:
            least = runs["least-tokens"]
            hits = joint["hit_rate"] / max(1e-9, least["hit_rate"])
            first = joint["ttft_p50_s"] / least["ttft_p50_s"]
            holds = hits >= HIT_RATES and first <= FIRST_TOKENS
            words = f"{hits:.2f} times the hits of least-tokens, and {first:.2f} of its TTFT p50"
            lines.append(f"{where}: joint has {words}: {_said(holds)}")
    return lines


def _said(holds: bool) -> str:
    return "the bar holds" if holds else "BELOW THE BAR"


def main() -> None:
    options = parse_arguments()
    write_record(options.out / "simulated-routes.json", options, runs=run(options, Console()))


if __name__ == "__main__":
    main()
