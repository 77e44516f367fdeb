"""The sections of docs/performance.md on attention kernels. Used by performance.py; needs the standard library only."""

import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from tools.result_files import MissingFigureError, percent, read_json, read_text, span, table, whole

Figure = Mapping[str, Any]


def gpu_section() -> str:
    """Of one GPU: decode steps, prompts, and the tests that ran there."""
    run = read_json("gpu-steps-llama-8b.json")
    rows = []
    for line in run["decode"]:
        replayed, eager = (statistics.median(line[kind]) for kind in ("replayed", "eager"))
        peer = run["transformers_ms"].get(str(line["rows"]))
        rows.append(
            [
                str(line["rows"]),
                f"{replayed:.2f}",
                percent(line["roofline_ms"] / replayed),
                f"{eager:.2f}",
                whole(1e3 * line["rows"] / replayed),
                "" if peer is None else f"{peer:.2f}",
            ]
        )
    prompts, most = statistics.median(run["prompt_tokens_per_s"]), run["prompt_roofline_tokens_per_s"]
    now, before = (sum(map(int, re.findall(r"(\d+) passed", part))) for part in _gpu_tests())
    heads = ["rows", "replayed, ms", "of the roofline", "eager, ms", "tokens/s", "`transformers`, ms"]
    return f"""## One GPU

`make bench-gpu` on one {run["device"]}, torch {run["torch"]}, one rank of the Llama 3.1 8B shape in this process: bf16,
random weights, {run["options"]["context"]} tokens of context a row. A step is the median gap between a row's tokens
while all rows decode. Replayed steps were CUDA graphs of the layers; graphs of whole steps
([076](decisions/076-whole-step-graphs.md)) are younger. The peer is one `generate` call over as many equal rows. The
roofline reads the weights once and the rows' KV, at the {run["read_bytes_per_s"] / 1e12:.1f} TB/s measured beside it.

{table(heads, rows)}

{_h100()}

Prompts of 2,048 tokens took, on the first of these, {whole(prompts)} tokens/s, {percent(prompts / most)} of what the
products of the weights take at the {run["flop_per_s"] / 1e12:.0f} TFLOP/s of a large product. There are one or two
runs of each figure, and none beside vLLM; the peer's is the mean of {run["options"]["steps"] // 4} tokens. In
all these runs norms, rotations, activations and writes to the cache were torch operations of their own, 17 kernels a
layer with the rest. [Three Triton kernels](decisions/070-fused-gpu-kernels.md) have made them 10 since, and
attention [fetches keys ahead and cuts contexts evenly](decisions/072-decode-attention-by-work-list.md), and
[torch's flash kernel](decisions/074-prompts-by-flash.md) attends prompts of large steps: these are **not measured**.
{now} tests passed on that GPU with the attention kernel: texts of all families, and adapters, drafts, KV offload and
grammars with the demo model. {before} more, before there was the kernel, with torch's SDPA: drafts, offload
and streamed layers of every family, and `tandem serve` with a killed rank. Nothing is
measured on more than one GPU; that their ranks replay captured steps too, and that captures are made at the start, is
younger than these runs ([decision 071](decisions/071-tp-replays.md)).

{_compiled()}"""


def _compiled() -> str:
    """Variants that are compiled without a GPU, and how many of them spill."""
    printed = read_text("compiled-kernels.txt")
    ((variants, kernels, triton),) = re.findall(r"(\d+) variants of (\d+) kernels, Triton ([\d.]+),", printed)
    spilled = [int(size) for size in re.findall(r" for sm_\d+ spills (\d+) bytes", printed)]
    targets = ", ".join(re.findall(r"sm_(\d+), \d+ KiB", printed))
    spills = f"{len(spilled)} of them spill, {min(spilled)} to {max(spilled)} bytes" if spilled else "none spills"
    return f"""Without a GPU, Triton {triton} compiles {variants} variants of {kernels} kernels for sm_{targets}
(`python -m tools.check_kernels`); {spills}."""


