"""Laws of names, words and sizes (tools/laws.py, tools/house.py); what still breaks one stands in an exact list, which
may only shrink."""

from collections import Counter
from pathlib import Path

import pytest

from tools.house import Import, Size, budget_room, budgets, leaf_circles, over_budget, own_imports, sizes
from tools.laws import (
    SUBJECT_LENGTH,
    SUBJECTS_SINCE,
    bad_beginnings,
    bare_sleeps,
    classes_of_one_name,
    long_subjects,
    subjects,
)
from tools.sources import Source, sources

ROOT = Path(__file__).resolve().parents[2]
FILES = sources(ROOT)

TWICE: set[str] = set()
"""Names of several classes."""
BEGINNINGS: dict[str, int] = {}
"""By room, docstrings that begin with a clause or a preposition."""
CIRCLES: set[tuple[str, ...]] = set()
"""Folders that import each other in a ring."""


def test_no_two_classes_have_one_name() -> None:
    found = classes_of_one_name(FILES)
    assert set(found) == TWICE, {name: places for name, places in found.items() if name not in TWICE}
    invented = [Source("a.py", "class A: ...\n"), Source("b.py", "def f():\n    class A: ...\n")]
    assert classes_of_one_name(invented) == {"A": ["a.py:1", "b.py:2"]}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = {file.name: list(bad_beginnings(file)) for file in FILES}
    counts = Counter[str]()
    for name, lines in found.items():
        counts[budget_room(name)] += len(lines)
    rooms = {room for room in {*counts, *BEGINNINGS} if counts[room] != BEGINNINGS.get(room, 0)}
    assert not rooms, [line for name, lines in found.items() if budget_room(name) in rooms for line in lines]
    invented = '"""Of files."""\nA = 1\n"""Whether."""\ndef f():\n    """Return, for whom it is."""\n'
    assert list(bad_beginnings(Source("a.py", invented))) == ["a.py:1: Of files.", "a.py:3: Whether."]


def test_no_room_is_over_its_budget() -> None:
    """A later issue raises its rooms at most once, in one decision that says old, new and what was removed for it."""
    wrong = over_budget(sizes(FILES), budgets())
    assert not wrong, "change a row of tools/house.toml once per issue, with a decision (old, new, what was removed)"
    held = {"a": Size(10, 2), "b": Size(11, 2), "c": Size(10, 3), "d": Size(1, 0)}
    assert over_budget(held, {"a": Size(10, 2), "b": Size(10, 2), "c": Size(10, 2), "e": Size(1, 1)}) == [
        "b: 11 lines of 10, 2 classes of 2",
        "c: 10 lines of 10, 3 classes of 2",
        "d: no row; it has 1 lines and 0 classes",
        "e: no such room any more",
    ]


def test_no_leaf_folders_import_each_other() -> None:
    """A folder and one below it are two."""
    assert set(leaf_circles(own_imports(ROOT))) == CIRCLES
    ring = [Import("a/x", "a/b/y"), Import("a/b/z", "c/x"), Import("c/x", "a/x"), Import("c/x", "d/x")]
    assert leaf_circles(ring) == [("a", "a/b", "c")]
    assert not leaf_circles(ring[1:]) and not leaf_circles([Import("a/x", "a/y"), Import("a/y", "a/x")])


def test_tests_sleep_in_loops_that_poll_or_say_why() -> None:
    """A sleep that waits for something makes a slow test on a fast machine and a failure on a slow one."""
    tests = sources(ROOT, ("tests",))
    assert len(tests) > 300
    assert not [line for file in tests for line in bare_sleeps(file)]
    waits = "while not done():\n    time.sleep(0.1)\ntime.sleep(0)\ntime.sleep(1)  # slow on purpose\ntime.sleep(2)\n"
    assert list(bare_sleeps(Source("a.py", waits))) == ["a.py:5: time.sleep(2)"]
    named = "while x:\n    def slow():\n        sleep(1)\n"
    assert list(bare_sleeps(Source("a.py", named))) == ["a.py:3: sleep(1)"]


def test_subjects_of_commits_are_short() -> None:
    assert long_subjects(["x" * SUBJECT_LENGTH, "y" * (SUBJECT_LENGTH + 1)]) == ["73 characters: " + "y" * 73]
    said = subjects(ROOT, SUBJECTS_SINCE)
    if said is None:
        pytest.skip("this copy has no history")
    assert not long_subjects(said)
