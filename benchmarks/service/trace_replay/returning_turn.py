"""One returning turn over HTTP on an idle service: its prefix is in host memory, and the device has lost it.

A few conversations take turns on a device that holds two of them; between their turns come fresh prompts of the same
length, for comparison. The split of each time is from the service's /metrics. Part `return` of `trace_replay kv`.
"""

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import asdict, dataclass

import aiohttp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.machine import QUIET, OtherCpu, wait_until_quiet
from benchmarks.models import find_model
from benchmarks.service.serving import Service, stream_completion
from benchmarks.service.trace_replay.kv_model import GIB, KVModel
from benchmarks.service.trace_replay.trace import BLOCK
from benchmarks.workload import Job, Timeline, random_prompt, short

NEW = 16
CONVERSATIONS = 3
PUBLISHED_S = 5.0
COUNTERS = {
    "requests": "e2e_request_latency_seconds_count",
    "queue_s": "request_queue_time_seconds_sum",
    "engine_ttft_s": "time_to_first_token_seconds_sum",
    "step_s": "step_device_seconds_total",
    "copy_s": 'kv_offload_seconds_total{kind="load"}',
    "loaded_tokens": "kv_offload_loaded_tokens_total",
}


@dataclass(frozen=True)
class Answer:
    """One turn, in seconds. http_s: outside the engine; queue_s: in the engine before the first step, a load included;
    copy_s: bytes moving within that; step_s: on the ranks; rest_s: planning, and the way to the ranks and back."""

    ttft_s: float
    cached_tokens: int
    loaded_tokens: int
    http_s: float
    queue_s: float
    copy_s: float
    step_s: float
    rest_s: float
    other_cpu: float


@dataclass(frozen=True)
class ReturningTurn:
    """As many turns of each kind, and other_cpu over all of them."""

    prefix: int
    returning: list[Answer]
    fresh: list[Answer]
    other_cpu: float

    @property
    def ratio(self) -> float:
        """Fresh over returning, by the medians of TTFT."""
        return median_of(self.fresh, "ttft_s") / median_of(self.returning, "ttft_s")

    @property
    def quiet_ratio(self) -> float | None:
        """The same over quiet turns; None without any."""
        fresh, returning = quiet(self.fresh), quiet(self.returning)
        return median_of(fresh, "ttft_s") / median_of(returning, "ttft_s") if fresh and returning else None

    @property
    def least_ratio(self) -> float:
        """Fresh over returning, by the least TTFT."""
        return min(a.ttft_s for a in self.fresh) / min(a.ttft_s for a in self.returning)


def median_of(answers: list[Answer], name: str) -> float:
    return statistics.median(getattr(answer, name) for answer in answers)


def quiet(answers: list[Answer]) -> list[Answer]:
    """The turns during which other processes took less than QUIET of the machine."""
    return [answer for answer in answers if answer.other_cpu < QUIET]


