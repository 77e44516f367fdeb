"""docs/serving/drafts-tested.md is what its tool makes: its cases are those of the tests."""

import inspect

from tests.parity import test_speculation
from tests.support.draft_cases import CASES, RESUMED
from tools.draft_matrix import METHODS, PAGE, REQUESTED, RESUMING, ROWS, TEST, cell, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.draft_matrix"


def test_cells_are_cases_of_the_tests() -> None:
    """Both tests get all of them, and no method is left out."""
    assert {case.method for case in CASES.values()} == set(METHODS) and set(RESUMED) <= set(CASES)
    for name, cases in ((TEST, "CASES"), (RESUMING, "RESUMED")):
        assert cases in inspect.getsource(getattr(test_speculation, name if cases == "RESUMED" else "case"))
        assert "case" in inspect.signature(getattr(test_speculation, name)).parameters
    said = {cell(method, row).strip("*") for method in METHODS for row in ROWS}
    assert said <= {*CASES, "not tested"}


def test_requests_have_what_the_page_says() -> None:
    source = inspect.getsource(test_speculation)
    fields = [field for names in REQUESTED.values() for field in names]
    assert [field for field in fields if f'"{field}":' not in source and f"{field}=" not in source] == []
