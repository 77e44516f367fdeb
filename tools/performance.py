"""Writes docs/performance.md from the raw benchmark output in benchmarks/results/latest.

    make performance

Every figure of the page is read from a file there, so replacing a file and running this is all that an update takes.
JSON is read as it is; lines of printed output are found by pattern, and a missing line is an error.
Needs the standard library only.
"""

import statistics
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from tools import result_files
from tools.invariance_figures import invariance_section
from tools.kernel_figures import attention_section, gpu_section, latent_section
from tools.result_files import (
    NUMBER,
    ROOT,
    MissingFigureError,
    Table,
    found,
    one,
    percent,
    read_json,
    span,
    table,
    whole,
)
from tools.service_figures import (
    cluster_section,
    load_clients_section,
    lost_nodes_section,
    overload_section,
    routes_section,
    scaling_section,
    simulated_routes_section,
    simulator_section,
    updates_section,
    watched_section,
)
from tools.token_figures import batching_section, sampling_section, speculation_section, structured_section
from tools.turn_figures import turns_section
from tools.weight_figures import (
    codes_section,
    experts_section,
    loading_section,
    peers_section,
    quality_section,
    quantization_section,
)

PAGE = ROOT / "docs" / "performance.md"
SHAPES = {"qwen3-0.6b": "Qwen3-0.6B shape", "llama-135m": "135M Llama shape", "demo": "demo model (2.4M)"}
ROOFLINE = "(?:floor|roofline)"  # of older and newer outputs; so below with run and eager
RATIO = r"(?: \([\d.]+\))?"
ZIPF_LINE = (
    rf"(\d+) adapters, room for 8: TTFT ms(?:, and times the first line's:)? p50 (\d+){RATIO} p90 \d+{RATIO} "
    rf"p99 (\d+){RATIO}; (\d+) loads"
)
"""Of measured lines, with and without the ratios of newer outputs, but not of simulated ones."""


# ---- offline and HTTP ----


class Offline(NamedTuple):
    """One throughput run: medians in tokens/s."""

    ours: float
    roofline: float
    peer: float


def offline(model: str) -> Offline:
    if (result_files.LATEST / f"throughput-{model}.json").exists():
        run = read_json(f"throughput-{model}.json")
        return Offline(
            statistics.median(repeat["tokens_per_s"] for repeat in run["ours"]),
            run.get("roofline_tokens_per_s") or run["floor_tokens_per_s"],
            statistics.median(run["transformers_sequential_tokens_per_s"]),
        )
    name = f"throughput-{model}.txt"
    return Offline(
        statistics.median(float(rate) for (rate,) in found(rf"tandem offline \[\d\] {NUMBER} tok/s", name)),
        float(one(rf"{ROOFLINE} [\d.]+ s = (\d+) tok/s", name)[0]),
        statistics.median(float(rate) for (rate,) in found(rf"transformers, sequential \[\d\] {NUMBER} tok/s", name)),
    )


def http(model: str) -> tuple[float, float]:
    """Median tokens/s through the engine in process and over HTTP, in turns in one run."""
    if (result_files.LATEST / f"serve-{model}.json").exists():
        run = read_json(f"serve-{model}.json")
        sides = [[repeat["tokens_per_s"] for repeat in run[side]] for side in ("offline", "http")]
    else:
        name = f"serve-{model}.txt"
        sides = [
            [float(rate) for (rate,) in found(rf"{side} \[\d\] {NUMBER} tok/s", name)] for side in ("offline", "http")
        ]
    return statistics.median(sides[0]), statistics.median(sides[1])


