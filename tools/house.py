"""The rooms of the product: which way imports go between them, circles, and how large each one may be.

The orders are those of docs/architecture.md; tests/architecture/test_rooms.py holds them and the budgets of house.toml.
`python -m tools.shape` prints all of it.
"""

import ast
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tools.sources import Source, folder, module_of, sources

ORDERS: dict[str, tuple[str, ...]] = {
    "cluster": (
        "state process logs",
        "ray_private",
        "wire",
        "fleet tenants routing",
        "adapters scaling",
        "group gateway",
        "deploy simulator",
        "app",
        "service",
        "cli",
    ),
    "cluster/gateway": (
        "records",
        "tracing",
        "http",
        "schemas generation",
        "services",
        "serving",
        "conversation",
        "openai",
        "anthropic responses scoring admin ui files idempotency",
        "batches",
        "app",
    ),
    "workers": (
        "messages",
        "text",
        "models/spec structured",
        "gguf",
        "planning",
        "lora/peft",
        "kernels",
        "attention",
        "graphs",
        "tuning",
        "platforms",
        "models sampling speculation",
        "lora/device",
        "rank",
        "executor",
        "build",
        "offline",
        "evaluation",
        "quantize",
        "distill",
        "*",
    ),
    "workers/engine": (
        "blocks",
        "base",
        "drafting observers",
        "transfers",
        "waiting",
        "adapters",
        "*",
        "recording thread",
    ),
}
"""Per folder its rooms from the ground up: a room imports rooms of lower floors only. `*`: modules beside the rooms."""

ONLY = {"workers/engine": {"workers/messages"}}
"""Rooms beside an order: what they may import of the same folder. Rooms of that order on top of them: ABOVE."""
ABOVE = {"workers/engine": {"workers/executor", "workers/build", "workers/offline"}}


class Import(NamedTuple):
    """One import between modules of ours, as paths without suffix: `workers/text/tokenizer`."""

    source: str
    target: str


class Size(NamedTuple):
    """What a room may hold at most, or holds."""

    lines: int
    classes: int


def own_imports(root: Path) -> list[Import]:
    """Every import between our modules, those inside functions too, those for type checkers left out."""
    files = sources(root)
    known = {module_of(file.name) for file in files}
    found: set[Import] = set()
    for file in files:
        for dotted in _imported(file.tree):
            target = _longest_known(dotted.removeprefix("tandem.").split("."), known)
            if target is not None and target != module_of(file.name):
                found.add(Import(module_of(file.name), target))
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


def circles(imports: Iterable[Import]) -> list[tuple[str, str]]:
    """Pairs of folders that import each other; a folder and one below it count as one."""
    edges = {(folder(a), folder(b)) for a, b in imports}
    related = {(a, b) for a, b in edges if a.startswith(b + "/") or b.startswith(a + "/")}
    return sorted((a, b) for a, b in edges - related if a < b and (b, a) in edges)


def leaf_circles(imports: Iterable[Import]) -> list[tuple[str, ...]]:
    """Folders from each of which imports lead to all others and back, sorted; a folder and one below it are two."""
    edges: dict[str, set[str]] = defaultdict(set)
    for source, target in imports:
        edges[folder(source)].add(folder(target))
    reached = {where: _reached(where, edges) for where in list(edges)}
    groups = {tuple(sorted(b for b in reached[a] if a in reached.get(b, ()))) for a in reached}
    return sorted(group for group in groups if len(group) > 1)


def _reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Return where one gets from `start` along at least one edge."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = edges.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


# ---- budgets ----

BUDGETS = Path(__file__).with_name("house.toml")


def budget_room(file: str) -> str:
    """The row of house.toml that a file counts to: its room in the innermost order, else its top folder."""
    path = file.removesuffix(".py")
    scopes = [scope for scope in ORDERS if path.startswith(scope + "/")]
    if not scopes:
        return path.split("/")[0]
    scope = max(scopes, key=len)
    return f"{scope}/{room(path, scope)}"


def sizes(files: Iterable[Source]) -> dict[str, Size]:
    """Lines and classes of each room."""
    lines, classes = Counter[str](), Counter[str]()
    for file in files:
        where = budget_room(file.name)
        lines[where] += file.text.count("\n")
        classes[where] += sum(isinstance(node, ast.ClassDef) for node in file.nodes)
    return {where: Size(lines[where], classes[where]) for where in sorted(lines)}


def budgets() -> dict[str, Size]:
    return {where: Size(*row) for where, row in tomllib.loads(BUDGETS.read_text()).items()}


def over_budget(held: dict[str, Size], allowed: dict[str, Size]) -> list[str]:
    """One line for each room that is larger than its row, has no row, or is gone."""
    wrong = [f"{where}: no such room any more" for where in allowed.keys() - held.keys()]
    for where, (lines, classes) in held.items():
        most = allowed.get(where)
        if most is None:
            wrong.append(f"{where}: no row; it has {lines} lines and {classes} classes")
        elif lines > most.lines or classes > most.classes:
            wrong.append(f"{where}: {lines} lines of {most.lines}, {classes} classes of {most.classes}")
    return sorted(wrong)