def run_returning_turn(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Measures on a service of its own, whose device holds two prompts; at most half of it is stored at once."""
    prefix = options.prefix
    model = KVModel(find_model(options.model, options.dtype), options.dtype, options.threads, prefix + 4 * BLOCK)
    blocks = -(-(prefix + NEW + 1) // BLOCK)
    host_blocks = (CONVERSATIONS + 3) * (blocks + 1) + options.repeats * (blocks + 2)
    flags = {
        "--device": "cpu",
        "--dtype": options.dtype,
        "--max-model-len": str(model.max_model_len),
        "--cpu-threads": str(options.threads),
        "--num-gpu-blocks-override": str(2 * (blocks + 1)),
        "--block-size": str(BLOCK),
        "--kv-offloading-size": f"{host_blocks * model.block_bytes / GIB:.4f}",
    }
    arguments = [word for flag in flags.items() for word in flag]
    with Service(str(model.folder), arguments, options.out / "trace-replay-serve.log") as service, OtherCpu() as other:
        returning, fresh = asyncio.run(
            _converse(service, prefix, model.spec.vocab_size, options.repeats, options.patience)
        )
    result = ReturningTurn(prefix, returning, fresh, other.share)
    show(console, options.model, result)
    return asdict(result)


def show(console: Console, model: str, result: ReturningTurn) -> None:
    title = f"one turn over HTTP, {model}, {result.prefix} + {NEW} tokens, medians of {len(result.returning)}, ms"
    table = Table("", "TTFT", "least", "HTTP", "wait", "copy in it", "step", "rest", "from host", title=title)
    for name, answers in (("returning", result.returning), ("new", result.fresh)):
        fields = ("ttft_s", "http_s", "queue_s", "copy_s", "step_s", "rest_s")
        ttft, *split = [short(1e3 * median_of(answers, field)) for field in fields]
        least = short(1e3 * min(a.ttft_s for a in answers))
        table.add_row(name, ttft, least, *split, f"{median_of(answers, 'loaded_tokens'):.0f}")
    console.print(table)
    quiet = "–" if result.quiet_ratio is None else f"{result.quiet_ratio:.1f}x"
    console.print(
        f"{result.ratio:.1f}x lower (medians); {quiet} over quiet turns; {result.least_ratio:.1f}x by the least; "
        f"other_cpu {result.other_cpu:.2f}"
    )


async def _converse(
    service: Service, prefix: int, vocab_size: int, repeats: int, patience_s: float
) -> tuple[list[Answer], list[Answer]]:
    draw = random.Random(1)
    talks = [random_prompt(draw, prefix, vocab_size) for _ in range(CONVERSATIONS)]
    returning: list[Answer] = []
    fresh: list[Answer] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for talk in talks:
            await _turn(session, service, talk, 0.0)
        await _turn(session, service, talks[0] + random_prompt(draw, NEW, vocab_size), 0.0)  # the first load of all
        for repeat in tqdm(range(repeats), desc="returning turn", unit="pair", leave=False):
            fresh.append(await _turn(session, service, random_prompt(draw, prefix + NEW, vocab_size), patience_s))
            talk = talks[(repeat + 1) % CONVERSATIONS] + random_prompt(draw, NEW, vocab_size)
            returning.append(await _turn(session, service, talk, patience_s))
    return returning, fresh


async def _turn(session: aiohttp.ClientSession, service: Service, prompt: list[int], patience_s: float) -> Answer:
    """Measures one token of one prompt, and the growth of the service's counters."""
    await asyncio.to_thread(wait_until_quiet, patience_s)
    before = await _counters(session, service)
    with OtherCpu() as other:
        timeline = Timeline(time.perf_counter())
        usage = await stream_completion(session, service, Job(prompt, 1), timeline)
    after = await _settled(session, service, before["requests"] + 1)
    grown = {name: after[name] - before[name] for name in COUNTERS}
    ttft_s = timeline.ttft_ms / 1e3
    return Answer(
        ttft_s=ttft_s,
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        loaded_tokens=int(grown["loaded_tokens"]),
        http_s=ttft_s - grown["engine_ttft_s"],
        queue_s=grown["queue_s"],
        copy_s=grown["copy_s"],
        step_s=grown["step_s"],
        rest_s=grown["engine_ttft_s"] - grown["queue_s"] - grown["step_s"],
        other_cpu=other.share,
    )


async def _settled(session: aiohttp.ClientSession, service: Service, requests: float) -> dict[str, float]:
    """The counters once they include `requests` requests (published once a second); stores have time to end."""
    deadline_s = time.perf_counter() + PUBLISHED_S
    while (now := await _counters(session, service))["requests"] < requests:
        if time.perf_counter() > deadline_s:
            raise TimeoutError(f"/metrics did not settle: {now}, {requests} requests awaited")
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)
    return now


async def _counters(session: aiohttp.ClientSession, service: Service) -> dict[str, float]:
    async with session.get(f"{service.url}/metrics") as response:
        text = await response.text()
    return {name: _sum_of(text, family) for name, family in COUNTERS.items()}


def _sum_of(text: str, family: str) -> float:
    """The sum of a family's samples over all groups; a label in braces must be among theirs."""
    name, _, label = family.partition("{")
    label = label.removesuffix("}")
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"tandem:{name}{{") and label in line
    ]
    return sum(values)
