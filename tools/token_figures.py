"""The sections of docs/performance.md about tokens of a step: speculation, sampling and batching policies."""

import statistics
from typing import Any

from tools.result_files import found as matches
from tools.result_files import percent, read_json, span, table, whole


def speculation_section() -> str:
    """What n-gram drafts bring by acceptance, at one row and at several."""
    files = [read_json(f"speculation-llama-135m-{rows}.json") for rows in (1, 4)]

    def cells(outcome: dict[str, Any]) -> list[str]:
        speed_up, predicted = outcome["speed_up"], outcome["predicted"]
        return [
            percent(outcome["acceptance"]),
            f"{outcome['tokens_per_step']:.2f}",
            f"{statistics.median(speed_up):.2f} ({span(speed_up)})",
            "" if predicted is None else f"{predicted:.2f}",
        ]

    names = [outcome["name"] for outcome in files[0]["outcomes"]]
    by_file = [{outcome["name"]: cells(outcome) for outcome in file["outcomes"]} for file in files]
    pairs = list(zip(files, by_file, strict=True))
    rows = [[name, str(file["options"]["rows"]), *by[name]] for name in names for file, by in pairs]
    head = ["text", "rows", "accepted", "tokens a row and step", "times as fast (runs)", "predicted"]
    options = files[0]["options"]
    return f"""## Speculative decoding

`make bench-speculation` compares n-gram speculation (five drafts, lookups of two to four tokens) with none,
{options["repeats"]} pairs each in turn. The first two texts are the demo model's own. The others run on the 135M Llama
shape with random weights: it is made to write edits and extractive summaries of passages in its prompts; then drafts
are right with a given probability. Right drafts behind a wrong one are rejected too, so fewer are accepted. Predicted
is what the measured times of steps give for that acceptance, at least 1.

{table(head, rows)}

Where nothing is accepted, drafting switches itself off after some steps of each answer. Each run is one batch, over
when its last answer is: at four rows a draft that shortens one answer shows only if it shortens all.

{_checked_positions()}

{_drafts_of_a_model()}"""


def _checked_positions() -> str:
    """What a step costs that checks drafts, beside one without."""
    line = r"(\S+): (\d+) rows x (\d+) positions, context (\d+): .*?, ([\d.]+) times"
    ratios: dict[tuple[str, str, str], dict[str, str]] = {}
    for model, rows, count, context, ratio in matches(line, "positions.txt"):
        ratios.setdefault((model, rows, context), {})[count] = ratio
    counts = list(next(iter(ratios.values())))[1:]
    head = ["model", "rows", "context", *(f"{count} positions" for count in counts)]
    cells = [[*key, *(by_count[count] for count in counts)] for key, by_count in ratios.items()]
    return f"""A step that checks drafts reads weights and KV once for all of a row's positions. Its CPU time on one
thread, as times that of a step of one position (`python -m benchmarks.engine.decode_step --positions 1 2 3 5`, bf16):

{table(head, cells)}"""


DRAFTED = (
    ("grown, `draft_model`", "AVX512", "drafts-grown.json"),
    ("grown, `draft_model`", "AVX512", "drafts-grown-bf16.json"),
    ("grown, `draft_model`", "AVX2", "drafts-grown-avx2.json"),
    ("grown, `medusa`", "AVX2", "drafts-grown-medusa-avx2.json"),
    ("SmolLM2-135M, `eagle3`", "AVX512", "drafts-real.json"),
    ("SmolLM2-135M, `eagle3`", "AVX512", "drafts-real-bf16.json"),
)
"""Targets, CPUs and files of drafts that a model makes."""


def _drafts_of_a_model() -> str:
    """What drafts of distilled models and heads bring, by batch."""
    files = [(name, cpu, read_json(file)) for name, cpu, file in DRAFTED]
    rows = [
        [
            name,
            f"{found['options']['dtype']}, {cpu}",
            str(outcome["rows"]),
            percent(outcome["acceptance"]),
            f"{outcome['tokens_per_step']:.2f}",
            f"{statistics.median(outcome['speed_up']):.2f} ({span(outcome['speed_up'])})",
            f"{statistics.median(outcome['cpu_speed_up']):.2f}",
        ]
        for name, cpu, found in files
        for outcome in found["outcomes"]
    ]
    options = files[0][2]["options"]
    head = ["target", "type, CPU", "rows", "accepted", "tokens a row and step", "times as fast (runs)", "by CPU time"]
    return f"""### Drafts of a model

`make bench-drafts`, up to {options["drafts"]} drafts, greedy, prompts that distilling did not see, {options["threads"]}
thread, {options["repeats"]} or 3 pairs in turns, on two cores of an AMD EPYC: with AVX512 and products of bf16 pairs,
or with AVX2 alone. *grown*: the demo model in a body of 0.44 billion parameters with the same logits
([grown](serving/distilling.md#the-demo-model-grown): it takes a large model's time, and is none that anybody trained),
with a draft that `tandem distill` made for the demo, or its Medusa heads, made as wide. *SmolLM2-135M*: `make
real-model`, its weights undone to the type, with an EAGLE-3 head of
4,096 tokens that `tandem distill eagle` made of its own answers to 900 programming tasks; asked others of that kind.

{table(head, rows)}

Below: `python -m benchmarks.engine.draft_plot`, of the drafts that are right with a given probability and of these.

![Gain by accepted drafts, and by sequences at once](drafts.png)"""


