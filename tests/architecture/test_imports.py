"""The import rules of CONTRIBUTING.md: direction between folders, libraries in their places, torch-free processes.

One case a rule; each is also shown an invented file that breaks it.
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.sources import Source, module_of, sources

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "configs": {"configs"},
    "parallel": {"parallel", "configs"},
    "offload": {"offload", "configs"},
    "workers": {"workers", "parallel", "offload", "configs"},
    "cluster": {"cluster", "workers", "parallel", "offload", "configs"},
}
ONLY_IN = {
    "ray": ("cluster/",),
    "fastapi": ("cluster/",),
    "starlette": ("cluster/",),
    "pydantic": ("cluster/",),
    "redis": ("cluster/state/redis_client.py",),
    "opentelemetry": ("cluster/gateway/tracing/",),
    "fsspec": ("workers/lora/peft/adapter_source.py",),
    "triton": ("workers/kernels/",),
    "llguidance": ("workers/structured/", "workers/text/grammars.py"),
}
TORCH_FREE_FOLDERS = ("configs/", "offload/", "workers/engine/", "workers/text/", "workers/structured/", "cluster/")
RANK_SIDE = (
    "offload/copies/accelerator.py",
    "offload/copies/host_slab.py",
    "offload/copies/kv_copies.py",
    "offload/weights/weight_copiers.py",
    "offload/weights/weight_stream.py",
)
TORCH_LIBRARIES = {"torch", "transformers", "triton", "accelerate", "peft"}
RUNS_CODE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
OURS = set(MAY_IMPORT)
PRODUCT = sources(ROOT)
TORCH_FREE = (
    "tandem.cluster.gateway.app.routes",
    "tandem.cluster.adapters.checks",
    "tandem.cluster.routing.router.serve_router",
    "tandem.cluster.group.coordinator",
    "tandem.cluster.app",
    "tandem.cluster.cli.main",
    "tandem.workers.engine.engine",
    "tandem.workers.executor.rank_group",
    "tandem.workers.models.spec.family_rows.families",
    "tandem.workers.lora.peft.adapter_source",
    "tandem.workers.lora.peft.adapter_check",
    "tandem.workers.planning.adapter_room",
    "tandem.workers.lora.peft.base_tables",
    "tandem.workers.planning.planner",
    "tandem.cluster.cli.verbs.plan",
    "tandem.cluster.cli.verbs.doctor",
    "tandem.cluster.cli.base.check_process",
    "tandem.cluster.deploy.misfits",
    "tandem.workers.text.tokenizer",
    "tandem.workers.text.chat_template",
    "tandem.cluster.simulator.simulation",
)
RAY_FREE = (
    "tandem.workers.offline.llm",
    "tandem.workers.executor.local_ranks",
    "tandem.workers.rank.rank_server",
    "tandem.cluster.simulator.simulation",
    "tandem.cluster.cli.simulate.simulate",
)
Rule = Callable[[Source], Iterator[str]]
"""Yields what is wrong with a file, a line each."""


def all_imports(file: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement in a file, those inside functions too."""
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports(file: Source) -> Iterator[tuple[int, str]]:
    """The same with our own modules named by their folders, without the package: `workers.text`."""
    yield from ((line, module.removeprefix("tandem.")) for line, module in all_imports(file))


def broken(rule: Rule, files: tuple[Source, ...] = PRODUCT) -> list[str]:
    """Every line of these files that breaks a rule."""
    return [f"{file.name}:{wrong}" for file in files for wrong in rule(file)]


def sees(rule: Rule, name: str, text: str) -> bool:
    """True if the rule finds something wrong in an invented file."""
    return bool(broken(rule, (Source(name, text),)))


# ---- rules of one file ----

TOP = "|".join(sorted(OURS))
MAY_BE_BARE = re.compile(rf"\b(?:from\s+|import\s+(?:[^\n]*,\s*)?)(?:{TOP})\b")
BARE = re.compile(rf"""-m["', ]+(?:{TOP})\.""")


def bare_imports(file: Source) -> Iterator[str]:
    """Imports and commands that name our folders without the package."""
    if MAY_BE_BARE.search(file.text):
        yield from (f"{line}: {module}" for line, module in all_imports(file) if module.split(".")[0] in OURS)
    yield from (f" {found[0]}" for found in BARE.finditer(file.text))


def upward_imports(file: Source) -> Iterator[str]:
    allowed = MAY_IMPORT[file.name.split("/")[0]]
    for line, module in imports(file):
        if module.split(".")[0] in OURS and not any(is_below(module, one) for one in allowed):
            yield f"{line}: {module}"