def _h100() -> str:
    """Steps on another GPU, of this tree and of the one before decisions 042 to 049."""
    before, *after = (read_json(f"gpu-steps-h100-{name}.json") for name in ("before", "1", "2"))
    old, *new = ({line["rows"]: line["replayed"] for line in run["decode"]} for run in (before, *after))
    times = {rows: statistics.median(time for run in new for time in run[rows]) for rows in old}
    ratios = [statistics.median(old[rows]) / times[rows] for rows in old]
    shares = [line["roofline_ms"] / times[line["rows"]] for line in after[0]["decode"]]
    spelled = ", ".join(f"{time:.2f}" for time in times.values())
    (peer,) = after[0]["transformers_ms"].values()
    return f"""On one {before["device"]}, which reads {before["read_bytes_per_s"] / 1e12:.1f} TB/s, steps of
{", ".join(map(str, times))} rows took {spelled} ms, {span((100 * share for share in shares), 0)} % of the roofline
(`transformers`: {peer:.2f} ms for 32 rows). The tree before decisions 042 to 050, in turns with this one, took
{span(ratios, 3)} times as long. There {_h100_tests()} tests passed: texts of all families and of the demo model, and
Triton's kernels."""


def _h100_tests() -> int:
    """Return how many: the dots of the run that was ended before its summary, and the sums of the files after it."""
    texts, _, rest = read_text("gpu-tests-h100.txt").partition(" # the same files in parts")
    (dots,) = re.findall(r" (\.+) \[100%\]", texts)
    return len(dots) + sum(map(int, re.findall(r"(\d+) passed", rest.partition(" # tests/")[2])))


def _gpu_tests() -> tuple[str, str]:
    """What ran with the attention kernel, and before there was one."""
    now, _, before = read_text("gpu-tests.txt").partition("with attention by torch's SDPA")
    return now, before


def attention_section() -> str:
    figures = read_json("attention.json")["figures"]
    decodes = [each for each in figures if each["queries"] == 1]
    chunks = [each for each in figures if each["queries"] > 1]
    sizes = [each for each in decodes if (each["head_dim"], each["heads"]) != (128, 16)]
    usual = [each for each in chunks if each["head_dim"] == 128]
    others = [each for each in chunks if each["head_dim"] != 128]
    taken = span((100 * each["other_cpu"] for each in figures), 0)
    return f"""## Attention on CPU

`make bench-attention` calls the attention kernels in bf16 on one thread; times are CPU seconds of that thread, and
others took {taken} % of the machine meanwhile. The roofline of a decode is a plain read of the keys and values that are
seen, that of a prefill chunk a matmul of as many operations, in bf16 or float32, whichever is faster, both called in
turn with the kernel. Decodes of 16 heads of 128 over 8 KV heads:

{table(["rows", "context", "ms", "of the roofline"], _rooflines(decodes))}

Windows, soft-caps, ALiBi and sinks, each in turn with the plain case, and the torch operations that compute the same
where there is no compiler. A window reads and multiplies what it sees, here 512 positions:

{table(["step", "scores", "over plain", "of the roofline", "torch operations, over ours"], _variants(figures))}

Other head sizes and groups, 16 rows of 1,024 positions, by byte and in turn with heads of 128 in groups of two. Larger
groups multiply more for each byte, and are bound by that:

{table(["query heads", "KV heads", "head size", "of the roofline", "over heads of 128, by byte"], _sizes(sizes))}

Prefill chunks of 16 heads of 128 reach {_reached(usual)} % of the rate of a matmul, and of heads of 64, 80 and 256
{_reached(others)} %.

{_without_pairs(read_json("attention-without-bf16-pairs.json"))}"""


