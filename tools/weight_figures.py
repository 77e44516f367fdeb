"""The sections of docs/performance.md about loading, quantized weights and experts."""

from typing import Any

from tools.result_files import NUMBER, found, percent, read_json, span, table, whole

LOADING_GOAL = 1.3
NAMES = {"bf16": "bf16", "int8": "`int8`", "w8a8": "`w8a8`"}
OWN = "tandem "
CODES = {"int8": "`int8`", "w8a8": "`w8a8`", "int4": "`int4`", "w4a8": "`w4a8`", "nf4": "NF4"}


def quantization_section() -> str:
    """How fast quantized weights are beside bf16, and what they cost in perplexity."""
    found = read_json("quantization.json")
    steps, scored, options = found["steps"], found["perplexity"], found["options"]
    cases = steps["cases"]

    def cells(words: str, case: dict[str, Any]) -> list[str]:
        ratios = [
            f"{case['bf16']['median_ms'] / case[name]['median_ms']:.2f} "
            f"({case['bf16']['best_ms'] / case[name]['best_ms']:.2f})"
            for name in ("int8", "w8a8")
        ]
        return [words, *(whole(case[name]["median_ms"]) for name in NAMES), *ratios, percent(case["other_cpu"])]

    sizes = steps["weight_bytes"]
    head = ["step", *(f"{name}, ms" for name in NAMES.values()), "times as fast: `int8`", "`w8a8`", "others' CPU"]
    text = [["dense", f"{scored['dense']:.3f}"], *([NAMES[name], f"{scored[name]:.3f}"] for name in ("int8", "w8a8"))]
    return f"""## Quantized weights

`make bench-quantization` builds the Qwen3-0.6B shape with random weights three times, in bf16
({sizes["bf16"] / 1e9:.2f} GB, the table of the embedding twice) and quantized ({sizes["int8"] / 1e9:.2f} GB, that table
in bf16 and as int8), and takes steps of each in turn, the head included, at {options["context"]} tokens of context.
Ratios are of medians, in parentheses of the best times.

{table(head, [cells(words, case) for words, case in cases.items()])}

`int8` is for decoding few rows, which is bound by reading weights; with many rows, and in prompts, it gains nothing
over bf16, and `w8a8` does. The last column is what other processes took of the machine meanwhile.

Perplexity of {scored["checkpoint"]}, a trained model of 260 thousand parameters, over {scored["tokens"]:,} tokens of
stories in windows of {options["window"]}:

{table(["weights", "perplexity"], text)}"""


def codes_section() -> str:
    """How fast weights of 4 bits are beside bf16 and int8, by the CPU time of one thread."""
    record = read_json("quantization-4bit.json")
    steps, options = record["steps"], record["options"]
    names = [name for name in CODES if name in steps["weight_bytes"]]

    def cells(words: str, case: dict[str, Any]) -> list[str]:
        ratios = [f"{case['bf16']['cpu_ms'] / case[name]['cpu_ms']:.2f}" for name in names]
        share = case["int4"].get("roofline_ms", 0) / case["int4"]["median_ms"]
        return [
            words,
            f"{case['bf16']['cpu_ms']:.1f}",
            *ratios,
            percent(share) if share else "-",
            percent(case["other_cpu"]),
        ]

    sizes = ", ".join(f"{CODES[name]} {steps['weight_bytes'][name] / 1e9:.2f} GB" for name in names)
    head = [
        "step",
        "bf16, ms",
        *(f"times as fast: {CODES[name]}" for name in names),
        "`int4` of the roofline",
        "others' CPU",
    ]
    return f"""## Weights of 4 bits

`make bench-quantization ARGS="--threads 1 --seconds 1.5"`: the same, in turns, with {options["threads"]} thread and
random weights: {sizes}. Those of 4 bits (by 128 inputs; NF4 by 64) have a head of int8. Ratios are of the medians of
CPU time.

{table(head, [cells(words, case) for words, case in steps["cases"].items()])}

Forms whose inputs keep their precision (`int8`, `int4`, NF4) are for few rows; `w8a8` and `w4a8` round inputs to a
byte and are ahead of bf16 at any number of rows. A decode of one row takes int4 to two thirds of the roofline. This run
is older than [huge pages for weights](decisions/110-a-kernel-for-codes.md).

CPUs with AVX2 and no VNNI have [tiles of their own](decisions/120-codes-without-vnni.md). `python -m
benchmarks.kernels.weight_forms`: the products of a layer of that shape alone, in turns, CPU time of one thread of an
AMD EPYC whose hypervisor hides AVX512, while other work took 92 to 95 % of the machine, caches included:

{table(["rows", "bf16, ms", *(f"times as fast: {name}" for name in CODES.values())], _without_vnni())}

NF4 takes two passes there and is for memory alone."""


