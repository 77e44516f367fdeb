"""The flags of `tandem simulate` beside the service's: the load, the groups, the times of steps, and what is shown."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from tandem.cluster.cli.base.flag_groups import setting
from tandem.cluster.cli.base.plot_file import check_plot
from tandem.cluster.cli.bench.bench_flags import ResultFlags
from tandem.cluster.routing.policies.policy_names import POLICIES
from tandem.cluster.simulator.loads import LOADS
from tandem.cluster.simulator.outcomes import Goals
from tandem.configs.errors import SettingsError

MOST_GROUPS: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """The trace, how it is read, and the load that is made of it."""

    trace: str | None = setting(
        "File of arrivals and lengths, .jsonl or .csv, as `tandem bench` reads timed traces.", shown="a made-up trace"
    )
    load: str = setting(
        "The requests: the trace's own, or others at its arrivals, with its lengths.",
        default="trace",
        choices=tuple(LOADS),
    )
    num_prompts: int | None = setting("Rows to take, the first ones.", shown="all; 1000 of a made-up trace", least=1)
    request_rate: float | None = setting("Requests a second of a made-up trace.", shown="4", above=0)
    timed_trace_chunk_hash_size: int = setting(
        "Tokens that one of a row's hash_ids stands for, 512 in Mooncake's traces.", default=16, least=1
    )
    timed_trace_sec_multiplier: float = setting(
        "Seconds of a unit of the trace's times, 0.001 for milliseconds; smaller plays it faster.", default=1.0, above=0
    )
    timed_trace_length_scale: float = setting(
        "Multiplies all lengths, for models with a short context.", default=1.0, above=0
    )
    timed_trace_label_timestamp: str | None = setting("The field of times.", shown="as known traces call it")
    timed_trace_label_input_length: str | None = setting("The field of prompts' lengths.", shown="likewise")
    timed_trace_label_output_length: str | None = setting("The field of answers' lengths.", shown="likewise")
    timed_trace_label_hash_ids: str = setting("The field of ids of shared blocks.", default="hash_ids")
    seed: int = setting("Seed of all chance: the same seed prints the same.", default=0, least=0)

    def of_file(self) -> dict[str, Any]:
        """The flags that say how a trace's file is read, by name; DataFlags has the same."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name.startswith("timed_trace_")}


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """The groups and gateways."""

    groups: str | None = setting(
        "Groups to compare: 4, 1,2,4, or 1:64, which doubles from 1 to 64.",
        shown="the service's, or what the file's autoscaling_config makes of the load",
    )
    policy: tuple[str, ...] = setting(
        f"Routing policies to compare, of {', '.join(POLICIES)}.", default=(), shown="the service's --routing-policy"
    )
    gateways: int | None = setting("Gateways that route.", shown="the service's", least=1, most=64)
    groups_per_node: int = setting("Groups that share the cores and memory of a node.", default=1, least=1, most=1024)
    group_load_s: float = setting("Seconds in which a group loads.", default=30.0, least=0)
    adapter_load_s: float = setting("Seconds in which an adapter is read from its source.", default=1.0, least=0)
    deaths: int = setting("Groups that are lost, at moments that the seed draws.", default=0, least=0, most=1000)
    device_memory: float | None = setting(
        "GiB of each GPU, or of the machine on CPU.", shown="that of this machine", above=0
    )

    def policies(self, of_service: str) -> tuple[str, ...]:
        """The policies. SettingsError for an unknown one."""
        for name in self.policy:
            if name not in POLICIES:
                raise SettingsError(f"{name}: not one of {', '.join(POLICIES)}", "--policy")
        return self.policy or (of_service,)

    def numbers(self) -> list[int] | None:
        """The numbers of groups; None where no flag says them. SettingsError for what is none."""
        if self.groups is None:
            return None
        try:
            first, colon, last = self.groups.partition(":")
            found = [int(part) for part in self.groups.split(",")] if not colon else _doubled(int(first), int(last))
        except ValueError as error:
            raise SettingsError(
                f"{self.groups}: not a number, numbers with commas, or FIRST:LAST", "--groups"
            ) from error
        if not found or not all(1 <= one <= MOST_GROUPS for one in found):
            raise SettingsError(f"{self.groups}: groups are from 1 to {MOST_GROUPS}", "--groups")
        return found


@dataclass(frozen=True, kw_only=True)
class TimeFlags:
    """Sources of the times of steps."""

    step_log: tuple[str, ...] = setting(
        "Logs that groups of a real service have written (`tandem serve --step-log`), at the same time and on one "
        "machine: the times are fitted to them.",
        default=(),
    )
    step_times: str | None = setting("File of times of steps, in place of a log.")
    save_step_times: str | None = setting("Write the fitted times to this file.")


@dataclass(frozen=True, kw_only=True)
class ShownFlags:
    """Goals and output."""

    goodput: tuple[str, ...] = setting(
        "Goals in milliseconds, of ttft and tpot: goodput counts requests that reach both.",
        default=(),
        shown="ttft:2000 tpot:200",
    )
    json: bool = setting("Print one JSON object instead of a table.", default=False)
    plot: str | None = setting("Draw the comparison into this file (.png, .svg or .pdf).")
    disable_tqdm: bool = setting("No progress bar.", default=False)

    def goals(self) -> Goals:
        """The goals. SettingsError for others than those of first tokens and further ones."""
        given = ResultFlags(goodput=self.goodput).goals()
        if "e2el" in given:
            raise SettingsError("e2el: goals are of ttft, tpot", "--goodput")
        return Goals(**{f"{name}_s": limit / 1e3 for name, limit in given.items()})

    def plot_file(self) -> Path | None:
        """The file of --plot. SettingsError when it could not be drawn."""
        return check_plot(self.plot)


def _doubled(first: int, last: int) -> list[int]:
    """The numbers from first to last, each twice the one before; the last one in any case."""
    if not 1 <= first <= last:
        return []
    found = [first]
    while 2 * found[-1] < last:
        found.append(2 * found[-1])
    return found if found[-1] == last else [*found, last]
