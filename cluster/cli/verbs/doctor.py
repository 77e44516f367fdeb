"""`tandem doctor`: facts of this machine, what does not fit together, what is chosen on it and why, and self-checks;
with --cluster, the facts of every node of a Ray (base/cluster_report.py).

Facts and misfits are read here, without torch; choices and checks come from a process that loads it.
"""

import json
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cluster.cli.base.terminal import say, table
from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from tandem.cluster.deploy.machine_facts import MachineFacts
    from tandem.cluster.deploy.report_facts import ReportFacts

MIB, GIB = 2**20, 2**30
Row = dict[str, Any]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the nodes of a running Ray in place of this machine.")
    ] = False,
    address: Annotated[
        str | None, typer.Option("--address", help="With --cluster: that Ray's address. Default: RAY_ADDRESS, or here.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="With --cluster: a folder or hub id that each node looks for.")
    ] = None,
    port_range: Annotated[
        str | None, typer.Option("--port-range", help="With --cluster: FIRST-LAST, as the service will have it.")
    ] = None,
) -> None:
    """Check this machine, or the nodes of a cluster.

    Prints versions and limits, variables of the environment, what does not fit together, what is chosen and why, and
    the outcome of checks. They compare each CPU kernel with torch, replayed with eager steps of the demo model, and KV
    before and after a copy, run an all-reduce between two processes, and measure speeds; on a GPU all of that for its
    kernels, steps and copies too, and what two GPUs exchange. With --cluster every node of a Ray tells its versions,
    devices and limits, and tries to connect to every other one. The exit status is 1 when a check fails or something
    does not fit.
    """
    if cluster:
        from tandem.cluster.cli.base.cluster_report import report_cluster

        sys.exit(0 if report_cluster(address, model, port_range, as_json=as_json) else 1)
    for flag, value in (("--address", address), ("--model", model), ("--port-range", port_range)):
        if value is not None:
            raise SettingsError(f"{value}: needs --cluster", flag)
    from tandem.cluster.deploy.machine_facts import read_facts
    from tandem.cluster.deploy.misfits import misfits
    from tandem.cluster.deploy.report_facts import read_report_facts
    from tandem.cluster.service.ray_node import OBJECT_STORE_BYTES

    facts, report = read_facts(), read_report_facts()
    problems = misfits(facts, OBJECT_STORE_BYTES)
    if not as_json:
        _print_facts([*fact_rows(facts), *report_rows(report)], problems)
    choices, checks, torch_build = _run(facts, as_json)
    fits = not problems and all(check["status"] != "failed" for check in checks)
    if as_json:
        found = {"fits": fits, "facts": asdict(facts), "misfits": problems, "choices": choices, "checks": checks}
        typer.echo(json.dumps(found | {"report": asdict(report), "torch_build": torch_build}, indent=1))
    else:
        typer.echo(f"\n{_verdict(problems, checks)}")
    sys.exit(0 if fits else 1)


def _run(facts: "MachineFacts", as_json: bool) -> tuple[list[Row], list[Row], list[str]]:
    """Runs the process of the checks; prints what it finds as it comes. Returns (choices, checks, lines of torch's
    build)."""
    from tandem.cluster.cli.base.check_process import self_checks

    choices, checks, torch_build = _own_choices(facts), list[Row](), list[str]()
    with closing(_shown(self_checks())) as events:
        for event in events:
            if "choices" in event:
                choices += event["choices"]
                torch_build += event.get("torch", [])
                if not as_json:
                    _print_choices(choices)
            elif "name" in event:
                checks.append(event)
                line = check_line(event)
                say(line) if as_json else typer.echo(f"  {line}")
    return choices, checks, torch_build


def _shown(events: Generator[Row]) -> Generator[Row]:
    """Shows the check that runs on a terminal, until it has ended."""
    is_terminal = sys.stderr.isatty()
    with closing(events):
        for event in events:
            if is_terminal:
                sys.stderr.write(f"\r\033[K{event['begins']} ..." if "begins" in event else "\r\033[K")
                sys.stderr.flush()
            yield event


def _own_choices(facts: "MachineFacts") -> list[Row]:
    from tandem.cluster.deploy.misfits import device_choice, dtype_choice

    device, why = device_choice(facts)
    dtype, why_dtype = dtype_choice(device)
    return [
        {"subject": "device", "chosen": device, "why": why},
        {"subject": "dtype", "chosen": dtype, "why": why_dtype},
    ]