def _without_vnni() -> list[list[str]]:
    """Rows of a table: a layer's products in bf16, and how many times as fast each form is."""
    forms = ", ".join(rf"{form} [\d.]+ ms \({NUMBER}\)" for form in CODES)
    pattern = rf"(\d+) rows: bf16 {NUMBER} ms \([\d.]+\), {forms}; other_cpu"
    return [list(row) for row in found(pattern, "weight-forms-avx2.txt")]


def beside_peers(record: Any) -> list[list[str]]:
    """Rows of a table: CPU time of each case by engine, and how many times as fast each form is as the best peer."""
    rows = []
    for words, case in record["cases"].items():
        cpu_ms = {name: own["cpu_ms"] for name, own in case["engines"].items()}
        ours = {name.removeprefix(OWN): ms for name, ms in cpu_ms.items() if name.startswith(OWN)}
        theirs = {name: ms for name, ms in cpu_ms.items() if not name.startswith(OWN)}
        times = [", ".join(f"{name} {ms:,.0f}" for name, ms in of.items()) for of in (ours, theirs)]
        ratios = ", ".join(f"{name} {min(theirs.values()) / ms:.2f}" for name, ms in ours.items())
        rows.append([words, *times, ratios, percent(case["other_cpu"])])
    return rows


def peers_section() -> str:
    """Quantized weights beside other engines."""
    found, served = read_json("quantization-peers.json"), read_json("quantization-vllm.json")
    options = found["options"]
    held = found["loaded"]["tandem int4"]["peak_bytes"] / 1e9
    most = found["memory"]["tandem int4"]["peak_bytes"] / 1e9
    head = ["step", "Tandem, ms", "peers, ms", "times as fast as the best peer", "others' CPU"]
    return f"""## Quantized weights beside other engines

`make bench-quantization PEERS="llama.cpp=PYTHON openvino=PYTHON"`: each engine in a process of its own with
{options["threads"]} thread and random weights of the Qwen3-0.6B shape; in turn each computes {options["steps"]} steps,
of requests with prompts of {options["context"]} tokens. A step is all that a token costs: scheduling, the model, taking
the largest logits. The body has 4 bits (Tandem's and OpenVINO's by groups of 128, llama.cpp's Q4_0 by 32), the head
bytes, KV 16 bits. llama.cpp and OpenVINO round the inputs of products to a byte by 32, `w4a8` does by row, and `int4`
does not. Other work took most of the machine, so milliseconds are CPU time, which with
one thread is what a step needs; waiting for memory that others read is in it.

{table(head, beside_peers(found))}

![CPU time of the best peer over Tandem's](quantization-peers.png)

At one row `int4` was to be 1.3 times as fast as the best peer, and is. At 8 rows it was to be 1.4 times: `w4a8`, which
rounds inputs as the peers do, is, and `int4` is not. Its products of bytes, two for each weight and row, take 41 ms at
the rate of a loop of nothing but these instructions (234 billion a second), and attention 27 ms. A prompt was
to be 1.1 times as fast: `w4a8` is, and `int4`, which multiplies twice as much, is not.

Loading `int4` takes {held:.2f} GB of memory at most, libraries included; after these runs the most was {most:.2f} GB,
with the KV of the requests. 1.2 GB and KV was to be.

Beside vLLM for CPUs, compiled, which has a checkpoint of compressed-tensors' W8A8 form, whose head is in bf16; `w8a8
file` is the same checkpoint, the others are made at load, the head too. The mixed workload is of
{served["options"]["mixed"]} requests with prompts of 16 to 512 and outputs of 16 to 256 tokens:

{table(head, beside_peers(served))}

`w8a8` was to be 1.3 times as fast in the mixed workload, and is, also on the same checkpoint. Prompts were to be 1.1
times as fast: those of `w8a8` are, and of `w4a8` not beside vLLM, which multiplies bytes without looking codes up."""


