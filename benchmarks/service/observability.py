"""What it costs to be watched: a gateway's CPU time per token with all of it on, off, and in a checkout without it.

    python -m benchmarks.service.observability [--pairs 5] [--turns 8] [--streams 16] [--against CHECKOUT]

Each gateway runs over a fake engine behind uvicorn, with its client in another process, which sends streaming chats of
so many tokens. `off` has neither lines about requests nor traces. `on` has access lines and request lines in a file,
traces of one request in a hundred sent over OTLP to a collector in a process of its own, and a scrape of /metrics for
every fifteen seconds in which it serves, the first at once. --against: another checkout, off, for instance of before
these existed. The gateways of a pair live side by side and serve in short turns, one at a time, so that what else the
machine does meets all alike; a pair's ratio is that of the sums of its turns, and the median of the pairs counts. CPU
seconds are of the gateway's process in its turns, its threads included; spans that wait are sent at the end of each.
Tokens/s are by the clock of its turns, with client and gateway on this machine.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
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
    parser.add_argument("--rounds", type=int, default=15, help="of streams, in a turn")
    parser.add_argument("--turns", type=int, default=8, help="of each gateway in a pair, after a round that warms up")
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


def scrape(url: str) -> None:
    urllib.request.urlopen(url, timeout=30).read()


def client_turns(turns: Connection, port: int, options: argparse.Namespace) -> None:
    """Sends so many rounds of streams as the gateway says, time after time."""
    payload = body(options.tokens, {})
    while rounds := turns.recv():
        for _ in range(rounds):
            client_process(port, options.streams, payload)
        turns.send(rounds)


async def serve_turns(options: argparse.Namespace, watched: Mapping[str, Any]) -> int:
    """Serves a turn for each line of standard input, after one round that warms up, and prints the CPU and wall seconds
    of each. Returns the number of rounds."""
    tokenizer = load_tokenizer(DEMO)
    app = new_app(DEMO, tokenizer, FakeBackend(step_s=None), **watched)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", http="httptools"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.ready.wait()
    port = listener.getsockname()[1]
    turns, theirs = multiprocessing.get_context("spawn").Pipe()
    client = multiprocessing.get_context("spawn").Process(target=client_turns, args=(theirs, port, options))
    client.start()
    theirs.close()
    rounds, busy_s, scrape_at_s = 1, 0.0, 0.0 if watched else math.inf
    turns.send(1)
    await asyncio.to_thread(turns.recv)
    say(ready=True)
    while await asyncio.to_thread(sys.stdin.readline):
        cpu, wall = time.process_time(), time.perf_counter()
        turns.send(options.rounds)
        if busy_s >= scrape_at_s:
            scrape_at_s += SCRAPE_S
            await asyncio.to_thread(scrape, f"http://127.0.0.1:{port}/metrics")
        rounds += await asyncio.to_thread(turns.recv)
        busy_s += (wall_s := time.perf_counter() - wall)
        if watched:
            await asyncio.to_thread(watched["tracing"]._provider.force_flush)
        say(cpu_s=time.process_time() - cpu, wall_s=wall_s)
    turns.send(0)
    await asyncio.to_thread(client.join)
    server.should_exit = True
    await serving
    return rounds


def say(**words: object) -> None:
    """Tells the process that compares."""
    print(json.dumps(words), flush=True)


def tell(options: argparse.Namespace) -> None:
    """One gateway, in this process."""
    if options.tell == "off":
        uvloop.run(serve_turns(options, {}))
        return
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    collector = spawn.Process(target=collect, args=(theirs,))
    collector.start()
    with tempfile.TemporaryDirectory() as folder:
        watched = watching(ours.recv(), Path(folder))
        rounds = uvloop.run(serve_turns(options, watched))
        watched["tracing"].close()
        lines = sum(file.read_bytes().count(b"\n") for file in Path(folder).iterdir())
    if lines < 2 * rounds * options.streams:
        raise SystemExit(f"{lines} lines about {rounds * options.streams} requests")
    ours.send(None)
    say(lines=lines, spans=ours.recv())
    collector.join()


class TurnTaker:
    """A gateway in a process of its own, with the code of a checkout and this file. RuntimeError when it ends."""

    def __init__(self, checkout: Path, kind: str, options: argparse.Namespace) -> None:
        numbers = [f"--{name}={getattr(options, name)}" for name in ("streams", "tokens", "rounds")]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--tell", kind, *numbers]
        self._name = f"{kind} of {checkout.name}"
        self._process = subprocess.Popen(command, env=environment, cwd=checkout, text=True, stdin=PIPE, stdout=PIPE)
        self.told: dict[str, Any] = {"tokens": 0, "cpu_s": 0.0, "wall_s": 0.0}
        self._tokens = options.rounds * options.streams * options.tokens

    def ready(self) -> None:
        """Waits until it can take turns."""
        self._hear()

    def turn(self) -> None:
        """Has it serve its turn, and adds up what that took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._hear()
        self.told |= {name: self.told[name] + found[name] for name in ("cpu_s", "wall_s")}
        self.told["tokens"] += self._tokens

    def end(self) -> dict[str, Any]:
        """Ends it. Returns all that it has told."""
        rest, _ = self._process.communicate()
        if self._process.returncode != 0:
            raise RuntimeError(f"{self._name} ended with {self._process.returncode}")
        return self.told | (json.loads(rest.splitlines()[-1]) if rest.strip() else {})

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{self._name} ended with {self._process.wait()}")


def run_pair(kinds: Mapping[str, tuple[Path, str]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One run of each kind, all in short turns, their order turned from turn to turn."""
    takers = {name: TurnTaker(checkout, kind, options) for name, (checkout, kind) in kinds.items()}
    for taker in takers.values():
        taker.ready()
    with OtherCpu() as other:
        for turn in range(options.turns):
            for name in list(takers)[:: 1 if turn % 2 == 0 else -1]:
                takers[name].turn()
    return {name: taker.end() | {"other_cpu": other.share} for name, taker in takers.items()}


def compare(options: argparse.Namespace, console: Console) -> dict[str, list[dict[str, Any]]]:
    """The runs of each kind."""
    kinds = {"on": (ROOT, "on"), "off": (ROOT, "off")}
    if options.against is not None:
        kinds["against"] = (options.against.resolve(), "off")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for pair in range(options.pairs):
        wait_until_quiet(options.quiet_s)
        for name, found in run_pair(kinds, options).items():
            runs[name].append(found)
            more = f", {found['lines']} lines, {found['spans']} spans" if name == "on" else ""
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
        tell(options)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    runs = compare(options, console)
    found = ratios(runs)
    show(console, found)
    write_record(RESULTS / "observability.json", options, runs=runs, ratios=found)


if __name__ == "__main__":
    main()
