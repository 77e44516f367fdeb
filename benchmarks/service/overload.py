"""Overload of a `tandem serve`: goodput, time of refusals and memory when requests come faster than they can be served.

    python -m benchmarks.service.overload [--model llama-135m] [--levels 0.5 1 2 3] [--seconds 40]

First the capacity: clients that each wait for their answer, a few more than there are rows. Then open loop: Poisson
arrivals at each level times the capacity, whatever comes back. Goodput counts the tokens of requests that were answered
in full, with the first token within --ttft-s. Each refusal is timed from when it was due. The client shares the
machine: its cores and how late it sent are printed, and what other processes took. Other statuses, and streams that
end with an error or without all tokens, are failures, of which there may be none. JSON and a plot go to
out/benchmarks.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.machine import OtherCpu, wait_until_quiet
from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.service.serving import Service
from benchmarks.workload import percentiles, random_prompt
from tandem.cluster.cli.bench.load_client import answer_events
from tandem.workers.models.spec.config.config_reader import load_spec

TITLES = {"gateway": "ray::ServeReplica:tandem:tandem-gateway", "coordinator": "ray::ServeReplica:tandem:tandem-coord"}
GOODPUT_BAR, REFUSAL_BAR_MS, MEMORY_BAR = 0.9, 50.0, 1.2
"""Goodput at the highest level over the best; p99 of refusals; memory after the highest level over that after the
first."""
WARM_S = 5.0
"""Of each level, before what is counted begins."""
MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", help=MODELS)
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0], help="times the capacity")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each level")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16, help="--max-num-seqs of the service")
    parser.add_argument("--queue", type=int, default=32, help="--max-num-queued-reqs of the service")
    parser.add_argument("--ttft-s", type=float, default=10.0, help="what comes later is no goodput")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="of the rank")
    parser.add_argument("--quiet-s", type=float, default=60.0, help="longest wait for other processes to rest")
    return parser.parse_args()


@dataclass
class Request:
    """One request and what became of it. Times are seconds of perf_counter; status 0: no answer, or one that was cut
    off; is_ended: its stream came to `[DONE]` without an error."""

    due_s: float
    sent_s: float = 0.0
    status: int = 0
    end_s: float = 0.0
    is_ended: bool = False
    token_times_s: list[float] = field(default_factory=list)

    def is_answered(self, output_len: int) -> bool:
        """Whether the answer is whole: all its tokens, and no error among them or after."""
        return self.status == 200 and self.is_ended and len(self.token_times_s) == output_len

    def is_good(self, output_len: int, ttft_s: float) -> bool:
        return self.is_answered(output_len) and self.token_times_s[0] - self.due_s <= ttft_s


@dataclass(frozen=True)
class Level:
    """What was measured at one rate of arrivals; ms from when each was due. memory_mib: of each process at the
    beginning, at most, and at the end. client_cores: CPU seconds of the client per second."""

    level: float
    offered_per_s: float
    goodput_tokens_per_s: float
    answered: int
    refused: int
    failed: int
    ttft_ms: dict[str, float]
    refusal_ms: dict[str, float]
    sent_late_ms: dict[str, float]
    memory_mib: dict[str, tuple[float, float, float]]
    client_cores: float
    other_cpu: float
    load_average: float


class MemoryWatch:
    """Samples the resident memory of the gateway and the coordinator twice a second while it is entered."""

    def __init__(self, pid: int) -> None:
        found = psutil.Process(pid).children(recursive=True)
        self._processes = {
            name: next(p for p in found if " ".join(p.cmdline()).startswith(title)) for name, title in TITLES.items()
        }
        self._ends = threading.Event()
        self.samples: dict[str, list[float]] = {name: [] for name in TITLES}

    def __enter__(self) -> "MemoryWatch":
        self._sample()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._ends.wait(0.5):
            self._sample()

    def _sample(self) -> None:
        for name, process in self._processes.items():
            self.samples[name].append(process.memory_info().rss / MIB)

    def figures(self) -> dict[str, tuple[float, float, float]]:
        return {name: (taken[0], max(taken), taken[-1]) for name, taken in self.samples.items()}


class Client:
    """Sends requests of one shape to the service and reads their streams."""

    def __init__(self, service: Service, options: argparse.Namespace, vocab_size: int) -> None:
        self._url = f"{service.url}/v1/completions"
        self._options = options
        self._vocab_size = vocab_size
        self._draw = random.Random(0)
        self._fixed = {
            "model": service.model_name,
            "max_tokens": options.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def body(self) -> bytes:
        """A request with a prompt of its own."""
        prompt = random_prompt(self._draw, self._options.prompt_len, self._vocab_size)
        return json.dumps({**self._fixed, "prompt": prompt}).encode()

    async def send(self, session: aiohttp.ClientSession, request: Request, body: bytes) -> None:
        request.sent_s = time.perf_counter()
        headers = {"content-type": "application/json"}
        try:
            async with session.post(self._url, data=body, headers=headers) as response:
                has_error = False
                async for data in answer_events(response):
                    if data == b"[DONE]":
                        request.is_ended = not has_error
                    elif response.status == 200:
                        event = json.loads(data)
                        has_error |= "error" in event
                        choices = event.get("choices") or [{}]
                        count = len(choices[0].get("token_ids") or ())
                        request.token_times_s.extend([time.perf_counter()] * count)
                request.status = response.status
        except (aiohttp.ClientError, TimeoutError):
            request.status = 0
        request.end_s = time.perf_counter()

    async def closed_loop(self, session: aiohttp.ClientSession, clients: int, seconds: float) -> list[Request]:
        """Runs `clients` that each wait for their answer before they ask again."""
        ends_s, sent = time.perf_counter() + seconds, []

        async def run() -> None:
            while (now_s := time.perf_counter()) < ends_s:
                request = Request(due_s=now_s)
                sent.append(request)
                await self.send(session, request, self.body())

        await asyncio.gather(*(run() for _ in range(clients)))
        return sent

    async def open_loop(self, session: aiohttp.ClientSession, per_s: float, seconds: float) -> list[Request]:
        """Sends each request when it is due, whatever became of those before, and waits for all answers."""
        draw, due_s, sent, running = random.Random(1), 0.0, [], []
        bodies = []
        while (due_s := due_s + draw.expovariate(per_s)) < seconds:
            sent.append(Request(due_s=due_s))
            bodies.append(self.body())
        began_s = time.perf_counter()
        for request, body in zip(sent, bodies, strict=True):
            request.due_s += began_s
            await asyncio.sleep(max(0.0, request.due_s - time.perf_counter()))
            running.append(asyncio.create_task(self.send(session, request, body)))
        await asyncio.gather(*running)
        return sent


def run_client(work: Callable[[aiohttp.ClientSession], Awaitable[list[Request]]]) -> tuple[list[Request], float]:
    """The requests of work(session), and the cores that this process took."""

    async def run() -> list[Request]:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            return await work(session)

    wall_s, cpu_s = time.perf_counter(), time.process_time()
    sent = asyncio.run(run())
    return sent, (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)


def tokens_per_s(good: Sequence[Request], began_s: float, ended_s: float) -> float:
    """Tokens of these requests that came in the span, per second of it."""
    tokens = sum(began_s <= moment < ended_s for request in good for moment in request.token_times_s)
    return tokens / (ended_s - began_s)


def measure_capacity(client: Client, options: argparse.Namespace) -> float:
    """Requests per second while there is always one that waits for a row."""
    clients = min(options.queue, options.rows + max(1, options.queue // 8))  # at first all of them wait
    began_s = time.perf_counter()
    sent, _ = run_client(lambda session: client.closed_loop(session, clients, options.seconds))
    good = [request for request in sent if request.is_good(options.output_len, float("inf"))]
    assert len(good) == len(sent), "a closed loop within the queue is never refused"
    return tokens_per_s(good, began_s + WARM_S, began_s + options.seconds) / options.output_len


def measure_level(
    client: Client, service: Service, options: argparse.Namespace, level: float, capacity_per_s: float
) -> Level:
    wait_until_quiet(options.quiet_s)
    per_s = level * capacity_per_s
    with OtherCpu() as other, MemoryWatch(service.process.pid) as memory:
        began_s = time.perf_counter()
        sent, cores = run_client(lambda session: client.open_loop(session, per_s, options.seconds))
        load_average = os.getloadavg()[0]
    good = [request for request in sent if request.is_good(options.output_len, options.ttft_s)]
    refused = [request for request in sent if request.status == 429]
    answered = sum(request.is_answered(options.output_len) for request in sent)
    return Level(
        level=level,
        offered_per_s=per_s,
        goodput_tokens_per_s=tokens_per_s(good, began_s + WARM_S, began_s + options.seconds),
        answered=answered,
        refused=len(refused),
        failed=len(sent) - answered - len(refused),
        ttft_ms=percentiles([1e3 * (r.token_times_s[0] - r.due_s) for r in sent if r.token_times_s]),
        refusal_ms=percentiles([1e3 * (request.end_s - request.due_s) for request in refused]) if refused else {},
        sent_late_ms=percentiles([1e3 * (request.sent_s - request.due_s) for request in sent]),
        memory_mib=memory.figures(),
        client_cores=cores,
        other_cpu=other.share,
        load_average=load_average,
    )


def verdicts(levels: Sequence[Level]) -> dict[str, tuple[float, float, bool]]:
    """Each bar: the figure, what it may be, and whether it holds. Of the highest level; failures are of all."""
    first, last = levels[0], max(levels, key=lambda level: level.level)
    best = max(level.goodput_tokens_per_s for level in levels)
    goodput = last.goodput_tokens_per_s / best
    refusal_ms = last.refusal_ms.get("p99", float("inf"))  # nothing was refused: it was no overload
    failed = sum(level.failed for level in levels)
    memory = max(last.memory_mib[name][2] / first.memory_mib[name][2] for name in TITLES)
    return {
        "goodput over the best": (goodput, GOODPUT_BAR, goodput >= GOODPUT_BAR),
        "refusals, p99 ms": (refusal_ms, REFUSAL_BAR_MS, refusal_ms < REFUSAL_BAR_MS),
        "memory over the first level's": (memory, MEMORY_BAR, memory <= MEMORY_BAR),
        "failed": (failed, 0.0, failed == 0),
    }


def show(console: Console, levels: Sequence[Level], capacity_per_s: float) -> None:
    head = [
        "load",
        "offered/s",
        "goodput tok/s",
        "answered",
        "refused",
        "failed",
        "TTFT p50/p99 ms",
        "refusal p50/p99 ms",
    ]
    table = Table(
        *head, "MiB at most: gateway, coordinator", "client cores", "late p99 ms", "other_cpu", "load average"
    )
    for one in levels:
        table.add_row(
            f"{one.level:g}x",
            f"{one.offered_per_s:.1f}",
            f"{one.goodput_tokens_per_s:.0f}",
            *(str(count) for count in (one.answered, one.refused, one.failed)),
            f"{one.ttft_ms['p50']:.0f} / {one.ttft_ms['p99']:.0f}",
            " / ".join(f"{one.refusal_ms[q]:.1f}" for q in ("p50", "p99") if one.refusal_ms),
            ", ".join(f"{one.memory_mib[name][1]:.0f}" for name in TITLES),
            f"{one.client_cores:.2f}",
            f"{one.sent_late_ms['p99']:.1f}",
            f"{one.other_cpu:.2f}",
            f"{one.load_average:.2f}",
        )
    console.print(f"capacity, closed loop: {capacity_per_s:.2f} requests/s")
    console.print(table)
    for name, (value, bar, holds) in verdicts(levels).items():
        console.print(f"{name}: {value:.2f} (bar {bar:g}): {'holds' if holds else 'MISSED'}")


def plot(levels: Sequence[Level], file: Path) -> None:
    """Goodput, first tokens and refusals, and memory, by load."""
    from matplotlib import pyplot

    figure, (goodput, times, memory) = pyplot.subplots(1, 3, figsize=(13, 3.5))
    loads = [one.level for one in levels]
    goodput.plot(loads, [one.goodput_tokens_per_s for one in levels], "o-")
    goodput.set(title="goodput", xlabel="load over capacity", ylabel="tokens/s", ylim=(0, None))
    times.plot(loads, [one.ttft_ms["p99"] for one in levels], "o-", label="first token, p99")
    refused = [one for one in levels if one.refusal_ms]
    times.plot([one.level for one in refused], [one.refusal_ms["p99"] for one in refused], "o-", label="refusal, p99")
    times.axhline(REFUSAL_BAR_MS, linestyle=":", color="gray")
    times.set(title="times", xlabel="load over capacity", ylabel="ms", yscale="log")
    times.legend(fontsize=7)
    for name in TITLES:
        memory.plot(loads, [one.memory_mib[name][1] for one in levels], "o-", label=name)
    memory.set(title="memory at most", xlabel="load over capacity", ylabel="MiB", ylim=(0, None))
    memory.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def service_flags(options: argparse.Namespace) -> list[str]:
    limits = ["--max-num-seqs", str(options.rows), "--max-num-queued-reqs", str(options.queue)]
    return [*limits, "--device", "cpu", "--cpu-threads", str(options.threads), "--max-model-len", "1024"]


def main() -> None:
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 180)
    folder = find_model(options.model)
    name = f"overload-{Path(options.model).name}"
    with Service(str(folder), service_flags(options), RESULTS / f"{name}.log") as service:
        client = Client(service, options, load_spec(folder).vocab_size)
        wait_until_quiet(options.quiet_s)
        capacity_per_s = measure_capacity(client, options)
        levels = [measure_level(client, service, options, level, capacity_per_s) for level in options.levels]
    show(console, levels, capacity_per_s)
    write_record(
        RESULTS / f"{name}.json",
        options,
        capacity_per_s=capacity_per_s,
        levels=[asdict(level) for level in levels],
        bars={name: {"value": v, "bar": bar, "holds": holds} for name, (v, bar, holds) in verdicts(levels).items()},
    )
    plot(levels, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