def loading_section() -> str:
    """How long loading takes beside reading the file."""
    found = read_json("loading.json")
    options, figures = found["options"], found["figures"]

    def cells(state: str) -> list[str]:
        of = figures[state]
        times = [f"{of[f'{name}_s']:.2f} ({of[f'{name}_cpu_s']:.2f})" for name in ("read", "load", "not ahead")]
        ratios = [f"{of[f'{name}_ratio']:.2f} ({of[f'{name}_least_ratio']:.2f})" for name in ("load", "not ahead")]
        return [state, *times, *ratios]

    def met(state: str) -> str:
        return f"{'met' if figures[state]['load_ratio'] <= LOADING_GOAL else 'missed'} {state}"

    head = ["page cache", "reading, s", "loading, s", "not ahead, s", "loading / reading", "not ahead / reading"]
    return f"""## Loading

`make bench-load` writes {found["file_bytes"] / 1e9:.2f} GB of random bf16 weights of the Qwen3-0.6B shape, and in turns
reads the file with one thread into a buffer that is used again, loads a rank's decoder from it, and loads one without
reading ahead. Cold, the file's pages are dropped from the page cache before each. Times are medians of
{options["turns"]} turns with {options["threads"]} threads (in parentheses CPU seconds); ratios are medians of the
turns' (in parentheses of the least times).

{table(head, [cells(state) for state in figures])}

The goal is {LOADING_GOAL}: by medians it is {met("cold")} and {met("warm")}. Loading writes every weight into new
memory, in the layout that is multiplied, and the table of the embedding twice. Writing the file's bytes into new memory
takes one thread {figures["warm"]["write_s"]:.2f} s ({figures["warm"]["write_cpu_s"]:.2f} of CPU), most of it the
kernel's to provide pages: a warm file's loading is bound by that, and takes
{figures["warm"]["load_roofline_ratio"]:.1f} times as long as reading and writing together. Other processes took
{percent(found["other_cpu"])} of the two cores meanwhile, which stretches what computes more than what waits for a disk:
the figures are of a busy machine on which times vary severalfold, and no gain of reading ahead can be told from
them."""


def experts_section() -> str:
    """How near one layer of experts is to the roofline, and what a loop over experts takes."""
    rows, touched = [], []
    for form in ("bf16", "int8"):
        for tokens, case in read_json(f"experts-{form}.json")["steps"].items():
            new, old = case["grouped"]["cpu_ms"], case["loop"]["cpu_ms"]
            used = sum(case["used"]) / len(case["used"])
            cells = [f"{NAMES[form]}, {tokens}", whole(used), f"{new:.2f}", f"{old:.2f}", f"{old / new:.2f}"]
            rows.append([*cells, percent(case["roofline_cpu_ms"] / new), percent(case["other_cpu"])])
            touched.append(case["touched"])
    head = ["weights, tokens", "experts used", "grouped, ms", "loop, ms", "loop / grouped", "of the roofline"]
    return f"""## Mixtures of experts

`make bench-moe` computes one layer of the Qwen3-30B-A3B shape (128 experts of 768, 8 for each token), routing included,
by grouped products and by the loop over the experts used that they replace, in turns. Other processes took most of
the machine, so milliseconds are CPU time over the two threads, for the layer as for the roofline: the bytes of the
experts used at the rate of a plain read, or the operations at that of a large bf16 product, whichever takes longer.

{table([*head, "others' CPU"], rows)}

A step touches the weights of the experts that it uses and no others: bytes of accessed pages, as the processor marks
them, over the bytes of those experts are {span(touched, 3)}."""