def _without_pairs(record: Figure) -> str:
    """The paragraph on CPUs that compute chunks of bf16 in float32, from a record of an imitation of one."""
    if record["multiplies_pairs"]:
        raise MissingFigureError("attention-without-bf16-pairs.json: is of a CPU that multiplies pairs of bf16")
    figures = record["figures"]
    chunks = [each for each in figures if each["queries"] > 1 and each["head_dim"] == 128]
    scores = [each for each in chunks if each["scores"] != "plain" and "window" not in each["scores"]]
    (whole_prompt,) = (each for each in chunks if each["queries"] == 2048 and each["scores"] == "plain")
    return f"""x86 CPUs without products of bf16 pairs compute chunks in float32. Here this CPU imitates one, with
`ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI` and a compiler that is told `-mno-avx512bf16`: 2,048 of 2,048 tokens take
{whole(whole_prompt["ms"])} ms, {whole_prompt["ms"] / whole_prompt["twin_ms"]:.2f} of the time of torch's SDPA; chunks
reach {_reached(chunks)} % of the rate of a float32 matmul, and soft-caps, ALiBi and sinks take
{span(each["of_plain"] for each in scores)} of the plain case."""


def latent_section() -> str:
    record = read_json("latent-attention.json")
    figures = record["figures"]
    decodes = [each for each in figures if each["queries"] == 1]
    chunks = [each for each in figures if each["queries"] > 1]
    taken = span((100 * each["other_cpu"] for each in figures), 0)
    head = ["heads", "rows", "context", "ms", "of the roofline", "bound by", "torch operations, over ours"]
    pairs = "multiplies pairs of bf16" if record["multiplies_pairs"] else "does not multiply pairs of bf16"
    return f"""## Latent attention on CPU

`make bench-latents` takes DeepSeek's widths with 16 heads, as in V2-Lite, and 128, as in V3, in bf16 on one thread of a
CPU that {pairs}; others took {taken} % of the machine. Products between latents and heads are included. The
roofline is the larger of a plain read of the latents and the heads' matrix, and a matmul, in bf16 or float32, whichever
is faster, of as many operations as the way that is taken needs, in turn with the kernel. Torch operations are what
decodes took before there was a kernel, and take where there is no compiler:

{table(head, _latents(decodes))}

Prefill chunks of one row, expanded or absorbed by what takes fewer multiplications, are matmuls and the chunk kernel:

{table(["heads", "tokens", "context", "ms", "of the roofline"], _latent_chunks(chunks))}"""


def _latents(decodes: Iterable[Figure]) -> list[list[str]]:
    return [
        [
            *(whole(each[key]) for key in ("heads", "rows", "context")),
            f"{each['ms']:.2f}",
            percent(each["of_roofline"]),
            {"read": "reading", "multiply": "multiplying"}[each["bound"]],
            f"{each['torch_ms'] / each['ms']:.1f}" if each["torch_ms"] else "–",
        ]
        for each in decodes
    ]


def _latent_chunks(chunks: Iterable[Figure]) -> list[list[str]]:
    return [
        [
            *(whole(each[key]) for key in ("heads", "queries", "context")),
            f"{each['ms']:.1f}",
            percent(each["of_roofline"]),
        ]
        for each in chunks
    ]


def _rooflines(decodes: Iterable[Figure]) -> list[list[str]]:
    return [
        [str(each["rows"]), whole(each["context"]), f"{each['ms']:.2f}", percent(each["of_roofline"])]
        for each in decodes
        if each["scores"] == "plain" and (each["head_dim"], each["heads"]) == (128, 16)
    ]


def _variants(figures: Iterable[Figure]) -> list[list[str]]:
    return [
        [
            f"{each['rows']} × {whole(each['queries'])} of {whole(each['context'])}",
            each["scores"],
            f"{each['of_plain']:.2f}",
            percent(each["of_roofline"]),
            f"{each['twin_ms'] / each['ms']:.1f}" if each["twin_ms"] else "–",
        ]
        for each in figures
        if each["scores"] != "plain"
    ]


def _sizes(figures: Iterable[Figure]) -> list[list[str]]:
    return [
        [
            *(str(each[key]) for key in ("heads", "kv_heads", "head_dim")),
            percent(each["of_roofline"]),
            f"{each['of_standard']:.2f}",
        ]
        for each in figures
    ]


def _reached(figures: Iterable[Figure]) -> str:
    return span((100 * each["of_roofline"] for each in figures), 0)