def throughput_section() -> str:
    rows = []
    for model in ("qwen3-0.6b", "llama-135m"):
        run = offline(model)
        rows.append(
            [
                SHAPES[model],
                whole(run.ours),
                percent(run.ours / run.roofline),
                f"{run.peer:.1f}",
                f"{run.ours / run.peer:.1f}×",
            ]
        )
    served = []
    for model in ("qwen3-0.6b", "llama-135m", "demo"):
        inside, over_http = http(model)
        served.append([SHAPES[model], whole(inside), whole(over_http), f"{over_http / inside:.2f}"])
    waste = read_json("serve-demo.json")
    wasted = f"{waste['http_kv_waste']:.1%} over HTTP, {waste['offline_kv_waste']:.1%} in process"
    return f"""## Throughput

The workload is 32 requests with prompts of 16 to 512 and outputs of 16 to 256 tokens, at most 16 at a time. The peer is
`transformers` with one `generate` call per request, in the same run.

{table(["offline (`make bench-engine`)", "tokens/s", "of the roofline", "`transformers`", "ratio"], rows)}

The same requests run over HTTP and in process, alternating. The client shares the two cores.

{table(["served (`make bench-serve`)", "in process, tokens/s", "over HTTP, tokens/s", "HTTP / in process"], served)}

HTTP costs little where a step takes tens of milliseconds. The demo model's steps take about two, so there the
gateway and
the engine compete for the two cores.

`make bench-serve` also prints the KV waste of both sides: the share of allocated KV slots that hold no token, averaged
over time. A slot has room for one token; allocated are all slots of the blocks that running sequences use, and a slot
holds a token once a plan that computes it has been sent. A prompt takes blocks chunk by chunk, so what is empty is the
end of each sequence's last block, half a block on average: {wasted} for the demo model."""


# ---- start and idle ----


def startup_section() -> str:
    name = "startup.txt"
    (first_answer,) = one(rf"first answer after {NUMBER} s", name)
    ours = found(rf"│ ours │ │ {NUMBER} │ │", name)[0][0]
    totals = found(r"│ total │ │ ([\d.]+) │ ([\d.]+) │", name)
    if len(totals) != 2:
        raise MissingFigureError(f"{name}: totals of the service and of an empty Serve application")
    (all_cpu, all_mib), (empty_cpu, empty_mib) = totals
    return f"""## Start and idle cost

`make bench-startup` starts the demo model, one group with one rank. The first answer came after {first_answer} s, with
CPU kernels compiled by an earlier start. Then nothing is sent for a minute:

{
        table(
            ["idle", "% of one core", "memory, MiB"],
            [
                ["Tandem's processes", ours, ""],
                ["Tandem and Ray together", all_cpu, all_mib],
                ["an empty Serve application, same run", empty_cpu, empty_mib],
            ],
        )
    }"""


# ---- KV offload ----


def trace_rows(name: str, names: dict[str, str]) -> Table:
    """One row per set of tiers: TTFT and tokens that were computed twice."""
    results = {result["name"]: result for result in read_json(name)["trace"]["results"]}
    return [
        [
            shown,
            whole(results[key]["summary"]["ttft_ms"]["p50"]),
            whole(results[key]["summary"]["ttft_ms"]["p99"]),
            whole(results[key]["recomputed"]),
        ]
        for key, shown in names.items()
    ]


def bins_rows(name: str, keys: Sequence[str]) -> Table:
    return [
        [row["known"].replace("+", " and more"), str(row["turns"]), *(whole(row["p50_ms"][key]) for key in keys)]
        for row in read_json(name)["trace"]["ttft_by_known_tokens"]
    ]


def returning_row(threads: int) -> Sequence[str]:
    run = read_json(f"return-{threads}-thread{'s' if threads > 1 else ''}.json")["return"]
    known, fresh = (statistics.median(turn["ttft_s"] for turn in run[key]) * 1e3 for key in ("returning", "fresh"))
    return [str(threads), whole(fresh), whole(known), f"{fresh / known:.1f}×"]


