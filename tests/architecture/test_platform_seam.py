"""Devices differ in one room.

Nothing outside workers/platforms asks a tensor or torch what device there is, and the names of devices are read only
where settings, plans and Ray's resources are made: neither as strings nor through constants that hold them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house import module_of, source_files

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = "workers/platforms/"
NAMES_READ_IN = ("configs/", "workers/planning/", "cluster/deploy/", PLATFORMS)
A_NAME = re.compile(r"(cpu|cuda)(:\d+)?")
FILES = source_files(ROOT)


def device_tests(tree: ast.AST) -> Iterator[str]:
    """`device.type`, `is_cuda` and `torch.cuda`, as they stand in the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            asks_type = node.attr == "type" and text.removesuffix(".type").endswith("device")
            if asks_type or node.attr in ("is_cuda", "is_cpu") or text.startswith("torch.cuda"):
                yield f"line {node.lineno}: {text}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            yield f"line {node.lineno}: import of {node.module}"
        elif isinstance(node, ast.Import) and any(alias.name.startswith("torch.cuda") for alias in node.names):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def constants(file: str) -> set[tuple[str, str]]:
    """Module and name of each constant of a file that is a device's name."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found |= {(module_of(file).replace("/", "."), name) for name in names if list(device_names(node.value))}
    return found


def constants_read(tree: ast.AST, known: set[tuple[str, str]]) -> Iterator[str]:
    """Imports of such constants, and attributes of a module that are one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("tandem.")
            yield from (f"line {node.lineno}: {a.name} of {module}" for a in node.names if (module, a.name) in known)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("tandem.")
            if any(node.attr == name and owner in (module, module.rpartition(".")[2]) for module, name in known):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def device_names(tree: ast.AST) -> Iterator[str]:
    """Strings that are a device's name, or begin with one as torch writes it (cuda:0)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and A_NAME.fullmatch(node.value):
            yield f"line {node.lineno}: {node.value!r}"


CONSTANTS = set[tuple[str, str]]().union(*(constants(name) for name in FILES))


@pytest.mark.parametrize("file", [name for name in FILES if not name.startswith(PLATFORMS)])
def test_only_platforms_ask_for_the_device(file: str) -> None:
    assert not list(device_tests(ast.parse((ROOT / file).read_text())))


@pytest.mark.parametrize("file", [name for name in FILES if not name.startswith(NAMES_READ_IN)])
def test_names_of_devices_are_read_in_few_places(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert not [*device_names(tree), *constants_read(tree, CONSTANTS)]


@pytest.mark.parametrize(
    "line",
    [
        "x.device.type == 'x'",
        "device.type",
        "x.is_cuda",
        "torch.cuda.synchronize()",
        "import torch.cuda.nvtx",
        "a = torch.cuda",
    ],
)
def test_a_device_test_is_found(line: str) -> None:
    assert list(device_tests(ast.parse(line)))


def test_a_devices_name_is_found() -> None:
    tree = ast.parse("if name == 'cuda' or other in ('cpu', 'cuda:0'): 'cpu kernels'; 'cpu-paged'; 'cpu:x'")
    assert [found.split(": ", 1)[1] for found in device_names(tree)] == ["'cuda'", "'cpu'", "'cuda:0'"]


def test_a_constant_with_a_devices_name_is_found(tmp_path: Path) -> None:
    """The compared constants of configs/schema.py, put back."""
    file = tmp_path / "schema.py"
    file.write_text("HOST: Final[Device] = 'cpu'\nGPU = 'cuda'\nLOOPBACK = '127.0.0.1'\n")
    held = {("configs.schema", name) for _, name in constants(str(file))}
    assert held == {("configs.schema", "HOST"), ("configs.schema", "GPU")}
    source = "from tandem.configs.schema import GPU as g, LOOPBACK; schema.HOST; tier.HOST; tandem.configs.schema.GPU"
    found = [line.split(": ", 1)[1] for line in constants_read(ast.parse(source), held)]
    assert sorted(found) == ["GPU of configs.schema", "schema.HOST", "tandem.configs.schema.GPU"]


def test_only_platforms_choose_graphs_and_rows() -> None:
    """Everything else knows GraphRunner and DeviceRows."""
    chosen = {"NoGraphs", "CpuGraphs", "CudaGraphs", "HostRows", "TensorRows"}
    for file in FILES:
        if not file.startswith((PLATFORMS, "workers/graphs/")):
            assert not any(name in (ROOT / file).read_text() for name in chosen), file


def test_retired_choices_are_gone() -> None:
    """What Platform replaced."""
    retired = {"select_attention", "select_lora_ops", "select_fused_ops", "make_matrix", "make_copier", "set_threads"}
    for file in FILES:
        names = {node.id for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.Name)}
        assert not names & retired, file
