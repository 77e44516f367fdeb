"""Writes the table of quantized weights and what they are served with, in docs/serving/quantized.md.

    python -m tools.quantized_matrix

tests/unit/docs/test_quantized_matrix.py holds the page up to date, and each cell by the test that it names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving" / "quantized.md"
BEGIN, END = "<!-- Written by tools/quantized_matrix.py. -->\n", "<!-- The end of what it writes. -->\n"
MADE, INT8 = "test_made_at_load", "test_quantized_logits"
FORMS, INVARIANT = "test_quantized_forms", "test_batch_invariance"
COLUMNS: Final = (
    "-tp",
    "-pp",
    "experts whole",
    "adapters",
    "drafts",
    "streamed layers",
    "KV tiers",
    "--batch-invariant",
)


class Cell(NamedTuple):
    """The test of tests/parity/ that tries a form with what a column names. refused: it shows the refusal."""

    file: str
    test: str
    refused: bool = False


RANKS, TOKENS = (
    Cell(MADE, "test_ranks_equal_one_rank"),
    Cell(MADE, "test_drafts_tiers_and_streamed_layers_change_no_token"),
)
ADAPTERS, INT8_ADAPTERS = (Cell(file, "test_adapters_are_added_to_rounded_weights") for file in (MADE, INT8))
ALONE, REFUSED = Cell(MADE, "test_batch_invariant_tokens"), Cell(MADE, "test_batch_invariance_refuses_fp8", True)
CROWDS = Cell(INVARIANT, "test_ranks_and_adapters_among_other_crowds")
STORED_RANKS, STORED_ADAPTERS = Cell(FORMS, "test_ranks"), Cell(FORMS, "test_adapters")
STORED_EXPERTS, STORED_TOKENS = Cell(FORMS, "test_whole_experts"), Cell(FORMS, "test_drafts_streamed_layers_and_tiers")
STORED_ALONE = Cell(FORMS, "test_batch_invariant")
STORED = (STORED_RANKS, STORED_RANKS, STORED_EXPERTS, STORED_ADAPTERS, STORED_TOKENS, STORED_TOKENS, STORED_TOKENS)
BYTES = (RANKS, RANKS, RANKS, INT8_ADAPTERS, TOKENS, TOKENS, TOKENS, CROWDS)
CODES = (RANKS, RANKS, RANKS, ADAPTERS, TOKENS, TOKENS, TOKENS)
ROWS: Final[Mapping[str, tuple[Cell, ...]]] = {
    "int8": BYTES,
    "w8a8": BYTES,
    "int4": (*CODES, ALONE),
    "w4a8": (*CODES, ALONE),
    "nf4": (*CODES, ALONE),
    "fp8": (*CODES, REFUSED),
    **dict.fromkeys(("gptq", "awq", "auto-round", "ct int4", "ct w8a8", "ct nvfp4"), (*STORED, STORED_ALONE)),
    **dict.fromkeys(("fp8 blocks", "fbgemm_fp8"), (*STORED, Cell(FORMS, "test_batch_invariance_refuses_fp8", True))),
    **dict.fromkeys(("modelopt", "bnb nf4", "bnb int8", "mxfp4", "gguf"), (*STORED, STORED_ALONE)),
}
"""Forms, and a cell for each column: those of AT_LOAD, then those of checkpoints (test_quantized_forms.FORMS)."""


def table() -> str:
    """Returns the table, and below it the tests that its letters stand for."""
    cells = list(dict.fromkeys(cell for row in ROWS.values() for cell in row))
    letters = {cell: chr(ord("a") + place) for place, cell in enumerate(cells)}
    lines = [f"| | {' | '.join(f'`{name}`' if name[0] == '-' else name for name in COLUMNS)} |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for form, row in ROWS.items():
        shown = (f"{'refused' if cell.refused else '✓'} {letters[cell]}" for cell in row)
        lines.append(f"| `{form}` | {' | '.join(shown)} |")
    lines.append("")
    lines += [f"- {letter}: `tests/parity/{cell.file}.py::{cell.test}`" for cell, letter in letters.items()]
    return "\n".join(lines) + "\n"


def page(old: str) -> str:
    """Returns the page with the table that there is now."""
    before, _, rest = old.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
