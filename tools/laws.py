"""Laws of names and words that tests/architecture/test_laws.py holds: one class per name, how docstrings begin, how
long a commit's subject is. Each function returns or yields who breaks one, with file and line."""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.sources import Source

NO_BEGINNING = {
    "Whether", "What", "How", "As", "Why", "Of", "Which", "Who", "Whose", "Where", "When", "For", "Those", "If", "In",
    "From", "With", "By", "To", "That",
}  # fmt: skip
"""Words that begin a clause or a phrase: a docstring begins with a verb or a noun."""

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

SUBJECT_LENGTH = 72
SUBJECTS_SINCE = "ec0868fa"
"""Commits after this one keep to SUBJECT_LENGTH."""


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


def long_subjects(subjects: Iterable[str]) -> list[str]:
    """Subjects of commits that are too long."""
    return [f"{len(subject)} characters: {subject}" for subject in subjects if len(subject) > SUBJECT_LENGTH]


def subjects(root: Path, since: str) -> list[str] | None:
    """Subjects of the commits after `since`; None where this part of the history is absent."""
    log = ["git", "log", "--format=%s", f"{since}..HEAD"]
    done = subprocess.run(log, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None
