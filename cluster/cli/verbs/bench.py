"""`tandem bench serve|latency|throughput`: the load client and the engine's speed, with the flags of vLLM's bench."""

import sys
from typing import Annotated, Any

import typer

from tandem.cluster.cli.base.flag_groups import with_group
from tandem.cluster.cli.base.flags import with_service_options
from tandem.cluster.cli.bench.bench_flags import FieldFlags, ResultFlags, TargetFlags, TrafficFlags
from tandem.cluster.cli.bench.bench_offline import LatencyFlags, ThroughputFlags
from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.configs.environment import PREFIX
from tandem.configs.options import OPTIONS

VARIABLES = f"{PREFIX}BENCH_"
"""The beginning of variables of these flags: `serve` has some of the same names, with other meanings."""
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub id, or `demo` (the bundled model).")]
NOT_OF_LLM = frozenset(option.name for option in OPTIONS if not option.path.startswith("engine.")) | {
    "served_model_name", "data_parallel_size", "max_num_queued_reqs", "max_num_queued_tokens",
}  # fmt: skip
"""Options of a service alone, which tandem.LLM has no use for."""


@with_group("target", TargetFlags, "Service", VARIABLES)
@with_group("data", DataFlags, "Prompts", VARIABLES)
@with_group("traffic", TrafficFlags, "Traffic", VARIABLES)
@with_group("fields", FieldFlags, "Fields of requests", VARIABLES)
@with_group("results", ResultFlags, "Results", VARIABLES)
def serve(
    target: TargetFlags, data: DataFlags, traffic: TrafficFlags, fields: FieldFlags, results: ResultFlags
) -> None:
    """Load a running service and print its times.

    The times to tokens and the throughput are those of `vllm bench serve`, with its flags.

    Ctrl-C ends the load and shows what there is so far. The exit status is 1 when every request failed.
    """
    from tandem.cluster.cli.bench.bench_serving import ServeBench

    sys.exit(ServeBench(target, data, traffic, fields, results).run())


@with_group("latency", LatencyFlags, "Batch", VARIABLES)
@with_service_options(leave_out=NOT_OF_LLM)
def latency(model: Model, latency: LatencyFlags, *, flags: dict[str, Any]) -> None:
    """Time one batch in this process, again and again.

    As `vllm bench latency`, with its flags.
    """
    from tandem.cluster.cli.bench.bench_offline import run_latency

    run_latency(model, latency, flags)


@with_group("run", ThroughputFlags, "Run", VARIABLES)
@with_group("data", DataFlags, "Prompts", VARIABLES)
@with_service_options(leave_out=NOT_OF_LLM | {"seed"})
def throughput(model: Model, data: DataFlags, run: ThroughputFlags, *, flags: dict[str, Any]) -> None:
    """Run a data set in this process at once.

    As `vllm bench throughput`, with its flags.

    The exit status is 1 when no prompt was served.
    """
    from tandem.cluster.cli.bench.bench_offline import run_throughput

    sys.exit(0 if run_throughput(model, data, run, flags) else 1)


VERBS = {"serve": serve, "latency": latency, "throughput": throughput}
