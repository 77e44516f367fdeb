"""Writes docs/reference/, the pages of all commands, routes and metrics, from the code that has them.

    make reference

tests/unit/docs/test_reference.py holds the pages up to date.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.reference_cli import cli_page
from tools.reference_metrics import metrics_page
from tools.reference_rest import rest_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {"cli.md": cli_page, "rest.md": rest_page, "metrics.md": metrics_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
