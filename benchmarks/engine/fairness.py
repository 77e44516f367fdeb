"""Shares of rows and first tokens of tenants beside a flood, on the engine over ranks that compute nothing.

    python -m benchmarks.engine.fairness                      # every mix of tenants
    python -m benchmarks.engine.fairness --against ../before  # the same with another checkout's engine, in turns

Counted in steps (tests/support/tenant_steps.py), so no figure hangs on the machine but the last: engine steps a CPU
second of one tenant alone, the best of --repeats runs each, and with --against the median of the ratios of turns
(A-B-A-B). A tenant may claim the lesser of what it is served when it is alone and its weighted share of all that is
served; its first tokens are those of requests that come while its share is not used up. Prints too which part of all
computed tokens had been computed before, and how much more that is than if all were one tenant's. JSON goes to
out/benchmarks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.engine.scheduler import Load
from benchmarks.engine.scheduler import measure as measure_speed
from benchmarks.record import RESULTS, write_record
from tests.support.tenant_steps import Outcome, Room, Share, Tenant, describe, measure, measure_groups

ROOT = Path(__file__).resolve().parents[2]
FLOOD = Tenant("flood", 120, 0)
MIXES: dict[str, tuple[list[Tenant], Room]] = {
    **{f"half of the rows, pause {pause}": ([Tenant("calm", 8, pause), FLOOD], Room()) for pause in (0, 2, 10, 30)},
    "three times the weight": ([Tenant("calm", 12, weight=3.0), FLOOD], Room()),
    "short answers": ([Tenant("calm", 6, tokens=(30, 50)), FLOOD], Room()),
    "long prompts": ([Tenant("calm", 3, prompt=200, tokens=(40, 60)), FLOOD], Room()),
    "beside long prompts": ([Tenant("calm", 6), Tenant("flood", 120, 0, prompt=600, tokens=(20, 60))], Room()),
    "adapters": ([Tenant("calm", 6, adapters=3, tokens=(40, 60)), Tenant("flood", 120, adapters=2)], Room()),
    "three tenants": ([Tenant("calm", 5), Tenant("light", 3, 10, weight=0.5, tokens=(40, 200)), FLOOD], Room()),
    "fifteen tenants": ([*(Tenant(f"t{i}", 1, 10, tokens=(35, 35)) for i in range(15)), FLOOD], Room()),
    "two thirds of the KV": ([Tenant("calm", 4), FLOOD], Room(blocks=96)),
    "KV for less than the rows": (
        [Tenant("calm", 3, 5, prompt=60, tokens=(60, 120)), Tenant("flood", 100, prompt=100, tokens=(60, 180))],
        Room(blocks=130),
    ),
}
TWO_GROUPS = "half of the rows, two groups"


def outcomes(steps: int) -> dict[str, Outcome]:
    """What becomes of each mix."""
    found = {name: measure(tenants, room, steps=steps) for name, (tenants, room) in MIXES.items()}
    found[TWO_GROUPS] = measure_groups([[Tenant("calm", 8), FLOOD]] * 2, steps=steps)
    return found


def steps_per_s(rows: Sequence[int], repeats: int) -> dict[str, float]:
    """Engine steps a second of one tenant alone, by rows: the best of all runs."""
    return {str(n): max(1e6 / measure_speed(Load(n), 400, False).us_per_step for _ in range(repeats)) for n in rows}


def ask(checkout: Path, *arguments: str) -> dict:
    """Runs this file with the engine of a checkout, and returns what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tandem").symlink_to(checkout.resolve() / "tandem")
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-P", "-m", "benchmarks.engine.fairness", *arguments]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(answer)


def of_checkout(checkout: Path, steps: int) -> dict[str, Outcome]:
    """The outcomes with the engine of a checkout."""
    told = ask(checkout, "--tell", "outcomes", "--steps", str(steps))
    return {name: Outcome([Share(**share) for share in one.pop("shares")], **one) for name, one in told.items()}


def speeds(checkouts: Sequence[Path], rows: list[int], repeats: int) -> list[list[dict[str, float]]]:
    """Steps a second of each checkout, in turns."""
    arguments = ("--tell", "speed", "--rows", *map(str, rows), "--repeats", "5")
    return [[ask(checkout, *arguments) for checkout in checkouts] for _ in range(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="of each mix, after 400 that do not count")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256], help="of one tenant alone")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--tell", choices=("outcomes", "speed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tell == "outcomes":
        print(json.dumps({name: asdict(outcome) for name, outcome in outcomes(options.steps).items()}))
    elif options.tell == "speed":
        print(json.dumps(steps_per_s(options.rows, options.repeats)))
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    found = {"here": outcomes(options.steps)}
    checkouts = [ROOT]
    if options.against is not None:
        found["against"] = of_checkout(options.against, options.steps)
        checkouts.append(options.against)
    for name in found["here"]:
        for where, of_mixes in found.items():
            print(f"{name} ({where})", *describe(of_mixes[name]), sep="\n")
    runs = speeds(checkouts, options.rows, options.repeats)
    for rows in map(str, options.rows):
        best = " and ".join(f"{max(turn[place][rows] for turn in runs):,.0f}" for place in range(len(checkouts)))
        line = f"one tenant alone, {rows} rows: {best} steps/s"
        if options.against is not None:
            line += f", median ratio {statistics.median(turn[0][rows] / turn[1][rows] for turn in runs):.3f}"
        print(line)
    mixes = {where: {name: asdict(one) for name, one in of_mixes.items()} for where, of_mixes in found.items()}
    write_record(RESULTS / "fairness.json", options, outcomes=mixes, steps_per_s=runs)


if __name__ == "__main__":
    main()