def strayed_libraries(file: Source) -> Iterator[str]:
    for line, module in imports(file):
        places = ONLY_IN.get(module.split(".")[0])
        if places and not file.name.startswith(places):
            yield f"{line}: {module}"


def torch_in_the_torch_free_half(file: Source) -> Iterator[str]:
    if file.name.startswith(TORCH_FREE_FOLDERS) and not file.name.startswith(RANK_SIDE):
        yield from (f"{line}: {module}" for line, module in imports(file) if module.split(".")[0] in TORCH_LIBRARIES)


def ray_in_the_simulator(file: Source) -> Iterator[str]:
    """Ray and torch, also inside functions: the simulator is the product's pure half on a virtual clock."""
    if file.name.startswith(("cluster/simulator/", "cluster/cli/simulate/")):
        slow = TORCH_LIBRARIES | {"ray"}
        yield from (f"{line}: {module}" for line, module in imports(file) if module.split(".")[0] in slow)


def code_from_outside(file: Source) -> Iterator[str]:
    """Pickle, eval, exec and torch.load (Ray's own envelope is Ray's)."""
    yield from (f"{line}: {module}" for line, module in imports(file) if module.split(".")[0] in RUNS_CODE)
    for node in file.nodes:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_wrong = called in {"eval", "exec", "torch.load", "zmq.Socket.recv_pyobj"}
            if is_wrong or called.endswith((".recv_pyobj", ".send_pyobj")):
                yield f"{node.lineno}: {called}"


def engine_in_a_rank(file: Source) -> Iterator[str]:
    if file.name.startswith("workers/rank/"):
        yield from (f"{line}: {module}" for line, module in imports(file) if is_below(module, "workers.engine"))


def private_names_of_ray(file: Source) -> Iterator[str]:
    """Imports, attributes and arguments of Ray and Serve that begin with an underscore."""
    if file.name.startswith("cluster/ray_private/"):
        return
    for line, module in all_imports(file):
        if is_below(module, "ray") and "._" in module:
            yield f"{line}: {module}"
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and is_rays(node):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_rays(node.func):
            yield from (f"{node.lineno}: {one.arg}=" for one in node.keywords if (one.arg or "").startswith("_"))


def is_rays(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in {"ray", "serve"}


def is_below(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


def test_our_packages_are_imported_as_parts_of_tandem() -> None:
    """A user may have packages `configs`, `workers` and `cluster` of his own."""
    everything = sources(ROOT, (*sorted(OURS), "tests", "benchmarks", "tools", "tandem"))
    assert len(everything) > len(PRODUCT)
    assert not broken(bare_imports, everything)
    assert sees(bare_imports, "tests/x.py", "def f():\n    import os, workers.text as t")
    assert sees(bare_imports, "tests/x.py", "run([sys.executable, '-m" + "', 'cluster.cli'])")
    assert not sees(bare_imports, "tests/x.py", "'import cluster'\nfrom tandem.cluster import app")


def test_bare_imports_of_our_folders_name_the_package() -> None:
    code = "\n".join(f"try:\n    import {top}\nexcept ImportError as e:\n    print(e)" for top in sorted(OURS))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert said == [f"import tandem.{top} instead of {top}" for top in sorted(OURS)], done.stderr


def test_imports_follow_the_direction_of_the_folders() -> None:
    assert not broken(upward_imports)
    assert sees(upward_imports, "offload/x.py", "def f():\n    from tandem.workers.text import tokenizer")


def test_libraries_stay_in_their_places() -> None:
    assert not broken(strayed_libraries)
    assert sees(strayed_libraries, "cluster/state/keys.py", "import redis.asyncio")


def test_the_torch_free_half_never_imports_torch() -> None:
    assert not broken(torch_in_the_torch_free_half)
    assert sees(torch_in_the_torch_free_half, "workers/engine/x.py", "from torch import nn")
    assert {name for name in RANK_SIDE if not (ROOT / name).is_file()} == set()


def test_the_simulator_never_imports_ray_or_torch() -> None:
    """What it imports does not either: it is among TORCH_FREE and RAY_FREE."""
    assert not broken(ray_in_the_simulator)
    assert sees(ray_in_the_simulator, "cluster/simulator/x.py", "def f():\n    from ray import serve")


def test_nothing_received_can_run_code() -> None:
    assert not broken(code_from_outside)
    for line in (
        "import pickle",
        "from marshal import loads",
        "torch.load(x)",
        "eval('1')",
        "self._socket.recv_pyobj()",
    ):
        assert sees(code_from_outside, "workers/x.py", line), line


def test_rank_never_imports_the_engine() -> None:
    assert not broken(engine_in_a_rank)
    assert sees(engine_in_a_rank, "workers/rank/x.py", "from tandem.workers.engine.engine import Engine")


def test_private_names_of_ray_stay_in_their_room() -> None:
    """tests/unit/cluster/ray_private/ holds what each means, so that a new Ray fails there and nowhere else."""
    assert not broken(private_names_of_ray)
    for line in (
        "from ray._private import worker",
        "from ray.serve.context import _get_global_client",
        "ray._raylet.setproctitle",
        "serve.context._cached",
        "def f():\n    ray.init(address='local', _temp_dir='x')",
    ):
        assert sees(private_names_of_ray, "cluster/x.py", line), line
    assert not sees(private_names_of_ray, "cluster/x.py", "from ray import serve\nray.init(address=self._x)")


# ---- rules of all files together ----


def module_circle(files: tuple[Source, ...]) -> list[str]:
    """A circle of modules by their imports, those inside functions too; empty if there is none."""
    modules = {module_of(file.name).replace("/", "."): file for file in files}
    edges = {
        module: {known for _, one in imports(file) if (known := longest_known(one, modules)) and known != module}
        for module, file in modules.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module not in done:
            for target in sorted(edges[module]):
                if found := visit(target, (*trail, module)):
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(modules) if (found := visit(module, ()))), [])


def longest_known(dotted: str, modules: dict[str, Source]) -> str | None:
    parts = dotted.split(".")
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules), None)


