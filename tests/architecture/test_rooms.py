"""The rooms of docs/architecture.md: which way imports go inside cluster/ and workers/, sizes of folders, file
names."""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tools.house import ORDERS, Import, against_the_order, circles, folder, module_of, own_imports, source_files

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = own_imports(ROOT)
MODULES = [module_of(file) for file in source_files(ROOT) if not file.endswith("__init__.py")]

AGAINST: set[Import] = set()
"""Imports against the order that a later rewrite dissolves. This list may only shrink."""

SAME_IDEA = {"errors"}
"""Names that stand twice for one idea: the exceptions of a layer."""


@pytest.mark.parametrize("scope", sorted(ORDERS))
def test_imports_inside_a_folder_go_down(scope: str) -> None:
    found = set(against_the_order(IMPORTS, scope))
    assert found == {one for one in AGAINST if against_the_order([one], scope)}, "the list of exceptions is exact"


def test_exceptions_are_imports_that_are_there() -> None:
    assert set(IMPORTS) >= AGAINST


def test_no_folders_import_each_other() -> None:
    assert not circles(IMPORTS)


def test_folders_have_at_most_twelve_modules() -> None:
    crowded = {where: count for where, count in Counter(map(folder, MODULES)).items() if count > 12}
    assert not crowded


def test_no_name_stands_for_two_ideas() -> None:
    where = defaultdict(list)
    for module in MODULES:
        where[module.rsplit("/", 1)[1]].append(module)
    assert {name for name, modules in where.items() if len(modules) > 1} == SAME_IDEA


def test_the_order_is_held_against_an_import_that_goes_up() -> None:
    assert against_the_order([Import("cluster/state/keys", "cluster/cli/main")], "cluster")
    assert against_the_order([Import("workers/engine/engine", "workers/rank/batch")], "workers")
    assert against_the_order([Import("workers/rank/batch", "workers/engine/engine")], "workers")
    assert not against_the_order([Import("workers/executor/rank_group", "workers/engine/engine")], "workers")


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone: one run, as `make chaos`, could not collect both."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not {name for name, count in names.items() if count > 1}
