"""Groups that follow the load, from none and back: 0 -> 1 -> 3 -> 1 -> 0, with long streams over each change.

    python -m benchmarks.service.scaling [--model llama-135m] [--tokens 100] [--rows 8]

A service sleeps. One long stream wakes it; a rush of short ones brings the third group; a few more long ones go on when
the rush is over, so that two groups are taken down under them and their streams move; the last group goes once nothing
is left to do. Then requests are sent at the moment at which the last group goes, --edges times. Every stream
must end whole: with all its tokens, and without an error. JSON and a plot go to out/benchmarks.
"""

import argparse
import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console

from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.service.serving import START_DEADLINE_S, Service
from tandem.cluster.cli.bench.load_client import answer_events

SAMPLE_S = 0.5
CHANGE_S = 300.0
"""The longest wait for a change of the number of groups."""
ANSWER_S = 900.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", help=MODELS)
    parser.add_argument("--groups", type=int, default=3, help="the most")
    parser.add_argument("--rows", type=int, default=8, help="--max-num-seqs of a group")
    parser.add_argument("--rush", type=int, default=28, help="streams at a time until the last group is there")
    parser.add_argument("--long", type=int, default=4, help="streams that go on while groups are taken down")
    parser.add_argument("--tokens", type=int, default=100, help="of a stream of the rush")
    parser.add_argument("--long-tokens", type=int, default=3000, help="of a long stream")
    parser.add_argument("--edges", type=int, default=5, help="requests at the moment at which the last group goes")
    parser.add_argument("--shutdown-timeout", type=float, default=20.0, help="after which streams of a group must move")
    parser.add_argument("--delay", type=float, default=8.0, help="downscale_delay_s, and the same to zero")
    return parser.parse_args()


@dataclass
class Course:
    """One stream. Times are seconds since the start; held_s: until its first token."""

    name: str
    tokens: int
    began_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    got: int = 0
    longest_gap_s: float = 0.0
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.got == self.tokens


