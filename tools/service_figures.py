"""The sections of docs/performance.md about a service that has more requests, groups or tenants than others."""

from statistics import mean, median
from typing import Any

from tools.result_files import found as matches
from tools.result_files import percent, read_json, span, table, whole

CLIENT_FIGURES = {
    "median_ttft_ms": "TTFT, ms",
    "median_tpot_ms": "TPOT, ms",
    "output_throughput": "output tokens/s",
    "cpu_s": "CPU of the client, s",
}


def overload_section() -> str:
    """What happens beyond the capacity, with the plot."""
    found = read_json("overload-llama-135m.json")
    options, bars = found["options"], found["bars"]

    def row(level: dict[str, Any]) -> list[str]:
        refusal_ms = level["refusal_ms"]
        return [
            f"{level['level']:g} × capacity",
            whole(level["goodput_tokens_per_s"]),
            str(level["answered"]),
            str(level["refused"]),
            str(level["failed"]),
            f"{level['ttft_ms']['p50'] / 1e3:.1f} / {level['ttft_ms']['p99'] / 1e3:.1f}",
            " / ".join(f"{refusal_ms[q]:.0f}" for q in ("p50", "p99")) if refusal_ms else "",
            whole(sum(most for _, most, _ in level["memory_mib"].values())),
        ]

    head = [
        "load", "goodput, tokens/s", "answered", "refused", "failed", "first token p50 / p99, s",
        "refusal p50 / p99, ms", "gateway and coordinator, MiB",
    ]  # fmt: skip
    return f"""## Overload

`make bench-overload` sends requests of {options["prompt_len"]} prompt and {options["output_len"]} output tokens to a
service of the 135M Llama shape with {options["rows"]} rows and a queue of {options["queue"]}, one group of one thread.
Its capacity is measured first, {found["capacity_per_s"]:.1f} requests/s; then requests come as a Poisson process,
whatever became of those before, for {options["seconds"]:.0f} s at each rate. Goodput counts the tokens of whole answers
whose first token came within {options["ttft_s"]:.0f} s; the client shares the two cores.

{table(head, [row(level) for level in found["levels"]])}

At the highest load goodput is {percent(bars["goodput over the best"]["value"])} of the best, and memory
{bars["memory over the first level's"]["value"]:.2f} times that at the lowest.

![Goodput, times and memory by load](overload.png)"""


def scaling_section() -> str:
    """Groups that come and go under streams, with the plot."""
    found = read_json("scaling-llama-135m.json")
    options, streams = found["options"], found["streams"]
    long = [one for one in streams if one["name"].startswith("long")]
    seconds = [one["end_s"] - one["first_s"] for one in long]
    edges = [one["first_s"] - one["began_s"] for one in streams if one["name"].startswith("edge")]
    pause_s = max(one["longest_gap_s"] for one in long)
    return f"""## From no group to {options["groups"]} and back

`make bench-scaling` serves the 135M Llama shape with {options["rows"]} rows a group, from none to
{options["groups"]} groups. One stream of {options["long_tokens"]} tokens wakes the service; {options["rush"]} clients
bring the third group; {options["long"]} more long streams of {min(seconds):.0f} to {max(seconds):.0f} s go on while two
groups are taken down, which have {options["shutdown_timeout"]:.0f} s for their requests; the last group goes when
nothing is left, and requests come at the moment at which it goes. {len(streams)} streams, {found["failed"]} failed.
The longest pause of a long one, whose prompt and tokens were computed again, was {pause_s:.1f} s. Requests that met no
group had their first token after {min(edges):.0f} to {max(edges):.0f} s. Others took part of the two cores.

![Groups and streams over time](scaling.png)"""


P99_US = 200
"""The bar of a choice of a group."""