def test_modules_hold_no_import_circles() -> None:
    """A circle would make the order of imports matter."""
    assert not module_circle(PRODUCT)
    pairs = [("a.py", "from tandem.b import x"), ("b.py", "def f():\n    import c"), ("c.py", "import tandem.a")]
    assert module_circle(tuple(Source(*pair) for pair in pairs)) == ["a", "b", "c", "a"]


def missing_names(file: Source, defined: dict[str, set[str]]) -> Iterator[str]:
    """Names that a file imports from modules that do not have them."""
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom) and node.module in defined:
            for alias in node.names:
                if alias.name not in defined[node.module] and f"{node.module}.{alias.name}" not in defined:
                    yield f"{node.lineno}: {alias.name} of {node.module}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem."):
            yield f"{node.lineno}: {node.module}"


def names_of(file: Source) -> set[str]:
    """What a module defines or imports, and what it gives out by __getattr__."""
    found = {node.id for node in file.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in file.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def test_what_benchmarks_and_tools_import_is_there() -> None:
    """No test runs most of them."""
    others = sources(ROOT, ("benchmarks", "tools"))
    defined = {f"tandem.{module_of(file.name).replace('/', '.')}": names_of(file) for file in PRODUCT}
    defined |= {module_of(file.name).replace("/", "."): names_of(file) for file in others}
    assert not broken(lambda file: missing_names(file, defined), others)
    for line in ("from tandem.workers.none import x", "from tandem.workers.offline.llm import NoSuch"):
        assert sees(lambda file: missing_names(file, defined), "tools/x.py", line)
    assert not sees(lambda file: missing_names(file, defined), "tools/x.py", "from tandem.workers import offline")


# ---- processes ----


def failing_imports(blocked: tuple[str, ...], modules: tuple[str, ...]) -> str:
    """What a fresh interpreter says that imports these modules, one after the other, and cannot import `blocked`."""
    code = f"""
    import importlib, sys
    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {blocked!r}:
                raise ImportError("blocked: " + name)
    sys.meta_path.insert(0, Block())
    for module in {modules!r}:
        try:
            importlib.import_module(module)
        except Exception as error:
            print(module, repr(error))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    return done.stdout + (done.stderr if done.returncode else "")


def test_torch_free_processes_start_with_torch_blocked() -> None:
    """And that would be noticed."""
    said = failing_imports(("torch", "transformers"), (*TORCH_FREE, "tandem.workers.rank.rank_server"))
    (line,) = said.splitlines()
    assert line.startswith("tandem.workers.rank.rank_server ImportError('blocked: torch")


def test_workers_run_with_ray_absent() -> None:
    """And that would be noticed."""
    said = failing_imports(("ray", "redis", "fastapi"), (*RAY_FREE, "tandem.cluster.app"))
    (line,) = said.splitlines()
    assert line.startswith("tandem.cluster.app ImportError('blocked: ")
