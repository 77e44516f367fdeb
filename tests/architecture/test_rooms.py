"""The rooms of docs/architecture.md: which way imports go inside cluster/ and workers/, sizes of folders, file
names."""

from collections import Counter, defaultdict
from pathlib import Path

from tools.house import ORDERS, Import, against_the_order, circles, own_imports
from tools.sources import folder, module_of, sources

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = own_imports(ROOT)
MODULES = [module_of(file.name) for file in sources(ROOT) if not file.name.endswith("__init__.py")]

AGAINST: set[Import] = set()
"""Imports against the order that a later rewrite dissolves. This list may only shrink."""

SAME_IDEA = {"errors"}
"""Names that stand twice for one idea: the exceptions of a layer."""


def test_imports_inside_a_folder_go_down() -> None:
    found = {one for scope in ORDERS for one in against_the_order(IMPORTS, scope)}
    assert found == AGAINST, "the list of exceptions is exact"


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
