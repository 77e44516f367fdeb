"""The section of docs/performance.md about batch invariance."""

from typing import Any

from tools.result_files import percent, read_json, table

FILE = "invariance-llama-135m.json"


def invariance_section() -> str:
    """What --batch-invariant costs beside the usual mode."""
    record = read_json(FILE)
    cases = [(dtype, words, case) for dtype, found in record["figures"].items() for words, case in found.items()]

    def cells(dtype: str, words: str, case: dict[str, Any]) -> list[str]:
        usual, invariant = case["usual"], case["invariant"]
        ratios = (invariant[time] / usual[time] for time in ("median_ms", "best_ms"))
        times = (f"{mode['median_ms']:,.1f}" for mode in (usual, invariant))
        return [dtype, words, *times, "{:.2f} ({:.2f})".format(*ratios)]

    others = [case["other_cpu"] for *_, case in cases]
    head = ["dtype", "step", "usual, CPU ms", "invariant, CPU ms", "times the CPU time"]
    options = record["options"]
    return f"""## Batch invariance

`make bench-invariant` takes steps of the 135M Llama shape with and without `--batch-invariant` in turn, the head
included, on {options["threads"]} threads; decodes are at {options["context"]} tokens of context. Other processes took
{percent(min(others))} to {percent(max(others))} of the machine, so times are CPU time of all threads, and ratios
are what counts: of medians, in parentheses of the best times. Above 1 the invariant mode is slower.

{table(head, [cells(*case) for case in cases])}

Decode steps pass the same kernels in bf16; in float32 the invariant mode has a product of its own in place of oneDNN's.
In a prompt every token reads its context by itself, so that the cost grows with the prompt's length."""
