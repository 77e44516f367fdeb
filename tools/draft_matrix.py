"""Writes docs/serving/drafts-tested.md: what each method of speculative decoding was compared with no drafts beside.

    python -m tools.draft_matrix

The cells follow from the cases of tests/parity/test_speculation.py (tests/support/draft_cases.py) and from what the
requests of each have. tests/unit/docs/test_draft_matrix.py holds the page up to date.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tandem.configs.options import DRAFT_METHODS
from tests.left_to import mark_of
from tests.support.draft_cases import CASES, EXACT, RESUMED, DraftCase

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving" / "drafts-tested.md"
FILE = "tests/parity/test_speculation.py"
TEST, RESUMING = "test_drafts_change_no_token", "test_a_stream_that_another_group_resumes"


METHODS: Final = tuple(DRAFT_METHODS)


class Row(NamedTuple):
    """What drafts are tried with: its name, and which cases do so."""

    name: str
    tries: Callable[[str, DraftCase], bool]
    test: str = TEST


def has(flag: str) -> Callable[[str, DraftCase], bool]:
    """Returns what tells cases with a flag."""
    return lambda _, case: flag in case.flags


REQUESTED: Final = {
    "adapters (LoRA)": ("lora_request",),
    "grammars": ("structured_outputs",),
    "log probabilities": ("logprobs", "prompt_logprobs"),
    "penalties": ("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "`n` of 3": ("n",),
}
"""What the requests of every case have at random, by their fields."""
ROWS: Final = (
    *(Row(name, lambda _, case: True) for name in REQUESTED),
    Row("prefix hits", lambda _, case: "found" in case.happens),
    Row("preemption", lambda _, case: "preempted" in case.happens),
    Row("swap: KV comes back from host memory", lambda _, case: "loaded" in case.happens),
    Row("KV comes back from files", has("kv_disk_path")),
    Row("drain and failover: another engine resumes", lambda name, _: name in RESUMED, RESUMING),
    Row("quantized weights (`--quantization int8`)", has("quantization")),
    Row("quantized KV (`--kv-cache-dtype int8`)", has("kv_cache_dtype")),
    Row("`-tp 2`", has("tensor_parallel_size")),
    Row("`-pp 2`", has("pipeline_parallel_size")),
    Row("bf16 with `--batch-invariant`, to the last bit", lambda _, case: EXACT.items() <= case.flags.items()),
)
WORDS: Final = """# What drafts are tested with

<!-- Written by tools/draft_matrix.py from tests/support/draft_cases.py. -->

[Drafts](speculative-decoding.md) change no text. A cell names a case in which that was compared with an engine without
drafts: tokens, texts, reasons of ends and log probabilities of the same requests, in float32 where nothing else is
named. `make parity` runs all of them, `make test` those in bold. What is not tested need not fail.

"""
REQUESTS: Final = """
The requests of each case are drawn at random, and have in any combination: an adapter (LoRA) or none, greedy choice
or temperatures 0.7 and 1, `top_p`, `min_p`, seeds, `n` of 1 or 3, presence, frequency and repetition penalties,
`logit_bias`, `bad_words`, `allowed_token_ids`, `min_tokens`, stop strings and stop tokens, `ignore_eos`,
`logprobs`, `prompt_logprobs`, a budget of thinking, and a grammar (a regular expression or a choice; then without
`allowed_token_ids` and `bad_words`, which might leave nothing). Some prompts repeat themselves and some come again.
`mtp` is tried on a small random DeepSeek-V3, all others on the demo model.

"""


def cell(method: str, row: Row) -> str:
    """Returns what a cell says: a case, of make test if there is one, or that it is not tested."""
    names = [name for name, case in CASES.items() if case.method == method and row.tries(name, case)]
    if not names:
        return "not tested"
    own = RESUMED if row.test == RESUMING else {name: case.parity for name, case in CASES.items()}
    late = {name: own[name] or mark_of(f"{FILE}::{row.test}[{name}]") is not None for name in names}
    first = min(names, key=lambda name: late[name])
    return first if late[first] else f"**{first}**"


def page() -> str:
    """Returns the page that there is now."""
    lines = [f"| | {' | '.join(f'`{method}`' for method in METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    lines += [f"| {row.name} | {' | '.join(cell(method, row) for method in METHODS)} |" for row in ROWS]
    tests = [f"- A case `NAME`: `{FILE}::{TEST}[NAME]`; of resumed requests `::{RESUMING}[NAME]`."]
    return WORDS + "\n".join(lines) + "\n" + REQUESTS + "\n".join(tests) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
