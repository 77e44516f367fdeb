"""What routing by KV costs a gateway: its CPU time per token, beside one that looks at load alone and hears of no KV.

    python -m benchmarks.service.route_cpu [--model demo] [--groups 2] [--pairs 3] [--turns 6]

Two services of the same model: `joint` with KV events, as by default, and `least-tokens` with --no-kv-events. They live
side by side and take short turns with the same conversations, so that what else the machine does meets both alike; a
pair's ratio is that of the sums of its turns, and the median counts. CPU seconds are of the gateway's process (Serve's
replica), its threads included. JSON goes to out/benchmarks.
"""

import argparse
import asyncio
import os
import statistics
from contextlib import ExitStack
from typing import Final

import aiohttp
import psutil
from rich.console import Console

from benchmarks.machine import OtherCpu
from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.service.serving import Service, stream_completion
from benchmarks.workload import Job, Timeline

BAR: Final = 1.03
"""Most CPU per token, as a ratio."""
SERVICES: Final = {
    "joint": ("--routing-policy", "joint"),
    "least-tokens": ("--routing-policy", "least-tokens", "--no-kv-events"),
}
GATEWAY: Final = "tandem-gateway"
"""In the title of a gateway's process."""
FIRST_TOKEN: Final = 10


def gateway_of(service: Service) -> psutil.Process:
    """Returns the process of a service's gateway."""
    family = psutil.Process(service.process.pid).children(recursive=True)
    found = [process for process in family if GATEWAY in "".join(process.cmdline())]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} gateways among {[' '.join(one.cmdline())[:80] for one in family]}")
    return found[0]


def conversations(turn: int, streams: int, turns: int, question: int, answer: int) -> list[list[Job]]:
    """The turns of so many conversations, each with all before it; those of another `turn` share nothing."""
    made = []
    for number in range(streams):
        base = FIRST_TOKEN + (turn * streams + number) * 7919
        ids = [FIRST_TOKEN + (base + place * 31) % 300 for place in range(turns * question)]
        made.append([Job(ids[: (place + 1) * question], answer) for place in range(turns)])
    return made


async def serve(service: Service, talks: list[list[Job]]) -> None:
    """Holds all conversations at once, each one turn after the other."""

    async def talk(session: aiohttp.ClientSession, jobs: list[Job]) -> None:
        for job in jobs:
            await stream_completion(session, service, job, Timeline(0.0))

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(talk(session, jobs) for jobs in talks))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=MODELS)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=6, help="of each service in a pair, after one that warms up")
    parser.add_argument("--streams", type=int, default=12, help="conversations at a time")
    parser.add_argument("--questions", type=int, default=4, help="of each conversation")
    parser.add_argument("--question", type=int, default=48, help="tokens of one")
    parser.add_argument("--answer", type=int, default=48, help="tokens of one")
    options = parser.parse_args()
    sizes = options.streams, options.questions, options.question, options.answer
    tokens = options.turns * options.streams * options.questions * options.answer
    ratios, spent = list[float](), list[dict[str, float]]()
    with ExitStack() as stack, OtherCpu() as other:
        services = {}
        for name, flags in SERVICES.items():
            arguments = ["-dp", str(options.groups), "--device", "cpu", "--cpu-threads", "1", *flags]
            log = RESULTS / f"route-cpu-{name}.log"
            services[name] = stack.enter_context(Service(str(find_model(options.model)), arguments, log))
        gateways = {name: gateway_of(service) for name, service in services.items()}
        for pair in range(options.pairs):
            took = dict.fromkeys(SERVICES, 0.0)
            for turn in range(options.turns + 1):
                for name in SERVICES:
                    before_s = cpu_s(gateways[name])
                    asyncio.run(serve(services[name], conversations(pair * 100 + turn, *sizes)))
                    took[name] += (cpu_s(gateways[name]) - before_s) if turn else 0.0
            joint, plain = (1e6 * took[name] / tokens for name in SERVICES)
            ratios.append(joint / plain)
            spent.append({"joint_us": joint, "plain_us": plain})
            print(f"pair {pair + 1}: {joint:.1f} and {plain:.1f} us of CPU a token, {ratios[-1]:.3f}", flush=True)
    median = statistics.median(ratios)
    Console().print(
        f"routing by KV: {median:.3f} times the gateway's CPU per token ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"bar {BAR}: {'holds' if median <= BAR else 'does not hold'}; others took {other.share:.0%}"
    )
    write_record(RESULTS / "route-cpu.json", options, pairs=spent, ratios=ratios, other_cpu=other.share)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
