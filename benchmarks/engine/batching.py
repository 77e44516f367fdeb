"""Continuous, dynamic and static batching on the mixed workload: throughput, and what idle rows predict beside it.

    python -m benchmarks.engine.batching [--model demo | llama-135m | qwen3-0.6b | FOLDER] [--jobs 64] [--repeats 3]

One engine for each policy, in this process, takes turns with the others (A-B-C-A-B-C). All jobs are submitted at once.
Static batches are then known before: the jobs in order, as many as there are rows. Each takes as many steps as its
longest output has tokens, so its rows are busy for the sum of its outputs out of rows x longest. The mean over batches
of (longest output x rows) / (sum of outputs) is the loss that idle rows predict, if a step takes the same time however
many of its rows are busy. Beside it stands the loss of time that is measured: the throughput of continuous batching
over that of the policy. As a check, the slots of a policy are counted too: rows x steps over output tokens. A run in
which other processes took more than --quiet of the machine is made again, up to --tries times. JSON and a plot go to
out/benchmarks.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.engine.engine_run import CONCURRENCY, TimelineSink, cpu_settings, opened_engine, run_jobs
from benchmarks.machine import OtherCpu, wait_until_quiet
from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.workload import Job, Summary, describe, mixed_workload, summarize
from tandem.configs.schema import BatchingPolicyName, EngineSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.models.spec.config.config_reader import load_spec

POLICIES: tuple[BatchingPolicyName, ...] = ("continuous", "dynamic", "static")
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Run:
    """One run of a policy. slots_per_token: rows x steps over output tokens. other_cpu: share of the machine that other
    processes took, 0 to 1; load_average: of one minute, at its end."""

    summary: Summary
    slots_per_token: float
    other_cpu: float
    load_average: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=MODELS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each policy")
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--rows", type=int, default=CONCURRENCY, help="max_num_seqs")
    parser.add_argument("--quiet", type=float, default=0.05, help="share of the machine that others may take in a run")
    parser.add_argument("--tries", type=int, default=10, help="of each run, until others took no more than that")
    parser.add_argument(
        "--quiet-s", type=float, default=20.0, help="longest wait for other processes to rest, each try"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser.parse_args()


def predicted_loss(output_lens: Sequence[int], rows: int) -> float:
    """The mean over static batches, `rows` outputs each in the order given, of (longest x rows) / (sum of lengths). A
    last batch that is not full counts with all rows: those that it leaves empty are idle too."""
    batches = [output_lens[start : start + rows] for start in range(0, len(output_lens), rows)]
    return statistics.mean(max(batch) * rows / sum(batch) for batch in batches)


def settings_of(policy: BatchingPolicyName, base: EngineSettings) -> EngineSettings:
    """The same engine under a policy."""
    return msgspec.structs.replace(base, scheduler=msgspec.structs.replace(base.scheduler, batching_policy=policy))


def measured(engine: Engine, sink: TimelineSink, jobs: list[Job], rows: int, tag: str) -> Run:
    """Submits all jobs at once and runs them."""
    before = engine.stats().steps
    with OtherCpu() as other:
        summary = summarize(run_jobs(engine, sink, jobs, len(jobs), tag))
    steps = engine.stats().steps - before
    return Run(summary, rows * steps / summary.output_tokens, other.share, os.getloadavg()[0])


def quietest(engine: Engine, sink: TimelineSink, jobs: list[Job], options: argparse.Namespace, tag: str) -> Run:
    """The first run in which others took no more than they may, or the best of all tries."""
    best: Run | None = None
    for attempt in range(options.tries):
        wait_until_quiet(options.quiet_s)
        run = measured(engine, sink, jobs, options.rows, f"{tag}-{attempt}")
        best = run if best is None or run.other_cpu < best.other_cpu else best
        if best.other_cpu <= options.quiet:
            break
    assert best is not None, "--tries is at least 1"
    return best


def losses(runs: dict[str, list[Run]]) -> dict[str, float]:
    """By policy, the median of the throughput of continuous batching over the policy's in the same round."""
    ratios = {
        policy: [
            one.summary.tokens_per_s / other.summary.tokens_per_s
            for one, other in zip(runs["continuous"], of_policy, strict=True)
        ]
        for policy, of_policy in runs.items()
    }
    return {policy: statistics.median(of_policy) for policy, of_policy in ratios.items()}


def plot(runs: dict[str, list[Run]], lost: dict[str, float], predicted: float, file: Path) -> None:
    """Throughput of each policy's runs; the loss against continuous batching, predicted and measured."""
    from matplotlib import pyplot

    figure, (speed, loss) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for place, (policy, of_policy) in enumerate(runs.items()):
        values = [run.summary.tokens_per_s for run in of_policy]
        speed.bar(place, statistics.median(values), color="lightgray")
        speed.plot([place] * len(values), values, "o", label=policy)
    speed.set(title="throughput", ylabel="output tokens/s", xticks=range(len(runs)), xticklabels=list(runs))
    slots = statistics.median(run.slots_per_token for run in runs["static"])
    named = {"idle rows predict": predicted, "rows x steps / tokens": slots, "measured: time": lost["static"]}
    loss.bar(list(named), list(named.values()), color=["lightgray", "silver", "tab:orange"])
    loss.axhline(1.0, linestyle=":", color="gray")
    loss.set(title="loss of static batching", ylabel="times")
    loss.tick_params(axis="x", labelsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    options = parse_arguments()
    console = Console(width=160)
    folder = find_model(options.model, options.dtype)
    spec = load_spec(folder)
    max_len = min(MAX_MODEL_LEN, spec.max_position_embeddings)
    jobs = mixed_workload(spec.vocab_size, count=options.jobs, scale=max_len / MAX_MODEL_LEN)
    base = cpu_settings(folder, options.threads, max_len, dtype=options.dtype, rows=options.rows)
    runs: dict[str, list[Run]] = {policy: [] for policy in POLICIES}
    with ExitStack() as opened:
        engines: dict[str, tuple[Engine, TimelineSink]] = {}
        for policy in POLICIES:
            sink = TimelineSink()
            engine, _ = opened.enter_context(opened_engine(settings_of(policy, base), sink))
            engines[policy] = engine, sink
            run_jobs(engine, sink, jobs[:2], 2, "warm")
        for repeat in range(options.repeats):
            for policy, (engine, sink) in engines.items():
                run = quietest(engine, sink, jobs, options, f"run{repeat}")
                runs[policy].append(run)
                load = f"other_cpu {run.other_cpu:.2f}  load average {run.load_average:.1f}"
                console.print(describe(f"{policy} [{repeat}]", run.summary), load)
    predicted, lost = predicted_loss([job.output_len for job in jobs], options.rows), losses(runs)
    slots = {policy: statistics.median(run.slots_per_token for run in of_policy) for policy, of_policy in runs.items()}
    for policy in POLICIES[1:]:
        console.print(
            f"{policy}: idle rows predict {predicted:.2f} times the time of full rows; rows x steps over tokens were"
            f" {slots[policy]:.2f} (continuous {slots['continuous']:.2f}); measured: {lost[policy]:.2f} times the time"
            " of continuous batching"
        )
    name = f"batching-{Path(options.model).name}"
    write_record(
        RESULTS / f"{name}.json",
        options,
        predicted_loss=predicted,
        measured_loss=lost,
        slots_per_token=slots,
        runs={policy: [asdict(run) for run in of_policy] for policy, of_policy in runs.items()},
    )
    plot(runs, lost, predicted, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
