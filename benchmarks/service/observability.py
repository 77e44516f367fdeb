"""What it costs to be watched: a gateway's CPU time per token with all of it on, off, and in a checkout without it.

    python -m benchmarks.service.observability [--pairs 5] [--streams 16] [--rounds 120] [--against CHECKOUT]

The gateway runs over a fake engine behind uvicorn, with its client in another process, which sends `rounds` times so
many streaming chats of so many tokens. `off` has neither lines about requests nor traces. `on` has access lines and
request lines in a file, traces of one request in a hundred sent over OTLP to a collector in a process of its own, and
a scrape of /metrics every fifteen seconds, the first at once. --against: another checkout, off, for instance of before
these existed. All in turns, the order turned from pair to pair; the ratios are of the two of a pair, and their median
counts. CPU seconds are of the gateway's process, its threads included; tokens/s are by the clock with client and
gateway on this machine.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.machine import OtherCpu, wait_until_quiet
from benchmarks.models import DEMO
from benchmarks.record import RESULTS, write_record
from benchmarks.service.gateway import Server, body, client_process, new_app
from tandem.workers.text.tokenizer import load_tokenizer
from tests.support.fake_backend import FakeBackend

ROOT = Path(__file__).resolve().parents[2]
SAMPLED, SCRAPE_S = 0.01, 15.0
BARS = {"on": 1.02, "off": 1.005}
"""Most CPU per token, as a ratio: on to off, and off to the other checkout."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16, help="at a time")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=120, help="in one run, after one that warms up")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--quiet-s", type=float, default=60.0, help="longest wait for other processes to rest")
    parser.add_argument("--tell", choices=("on", "off"), help=argparse.SUPPRESS)
    return parser.parse_args()


def watching(endpoint: str, folder: Path) -> dict[str, Any]:
    """Opens the lines about requests and the traces, as a gateway does; the fields of its context."""
    from tandem.cluster.gateway.records.request_log import AccessLog, write_request_line
    from tandem.cluster.gateway.records.request_records import RequestRecords
    from tandem.cluster.gateway.tracing.tracing import exporting, open_tracing
    from tandem.cluster.logs.log_files import open_requests_log

    os.environ |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(SAMPLED)}
    tracing = open_tracing(endpoint, "bench")
    open_requests_log(folder, "requests-bench")
    records = RequestRecords(write_request_line, "bench", export=exporting(tracing))
    return {"access_log": AccessLog(is_on=True), "records": records, "tracing": tracing}


def collect(said: Connection) -> None:
    """A collector in a process of its own: says its endpoint, and at the end how many spans came."""
    from tests.support.otlp_receiver import over_grpc

    with over_grpc() as (receiver, endpoint):
        said.send(endpoint)
        said.recv()
        said.send(len(receiver.spans))


def scrape(url: str, is_over: threading.Event) -> None:
    urllib.request.urlopen(url, timeout=30).read()
    while not is_over.wait(SCRAPE_S):
        urllib.request.urlopen(url, timeout=30).read()


async def send_all(options: argparse.Namespace, watched: Mapping[str, Any]) -> dict[str, float]:
    """Serves all rounds but the first under measurement; CPU and wall seconds."""
    tokenizer = load_tokenizer(DEMO)
    app = new_app(DEMO, tokenizer, FakeBackend(step_s=None), **watched)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", http="httptools"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.ready.wait()
    port, payload = listener.getsockname()[1], body(options.tokens, {})
    is_over = threading.Event()
    url = f"http://127.0.0.1:{port}/metrics"
    scraper = threading.Thread(target=scrape, args=(url, is_over), daemon=True)
    await run_clients(port, 1, options.streams, payload)
    cpu, wall = time.process_time(), time.perf_counter()
    if watched:
        scraper.start()
    await run_clients(port, options.rounds, options.streams, payload)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    is_over.set()
    server.should_exit = True
    await serving
    return {"cpu_s": cpu, "wall_s": wall}