def offload_section() -> str:
    tiers = {"recompute": "device only", "host": "host memory", "host+prefetch": "host memory, prefetch (default)"}
    busy = {**tiers, "host+prefetch+disk": "small host memory and disk, prefetch"}
    head = ["KV tiers", "TTFT p50, ms", "TTFT p99, ms", "prompt tokens computed again"]
    slower = read_json("trace-load-0.6.json")["trace"]["prefetch_slower_at"]
    bins = (
        f"was slower than device only at {', '.join(slower)} tokens" if slower else "was never slower than device only"
    )
    host = one(r"TTFT p50 ms │ (\d+) │", "trace-load-1.0-host.txt")[0]
    prefetch = one(r"TTFT p50 ms │ (\d+) │", "trace-load-1.0-prefetch.txt")[0]
    copies = [
        [whole(float(prefix)), known, whole(float(fresh)), f"{ratio}×"]
        for prefix, known, fresh, ratio in found(
            rf"│ (\d+) │ {NUMBER} │ [\d.]+ │ [\d.]+ │ [\d.]+ │ {NUMBER} │ [\d.]+ │ {NUMBER} │ [\d.]+ │ \d+/\d+ │",
            "crossover.txt",
        )
    ]
    turn_head = ["compute threads", "all 1,040 computed, TTFT ms", "from host memory, TTFT ms", "ratio"]
    (slower_at,) = one(r"crossover(?: at \d+ tokens)?; host is (.*? slower|slower at [\d, ]+);", "crossover.txt")
    return f"""## Multi-turn conversations and KV offload

`make bench-multiturn` replays a conversation trace. Here it is 200 turns of 69 conversations from the Mooncake trace
(`--trace`; it is not part of this repository, and without the option a generated trace is replayed) with the 135M Llama
shape. The KV of all prompts is 4 times what the device holds. At 60 % of the capacity:

{table(head, trace_rows("trace-load-0.6.json", tiers))}

Median TTFT in ms by the number of prompt tokens that earlier turns had computed. The default {bins}:

{table(["cached prefix, tokens", "turns", *tiers.values()], bins_rows("trace-load-0.6.json", tuple(tiers)))}

At full capacity the queue never empties and hides most of the gain:

{table(head, trace_rows("trace-load-1.0.json", busy))}

That run is older than the rule that prefetch starts only for requests of the next step. Two later runs, one after the
other, had a median TTFT of {whole(float(host))} ms with host memory and {whole(float(prefetch))} ms with prefetch,
while
memory bandwidth changed between them.

One turn over HTTP (Qwen3-0.6B shape) whose first 1,024 tokens are in host memory and 16 are new:

{table(turn_head, [returning_row(1), returning_row(2)])}

In an idle engine, time to the first token by the length of the prefix that the host holds, plus 16 new tokens. The
engine
chooses between copying and computing itself; with the prefix it was {slower_at} than computing everything. This run
is older than the
faster attention for short prefill chunks.

{table(["prefix, tokens", "prefix in host memory, ms", "all computed, ms", "ratio"], copies)}"""


# ---- kernels and steps ----


def decode_section() -> str:
    replay: dict[str, float] = {}
    eager: dict[str, float] = {}
    for rows, median, _, is_eager in found(
        rf"(\d+) rows x 1 tokens, context 300: median {NUMBER} ms, best {NUMBER} ms,.*?KV bfloat16"
        r"(?:, replay)?(, (?:run|eager))?",
        "decode-step.txt",
    ):
        (eager if is_eager else replay)[rows] = float(median)
    steps = [
        [rows, f"{eager[rows]:.1f}", f"{replay[rows]:.1f}", f"{replay[rows] / eager[rows]:.2f}"] for rows in replay
    ]
    gemm, by_row, by_row_avx2 = map(_products, ("skinny-gemm.txt", "row-gemm.txt", "row-gemm-avx2.txt"))
    head = ["rows", "oneDNN, ms", "ours, ms", "ratio", "read bandwidth, GB/s"]
    return f"""## Decode steps on CPU

One decode step of the Qwen3-0.6B shape at a context of 300 tokens. Replay calls the kernels of a captured step again
instead of running the Python between them; the two alternate call by call
(`python -m benchmarks.engine.decode_step --eager --batch 1 4 16 32`).

{table(["rows", "eager, ms", "replay (default), ms", "ratio"], steps)}

Quantized KV (`--kv-cache-dtype`) stores a token in 0.52 of its bytes in bf16. This run is older than replay; in
brackets is
the ratio to bf16:

{table(["rows", "context", "bf16, ms", "int8, ms", "fp8, ms"], _quantized_steps())}

All weight products of a decode step, by our skinny GEMM kernel and by oneDNN in turn. The bandwidth that the machine
had
during each line decides how much there is to gain:

{table(head, gemm)}

x86 CPUs without products of bf16 pairs use the row GEMM. This is the Llama 135M shape on two cores of an Intel Xeon
with AVX512, of which other processes took a third, before more than six rows were widened once
([decision 003](decisions/003-cpu-kernels.md)):

{table(head, by_row)}

The same on a CPU without AVX512, which an AMD EPYC imitates (`TANDEM_CPU_ISA=avx2`), beside torch, which multiplied
there before; CPU time of one thread, on a machine that others kept busy:

{table(["rows", "torch, ms", *head[2:]], by_row_avx2)}"""