@dataclass
class Run:
    """What was seen of the service, every SAMPLE_S, and its streams."""

    url: str
    model: str
    session: aiohttp.ClientSession
    started_s: float = field(default_factory=time.perf_counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    courses: list[Course] = field(default_factory=list)

    def now_s(self) -> float:
        return time.perf_counter() - self.started_s

    async def load(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/load") as answer:
            return dict(await answer.json())

    async def watch(self) -> None:
        """Samples until it is cancelled."""
        while True:
            with suppress(aiohttp.ClientError):
                self.samples.append({"at_s": round(self.now_s(), 2)} | await self.load())
            await asyncio.sleep(SAMPLE_S)

    async def until(self, holds: Callable[[dict[str, Any]], bool], what: str, period_s: float = SAMPLE_S) -> None:
        deadline_s = self.now_s() + CHANGE_S
        while not holds(load := await self.load()):
            if self.now_s() > deadline_s:
                raise TimeoutError(f"not within {CHANGE_S:.0f} s: {what}; {load}")
            await asyncio.sleep(period_s)

    async def stream(self, name: str, tokens: int) -> Course:
        """Streams one completion of exactly so many tokens."""
        course = Course(name, tokens, self.now_s())
        self.courses.append(course)
        body = {"model": self.model, "prompt": f"{name}: once upon a time", "max_tokens": tokens, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    course.error = f"{answer.status}: {(await answer.text())[:200]}"
                else:
                    await self._read(answer, course)
        except (aiohttp.ClientError, TimeoutError) as error:
            course.error = f"{type(error).__name__}: {error}"
        course.end_s = self.now_s()
        return course

    async def _read(self, answer: aiohttp.ClientResponse, course: Course) -> None:
        last_s, is_ended = self.now_s(), False
        async for data in answer_events(answer):
            if data == b"[DONE]":
                is_ended = True
            else:
                chunk = json.loads(data)
                if "error" in chunk:
                    course.error = str(chunk["error"])[:200]
                count = len(chunk["choices"][0].get("token_ids") or ()) if chunk.get("choices") else 0
                course.got += count
                course.first_s = course.first_s or self.now_s()
                course.longest_gap_s = max(course.longest_gap_s, self.now_s() - max(last_s, course.first_s))
                last_s = self.now_s()
        if not is_ended and course.error is None:
            course.error = "cut off"


class SleepingService(Service):
    """One that is ready without a group."""

    def _await_first_answer(self) -> float:
        while time.perf_counter() - self.started_s < START_DEADLINE_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"tandem serve ended:\n{self.log.read_text()[-2000:]}")
            try:
                assert json.load(urllib.request.urlopen(f"{self.url}/readyz", timeout=2))["asleep"]
                models = json.load(urllib.request.urlopen(f"{self.url}/v1/models", timeout=2))
                self.model_name = models["data"][0]["id"]
                return time.perf_counter() - self.started_s
            except (OSError, ValueError):
                time.sleep(0.05)
        raise TimeoutError(f"not ready within {START_DEADLINE_S} s:\n{self.log.read_text()[-2000:]}")


async def drive(service: Service, options: argparse.Namespace, console: Console) -> Run:
    """The course of the whole run."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        run = Run(service.url, service.model_name, session)
        watching = asyncio.create_task(run.watch())
        try:
            await _phases(run, options, console)
        finally:
            watching.cancel()
        return run


async def _phases(run: Run, options: argparse.Namespace, console: Console) -> None:
    def say(words: str) -> None:
        console.print(f"{run.now_s():6.1f} s  {words}")

    say("asleep; one stream comes")
    first = asyncio.create_task(run.stream("first", options.long_tokens))
    await run.until(lambda load: load["num_requests_running"] >= 1, "the first group serves")
    say(f"one group serves; {options.rush} clients come, with one stream after the other")
    is_full = asyncio.Event()

    async def keep_asking(name: str) -> None:
        number = 0
        while not is_full.is_set():
            await run.stream(f"{name}.{number}", options.tokens)
            number += 1

    rush = [asyncio.create_task(keep_asking(f"rush {number}")) for number in range(options.rush)]
    await run.until(lambda load: load["groups_serving"] >= options.groups, f"{options.groups} groups serve")
    say(f"{options.groups} groups serve; {options.long} long streams come, and the clients leave")
    is_full.set()
    long = [asyncio.create_task(run.stream(f"long {i}", options.long_tokens)) for i in range(options.long)]
    await asyncio.gather(*rush)
    await run.until(lambda load: load["groups"] == 1, "one group")
    say(f"one group, and {sum(not task.done() for task in (first, *long))} of {1 + len(long)} long streams still run")
    await asyncio.gather(first, *long)
    say("nothing is left to do")
    await run.until(lambda load: load["groups"] == 0, "no group")
    say("asleep again")
    for number in range(options.edges):
        await run.stream(f"edge {number}", 20)
        await run.until(lambda load: load["groups"] == 0, "no group", 0.02)
    await run.stream("edge", 20)
    say("requests at the ends of the last group have been answered")


def changes(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples that differ from the one before in what they say of groups, and the last one."""
    shown = ("at_s", "groups", "groups_serving", "groups_wanted", "why", "requests_held")
    short = [{name: sample[name] for name in shown} for sample in samples]
    before = [{}, *short]
    kept = [one for last, one in zip(before, short, strict=False) if last | {"at_s": 0} != one | {"at_s": 0}]
    return kept if not short or kept[-1] is short[-1] else [*kept, short[-1]]


def plot(run: Run, file: Path) -> None:
    """Groups over time, wanted and there, above the streams."""
    from matplotlib import pyplot

    figure, (groups, streams) = pyplot.subplots(2, 1, figsize=(10, 6), sharex=True, height_ratios=(1, 2))
    times = [sample["at_s"] for sample in run.samples]
    groups.step(times, [sample["groups_serving"] for sample in run.samples], where="post", label="serving")
    wanted = [sample["groups_wanted"] for sample in run.samples]
    groups.step(times, wanted, where="post", linestyle=":", label="wanted")
    groups.set(ylabel="groups", yticks=range(max(wanted, default=1) + 1))
    groups.legend(fontsize=7)
    clients: dict[str, int] = {}
    for course in run.courses:
        row = clients.setdefault(course.name.partition(".")[0], len(clients))
        streams.plot([course.began_s, course.first_s], [row, row], color="lightgray", linewidth=3)
        color = "tab:blue" if course.is_whole else "tab:red"
        streams.plot([course.first_s, course.end_s], [row, row], color=color, linewidth=3)
    streams.set(xlabel="seconds", ylabel="streams (gray: until the first token)", yticks=[])
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    options = parse_arguments()
    console = Console()
    name = f"scaling-{Path(options.model).name}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    config = RESULTS / f"{name}.yaml"
    scaled = {"min_replicas": 0, "max_replicas": options.groups, "upscale_delay_s": 2, "look_back_period_s": 2}
    scaled |= {
        "metrics_interval_s": 0.5,
        "downscale_delay_s": options.delay,
        "downscale_to_zero_delay_s": options.delay,
    }
    config.write_text(
        yaml.safe_dump(
            {
                "max_num_seqs": options.rows,
                "device": "cpu",
                "cpu_threads": 1,
                "shutdown_timeout": options.shutdown_timeout,
                "autoscaling_config": scaled,
            }
        )
    )
    model = "demo" if options.model == "demo" else str(find_model(options.model))
    with SleepingService(model, ["--config", str(config)], RESULTS / f"{name}.log") as service:
        run = asyncio.run(drive(service, options, console))
    failed = [course for course in run.courses if not course.is_whole]
    long_s = [course.end_s - course.first_s for course in run.courses if course.name.startswith("long")]
    console.print(
        f"{len(run.courses)} streams, {len(failed)} failed; long ones of {min(long_s):.0f} to {max(long_s):.0f} s, "
        f"longest pause {max(course.longest_gap_s for course in run.courses):.1f} s"
    )
    reasons = list(dict.fromkeys(f"{sample['groups_wanted']}: {sample['why']}" for sample in run.samples))
    write_record(
        RESULTS / f"{name}.json",
        options,
        failed=len(failed),
        streams=[asdict(course) for course in run.courses],
        samples=changes(run.samples),
        reasons=reasons,
    )
    plot(run, RESULTS / f"{name}.png")
    if failed:
        raise SystemExit(f"{len(failed)} streams failed, the first: {failed[0]}")


if __name__ == "__main__":
    main()
