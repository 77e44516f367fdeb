"""Time of one choice of a group in a gateway, by the number of groups, the request's adapter and its prompt.

    python -m benchmarks.service.routing [--groups 16 64 256] [--choices 3000] [--repeats 3] [--entries 1000000]

Runs the router that Serve calls, with Serve's own records of replicas; no Serve, no group and no network. Each group
has reported 32 adapters and the tokens of four gateways. Requests end in the order in which they came, so that two for
each group are in flight, and after every 50 choices new reports come. An adapter is `none`, `held` (one of 64, each by
a few groups) or `missing` (a new one each time). Prints microseconds of the thread's CPU time, which is what the event
loop loses; JSON goes to out/benchmarks.

Each gateway has the index of what the groups have told of their KV (--entries, a million): of each prompt that is long
enough the overlaps of all groups travel with the request, as they were found on a thread, and what is sent is expected.
A prompt of 100,000 tokens is one that all groups have. What the index itself costs stands below the table
(benchmarks/service/index_cost.py).

The roofline is what a choice cannot do without: one number of each group is looked at (min over a list of them).
"""

import argparse
import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID, RunningReplicaInfo
from ray.serve.request_router import RequestRouter, RunningReplica
from rich.console import Console
from rich.table import Table

from benchmarks.machine import OtherCpu
from benchmarks.record import RESULTS, write_record
from benchmarks.service.index_cost import IndexCost, hot_prompt, index_cost
from tandem.cluster.routing.route_hint import hint_of
from tandem.cluster.routing.router.serve_router import GroupRouter
from tandem.cluster.routing.router_view import router_view
from tandem.cluster.routing.told_prefixes import PromptPrefix
from tandem.workers.messages.request import AdapterRef, GenerationRequest, ReplyTo, SamplingParams

ADAPTERS = ("none", "held", "missing")
PROMPTS = (100, 100_000)
ADAPTERS_HELD, ADAPTERS_USED, REPORTS_EVERY, IN_FLIGHT = 32, 64, 50, 2
GATEWAYS = ("me", "you", "he", "she")


class Failures(logging.Handler):
    """Raises what the router logs as a failed choice: Serve would take any group, and times would be of that."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            raise RuntimeError(record.getMessage()) from (record.exc_info or (None, None))[1]


class Group(RunningReplica):
    """Serve's record of a replica, without the actor behind it."""

    def __init__(self, info: RunningReplicaInfo) -> None:
        self._replica_info = info


def reports(groups: int, rng: random.Random) -> list[Group]:
    """A new list of Serve's, with a report of each group."""
    found = []
    for number in range(groups):
        held = [f"{(7 * number + i) % (8 * groups):016x}" for i in range(ADAPTERS_HELD)]
        stats = {
            "outstanding_tokens": {name: rng.randrange(20_000) for name in GATEWAYS},
            "stalled_s": 0.0,
            "kv_used": 0.5,
            "on_device": held[:8],
            "on_host": held[8:],
        }
        info = RunningReplicaInfo(
            replica_id=ReplicaID(f"g{number:04}xyz", DeploymentID("tandem-coordinator", "tandem")),
            node_id=None,
            node_ip=None,
            availability_zone=None,
            actor_name="",
            max_ongoing_requests=100_000,
            routing_stats=stats,
        )
        found.append(Group(info))
    return found


def requests(groups: int, adapter: str, prompt: list[int]) -> Iterator[Any]:
    """What Serve gives to the router, one request after the other."""
    number = 0
    while True:
        number += 1
        key = number * 7919 if adapter == "missing" else number % ADAPTERS_USED
        digest = f"{'f' if adapter == 'missing' else '0'}{key:015x}{'0' * 48}"
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=200),
            adapter=None if adapter == "none" else AdapterRef(name="x", digest=digest, source="/x"),
            reply_to=ReplyTo("tcp://127.0.0.1:1", "me"),
        )
        yield SimpleNamespace(
            args=[b""],
            kwargs={"hint": hint_of(request, overlaps=_noted(request))},
            metadata=SimpleNamespace(internal_request_id=str(number)),
            routing_context=SimpleNamespace(should_backoff=False),
            future=Future(),
        )


def _noted(request: GenerationRequest) -> Mapping[str, tuple[int, int]]:
    """The overlaps of all groups, noted for the router as a gateway does before it sends the request."""
    prefixes = router_view().prefixes
    if len(request.prompt_token_ids) <= (prefixes.least_tokens or 0):
        return {}
    prompt = _PROMPTS.get(len(request.prompt_token_ids))
    if prompt is None:
        prompt = _PROMPTS[len(request.prompt_token_ids)] = prefixes.overlaps(request)
    prefixes.note(request.request_id, prompt)
    return prompt.overlaps


