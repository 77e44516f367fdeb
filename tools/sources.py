"""The Python files of a checkout as text and syntax trees, read once. Used by what looks at the product's shape.

A file's name is its path below the checkout, a module's the same without suffix: `workers/text/tokenizer`.
"""

import ast
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

TOPS = ("configs", "parallel", "offload", "workers", "cluster")


@dataclass(frozen=True)
class Source:
    """One file; its tree is made when it is first asked for."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))


@cache
def sources(root: Path, tops: tuple[str, ...] = TOPS) -> tuple[Source, ...]:
    """Python files in these folders of a checkout that git does not ignore, by name."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *tops]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    names = [name for name in sorted(set(listed.splitlines())) if name.endswith(".py") and (root / name).is_file()]
    return tuple(Source(name, (root / name).read_text()) for name in names)


def lines_with(word: re.Pattern[str], files: Iterable[Source]) -> list[str]:
    """Every line that a pattern is found in, with its place."""
    return [
        f"{file.name}:{number}: {line.strip()}"
        for file in files
        if word.search(file.text)
        for number, line in enumerate(file.text.splitlines(), 1)
        if word.search(line)
    ]


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__")


def folder(module: str) -> str:
    return module.rsplit("/", 1)[0]
