"""Laws of names and words that tests/architecture/test_laws.py holds: one class per name, how docstrings begin, how
long a commit's subject is, where tests sleep. Each function returns or yields who breaks one, with file and line."""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from tools.sources import Source

NO_BEGINNING = {
    "Whether", "What", "How", "As", "Why", "Of", "Which", "Who", "Whose", "Where", "When", "For", "Those", "If", "In",
    "From", "With", "By", "To", "That",
}  # fmt: skip
"""Words that begin a clause or a phrase: a docstring begins with a verb or a noun."""

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

SUBJECT_LENGTH = 72
SUBJECTS_SINCE = datetime.fromisoformat("2026-11-29T21:00:00+00:00")
"""Commits written after this hour keep to SUBJECT_LENGTH: hashes change when history is rewritten."""


def classes_of_one_name(files: Iterable[Source]) -> dict[str, list[str]]:
    """Names that more than one class has, with where they stand."""
    where = defaultdict(list)
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                where[node.name].append(f"{file.name}:{node.lineno}")
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def docstrings(file: Source) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, and of each string that follows an assignment."""
    for node in file.nodes:
        if isinstance(node, ast.ClassDef | FUNCTIONS | ast.Module):
            if text := ast.get_docstring(node):
                yield node.body[0].lineno, text
            for before, after in zip(node.body, node.body[1:], strict=False):
                text = _string(after) if isinstance(before, ast.Assign | ast.AnnAssign) else None
                if text:
                    yield after.lineno, text


def _string(statement: ast.stmt) -> str | None:
    """The text of a statement that is a string alone."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None


def bad_beginnings(file: Source) -> Iterator[str]:
    """Docstrings that begin with a clause or a preposition."""
    for line, text in docstrings(file):
        if text.split()[0].strip(",.:;`") in NO_BEGINNING:
            yield f"{file.name}:{line}: {text.splitlines()[0][:70]}"


def bare_sleeps(file: Source) -> Iterator[str]:
    """Sleeps of a test outside a loop that polls, without a comment on their line; `sleep(0)` lets others run."""
    lines = file.text.splitlines()
    for node, is_polled in _in_loops(file.tree, is_in_loop=False) if "sleep(" in file.text else ():
        if isinstance(node, ast.Call) and not is_polled:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            line = lines[node.lineno - 1]
            if called == "sleep" and "#" not in line and [ast.unparse(given) for given in node.args] != ["0"]:
                yield f"{file.name}:{node.lineno}: {line.strip()}"


def _in_loops(node: ast.AST, is_in_loop: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it stands in a loop of its own function."""
    is_in_loop = is_in_loop or isinstance(node, ast.While | ast.For | ast.AsyncFor)
    for inner in ast.iter_child_nodes(node):
        begins_anew = isinstance(inner, FUNCTIONS | ast.Lambda)
        yield inner, is_in_loop
        yield from _in_loops(inner, is_in_loop and not begins_anew)


def long_subjects(subjects: Iterable[str]) -> list[str]:
    """Subjects of commits that are too long."""
    return [f"{len(subject)} characters: {subject}" for subject in subjects if len(subject) > SUBJECT_LENGTH]


def subjects(root: Path, since: datetime) -> list[str] | None:
    """Subjects of the commits written after `since`, without merges (git words those). None without history."""
    log = ["git", "log", "--no-merges", "--format=%aI %s"]
    done = subprocess.run(log, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    written = (line.split(" ", 1) for line in done.stdout.splitlines())
    return [subject for when, subject in written if datetime.fromisoformat(when) > since]