def cluster_section() -> str:
    """What one gateway and one Redis have to do for many groups."""
    routing, charges = read_json("routing.json"), read_json("charges.json")
    rows = []
    for groups in routing["options"]["groups"]:
        for adapter in ("none", "held", "missing"):
            found = [c for c in routing["choices"] if (c["groups"], c["adapter"]) == (groups, adapter)]
            p50, p99 = (max(c[name] for c in found) for name in ("p50_us", "p99_us"))
            rows.append([str(groups), adapter, f"{p50:.0f}", f"{p99:.0f}"])
    options, most = charges["options"], max(routing["options"]["groups"])
    worst = max(c["p99_us"] for c in routing["choices"] if c["groups"] == most)
    return f"""## Many groups

`make bench-routing` times the choice of a group in a gateway, with prompts of 100 tokens, and of 100,000 of which all
groups have KV (the slower is shown: the router reads no prompt), and with an adapter that one group has, or none.

{table(["groups", "adapter", "p50, µs", "p99, µs"], rows)}

The bar is a p99 of {P99_US} µs with {most} groups: it {"holds" if worst <= P99_US else "is missed"}. The index of all
has {routing["index"]["entries"]:,} entries in {routing["index"]["memory_mib"]:.0f} MiB.

Groups tell each other what each tenant's work cost, so that shares hold over the cluster.
`python -m benchmarks.service.charges` plays {options["groups"]} groups that each served
{whole(options["charged"])} tenants in a second: an exchange is {charges["bytes_per_exchange"] / 1e3:.0f} kB,
all together {charges["bytes_per_s"] / 1e6:.1f} MB/s, and Redis is busy for {percent(charges["redis_cpu_s_per_s"])} of
a core."""


def routes_section() -> str:
    """Routing policies on real groups, and the simulator beside them."""
    found, cost = read_json("real-routes.json"), read_json("route-cpu.json")
    options, services = found["options"], found["services"]
    shown = {
        "hit_rate": ("tokens found in KV", percent),
        "ttft_p50_s": ("first token p50, s", "{:.2f}".format),
        "ttft_p99_s": ("p99, s", "{:.2f}".format),
        "itl_p50_s": ("gap p50, s", "{:.3f}".format),
        "itl_p99_s": ("p99, s", "{:.3f}".format),
        "goodput": ("good requests/s", "{:.2f}".format),
    }
    rows = []
    for one in services:
        for kind, figures in (*(("real", run) for run in one["real"]), ("simulated", one["simulated"])):
            rows.append([one["policy"], kind, *(say(figures[name]) for name, (_, say) in shown.items())])

    def ratio(kind: str, name: str) -> float:
        first, other = (
            mean(
                figures[name]
                for one in services
                if one["policy"] == policy
                for figures in (one["real"] if kind == "real" else [one["simulated"]])
            )
            for policy in options["policies"][:2]
        )
        return float(first / other)

    real, simulated = (
        f"{ratio(kind, 'hit_rate'):.2f} times the tokens and {ratio(kind, 'ttft_p50_s'):.2f} of the time to the first "
        "token (p50)"
        for kind in ("real", "simulated")
    )
    return f"""## Routing policies on real groups

`make bench-simulated ARGS="--load {options["load"]} --policies {" ".join(options["policies"])} --rounds
{options["rounds"]} --runs {options["runs"]} --requests {options["requests"]} --rate {options["rate"]} --dtype
{options["dtype"]} --blocks {options["blocks"]}"`: {options["groups"]} groups of the 135M Llama shape on two cores with
AVX2, generated conversations, {options["rate"]} requests a second, a service for each line in turn; and the simulator,
with times of steps fitted to the same service's log of a load before.

{table(["policy", "", *(name for name, _ in shown.values())], rows)}

`joint` finds {real} of `least-tokens` there; the simulator says {simulated}. Bars: 1.6 and 0.85.

Routing by KV costs a gateway {median(cost["ratios"]):.3f} times the CPU per token of one that routes by load and
hears of no KV (`python -m benchmarks.service.route_cpu`; {min(cost["ratios"]):.3f} to {max(cost["ratios"]):.3f} in
{len(cost["ratios"])} pairs; the bar is 1.03)."""