def sampling_section() -> str:
    """What the fields of a request cost in a step."""
    found = read_json("sampling.json")
    options = found["options"]
    (rows, best_ms), *_ = found["best_ms"].items()
    greedy, step_ms = best_ms["greedy"], options["step_ms"]
    names = [name for name in best_ms if not name.startswith("all but")]
    lines = [
        [name, f"{best_ms[name]:.2f}", f"{best_ms[name] - greedy:+.2f}", f"{(best_ms[name] - greedy) / step_ms:+.1%}"]
        for name in names
    ]
    return f"""## Sampling

`make bench-sampling` times the sampling of a step of {rows} rows over a vocabulary of {options["vocab"]:,} tokens.
Every row has the field. The share is that of a decode step of the Qwen3-0.6B shape with as many rows, {step_ms:g} ms
in the same hour. All means all but `allowed_token_ids`, which leave the others little to do.
[Decision 069](decisions/069-gumbel-noise.md) has the rule for draws, and the one before it in turns.

{table(["fields", "ms", "more than greedy, ms", "share of a step"], lines)}"""


def structured_section() -> str:
    """What grammars cost: to compile, a mask, a step in which every row has one."""
    found = read_json("structured.json")
    options, schemas, step = found["options"], found["schemas"], found["step"]
    compiling, mask, seen = schemas["compile_ms"], schemas["mask_us"], schemas["instances"]
    rows = [
        ["compiling a schema, ms", f"{compiling['p50']:.1f}", f"{compiling['p99']:.0f}"],
        ["mask of a token, µs", whole(mask["p50"]), whole(mask["p99"])],
    ]
    valid = seen.get("valid accepted", 0) + seen.get("valid refused", 0)
    invalid = seen.get("invalid accepted", 0) + seen.get("invalid refused", 0)
    return f"""## Structured output

`make bench-structured` compiles {schemas["schemas"]} JSON schemas of MaskBench on one thread, over a vocabulary of
{options["vocab"]:,} tokens, and makes a mask ahead of each token of their valid instances. {schemas["compiled"]}
compile, as many as with llguidance alone; the others are refused. {seen.get("valid accepted", 0)} of {valid} valid
instances are accepted, and {seen.get("invalid refused", 0)} of {invalid} invalid ones refused.

{table(["one thread", "median", "99th percentile"], rows)}

A decode step of {options["batch"]} rows of the Qwen3-0.6B shape takes {step["step_ms"]["unmasked"]:.0f} ms without
masks and {step["ratio"]:.2f} times that with one in every row, in turns; sampling takes
{step["sampling_ms"]["unmasked"]:.1f} ms and {step["sampling_ms"]["masked"]:.1f} ms of it, so that masks take
{percent(step["added_share"])} of a step. These are the best times. Others took
{percent(step["other_cpu"])} of the machine."""


def batching_section() -> str:
    """What static and dynamic batches lose to continuous batching, with the plot."""
    found = read_json("batching-llama-135m.json")
    options, runs = found["options"], found["runs"]
    rows = [
        [
            policy,
            span((run["summary"]["tokens_per_s"] for run in of_policy), 0),
            f"{found['slots_per_token'][policy]:.2f}",
            f"{found['measured_loss'][policy]:.2f}",
        ]
        for policy, of_policy in runs.items()
    ]
    busy = max(run["other_cpu"] for of_policy in runs.values() for run in of_policy)
    head = ["policy", "output tokens/s", "rows × steps / tokens", "time over continuous"]
    return f"""## Batching policies

`make bench-batching` submits {options["jobs"]} requests of the mixed workload to engines of the 135M Llama shape with
{options["rows"]} rows, {options["repeats"]} times each in turn. In static batches rows idle until the longest answer is
done: longest output × rows over the sum of outputs, its mean over the batches, predicts {found["predicted_loss"]:.2f}
times the time of full rows, if a step takes the same time however many rows are busy. Others took at most
{percent(busy)} of the machine.

{table(head, rows)}

A step with fewer busy rows is shorter on a CPU, so that less time is lost than rows idle.

![Throughput by policy; loss of static batching](batching.png)"""