def _quantized_steps() -> list[list[str]]:
    dtypes: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for rows, context, median, dtype, ratio in found(
        rf"(\d+) rows x 1 tokens, context (\d+): median {NUMBER} ms,.*?KV (\w+) {NUMBER}x", "decode-kv-dtype.txt"
    ):
        dtypes.setdefault((rows, context), {})[dtype] = (median, ratio)
    return [
        [
            rows,
            whole(float(context)),
            by["bfloat16"][0],
            *(f"{by[key][0]} ({by[key][1]})" for key in ("int8", "float8_e4m3fn")),
        ]
        for (rows, context), by in dtypes.items()
    ]


def _products(file: str) -> list[list[str]]:
    """By oneDNN or torch and by a kernel of ours."""
    pattern = (
        rf"(\d+) rows: (?:oneDNN|torch) +{NUMBER} ms, kernel +{NUMBER} ms \({NUMBER} of it\), "
        rf"read +[\d.]+ ms \({NUMBER} GB/s\)"
    )
    return [[rows, others, kernel, ratio, rate] for rows, others, kernel, ratio, rate in found(pattern, file)]


def weights_section() -> str:
    lines = found(
        rf"(\d+)% on the device, +(\d+) stream \(inline\) batch (\d+) {NUMBER} tok/s, step {NUMBER} ms "
        rf"resident {NUMBER} ms copies {NUMBER} ms .*?= {NUMBER} \(reads {NUMBER}, .*?of both {NUMBER}",
        "weight-stream.txt",
    )
    rows = [
        [f"{share} %", layers, batch, step, percent(float(roofline)), both if int(layers) else "–", reads]
        for share, layers, batch, _, step, _, _, roofline, reads, both in lines
    ]
    head = ["layers on the device", "streaming", "batch", "step, ms"]
    streams = [float(line[9]) for line in lines if int(line[1])]
    single = [100 * float(line[7]) for line in lines if line[2] == "1"]
    full = [100 * float(line[7]) for line in lines if line[2] != "1"]
    return f"""## Weights larger than the device

`make bench-weight-stream` decodes with the Qwen3-0.6B shape while a part of the layers streams from host memory. On
a CPU
both memories are one, so this shows the cost of the mechanism and saves nothing. With layers streaming, a step is
{span(streams)} times as fast as computing and copying one after the other. Batch 1 reaches {span(single, 0)} % of the
roofline (bytes over measured bandwidth); above 100 % a part was still in the processor's cache. Batch 16 reaches
{span(full, 0)} %, and is bound by computing where bandwidth is high.

{table([*head, "of the roofline", "over compute then copy", "read bandwidth, GB/s"], rows)}"""