def simulated_routes_section() -> str:
    """Routing policies in the simulator, on generated and recorded loads, and how long a large fleet takes."""
    rows = []
    files = ("", ""), ("-recorded-8", ", recorded"), ("-recorded-64", ", recorded")
    for name, kind in ((f"simulated-routes{end}.json", kind) for end, kind in files):
        for (load, groups), runs in _by_load(read_json(name)["runs"]).items():
            joint, least = runs["joint"], runs["least-tokens"]
            best = min(runs, key=lambda policy: runs[policy]["ttft_p50_s"])
            rows.append(
                [
                    f"{load}{kind}", str(groups), percent(joint["hit_rate"]), percent(least["hit_rate"]),
                    f"{1e3 * joint['ttft_p50_s']:.0f}", f"{1e3 * least['ttft_p50_s']:.0f}",
                    f"{1e3 * runs[best]['ttft_p50_s']:.0f} ({best})",
                ]
            )  # fmt: skip
    head = [
        "load", "groups", "joint finds", "least-tokens", "joint's p50, ms", "least-tokens", "best policy",
    ]  # fmt: skip
    share, fleet = read_json("simulated-routes.json")["options"]["load"], read_json("simulated-thousand.json")
    (large,) = fleet["runs"]
    figures = large["figures"]
    return f"""## Routing policies in the simulator

`make bench-simulated-routes`, and the same with `--loads trace --trace FILE` on recorded conversations: the service's
own classes on a virtual clock, at {share:g} of what the groups can compute without a prefix hit. Share of prompt
tokens found in KV, and median of the time to the first token:

{table(head, rows)}

Bars on conversations: 2.3 times the tokens of `least-tokens`, 0.8 of its p50; `joint` within 5 % of the best policy
everywhere. A fleet of {large["groups"]} groups with {whole(figures["requests"])} requests in
{figures["duration_s"] / 60:.1f} simulated minutes ({figures["requests"] / figures["duration_s"]:.0f} a second) takes
{figures["cpu_s"] / 60:.1f} minutes of one core. Time goes by requests: groups that are busy all the time take hours."""


def simulator_section() -> str:
    """The simulator beside three runs of a real service of four groups."""
    found = read_json("simulated.json")
    options, (service,) = found["options"], found["services"]
    rows = []
    for name in ("goodput", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "hit_rate"):
        real, simulated = [run[name] for run in service["real"]], service["simulated"][name]
        rows.append([name, f"{simulated:.3f}", span(real, 3), f"{simulated / mean(real):.2f}"])
    return f"""## The simulator beside a real service

`make bench-simulated ARGS="--requests {options["requests"]} --rate {options["rate"]:g} --runs {options["runs"]}"`:
{options["groups"]} groups of the 135M Llama shape on two cores of an AMD EPYC with AVX512, a generated trace, times
fitted to {service["fitted_steps"]} steps of a load before (mean error {percent(service["fit_error"])}):

{table(["", "simulated", f"{len(service['real'])} real runs", "simulated / real"], rows)}

Bars: goodput and medians within 15 %, the 99th percentile within 30 % or the spread of the real runs. With a third
of the requests to fit and to compare, or at the limit of the groups, it is further off (above)."""


