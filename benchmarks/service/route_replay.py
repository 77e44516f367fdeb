"""What each routing policy makes of a load: prompts found in KV and first tokens, on toy groups.

    python -m benchmarks.service.route_replay [--groups 8 64] [--loads conversations ..] [--policies joint ..]
        [--trace FILE] [--rows N] [--blocks 1600] [--below 0] [--rate 12000] [--gateways 2]

Plays a trace of conversations in Mooncake's form (../shared/data/traces, where that is; else one that a generator
makes), and loads that are made of its arrivals. With more than 8 groups all comes as much faster. The policies are the
product's; the groups are toys (toy_fleet.py), so nothing here says how fast Tandem is. Compare rows of one load. The
roofline of a hit rate is a cache without end that all share. JSON goes to out/benchmarks.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, write_record
from benchmarks.service.route_loads import FLOOD, LOADS
from benchmarks.service.toy_fleet import BLOCK, Asked, Fleet, Replay
from benchmarks.service.trace_replay.trace import Row, generate_trace, read_trace
from tandem.cluster.routing.policies.policy_names import POLICIES

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"
BASE_GROUPS = 8


def rows_of(trace: Path | None, count: int | None) -> tuple[str, list[Row]]:
    """The trace's name and rows: those of a file, else of a generator with the trace's density."""
    file = trace if trace is not None else TRACE
    if trace is None and not file.exists():
        name, rows = "generated", generate_trace(3000, turns=6)
    else:
        name, rows = file.name, read_trace(file)
    return name, rows[:count]


def endless_hit_rate(requests: Sequence[Asked]) -> float:
    """What one cache without end would find."""
    seen: set[int] = set()
    found = 0
    for asked in requests:
        count = next((i for i, one in enumerate(asked.blocks) if one not in seen), len(asked.blocks))
        found += min(asked.prompt - 1, count * BLOCK)
        seen.update(asked.blocks)
    return found / sum(asked.prompt for asked in requests)


def faster(requests: Sequence[Asked], times: float) -> list[Asked]:
    """The same requests in a part of the time."""
    return [Asked(a.time_s / times, a.prompt, a.output, a.blocks, a.tenant, a.adapter, a.session) for a in requests]


def measure(policy: str, fleet: Fleet, requests: Sequence[Asked]) -> dict[str, Any]:
    """Figures of one policy: of all requests, but of a flood's victims alone where there is one."""
    began_s = time.process_time()
    outcome = Replay(policy, fleet, requests).run()
    victims = [tenant for tenant in outcome.first_s if tenant != FLOOD]
    return {
        "policy": policy,
        "hit_rate": outcome.hit_rate(victims),
        "first_p50_s": outcome.first_token(0.5, victims),
        "first_p99_s": outcome.first_token(0.99, victims),
        "loads": outcome.loads,
        "spread": max(outcome.sent.values()) * fleet.groups / len(requests),
        "cpu_s": time.process_time() - began_s,
    }


def show(load: str, groups: int, roofline: float, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("policy", "hit rate", "first p50 s", "p99 s", "adapter loads", "busiest / mean")
    table.title = f"{load}, {groups} groups; a cache without end finds {roofline:.1%}"
    for row in rows:
        seconds = (f"{row['first_p50_s']:.2f}", f"{row['first_p99_s']:.1f}")
        table.add_row(row["policy"], f"{row['hit_rate']:.1%}", *seconds, str(row["loads"]), f"{row['spread']:.2f}")
    console = Console()
    console.print(table)
    by_name = {row["policy"]: row for row in rows}
    if "joint" in by_name and "least-tokens" in by_name:
        joint, load_alone = by_name["joint"], by_name["least-tokens"]
        times = joint["hit_rate"] / load_alone["hit_rate"] if load_alone["hit_rate"] else float("nan")
        first = joint["first_p50_s"] / load_alone["first_p50_s"]
        best = min(row["first_p50_s"] for row in rows)
        console.print(
            f"joint beside least-tokens: {times:.2f} times the hit rate, {first:.2f} of the first-token p50; "
            f"beside the best p50: {joint['first_p50_s'] / best:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--blocks", type=int, default=1600)
    parser.add_argument("--below", type=int, default=0)
    parser.add_argument("--rate", type=float, default=12_000.0)
    parser.add_argument("--gateways", type=int, default=2)
    options = parser.parse_args()
    source, rows = rows_of(options.trace, options.rows)
    figures = []
    for load in options.loads:
        requests = LOADS[load](rows, random.Random(1))
        roofline = endless_hit_rate([one for one in requests if one.tenant != FLOOD])
        for groups in options.groups:
            fleet = Fleet(groups, options.blocks, options.rate, options.below, options.gateways)
            quick = faster(requests, groups / BASE_GROUPS)
            found = [measure(policy, fleet, quick) for policy in options.policies]
            show(load, groups, roofline, found)
            figures += [{"load": load, "groups": groups, "endless_hit_rate": roofline, **row} for row in found]
    write_record(RESULTS / "routes.json", options, source=source, rows=figures)


if __name__ == "__main__":
    main()
