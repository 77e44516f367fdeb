"""Prints the shape of a checkout: sizes, classes, Protocols, circles, and what one prompt and one request touch.

    python -m tools.shape [CHECKOUT] [--folders] [--no-run]     # figures, those of one generate unless --no-run
    python -m tools.shape --budget > tools/house.toml           # a budget for each room, of what it holds now
    python -m tools.shape --laws                                # the lists of tests/architecture/test_laws.py

Counts are of the product's Python files, `__init__.py` left out of the files.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tools import house, laws
from tools.sources import TOPS, Source, folder, sources

CHAIN = (
    "ServeCaller", "ServeDispatch", "ServeAttempt", "Dispatch", "RequestPart", "Generation", "GenerationResponse",
    "TextResponse", "Delivery", "ResponseFormat",
)  # fmt: skip
"""Classes, old and new, around one dispatched request; Serve's handle before them and Protocols do not count."""
TOUCHED = {
    "a metric of a group": (
        ("workers/engine/base/metric_rows.py", "workers/engine/base/stats.py"),
        (
            "workers/engine/base/stats.py",
            "workers/engine/base/stats.py, cluster/fleet/engine_metrics.py, tests/unit/cluster/fleet/metrics.txt",
        ),
        "docs/operations.md",
    ),
    "an HTTP route": (
        ("cluster/gateway/app/routes.py", "cluster/gateway/app/routes.py"),
        ("cluster/gateway/routes.py", "cluster/gateway/routes.py"),
        "the handler's file", "a page of docs/",
    ),
    "an admission rule": (
        ("workers/engine/build_engine.py", "workers/engine/build_engine.py"),
        ("workers/engine/engine.py", "workers/engine/engine.py, workers/engine/scheduler.py"),
        "the rule's file",
    ),
}  # fmt: skip
"""What one touches to add something. Of the pairs the first counts whose first file a checkout has: trees differ."""
ROUNDED, SPARE_LINES, SPARE_CLASSES = 50, 25, 1
"""A budget is what a room holds, with at least so much to spare; lines are rounded up to the next multiple."""


class Members(NamedTuple):
    """What a class has of its own: its bases' names, and by method the number of parameters."""

    place: str
    bases: tuple[str, ...]
    methods: dict[str, int]
    fields: frozenset[str]


def function_lengths(files: Iterable[Source]) -> list[int]:
    """Lines of every function, sorted."""
    functions = (node for file in files for node in file.nodes if isinstance(node, laws.FUNCTIONS))
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)


# ---- Protocols ----


def members(files: Iterable[Source]) -> dict[str, list[Members]]:
    """Every class by its name."""
    found = defaultdict(list)
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(_members(f"{file.name}:{node.lineno}", node))
    return found


def _members(place: str, node: ast.ClassDef) -> Members:
    bases = tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
    methods = {one.name: len(one.args.args) for one in node.body if isinstance(one, laws.FUNCTIONS)}
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    fields |= {
        name.id
        for one in node.body
        if isinstance(one, ast.Assign)
        for name in one.targets
        if isinstance(name, ast.Name)
    }
    for one in ast.walk(node):  # self.x = ...
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self":
            fields.add(one.attr)
    return Members(place, bases, methods, frozenset(fields))


def implementations(files: Iterable[Source]) -> dict[str, list[str] | None]:
    """By Protocol the classes that have its members (methods with at least as many parameters), or name it as a base;
    None for Protocols of functions."""
    known = members(files)
    whole = {name: [_with_bases(one, known) for one in ones] for name, ones in known.items()}
    protocols = {name for name, ones in known.items() if any("Protocol" in one.bases for one in ones)}
    found: dict[str, list[str] | None] = {}
    for name in sorted(protocols):
        (wanted, *_) = [one for one in whole[name] if "Protocol" in one.bases]
        fits = [
            other for other in whole if other not in protocols and any(_fits(one, wanted, name) for one in whole[other])
        ]
        found[name] = None if "__call__" in wanted.methods else fits
    return found


def _with_bases(one: Members, known: dict[str, list[Members]]) -> Members:
    bases, methods, fields = list(one.bases), dict(one.methods), set(one.fields)
    for base in bases:
        for above in known.get(base, ())[:1]:
            bases += [name for name in above.bases if name not in bases and name != "Protocol"]
            methods, fields = {**above.methods, **methods}, fields | above.fields
    return Members(one.place, tuple(bases), methods, frozenset(fields))


def _fits(one: Members, wanted: Members, protocol: str) -> bool:
    if protocol in one.bases:
        return True
    has = one.fields | one.methods.keys()
    return wanted.fields <= has and all(
        name in one.fields or one.methods.get(name, -1) >= count for name, count in wanted.methods.items()
    )


