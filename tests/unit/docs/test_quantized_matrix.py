"""The table of quantized weights in docs/serving/quantized.md is what its tool makes, of tests that try each cell."""

import importlib
import inspect

import pytest

from tandem.parallel.quantization.weight_plan import AT_LOAD
from tests.parity.test_quantized_forms import FORMS
from tools.quantized_matrix import COLUMNS, PAGE, ROWS, Cell, page

CELLS = [(form, cell) for form, row in ROWS.items() for cell in dict.fromkeys(row)]


def test_the_page_has_the_table() -> None:
    assert page(PAGE.read_text(encoding="utf-8")) == PAGE.read_text(encoding="utf-8")
    assert set(ROWS) == {*AT_LOAD, *FORMS} and {len(row) for row in ROWS.values()} == {len(COLUMNS)}


@pytest.mark.parametrize(("form", "cell"), CELLS, ids=lambda given: getattr(given, "test", given))
def test_a_cell_is_a_test_of_that_form(form: str, cell: Cell) -> None:
    """Its name stands in the parameters of the test, or in its code."""
    test = getattr(importlib.import_module(f"tests.parity.{cell.file}"), cell.test)
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    assert form in f"{marks} {inspect.getsource(test)}"
    assert cell.refused == ("raises(SettingsError" in inspect.getsource(test) and "refuses" in cell.test)
