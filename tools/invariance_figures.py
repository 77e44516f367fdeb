"""The section of docs/performance.md about batch invariance."""

from typing import Any

from tools.result_files import percent, read_json, span, table

MODELS = {"llama-135m": "135M Llama", "qwen3-0.6b": "Qwen3-0.6B"}


def invariance_section() -> str:
    """What --batch-invariant costs beside the usual mode."""
    records = {model: read_json(f"invariance-{model}.json") for model in MODELS}

    def cells(model: str, dtype: str, words: str, case: dict[str, Any]) -> list[str]:
        usual, invariant = case["usual"], case["invariant"]
        ratios = (invariant[time] / usual[time] for time in ("median_ms", "best_ms"))
        return [
            MODELS[model],
            dtype,
            words,
            *(f"{mode['median_ms']:,.1f}" for mode in (usual, invariant)),
            "{:.2f} ({:.2f})".format(*ratios),
        ]

    cases = [
        (model, dtype, words, case)
        for model, record in records.items()
        for dtype, found in record["figures"].items()
        for words, case in found.items()
    ]
    others = [case["other_cpu"] for *_, case in cases]
    head = ["shape", "dtype", "step", "usual, CPU ms", "invariant, CPU ms", "times the CPU time"]
    options = records["llama-135m"]["options"]
    return f"""## Batch invariance

`make bench-invariant` takes steps with and without `--batch-invariant` in turn, the head included, on
{options["threads"]} threads; decodes are at {options["context"]} tokens of context. Other processes took
{percent(min(others))} to {percent(max(others))} of the machine, so times are CPU time of all threads, and ratios are what
counts: of medians, in parentheses of the best times. Above 1 the invariant mode is slower.

{table(head, [cells(*case) for case in cases])}

Decode steps pass the same kernels in bf16; in float32 the invariant mode's own product reads weights with less overhead
than oneDNN's. In a prompt every token reads its context by itself, so that the cost grows with its length (from
{span([_ratio(cases, "prompt of 128"), _ratio(cases, "prompt of 2048")])} times in bf16 between 128 and 2,048 tokens)."""


def _ratio(cases: list[tuple[str, str, str, dict[str, Any]]], words: str) -> float:
    """Of medians, of a step of the first shape in bf16."""
    case = next(case for _, dtype, name, case in cases if name == words and dtype == "bfloat16")
    return float(case["invariant"]["median_ms"] / case["usual"]["median_ms"])