def lora_section() -> str:
    speed = [
        [active, f"{rank} on {'all linears' if modules == 'all' else 'q and v'}", batch, ratio, predicted]
        for batch, active, rank, modules, ratio, predicted in found(
            rf"batch +(\d+), +(\d+) adapters of rank +(\d+) on (q, v|all) *: .*?: {NUMBER} of base; "
            rf"bytes predict {NUMBER}",
            "lora-speed.txt",
        )
    ]
    (enabled,) = one(rf"no adapter active: {NUMBER} of an engine without", "lora-enabled.txt")
    memory = read_json("lora-memory.json")["memory"]
    traffic = [[adapters, p50, p99, loads] for adapters, p50, p99, loads in found(ZIPF_LINE, "lora-zipf-peer.txt")]
    peer = one(rf"16 requests, 16 adapters: {NUMBER} tok/s; .*?: {NUMBER} tok/s: {NUMBER}x", "lora-zipf-peer.txt")
    kernels = [
        [f"{rows} rows, {adapters} adapters, rank {rank} on {modules}", mib, roofline, ours, twin]
        for rows, adapters, rank, modules, roofline, mib, ours, twin in found(
            rf"(\d+) rows, +(\d+) adapters, rank +(\d+) on (q and v|all linears) *: {ROOFLINE} {NUMBER} ms "
            rf"\( *{NUMBER} MiB\) CpuLora {NUMBER} ms .*?TorchLora {NUMBER} ms",
            "lora-kernels.txt",
        )
    ]
    return f"""## LoRA adapters

`make bench-lora` measures what adapters cost. Decode speed over that of the base model, Qwen3-0.6B shape, every row
with
one of the active adapters; the last column is the ratio that the additional bytes alone would give:

{table(["active adapters", "rank", "batch", "of base", "bytes predict"], speed)}

An engine with `--enable-lora` and no active adapter ran at {float(enabled):.2f} of one without.

Adapter memory follows the true rank. A GiB holds {whole(memory["per_gib"]["rank 8 on q, v"])} adapters of rank 8 on
q and v,
or {whole(memory["per_gib"]["rank 16 on all linears"])} of rank 16 on all linears; slots padded to rank 64 would hold
{whole(memory["padded_slots_per_gib"])}.

With room for 8 adapters on the device, requests draw from more of them (Zipf, 135M Llama shape, half the capacity):

{table(["adapters in use", "TTFT p50, ms", "TTFT p99, ms", "loads"], traffic)}

16 requests for 16 adapters ran at {peer[0]} tokens/s, and at {peer[1]} in `transformers` with `peft`, which switches
adapters
between requests ({peer[2]}×).

The grouped LoRA kernels by themselves, beside their torch twin (`python -m benchmarks.kernels.lora_kernels --twin`):

{table(["decode step", "adapter MiB", "roofline, ms", "kernel, ms", "torch twin, ms"], kernels)}"""


HEAD = """<!-- Written by tools/performance.py from benchmarks/results/latest. Run `make performance`; do not edit. -->

# Performance

Every figure here comes from a benchmark in this repository; the raw output, its date, commit and command are in
`benchmarks/results/latest`.

Runs used two cores of an AMD CPU with AVX512-BF16, where a section does not name another machine, and bf16 with random
weights. Other processes took at most 2 % of the machine unless a section says otherwise.
The machine reads memory at 40 or 70 GB/s, for minutes at a time, so absolute figures vary by a third. Compare within
one table: its runs alternate or follow each other. The roofline is the time that the bytes and operations of a run need
at the bandwidth and matmul rate measured beside it."""


def render() -> str:
    sections = [
        throughput_section(),
        gpu_section(),
        startup_section(),
        speculation_section(),
        sampling_section(),
        structured_section(),
        batching_section(),
        overload_section(),
        scaling_section(),
        cluster_section(),
        routes_section(),
        simulator_section(),
        simulated_routes_section(),
        updates_section(),
        lost_nodes_section(),
        load_clients_section(),
        watched_section(),
        offload_section(),
        decode_section(),
        attention_section(),
        latent_section(),
        loading_section(),
        quantization_section(),
        codes_section(),
        peers_section(),
        quality_section(),
        experts_section(),
        invariance_section(),
        weights_section(),
        lora_section(),
        turns_section(),
    ]
    blocks = "\n\n".join([HEAD, *sections]).split("\n\n")
    return "\n\n".join(block if block[0] in "#|<!" else filled(block) for block in blocks) + "\n"


def filled(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
