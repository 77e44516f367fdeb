"""Seconds from `tandem serve` to the first answer, then idle CPU and memory of every process it runs.

    python -m benchmarks.service.startup [--model demo] [--idle-s 20] [--no-empty-serve]

Idle CPU (% of a core) is split into our own processes (gateway, coordinator, ranks, Redis) and Ray's; memory is PSS in
MiB. An empty Serve application is measured afterwards, for comparison. JSON goes to out/benchmarks.
"""

import argparse
import re
import subprocess
import sys
import time
from contextlib import suppress

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, write_record
from benchmarks.service.serving import Service, free_port

EMPTY_SERVE = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from ray import serve
ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
@serve.deployment
class Nothing:
    async def __call__(self, request): return "nothing"
serve.start(http_options={"port": int(sys.argv[1])})
serve.run(Nothing.bind())
print("ready", flush=True)
sys.stdin.read()
"""
OURS = ("tandem ", "ray::ServeReplica:tandem:")


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> dict[int, float]:
    used = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        used[process.pid] = times.user + times.system
    return used


def label(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"
    return without_folders(words)[:60] or process.name()


def without_folders(words: str) -> str:
    """A command line with file names instead of paths, `python tandem serve` as `tandem serve`."""
    short = " ".join(re.sub(r"\S*/", "", words).split())
    return re.sub(r"^python[\d.]* (tandem )", r"\1", short)


def is_ours(words: str) -> bool:
    return words.startswith(OURS)


def measure_idle(pid: int, idle_s: float) -> list[dict[str, object]]:
    """CPU share of a core, and PSS in MiB, of each process of the family over idle_s seconds without a request."""
    time.sleep(idle_s / 2)  # the last request's threads settle before the measured window
    processes = family(pid)
    before, start = cpu_s(processes), time.perf_counter()
    time.sleep(idle_s)
    after, span = cpu_s(processes), time.perf_counter() - start
    rows: list[dict[str, object]] = []
    for process in processes:
        if process.pid in before and process.pid in after:
            words = label(process)
            memory = process.memory_full_info().pss / 2**20
            share = (after[process.pid] - before[process.pid]) / span
            rows.append({"process": words, "ours": is_ours(words), "core": share, "pss_mib": memory})
    return sorted(rows, key=lambda row: -float(str(row["core"])))


def show(console: Console, title: str, rows: list[dict[str, object]]) -> None:
    table = Table("process", "ours", "% of a core", "PSS MiB", title=title)
    for row in rows:
        core, memory = float(str(row["core"])), float(str(row["pss_mib"]))
        table.add_row(str(row["process"]), "yes" if row["ours"] else "", f"{100 * core:.2f}", f"{memory:.0f}")
    ours = sum(float(str(r["core"])) for r in rows if r["ours"])
    total = sum(float(str(r["core"])) for r in rows)
    memory = sum(float(str(r["pss_mib"])) for r in rows)
    table.add_row("ours", "", f"{100 * ours:.2f}", "")
    table.add_row("total", "", f"{100 * total:.2f}", f"{memory:.0f}")
    console.print(table)


def empty_serve(idle_s: float) -> list[dict[str, object]]:
    command = [sys.executable, "-c", EMPTY_SERVE, str(free_port())]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        while "ready" not in (line := process.stdout.readline()):
            assert line or process.poll() is None, "the empty Serve application did not start"
        return measure_idle(process.pid, idle_s)
    finally:
        end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """Ends the process by closing its input; after 30 s it and its children are killed."""
    members = family(process.pid) if process.poll() is None else []
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--empty-serve", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    console = Console()
    with Service(options.model, [], RESULTS / "startup.log") as service:
        console.print(f"first answer after {service.first_answer_s:.1f} s")
        rows = measure_idle(service.process.pid, options.idle_s)
    show(console, f"tandem serve {options.model}, idle", rows)
    figures: dict[str, object] = {"first_answer_s": service.first_answer_s, "processes": rows}
    if options.empty_serve:
        empty = empty_serve(options.idle_s)
        show(console, "an empty Serve application, idle", empty)
        figures["empty_serve"] = empty
    write_record(RESULTS / "startup.json", options, **figures)


if __name__ == "__main__":
    main()
