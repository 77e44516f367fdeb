"""The simulator beside a real service: one load by HTTP and on the virtual clock, with times fitted to step logs.

    python -m benchmarks.service.simulated                      # four groups of the 135M shape, three real runs
    python -m benchmarks.service.simulated --quick              # two of the demo model, one short run
    python -m benchmarks.service.simulated --trace FILE         # arrivals of a trace in Mooncake's form
    python -m benchmarks.service.simulated --policies joint least-tokens --load conversations

Serves the groups with step logs and replays a first load, to which the times of steps are fitted. Then another load of
the same kind is replayed --runs times, each with tokens of its own, so that no run finds what another has left, and
simulated once. Prints goodput, first tokens, gaps between tokens and prefix hits beside each other, with the spread of
the real runs. With several routing policies each has a service of its own, in turns, and the others are printed beside
the first. JSON: out/benchmarks.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.service.serving import Service, stream_completion
from benchmarks.service.trace_replay.trace import read_trace
from benchmarks.workload import Job, Timeline
from tandem.cluster.cli.simulate.simulated_service import group_kind
from tandem.cluster.routing.policies.policy_names import POLICIES
from tandem.cluster.simulator.loads import SimulatedRequest, TraceRow, generated_rows, make_load, tokens
from tandem.cluster.simulator.outcomes import Goals, percentile
from tandem.cluster.simulator.setup import Setup
from tandem.cluster.simulator.simulation import Simulation
from tandem.cluster.simulator.steps.fitted_times import FittedTimes
from tandem.cluster.simulator.steps.step_fit import fit_logs
from tandem.configs.load import build_settings

SMALLEST_VOCABULARY: Final = 400
"""Tokens of prompts are below it, whatever the model."""
SHOWN: Final = ("goodput", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "hit_rate")
TRACE_BLOCK: Final = 512


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"{MODELS} (default: llama-135m; --quick: demo)")
    parser.add_argument("--groups", type=int, help="(default: 4; --quick: 2)")
    parser.add_argument("--requests", type=int, help="of each load (default: 240; --quick: 30)")
    parser.add_argument("--rate", type=float, help="requests a second (default: 2; --quick: 3)")
    parser.add_argument("--runs", type=int, help="real ones (default: 3; --quick: 1)")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's form (default: a generated one)")
    parser.add_argument("--scale", type=float, default=0.1, help="multiplies lengths of the trace")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", type=int, default=8, help="--max-num-seqs of a group")
    parser.add_argument("--blocks", type=int, default=1024, help="KV blocks of a group")
    parser.add_argument("--load", default="trace", choices=("trace", "conversations"), help="made of the rows")
    parser.add_argument("--policies", nargs="+", default=["joint"], choices=list(POLICIES), help="--routing-policy")
    parser.add_argument("--rounds", type=int, default=1, help="services of each policy, in turns")
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds of a good first token")
    parser.add_argument("--tpot", type=float, default=0.2, help="seconds of a good further token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the smallest size that says something")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    sizes = {
        "model": ("llama-135m", "demo"),
        "groups": (4, 2),
        "requests": (240, 30),
        "rate": (2.0, 3.0),
        "runs": (3, 1),
    }
    for name, values in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
    return options


# ---- loads ----


def rows_of(options: argparse.Namespace, part: int) -> list[TraceRow]:
    """Rows of load `part`: 0 is fitted, 1 compared. Of a trace these are its first requests, and those behind them."""
    count, scale = options.requests, options.scale
    if options.trace is None:
        rows = generated_rows(count, options.rate, options.seed + part)
        return [_scaled(row, row.at_s, TRACE_BLOCK, scale) for row in rows]
    found = read_trace(options.trace)[part * count : (part + 1) * count]
    span_s = max(1e-9, found[-1].time_s - found[0].time_s)
    return [
        _scaled(
            TraceRow(row.time_s, row.input_length, row.output_length, row.block_ids),
            (row.time_s - found[0].time_s) / span_s * count / options.rate,
            TRACE_BLOCK,
            scale,
        )
        for row in found
    ]


def _scaled(row: TraceRow, at_s: float, block: int, scale: float) -> TraceRow:
    lengths = (max(2, round(length * scale)) for length in (row.input_len, row.output_len))
    return TraceRow(at_s, *lengths, row.block_ids, max(1, round(block * scale)))


def load_of(options: argparse.Namespace, part: int, max_len: int) -> list[SimulatedRequest]:
    """The requests, each of exactly its tokens, as clients ask for them with ignore_eos, at the rate asked for: of
    conversations the turns come faster upon each other than their readers read."""
    made = make_load(options.load, rows_of(options, part), options.seed)
    faster = max(1e-9, made[-1].at_s - made[0].at_s) / len(made) * options.rate
    return [
        one._replace(at_s=(one.at_s - made[0].at_s) / faster, max_tokens=one.output_len)
        for one in made
        if one.input_len + one.output_len <= max_len
    ]


def prompt_of(request: SimulatedRequest, salt: int) -> list[int]:
    """Token ids for a real model. salt: another one makes other tokens, which share as much with each other."""
    mixed = ((token * 2654435761 + salt * 40503 & 0xFFFFFFFF) >> 9 for token in tokens(request.pieces))
    return [10 + one % (SMALLEST_VOCABULARY - 10) for one in mixed]


# ---- the real service ----


@dataclass
class RealRequest:
    """Times and prefix hits of one request."""

    timeline: Timeline
    cached_tokens: int = 0


async def replay(service: Service, load: Sequence[SimulatedRequest], salt: int, name: str) -> list[RealRequest]:
    """Sends each request when it is due, whatever the others do."""
    timeout, start_s = aiohttp.ClientTimeout(total=None), time.perf_counter() + 0.5
    made = [RealRequest(Timeline(start_s + one.at_s)) for one in load]
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        with tqdm(total=len(load), desc=name, unit="request", leave=False) as bar:

            async def send(request: SimulatedRequest, real: RealRequest) -> None:
                await asyncio.sleep(max(0.0, real.timeline.submitted_s - time.perf_counter()))
                real.timeline.submitted_s = time.perf_counter()
                job = Job(prompt_of(request, salt), request.output_len)
                usage = await stream_completion(session, service, job, real.timeline)
                real.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                bar.update()

            async with asyncio.TaskGroup() as tasks:
                for one, real in zip(load, made, strict=True):
                    tasks.create_task(send(one, real))
    return made


def figures_of(made: Sequence[RealRequest], load: Sequence[SimulatedRequest], goals: Goals) -> dict[str, float]:
    """The figures of SHOWN, as Outcomes has them."""
    first_s = min(real.timeline.submitted_s for real in made)
    last_s = max(real.timeline.token_times_s[-1] for real in made)
    begun_s = first_s - load[0].at_s
    ttft_s = [real.timeline.token_times_s[0] - real.timeline.submitted_s for real in made]
    spans = [(real.timeline.token_times_s[0], real.timeline.token_times_s[-1], one.output_len) for real, one in
             zip(made, load, strict=True)]  # fmt: skip
    tpot_s = [(end - begin) / (count - 1) if count > 1 else 0.0 for begin, end, count in spans]
    gaps = sorted(
        b - a
        for real in made
        for a, b in zip(real.timeline.token_times_s, real.timeline.token_times_s[1:], strict=False)
    )
    good = sum(first <= goals.ttft_s and each <= goals.tpot_s for first, each in zip(ttft_s, tpot_s, strict=True))
    found = {"goodput": good / (last_s - begun_s)}
    found["hit_rate"] = sum(real.cached_tokens for real in made) / sum(one.input_len for one in load)
    for share in (50, 99):
        found[f"ttft_p{share}_s"] = percentile(sorted(ttft_s), share)
        found[f"itl_p{share}_s"] = percentile(gaps, share)
    return found


# ---- both ----


def run(options: argparse.Namespace, policy: str, console: Console) -> dict[str, Any]:
    """One service with a policy: its runs, and a simulation of them."""
    goals = Goals(ttft_s=options.ttft, tpot_s=options.tpot)
    flags = {
        "device": "cpu", "num_gpu_blocks_override": options.blocks, "max_num_seqs": options.rows,
        "routing_policy": policy, "dtype": options.dtype,
    }  # fmt: skip
    model = str(find_model(options.model, options.dtype))
    kind = group_kind(build_settings(model, flags), None, adapter_s=1.0)
    fitted, compared = (load_of(options, part, kind.facts.max_len(kind.num_slots)) for part in (0, 1))
    with tempfile.TemporaryDirectory(prefix="tandem-simulated-") as folder:
        logs = Path(folder) / "logs" / "steps.jsonl"
        logs.parent.mkdir()
        arguments = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        arguments += ["-dp", str(options.groups), "--step-log", str(logs)]
        with Service(model, arguments, options.out / "simulated.log") as service:
            asyncio.run(replay(service, fitted, 0, f"{policy}, to be fitted"))
            times = fit_logs(sorted(logs.parent.iterdir()))
            made = list[dict[str, float]]()
            for number in range(1, options.runs + 1):
                sent = asyncio.run(replay(service, compared, number, f"{policy}, run {number}"))
                made.append(figures_of(sent, compared, goals))
    setup = Setup(
        kind=kind, times=times, load=compared, groups=options.groups, groups_per_node=options.groups,
        policy=policy, seed=options.seed, goals=goals,
    )  # fmt: skip
    simulated = simulate(setup)
    show(console, policy, made, simulated, times)
    return {
        "policy": policy, "real": made, "simulated": simulated, "fit_error": times.error,
        "fitted_steps": times.num_steps,
    }  # fmt: skip


def simulate(setup: Setup) -> dict[str, float]:
    began_s = time.process_time()
    figures = Simulation(setup).run().figures
    return {name: figures[name] for name in SHOWN} | {"cpu_s": time.process_time() - began_s}


def show(
    console: Console, policy: str, made: Sequence[dict[str, float]], simulated: dict[str, float], times: FittedTimes
) -> None:
    table = Table(policy, "simulated", "real, mean", "of real runs", "simulated / real")
    for name in SHOWN:
        values = [one[name] for one in made]
        mean = statistics.mean(values)
        ratio = f"{simulated[name] / mean:.2f}" if mean else "-"
        table.add_row(name, f"{simulated[name]:.4f}", f"{mean:.4f}", f"{min(values):.4f} to {max(values):.4f}", ratio)
    console.print(table)
    console.print(
        f"fit: {times.num_steps} steps, mean error {times.error:.0%}; alone {times.alone}; beside {times.beside}"
    )
    console.print(f"the simulation took {simulated['cpu_s']:.1f} s of CPU")


def compare(console: Console, policies: Sequence[str], services: Sequence[dict[str, Any]]) -> None:
    """Prints the first policy beside the others, by means of all runs, real and simulated."""
    made = {policy: [run for one in services if one["policy"] == policy for run in one["real"]] for policy in policies}
    simulated = {policy: [one["simulated"] for one in services if one["policy"] == policy] for policy in policies}
    for other in policies[1:]:
        for kind, runs in (("real", made), ("simulated", simulated)):
            first, beside = (
                {name: statistics.mean(run[name] for run in runs[policy]) for name in SHOWN}
                for policy in (policies[0], other)
            )
            ratios = ", ".join(f"{name} {first[name] / beside[name]:.2f}" for name in SHOWN if beside[name])
            console.print(f"{kind}, {policies[0]} / {other}: {ratios}")


def main() -> None:
    options, console = parse_arguments(), Console(width=160)
    services = list[dict[str, Any]]()
    for _ in range(options.rounds):
        for policy in options.policies:
            services.append(run(options, policy, console))
            write_record(options.out / "simulated.json", options, services=services)
    compare(console, options.policies, services)


if __name__ == "__main__":
    main()
