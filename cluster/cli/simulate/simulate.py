"""`tandem simulate FILE --trace TRACE`: what numbers of groups and routing policies make of a load, without a service.

cluster/simulator/ computes it. This module reads flags and runs the comparison.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cluster.cli.base.flag_groups import with_group
from tandem.cluster.cli.base.flags import with_service_options
from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.simulate.simulate_flags import FleetFlags, ShownFlags, TimeFlags, TraceFlags
from tandem.cluster.cli.simulate.simulate_load import read_load
from tandem.cluster.cli.simulate.simulate_report import draw_runs, json_report, text_report
from tandem.cluster.cli.simulate.simulated_service import group_kind, read_service
from tandem.cluster.simulator.setup import Scaling, Setup, scaling_of
from tandem.cluster.simulator.simulation import SimulatedRun, Simulation, few_collections
from tandem.cluster.simulator.steps.fitted_times import FittedTimes, read_step_times, write_step_times
from tandem.cluster.simulator.steps.step_fit import fit_logs
from tandem.configs.environment import PREFIX
from tandem.configs.errors import SettingsError
from tandem.configs.options import OPTIONS
from tandem.configs.schema import ServiceSettings

SIMULATED = {
    "revision", "dtype", "quantization", "max_model_len", "hf_overrides", "tensor_parallel_size",
    "pipeline_parallel_size", "kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "num_gpu_blocks_override", "block_size", "enable_prefix_caching", "disable_hybrid_kv_cache_manager",
    "kv_offloading_size", "kv_eviction", "kv_events", "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs",
    "max_num_queued_tokens", "max_itl_ms", "speculative_config", "batching_policy", "batching_max_delay_ms",
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_memory_bytes", "device",
}  # fmt: skip
VARIABLES = f"{PREFIX}SIMULATE_"


@with_group("trace", TraceFlags, "Load", VARIABLES)
@with_group("fleet", FleetFlags, "Groups", VARIABLES)
@with_group("times", TimeFlags, "Times of steps", VARIABLES)
@with_group("shown", ShownFlags, "Results", VARIABLES)
@with_service_options(leave_out=frozenset(option.name for option in OPTIONS) - SIMULATED)
def simulate(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="File for `tandem serve --config`, or a model: folder, hub id, or `demo`."),
    ],
    trace: TraceFlags,
    fleet: FleetFlags,
    times: TimeFlags,
    shown: ShownFlags,
    *,
    flags: dict[str, Any],
) -> None:
    """Simulate a service with several numbers of groups.

    The service's own scheduler, block manager, router, failover and autoscaling run on a virtual clock; only the steps
    of the ranks are not computed: they take the times that were fitted to a step log. Prints goodput, times to tokens,
    prefix hits and group-hours. The same seed prints the same.
    """
    settings = read_service(file, flags)
    step_times = _step_times(times)
    plot = shown.plot_file()
    kind = group_kind(settings, fleet.device_memory, fleet.adapter_load_s)
    scaling = _scaling(settings, fleet)
    if trace.load == "adapters" and not kind.settings.lora.enable_lora:
        raise SettingsError("adapters: the service has none; it needs --enable-lora", "--load")
    load = read_load(trace, kind.facts.max_len(kind.num_slots))
    setups = [
        Setup(
            kind=kind,
            times=step_times,
            load=load,
            groups=groups,
            policy=policy,
            seed=trace.seed,
            gateways=fleet.gateways or settings.gateway.num_gateways,
            groups_per_node=fleet.groups_per_node,
            load_s=fleet.group_load_s,
            deaths=fleet.deaths,
            scaling=scaling,
            goals=shown.goals(),
        )
        for groups in fleet.numbers()
        or [settings.engine.parallel.data_parallel_size if scaling is None else scaling.first]
        for policy in fleet.policies(settings.gateway.routing_policy)
    ]
    runs = [_run(setup, shown) for setup in setups]
    typer.echo(json_report(runs, step_times) if shown.json else text_report(runs, scaling is not None), nl=False)
    if plot is not None:
        draw_runs(runs, plot)


def _run(setup: Setup, shown: ShownFlags) -> SimulatedRun:
    from tqdm import tqdm

    simulation, name = Simulation(setup), f"{setup.policy}, {setup.groups} groups"
    with (
        few_collections() as collects,
        tqdm(total=len(setup.load), unit="request", desc=name, disable=shown.disable_tqdm) as bar,
    ):

        def ended(count: int) -> None:
            bar.update(count)
            collects(count)

        return simulation.run(ended)


def _step_times(flags: TimeFlags) -> FittedTimes:
    """The times of steps that the flags name. SettingsError."""
    if flags.step_times is not None and flags.step_log:
        raise SettingsError(f"{flags.step_times}: --step-log says them already", "--step-times")
    if flags.step_times is not None:
        if flags.save_step_times is not None:
            raise SettingsError(f"{flags.save_step_times}: needs --step-log, whose fit is written", "--save-step-times")
        return read_step_times(Path(flags.step_times))
    if not flags.step_log:
        raise SettingsError("how long do steps take? Name a log of real ones, or --step-times FILE", "--step-log")
    fitted = fit_logs([Path(log) for log in flags.step_log])
    say(f"times fitted to {fitted.num_steps} steps, which are off by {fitted.error:.0%} of the mean step on average")
    if flags.save_step_times is not None:
        write_step_times(fitted, Path(flags.save_step_times))
    return fitted


def _scaling(settings: ServiceSettings, fleet: FleetFlags) -> Scaling | None:
    """The autoscaling of the file, unless a flag says the numbers of groups. SettingsError for another policy."""
    if settings.autoscaling_config is None or fleet.groups is not None:
        return None
    return scaling_of(settings.autoscaling_config)
