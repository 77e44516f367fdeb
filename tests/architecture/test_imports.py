"""The import rules of CONTRIBUTING.md: direction between folders, libraries in their places, torch-free processes."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

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
OURS = set(MAY_IMPORT)


def source_files() -> list[Path]:
    return sorted(path for top in OURS for path in (ROOT / top).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def all_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The same with our own modules named by their folders, without the package: `workers.text`."""
    yield from ((line, module.removeprefix("tandem.")) for line, module in all_imports(path))


def every_file() -> list[Path]:
    return [
        path
        for top in (*sorted(OURS), "tests", "benchmarks", "tools", "tandem")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]


@pytest.mark.parametrize("path", every_file(), ids=name)
def test_our_packages_are_imported_as_parts_of_tandem(path: Path) -> None:
    """A user may have packages `configs`, `workers` and `cluster` of his own."""
    assert not [f"line {line}: {m}" for line, m in all_imports(path) if m.split(".")[0] in OURS]
    bare = re.compile(rf"""-m["', ]+(?:{"|".join(sorted(OURS))})\.""")
    assert not bare.search(path.read_text())


@pytest.mark.parametrize("top", sorted(OURS))
def test_a_bare_import_of_our_folders_names_the_package(top: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {top}"], cwd=ROOT, capture_output=True, text=True)
    assert f"ImportError: import tandem.{top} instead of {top}" in done.stderr


def is_below(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


@pytest.mark.parametrize("path", source_files(), ids=name)
def test_imports_follow_the_direction_of_the_folders(path: Path) -> None:
    allowed = MAY_IMPORT[name(path).split("/")[0]]
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for line, module in imports(path)
        if module.split(".")[0] in OURS and not any(is_below(module, a) for a in allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("path", source_files(), ids=name)
def test_libraries_stay_in_their_places(path: Path) -> None:
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for line, module in imports(path)
        if (places := ONLY_IN.get(module.split(".")[0])) and not name(path).startswith(places)
    ]
    assert not wrong


@pytest.mark.parametrize("path", [p for p in source_files() if name(p).startswith(TORCH_FREE_FOLDERS)], ids=name)
def test_the_torch_free_half_never_imports_torch(path: Path) -> None:
    if name(path).startswith(RANK_SIDE):
        return
    assert not [f"line {line}: {m}" for line, m in imports(path) if m.split(".")[0] in TORCH_LIBRARIES]


@pytest.mark.parametrize("path", source_files(), ids=name)
def test_nothing_received_can_run_code(path: Path) -> None:
    """No pickle, eval, exec or torch.load anywhere in the product (Ray's own envelope is Ray's)."""
    for line, module in imports(path):
        assert module.split(".")[0] not in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, (
            f"{name(path)}:{line}"
        )
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "zmq.Socket.recv_pyobj"}, f"{name(path)}:{node.lineno}"
            assert not called.endswith((".recv_pyobj", ".send_pyobj")), f"{name(path)}:{node.lineno}"


def test_rank_never_imports_the_engine() -> None:
    for path in (ROOT / "workers" / "rank").rglob("*.py"):
        assert not [m for _, m in imports(path) if is_below(m, "workers.engine")], name(path)


def test_folders_hold_no_import_circles() -> None:
    """Between modules, by their top-level imports: a circle would make the order of imports matter."""
    modules = {name(p)[:-3].replace("/", ".").removesuffix(".__init__"): p for p in source_files()}
    edges = {
        m: {known for _, i in imports(p) if (known := longest_known(i, modules)) and known != m}
        for m, p in modules.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(modules):
        visit(module, ())


def longest_known(dotted: str, modules: dict[str, Path]) -> str | None:
    parts = dotted.split(".")
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules), None)


def run_blocked(blocked: tuple[str, ...], body: str) -> subprocess.CompletedProcess[str]:
    """Runs `body` in a fresh interpreter where importing any of `blocked` raises."""
    guard = f"""
    import sys
    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {blocked!r}:
                raise ImportError("blocked: " + name)
    sys.meta_path.insert(0, Block())
    """
    code = textwrap.dedent(guard) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "module",
    [
        "tandem.cluster.gateway.app.routes",
        "tandem.cluster.adapters.checks",
        "tandem.cluster.routing.serve_router",
        "tandem.cluster.group.coordinator",
        "tandem.cluster.app",
        "tandem.cluster.cli.main",
        "tandem.workers.engine.engine",
        "tandem.workers.executor.rank_group",
        "tandem.workers.models.spec.families",
        "tandem.workers.lora.peft.adapter_source",
        "tandem.workers.lora.peft.adapter_check",
        "tandem.workers.planning.adapter_room",
        "tandem.workers.lora.peft.base_tables",
        "tandem.workers.planning.planner",
        "tandem.cluster.cli.verbs.plan",
        "tandem.cluster.cli.verbs.doctor",
        "tandem.cluster.cli.check_process",
        "tandem.cluster.deploy.misfits",
        "tandem.workers.text.tokenizer",
        "tandem.workers.text.chat_template",
    ],
)
def test_torch_free_processes_start_with_torch_blocked(module: str) -> None:
    done = run_blocked(("torch", "transformers"), f"import {module}")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "module", ["tandem.workers.offline", "tandem.workers.executor.local_ranks", "tandem.workers.rank.rank_server"]
)
def test_workers_run_with_ray_absent(module: str) -> None:
    done = run_blocked(("ray", "redis", "fastapi"), f"import {module}")
    assert done.returncode == 0, done.stderr[-2000:]