def quality_section() -> str:
    """What forms of weights and KV cost in perplexity and KL."""
    found = read_json("quality.json")
    options, rows = found["options"], found["rows"]
    dense = next(iter(rows.values()))["against"]["perplexity"]
    head = ["form", "perplexity", "KL, mean", "median", "99 % below", "same first choice"]

    def cells(name: str, row: dict[str, Any]) -> list[str]:
        beside = row["against"]
        figures = [f"{beside[key]:.3g}" for key in ("mean_kl", "median_kl", "p99_kl")]
        return [name, f"{row['perplexity']:.2f}", *figures, f"{beside['agreement']:.1%}"]

    return f"""## What forms of weights and KV cost

`make bench-quality` judges a trained model on {found["scored"]:,} tokens of {options["text"]}, in windows of
{options["window"]}, with `tandem eval`'s code: SmolLM2-135M-Instruct (`make real-model`), undone to float32, whose
perplexity there is {dense:.2f}. KL is from that, in nats a token; forms are computed in bf16, which is the first row.

{table(head, [cells(name, row) for name, row in rows.items()])}

"As stored" is the file's own Q4_1, served as codes. The model's weights lie on that grid of 4 bits in groups of 32,
which flatters no other row: `int4`, `w4a8` and the folders of `tandem quantize` have groups of 128, `nf4` of 64. There
weights are rounded a second time, and a model of 135 million parameters loses more than large ones do: compare rows
with each other, not with other tables. Those folders were calibrated on 2,048 tokens of the same novel, behind the
scored ones.

{methods_section()}"""


def methods_section() -> str:
    """What each method of `tandem quantize` costs the same model."""
    found = read_json("quality-methods.json")
    options, rows = found["options"], found["rows"]
    one = next(iter(rows.values()))
    head = ["`--method`", "perplexity", "KL, mean", "median", "99 % below", "same first choice", "MB", "CPU s"]

    def cells(name: str, row: dict[str, Any]) -> list[str]:
        figures = [f"{row[key]:.3g}" for key in ("mean_kl", "median_kl", "p99_kl")]
        size, seconds = f"{row['bytes'] / 1e6:.0f}", f"{row['cpu_s']:.0f}"
        return [name, f"{row['perplexity']:.2f}", *figures, f"{row['agreement']:.1%}", size, seconds]

    missing = "".join(f" `{name}` has no row yet." for name in options["only"] if name not in rows)
    return f"""`python -m benchmarks.quality.methods --text FILE` tries the methods of
[`tandem quantize`](serving/quantized.md#quantize-a-model-yourself) on that model: 4 bits in groups of 128 where no
number stands, W8A8 for smoothquant, all calibrated on the same {options["calib_tokens"]:,} tokens and judged on
{one["tokens"]:,} others, where the dense model's perplexity is {one["dense"]:.2f}; in float32, with the weights that
codes stand for.{missing}

{table(head, [cells(name, row) for name, row in rows.items()])}

{producers_section()}"""


def producers_section() -> str:
    """The same tokens judged in bf16: what is made at load, by `tandem quantize`, and by auto-round."""
    found = read_json("quality-producers.json")
    rows, auto = found["rows"], found["auto_round"]
    head = ["weights", "perplexity", "KL, mean", "99 % below", "same first choice"]
    names = {
        **{name: f"`--quantization {name}`" for name in ("w8a8", "int4")},
        **{name: f"`quantize --method {name}`" for name in ("rtn", "awq", "gptq", "smoothquant")},
        "bf16": "dense",
        "auto-round": f"auto-round {auto['version']}, {auto['iterations']} iterations",
    }

    def cells(name: str, row: dict[str, Any]) -> list[str]:
        beside = row["against"]
        kl = (f"{beside[key]:.3g}" for key in ("mean_kl", "p99_kl"))
        return [names[name], f"{row['perplexity']:.2f}", *kl, f"{beside['agreement']:.1%}"]

    return f"""The same tokens in bf16, by `make bench-quality` with those folders, and one that auto-round made of the
same {auto["calib_tokens"]:,} tokens (4 bits, groups of 128, without zeros, its `iters` of {auto["iterations"]},
{auto["cpu_s"]} CPU seconds of a core with AVX2). It tunes by gradients how each weight is rounded, which no method of
`tandem quantize` does, and is nearer the dense model than all of ours in that form. `smoothquant` is nearer than
`w8a8`, which rounds inputs as they are.

{table(head, [cells(name, row) for name, row in rows.items()])}"""
