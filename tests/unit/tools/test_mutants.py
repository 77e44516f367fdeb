"""Which defects `make mutate` makes, and that its table fits the tree."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tools.reached_lines import ReachingFirst

if TYPE_CHECKING:
    from tools.mutants import Mutant

ROOT = Path(__file__).resolve().parents[3]
TABLE = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())

TEXT = """
LIMIT = -1


class Box:
    is_open: bool = True

    def take(self, wanted, most):
        assert wanted > 0, "nothing is not asked for"
        if not self.is_open or wanted <= most:
            return None
        for a, b in zip(wanted, most, strict=True):
            self.note(a - b)
        return wanted is most

    def check_invariants(self):
        assert self.is_open
        self.note(1)
"""


def mutants_of(module: str, text: str) -> "list[Mutant]":
    from tools import mutants  # loads libcst, which only one worker needs

    return mutants.mutants_of(module, text)


def test_each_defect_is_one_change_inside_a_function_or_class_and_nothing_that_only_checks_is_changed() -> None:
    mutants = mutants_of("box", TEXT)
    assert {(m.function, m.line, m.mutant) for m in mutants} == {
        ("Box", "is_open: bool = True", "is_open: bool = False"),
        *(
            ("Box.take", "if not self.is_open or wanted <= most:", changed)
            for changed in (
                "if self.is_open or wanted <= most:",
                "if not self.is_open and wanted <= most:",
                "if not self.is_open or wanted < most:",
            )
        ),
        ("Box.take", "self.note(a - b)", "self.note(a + b)"),
        ("Box.take", "self.note(a - b)", "pass"),
        ("Box.take", "return wanted is most", "return wanted is not most"),
    }
    for mutant in mutants:
        compile(mutant.text, "box", "exec")
        changed = [
            number
            for number, (old, new) in enumerate(zip(TEXT.splitlines(), mutant.text.splitlines(), strict=True), 1)
            if old != new
        ]
        assert changed == [mutant.number]


def test_defects_that_look_alike_are_counted_apart() -> None:
    mutants = mutants_of("two", "def f():\n    g()\n    g()\n")
    assert [(m.line, m.mutant, m.nth) for m in mutants] == [("g()", "pass", 0), ("g()", "pass", 1)]
    assert mutants[0].text != mutants[1].text


def test_tests_that_reach_a_line_run_first_and_the_others_too() -> None:
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in "abcde"]
    ReachingFirst({"b": [3, 7], "c": [3], "d": [7]}, 7).pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["b", "d", "a", "c", "e"]


@pytest.mark.parametrize("name", TABLE["modules"])
def test_the_table_names_files_that_there_are(name: str) -> None:
    row = TABLE["modules"][name]
    assert [path for path in (row["path"], *row["tests"]) if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("entry", TABLE["equivalent"], ids=lambda entry: f"{entry['module']}:{entry['function']}")
def test_what_no_test_can_notice_is_a_line_of_its_module(entry: dict[str, str]) -> None:
    text = (ROOT / TABLE["modules"][entry["module"]]["path"]).read_text()
    assert entry["line"] in " ".join(text.split()) and entry["reason"]