# ---- what is printed ----


def print_folders(files: Iterable[Source]) -> None:
    counts, lines = Counter[str](), Counter[str]()
    for file in files:
        where = folder(file.name)
        lines[where] += file.text.count("\n")
        counts[where] += not file.name.endswith("__init__.py")
    print(f"{'folder':<36}{'files':>6}{'lines':>8}")
    for where in sorted(lines):
        print(f"{where:<36}{counts[where]:>6}{lines[where]:>8}")
    for top in TOPS:
        inside = [where for where in lines if where == top or where.startswith(top + "/")]
        print(f"{top + ', all':<36}{sum(counts[w] for w in inside):>6}{sum(lines[w] for w in inside):>8}")


def figures(root: Path, *, is_run: bool) -> Iterator[tuple[str, object]]:
    """(what, how much), in the order in which they are printed."""
    files = sources(root)
    yield "files", sum(not file.name.endswith("__init__.py") for file in files)
    yield "lines", sum(file.text.count("\n") for file in files)
    lengths = function_lengths(files)
    p50, p95 = (lengths[int(len(lengths) * share)] for share in (0.5, 0.95))
    yield "functions", len(lengths)
    yield "lines of a function, p50 / p95 / max", f"{p50} / {p95} / {lengths[-1]}"
    yield "classes", sum(len(ones) for ones in members(files).values())
    yield "names of several classes", len(laws.classes_of_one_name(files))
    yield from _protocols(files)
    imports = house.own_imports(root)
    yield "circles of leaf folders", len(house.leaf_circles(imports))
    yield "folders in them", sum(map(len, house.leaf_circles(imports)))
    chain = [name for name in CHAIN if any("Protocol" not in one.bases for one in members(files).get(name, ()))]
    yield "classes around a dispatched request", f"{len(chain)} ({', '.join(chain)})"
    for what, rows in TOUCHED.items():
        (first, *_) = [row[1] for row in rows if isinstance(row, tuple) and (root / row[0]).exists()]
        touched = [*first.split(", "), *(row for row in rows if isinstance(row, str))]
        yield f"files touched for {what}", f"{len(touched)} ({', '.join(touched)})"
    if is_run:
        for part, (classes, count) in run_one_prompt(root).items():
            yield f'LLM("demo").generate, {part}', f"{classes} classes, {count} files"


def _protocols(files: Iterable[Source]) -> Iterator[tuple[str, object]]:
    found = implementations(files)
    single = [name for name, fits in found.items() if fits is not None and len(fits) == 1]
    none = [name for name, fits in found.items() if fits == []]
    yield "Protocols", len(found)
    yield "Protocols of one function", sum(fits is None for fits in found.values())
    yield "Protocols with one implementation", f"{len(single)} ({', '.join(single)})"
    yield "Protocols whose implementation was not found", f"{len(none)} ({', '.join(none)})"


def run_one_prompt(root: Path) -> dict[str, list[int]]:
    """Classes and files by part, counted by concepts.py in a process of its own."""
    script = Path(__file__).with_name("concepts.py")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_budget(files: Iterable[Source]) -> None:
    print("# Most lines and classes of each room's Python files; tests/architecture/test_laws.py holds them. An issue")
    print("# raises its rooms at most once, in one decision with old, new and what was removed for it.")
    spare = f"{SPARE_LINES} to {SPARE_LINES + ROUNDED - 1} lines and {SPARE_CLASSES} class"
    print(f"# A row was made with {spare} to spare: a small addition fits.")
    for where, held in house.sizes(files).items():
        lines = -(-(held.lines + SPARE_LINES) // ROUNDED) * ROUNDED
        print(f'"{where}" = [{lines}, {held.classes + SPARE_CLASSES}]')


def print_laws(root: Path) -> None:
    counts = Counter[str]()
    for file in sources(root):
        counts[house.budget_room(file.name)] += len(list(laws.bad_beginnings(file)))
    print("TWICE =", sorted(laws.classes_of_one_name(sources(root))))
    print("BEGINNINGS =", {room: count for room, count in sorted(counts.items()) if count})
    print("CIRCLES =", house.leaf_circles(house.own_imports(root)))


def main() -> None:
    """Prints what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", default=".", type=Path)
    for flag in ("--folders", "--no-run", "--budget", "--laws"):
        parser.add_argument(flag, action="store_true")
    asked = parser.parse_args()
    root: Path = asked.checkout.resolve()
    if asked.budget:
        print_budget(sources(root))
    elif asked.laws:
        print_laws(root)
    else:
        if asked.folders:
            print_folders(sources(root))
        for what, figure in figures(root, is_run=not asked.no_run):
            print(f"{what}: {figure}", flush=True)


if __name__ == "__main__":
    main()