def _by_load(runs: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """Returns the figures of each load and number of groups, by policy."""
    found: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    for one in runs:
        found.setdefault((one["load"], one["groups"]), {})[one["policy"]] = one["figures"]
    return found


def updates_section() -> str:
    """What a rolling update costs streams, before and now."""
    found = read_json("rolling-updates.json")

    def row(line: dict[str, Any]) -> list[str]:
        lasted = " / ".join(f"{seconds:.0f}" for seconds in line["seconds_min_p50_max"])
        ends = [str(line[end]) for end in ("ok", "refused", "failed", "cut")]
        return [line["kind"], line["code"], str(line["deploys"]), *ends, lasted, f"{line['longest_silence_s']:.0f}"]

    rows = [
        row(line | {"code": code})
        for code in ("before", "now")
        for line in found[code]
        if line.get("deploys") is not None
    ]
    head = [
        "what changes", "code", "deploys", "whole", "refused", "failed", "cut", "s, least / median / most",
        "longest silence, s",
    ]  # fmt: skip
    return f"""## Rolling updates

`make chaos` deploys another version of a service of two groups of the demo model, time after time, under 200 streams of
20 to 90 s: another argument, other code, another revision of the model (`tests/lab/test_rolling_updates.py`). The
machine was busy with other work, so that streams took longer than they should. Whole streams had all their tokens and
said what others of their prompt said. "Before" is the commit before decision 095.

{table(head, rows)}"""


def lost_nodes_section() -> str:
    """What streams notice of nodes that are lost or drained."""
    cases = matches(r"test_(\w+) (.*?)(?= tests?[/_]|$)", "lost-nodes.txt")
    rows = [[case.replace("_", " "), words.replace(" s the ", " s; the ")] for case, words in cases]
    return f"""## Lost nodes

`make lab`: nodes that are namespaces of one machine, two groups of the demo model, and what was seen of them
and of clients, on two cores beside other work. No stream failed, and each had the text that it has without that: 64
streams (`tests/lab/test_lost_nodes.py`), and 48 to 16 rows (`tests/lab/test_lost_coordinators.py`).

{table(["what happens", "seen"], rows)}"""


def load_clients_section() -> str:
    """The load client beside vLLM's, on a service that answers by the clock."""
    found = read_json("bench-client-paced.json")
    options, truth, names = found["options"], found["truth"], ("tandem", "vllm")
    runs = [run for load, by_client in found["runs"].items() if load != "idle_cpu_s" for run in by_client["tandem"]]
    rows = []
    for load, by_client in found["medians"].items():
        for figure, name in CLIENT_FIGURES.items():
            ours, theirs = (by_client[client][figure] for client in names)
            rows.append([load, name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}"])
    head = ["load", "median of", "`tandem bench serve`", "`vllm bench serve`", "ratio"]
    return f"""## Load clients

`make bench-client` runs `tandem bench serve` and the client of vLLM 0.33 with the same flags and seeds, so the same
prompts at the same times, in turns. Here both load a service that answers by the clock (`--paced`), the first token
after {truth["median_ttft_ms"]:.0f} ms and then one every {truth["median_tpot_ms"]:.0f} ms, since other work took up to
{percent(max(run["other_cpu"] for run in runs))} of the machine: medians of {options["pairs"]} pairs of
{options["num_prompts"]} requests.

{table(head, rows)}

CPU seconds are of a client's whole process; most of vLLM's are its imports. On a service that computes, with that other
work, times of both clients changed fivefold from run to run: no comparison there has been made on a quiet machine."""


def watched_section() -> str:
    """What it costs a gateway to be watched: lines, traces, scrapes."""
    found = read_json("observability.json")
    options, runs = found["options"], found["runs"]
    names = {"on": "all on / all off", "off": "all off / before there was any of it"}
    rows = [
        [names[name], f"{ratio['cpu_per_token']:.3f}", f"{ratio['tokens_per_s']:.3f}"]
        for name, ratio in found["ratios"].items()
    ]
    cpu_us = {name: median(1e6 * run["cpu_s"] / run["tokens"] for run in of) for name, of in runs.items()}
    shares = [run["other_cpu"] for of in runs.values() for run in of]
    return f"""## What being watched costs

`make bench-observability` streams chats of {options["tokens"]} tokens, {options["streams"]} at a time, from a gateway
over a fake engine, and counts the CPU time of its process. On: access lines, request lines, traces of one request in a
hundred over OTLP, and a scrape of `/metrics` every 15 s. Before: the commit before
[099](decisions/099-lines-about-requests.md),
in its own checkout. {options["pairs"]} runs of each, in turns of {options["rounds"]} rounds; ratios are medians of
those of a pair. Other work took at most {percent(max(shares))} of the machine. Aimed at: at most 1.02 and 1.005 of the
CPU time, at least 0.98 of the tokens a second.

{table(["compared", "CPU time per token", "tokens/s"], rows)}

A token took {cpu_us["on"]:.1f} µs with all on, {cpu_us["off"]:.1f} µs with all off and {cpu_us["against"]:.1f} µs
before. What is on costs a request, not a token, so shorter answers pay a larger share."""