_PROMPTS: dict[int, PromptPrefix] = {}


def measure(groups: int, adapter: str, prompt_len: int, choices: int) -> tuple[list[float], list[float]]:
    """Seconds of each choice, and of each time that new reports were read."""
    rng = random.Random(1)
    router = GroupRouter.__new__(GroupRouter)  # Serve's constructor wants a running Serve
    router.initialize_state()
    lists = [reports(groups, rng) for _ in range(20)]
    pending = requests(groups, adapter, hot_prompt()[:prompt_len])
    in_flight: deque[tuple[ReplicaID, str]] = deque()
    choice_s, report_s = [], []
    for number in range(choices + IN_FLIGHT * groups):
        if number % REPORTS_EVERY == 0:
            router._replicas_list = lists[number // REPORTS_EVERY % len(lists)]
            began = time.thread_time()
            router.update_replicas(router._replicas_list)
            report_s.append(time.thread_time() - began)
        request = next(pending)
        choosing = router.choose_replicas(router._replicas_list, request)
        began = time.thread_time()
        try:
            choosing.send(None)
        except StopIteration as chosen:  # it waits for nothing
            choice_s.append(time.thread_time() - began)
            in_flight.append((chosen.value[0][0].replica_id, request.metadata.internal_request_id))
        if len(in_flight) > IN_FLIGHT * groups:
            replica, name = in_flight.popleft()
            router.on_request_completed(replica, name)
            router_view().prefixes.forget(name)
        router_view().prefixes.expect_sent()
    return choice_s[IN_FLIGHT * groups :], report_s[1:]


def roofline_s(groups: int) -> float:
    """Seconds of the least over one number per group."""
    numbers = [random.Random(1).randrange(10**6) for _ in range(groups)]
    began = time.thread_time()
    for _ in range(10_000):
        min(numbers)
    return (time.thread_time() - began) / 10_000


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--choices", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--entries", type=int, default=1_000_000)
    options = parser.parse_args()
    logging.getLogger("ray.serve.tandem").addHandler(Failures())
    RequestRouter.update_replicas = lambda self, replicas: None  # Serve's part wants a running Serve
    cases = [(g, a, p) for g in options.groups for a in ADAPTERS for p in PROMPTS]
    choice_s: dict[tuple[int, str, int], list[list[float]]] = {case: [] for case in cases}
    report_s: dict[int, list[float]] = {groups: [] for groups in options.groups}
    with OtherCpu() as other:
        names = [group.replica_id.unique_id for group in reports(max(options.groups), random.Random(1))]
        router_view().prefixes, cost = index_cost(names, options.entries)
        for _ in range(options.repeats):
            for case in cases:
                chosen, reported = measure(*case, options.choices)
                choice_s[case].append(chosen)
                report_s[case[0]] += reported
    rows = []
    for (groups, adapter, prompt_len), runs in choice_s.items():
        # of all repeats: the median of p50, and of p99 too, which other processes disturb
        p50, p99 = (sorted(quantile(run, share) for run in runs)[len(runs) // 2] for share in (0.5, 0.99))
        rows.append({"groups": groups, "adapter": adapter, "prompt_tokens": prompt_len, "p50_us": p50, "p99_us": p99})
    show(rows, report_s, cost, other.share)
    figures = [
        {"groups": g, "p50_us": quantile(s, 0.5), "p99_us": quantile(s, 0.99), "roofline_us": roofline_s(g) * 1e6}
        for g, s in report_s.items()
    ]
    write_record(
        RESULTS / "routing.json", options, choices=rows, reports=figures, index=cost._asdict(), other_cpu=other.share
    )


def show(rows: list[dict[str, Any]], report_s: dict[int, list[float]], cost: IndexCost, other_cpu: float) -> None:
    table = Table("groups", "adapter", "prompt tokens", "p50 us", "p99 us", "roofline us", title="one choice")
    for row in rows:
        roofline = f"{roofline_s(row['groups']) * 1e6:.1f}"
        cells = (row["groups"], row["adapter"], row["prompt_tokens"], f"{row['p50_us']:.1f}", f"{row['p99_us']:.1f}")
        table.add_row(*map(str, cells), roofline)
    console = Console()
    console.print(table)
    for groups, seconds in report_s.items():
        console.print(f"reports of {groups} groups read in {quantile(seconds, 0.5):.0f} us")
    console.print(cost.words())
    console.print(f"other_cpu {other_cpu:.0%}")


if __name__ == "__main__":
    main()