def client_rounds(port: int, rounds: int, streams: int, payload: bytes) -> None:
    for _ in range(rounds):
        client_process(port, streams, payload)


async def run_clients(port: int, rounds: int, streams: int, payload: bytes) -> None:
    client = multiprocessing.get_context("spawn").Process(target=client_rounds, args=(port, rounds, streams, payload))
    client.start()
    await asyncio.to_thread(client.join)
    if client.exitcode:
        raise SystemExit("the client failed")


def tell(options: argparse.Namespace) -> dict[str, Any]:
    """One run in this process."""
    tokens = options.rounds * options.streams * options.tokens
    if options.tell == "off":
        return {"tokens": tokens, **uvloop.run(send_all(options, {}))}
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    collector = spawn.Process(target=collect, args=(theirs,))
    collector.start()
    with tempfile.TemporaryDirectory() as folder:
        watched = watching(ours.recv(), Path(folder))
        found = uvloop.run(send_all(options, watched))
        watched["tracing"].close()
        lines = sum(file.read_bytes().count(b"\n") for file in Path(folder).iterdir())
    if lines < 2 * (options.rounds + 1) * options.streams:
        raise SystemExit(f"{lines} lines about {(options.rounds + 1) * options.streams} requests")
    ours.send(None)
    spans = ours.recv()
    collector.join()
    return {"tokens": tokens, **found, "lines": lines, "spans": spans}


def run_of(checkout: Path, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own, with the code of a checkout and this file."""
    numbers = [f"--{name}={getattr(options, name)}" for name in ("streams", "tokens", "rounds")]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--tell", kind, *numbers]
    with OtherCpu() as other:
        done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{kind} of {checkout.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"other_cpu": other.share}


def compare(options: argparse.Namespace, console: Console) -> dict[str, list[dict[str, Any]]]:
    """The runs of each kind, in turns."""
    kinds = {"on": (ROOT, "on"), "off": (ROOT, "off")}
    if options.against is not None:
        kinds["against"] = (options.against.resolve(), "off")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for pair in range(options.pairs):
        for name in list(kinds)[:: 1 if pair % 2 == 0 else -1]:
            wait_until_quiet(options.quiet_s)
            checkout, kind = kinds[name]
            runs[name].append(found := run_of(checkout, kind, options))
            more = f", {found['lines']} lines, {found['spans']} spans" if kind == "on" else ""
            console.print(
                f"[{pair}] {name:8s} {microseconds(found):6.2f} us/token, others {found['other_cpu']:.0%}{more}"
            )
    return runs


def microseconds(run: Mapping[str, Any]) -> float:
    return float(1e6 * run["cpu_s"] / run["tokens"])


def rate(run: Mapping[str, Any]) -> float:
    return float(run["tokens"] / run["wall_s"])


def ratios(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians of the ratios of each pair, by what is compared."""
    pairs = {"on": ("on", "off")} | ({"off": ("off", "against")} if "against" in runs else {})
    return {
        name: {
            figure: statistics.median(of(one) / of(other) for one, other in zip(runs[left], runs[right], strict=True))
            for figure, of in (("cpu_per_token", microseconds), ("tokens_per_s", rate))
        }
        for name, (left, right) in pairs.items()
    }


def show(console: Console, found: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("compared", "CPU per token", "bar", "tokens/s")
    words = {"on": "all on / all off", "off": "all off / the other checkout"}
    for name, of in found.items():
        holds = of["cpu_per_token"] <= BARS[name]
        said = f"{of['cpu_per_token']:.4f} {'holds' if holds else 'MISSED'}"
        table.add_row(words[name], said, f"<= {BARS[name]}", f"{of['tokens_per_s']:.4f}")
    console.print(table)


def main() -> None:
    options = parse_arguments()
    if options.tell is not None:
        print(json.dumps(tell(options)))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    runs = compare(options, console)
    found = ratios(runs)
    show(console, found)
    write_record(RESULTS / "observability.json", options, runs=runs, ratios=found)


if __name__ == "__main__":
    main()