def check_line(check: Row) -> str:
    """One line of a check's outcome."""
    return f"{check['status']:<9} {check['name']:<32} {check['detail']} ({check['seconds']:.1f} s)"


def fact_rows(facts: "MachineFacts") -> list[list[str]]:
    """Names and values of the facts, for a table."""
    build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU build"
    known = f"runs CUDA up to {facts.driver_cuda // 1000}.{facts.driver_cuda % 1000 // 10}" if facts.driver_cuda else ""
    compiled = f" for {', '.join(facts.compiler_features)}" if facts.compiler_features else ""
    compiled = ", which fails" if facts.compiler_features is None else compiled
    return [
        ["tandem", f"{facts.tandem}, Python {facts.python}"],
        ["torch", f"{facts.torch}, {build}" if facts.torch else "not installed"],
        ["CUDA driver", ", ".join(part for part in (facts.driver, known) if part) or "none"],
        ["CUDA devices", str(facts.gpus)],
        ["Triton", facts.triton or "not installed"],
        ["NCCL", facts.nccl or "not installed"],
        ["Ray", facts.ray or "not installed"],
        ["Redis server", facts.redis or "not found"],
        ["CPU", f"{facts.cpu}, {facts.cores} core(s) for this process"],
        ["CPU features", ", ".join(facts.cpu_features) or "none that the kernels use"],
        ["C compiler", f"{facts.compiler}{compiled}" if facts.compiler else "not found"],
        ["memory", f"{facts.memory_bytes / GIB:.1f} GiB, {facts.available_bytes / GIB:.1f} GiB free"],
        ["/dev/shm", "none" if facts.shm_bytes is None else f"{facts.shm_bytes / MIB:,.0f} MiB"],
        ["proxies", proxy_words(facts.proxies)],
        ["locked memory", "no limit" if facts.memlock_bytes is None else f"up to {facts.memlock_bytes / MIB:,.0f} MiB"],
    ]


def report_rows(report: "ReportFacts") -> list[list[str]]:
    """The same of the facts for who reads a report; packages are in the JSON alone."""
    quota = "" if report.cpu_limit is None else f"{report.cpu_limit:g} CPUs"
    memory = "" if report.memory_limit_bytes is None else f"{report.memory_limit_bytes / GIB:.1f} GiB"
    tasks = "" if report.process_limit is None else f"{report.process_limit} processes"
    told = (name if value is None else f"{name}={value}" for name, value in report.variables.items())
    files = " to ".join("no limit" if limit is None else str(limit) for limit in report.open_files)
    return [
        ["system", f"{report.system}, Linux {report.kernel}, {report.libc}"],
        ["container", ", ".join(part for part in (quota, memory, tasks) if part) or "no limits"],
        ["open files", files],
        *([["GPUs", "; ".join(report.gpus)]] if report.gpus else []),
        ["variables", ", ".join(told) or "none that matter"],
        ["installed in", f"{report.folder} ({report.python})"],
        ["log files", f"{report.log_folder}, the newest {report.newest_log}" if report.newest_log else "none yet"],
    ]


def proxy_words(proxies: Mapping[str, str]) -> str:
    """Words for the proxies of the environment, and for what goes through them."""
    if not proxies:
        return "none in the environment"
    named = ", ".join(f"{name}={value}" for name, value in proxies.items())
    return (
        f"{named}: downloads go through them, and `chat` and `complete` to other machines; nothing between the "
        "processes of a service does"
    )


def _print_facts(rows: list[list[str]], problems: list[str]) -> None:
    typer.echo("This machine")
    for line in table([[f"  {name}", value] for name, value in rows], num_names=2):
        typer.echo(line.rstrip())
    typer.echo("\nDoes not fit together" if problems else "\nAll of this fits together")
    for problem in problems:
        typer.echo(f"  - {problem}")


def _print_choices(choices: list[Row]) -> None:
    typer.echo("\nChosen here without flags")
    for line in table([[f"  {one['subject']}", one["chosen"], one["why"]] for one in choices], num_names=3):
        typer.echo(line.rstrip())
    typer.echo("\nChecks")


def _verdict(problems: list[str], checks: list[Row]) -> str:
    failed = [check["name"] for check in checks if check["status"] == "failed"]
    words = [f"failed: {', '.join(failed)}"] if failed else []
    words += [f"{len(problems)} thing(s) do not fit together"] if problems else []
    return "; ".join(words) or "All checks passed."
