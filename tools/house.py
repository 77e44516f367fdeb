"""Prints the shape of the product: files and lines per folder, functions' lengths, and imports against the stated
order.

    python -m tools.house [CHECKOUT]

The orders are those of docs/architecture.md; tests/architecture/test_rooms.py holds them. Counts are of Python files
that git tracks, `__init__.py` left out of the files.
"""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TOPS = ("configs", "parallel", "offload", "workers", "cluster")

ORDERS: dict[str, tuple[str, ...]] = {
    "cluster": (
        "state process",
        "wire",
        "fleet tenants routing",
        "adapters",
        "group gateway",
        "deploy",
        "app",
        "service",
        "cli",
    ),
    "cluster/gateway": ("http", "generation", "services", "openai", "chat", "responses anthropic", "routes", "*"),
    "workers": (
        "messages",
        "text",
        "models/spec structured",
        "planning",
        "lora/peft",
        "kernels",
        "attention",
        "graphs",
        "platforms",
        "models sampling speculation",
        "lora/device",
        "rank",
        "executor",
        "*",
    ),
    "workers/engine": ("blocks", "base", "transfers", "waiting", "adapters", "*"),
}
"""Per folder its rooms from the ground up: a room imports rooms of lower floors only. `*`: modules beside the rooms."""

ONLY = {"workers/engine": {"workers/messages"}}
"""Rooms beside an order: what they may import of the same folder. Rooms of that order on top of them: ABOVE."""
ABOVE = {"workers/engine": {"workers/executor", "workers/*"}}


class Import(NamedTuple):
    """One import between modules of ours, as paths without suffix: `workers/text/tokenizer`."""

    source: str
    target: str


def source_files(root: Path) -> list[str]:
    """Tracked Python files of the product, as paths below `root`."""
    listed = subprocess.run(["git", "ls-files", *TOPS], cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in listed.splitlines() if name.endswith(".py") and (root / name).exists())


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__")


def own_imports(root: Path) -> list[Import]:
    """Every import between our modules, those inside functions too, those for type checkers left out."""
    files = source_files(root)
    known = {module_of(file) for file in files}
    found: set[Import] = set()
    for file in files:
        for dotted in _imported(ast.parse((root / file).read_text())):
            target = _longest_known(dotted.removeprefix("tandem.").split("."), known)
            if target is not None and target != module_of(file):
                found.add(Import(module_of(file), target))
    return sorted(found)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from _imported(node)


def _longest_known(parts: list[str], known: set[str]) -> str | None:
    return next(("/".join(parts[:n]) for n in range(len(parts), 0, -1) if "/".join(parts[:n]) in known), None)


def room(module: str, scope: str) -> str | None:
    """The room of `scope`'s order that a module is in: the longest that fits, `*` for the rest, None outside."""
    if not module.startswith(scope + "/"):
        return None
    inside = module[len(scope) + 1 :]
    names = [name for floor in ORDERS[scope] for name in floor.split()]
    names += [other.removeprefix(scope + "/") for other in ONLY if other.startswith(scope + "/")]
    fits = [name for name in names if inside == name or inside.startswith(name + "/")]
    return max(fits, key=len) if fits else "*"


def against_the_order(imports: list[Import], scope: str) -> list[Import]:
    """Imports inside `scope` that do not go from a higher floor to a lower one."""
    floor = {name: i for i, names in enumerate(ORDERS[scope]) for name in names.split()}
    wrong = []
    for one in imports:
        source, target = room(one.source, scope), room(one.target, scope)
        if source is None or target is None or source == target:
            continue
        beside = f"{scope}/{source}"
        if beside in ONLY:
            fits = f"{scope}/{target}" in ONLY[beside]
        elif f"{scope}/{target}" in ONLY:
            fits = f"{scope}/{source}" in ABOVE[f"{scope}/{target}"]
        else:
            fits = floor.get(source, -1) > floor.get(target, len(floor))
        if not fits:
            wrong.append(one)
    return wrong


def folder(module: str) -> str:
    return module.rsplit("/", 1)[0]


def circles(imports: list[Import]) -> list[tuple[str, str]]:
    """Pairs of folders that import each other; a folder and one below it count as one."""
    edges = {(folder(a), folder(b)) for a, b in imports}
    related = {(a, b) for a, b in edges if a.startswith(b + "/") or b.startswith(a + "/")}
    return sorted((a, b) for a, b in edges - related if a < b and (b, a) in edges)


def function_lengths(root: Path) -> list[int]:
    """Lines of every function of the product, sorted."""
    lengths = []
    for file in source_files(root):
        for node in ast.walk(ast.parse((root / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
    return sorted(lengths)


def print_folders(root: Path) -> None:
    files, lines = Counter[str](), Counter[str]()
    for file in source_files(root):
        where = folder(file)
        lines[where] += (root / file).read_text().count("\n")
        files[where] += not file.endswith("__init__.py")
    print(f"{'folder':<34}{'files':>6}{'lines':>8}")
    for where in sorted(lines):
        print(f"{where:<34}{files[where]:>6}{lines[where]:>8}")
    for top in TOPS:
        inside = [where for where in lines if where == top or where.startswith(top + "/")]
        print(f"{top + ', all':<34}{sum(files[w] for w in inside):>6}{sum(lines[w] for w in inside):>8}")
    print(f"{'product':<34}{sum(files.values()):>6}{sum(lines.values()):>8}")
    print(f"loose modules in one folder: {max(files.values())} at most")


def main() -> None:
    """Prints all of it."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    print_folders(root)
    lengths = function_lengths(root)
    at = [lengths[int(len(lengths) * share)] for share in (0.5, 0.95)]
    print(f"functions: {len(lengths)}; lines p50 {at[0]}, p95 {at[1]}, max {lengths[-1]}")
    imports = own_imports(root)
    found = circles(imports)
    print(f"pairs of folders that import each other: {len(found)}")
    for a, b in found:
        print(f"  {a} <-> {b}")
    names = defaultdict(list)
    for file in source_files(root):
        if not file.endswith("__init__.py"):
            names[module_of(file).rsplit("/", 1)[1]].append(module_of(file))
    print("module names that stand twice:", sorted(modules for modules in names.values() if len(modules) > 1))
    for scope in ORDERS:
        if (root / scope).is_dir():
            for one in against_the_order(imports, scope):
                print(f"against the order of {scope}: {one.source} -> {one.target}")


if __name__ == "__main__":
    main()
