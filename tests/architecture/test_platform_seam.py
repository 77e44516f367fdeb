"""Devices differ in one room.

Nothing outside workers/platforms asks a tensor or torch what device there is, and the names of devices are read only
where settings, plans and Ray's resources are made: neither as strings nor through constants that hold them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.sources import Source, module_of, sources

PLATFORMS = "workers/platforms/"
NAMES_READ_IN = ("configs/", "workers/planning/", "cluster/deploy/", PLATFORMS)
A_NAME = re.compile(r"(cpu|cuda)(:\d+)?")
FILES = sources(Path(__file__).resolve().parents[2])


def device_tests(file: Source) -> Iterator[str]:
    """`device.type`, `is_cuda` and `torch.cuda`, as they stand in the source."""
    for node in file.nodes:
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            asks_type = node.attr == "type" and text.removesuffix(".type").endswith("device")
            if asks_type or node.attr in ("is_cuda", "is_cpu") or text.startswith("torch.cuda"):
                yield f"{file.name}:{node.lineno}: {text}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            yield f"{file.name}:{node.lineno}: import of {node.module}"
        elif isinstance(node, ast.Import) and any(alias.name.startswith("torch.cuda") for alias in node.names):
            yield f"{file.name}:{node.lineno}: {ast.unparse(node)}"


def constants(file: Source) -> set[tuple[str, str]]:
    """Module and name of each constant of a file that is a device's name."""
    found = set()
    for node in file.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if is_device_name(node.value):
                found |= {(module_of(file.name).replace("/", "."), name) for name in names}
    return found


def constants_read(file: Source, known: set[tuple[str, str]]) -> Iterator[str]:
    """Imports of such constants, and attributes of a module that are one."""
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("tandem.")
            for alias in node.names:
                if (module, alias.name) in known:
                    yield f"{file.name}:{node.lineno}: {alias.name} of {module}"
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removeprefix("tandem.")
            if any(node.attr == name and owner in (module, module.rpartition(".")[2]) for module, name in known):
                yield f"{file.name}:{node.lineno}: {ast.unparse(node)}"


def is_device_name(node: ast.AST) -> bool:
    """True for a string that is a device's name, or begins with one as torch writes it (cuda:0)."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(A_NAME.fullmatch(node.value))


def device_names(file: Source) -> Iterator[str]:
    return (f"{file.name}:{node.lineno}: {ast.unparse(node)}" for node in file.nodes if is_device_name(node))


def found(lines: Iterator[str]) -> list[str]:
    """What stands in those lines, without their places."""
    return [line.split(": ", 1)[1] for line in lines]


def test_only_platforms_ask_for_the_device() -> None:
    assert not [line for file in FILES if not file.name.startswith(PLATFORMS) for line in device_tests(file)]
    offenders = ["x.device.type", "device.type", "x.is_cuda", "torch.cuda.synchronize", "torch.cuda"]
    for text in offenders:
        assert text in found(device_tests(Source("a.py", f"y = {text} == 'x'"))), text
    assert found(device_tests(Source("a.py", "import torch.cuda.nvtx"))) == ["import torch.cuda.nvtx"]
    assert found(device_tests(Source("a.py", "from torch.cuda import nvtx"))) == ["import of torch.cuda"]


def test_names_of_devices_are_read_in_few_places() -> None:
    known = set[tuple[str, str]]().union(*map(constants, FILES))
    others = [file for file in FILES if not file.name.startswith(NAMES_READ_IN)]
    assert not [line for file in others for line in (*device_names(file), *constants_read(file, known))]
    invented = "if name == 'cuda' or other in ('cpu', 'cuda:0'): 'cpu kernels'; 'cpu-paged'; 'cpu:x'"
    assert found(device_names(Source("a.py", invented))) == ["'cuda'", "'cpu'", "'cuda:0'"]


def test_a_constant_with_a_devices_name_is_found() -> None:
    """The compared constants of configs/schema.py, put back."""
    text = "HOST: Final[Device] = 'cpu'\nGPU = 'cuda'\nLOOPBACK = '127.0.0.1'\n"
    held = constants(Source("configs/schema.py", text))
    assert held == {("configs.schema", "HOST"), ("configs.schema", "GPU")}
    text = "from tandem.configs.schema import GPU as g, LOOPBACK; schema.HOST; tier.HOST; tandem.configs.schema.GPU"
    read = found(constants_read(Source("a.py", text), held))
    assert sorted(read) == ["GPU of configs.schema", "schema.HOST", "tandem.configs.schema.GPU"]


def test_only_platforms_choose_graphs_and_rows() -> None:
    """Everything else knows GraphRunner and DeviceRows."""
    chosen = {"NoGraphs", "CpuGraphs", "CudaGraphs", "HostRows", "TensorRows"}
    others = [file for file in FILES if not file.name.startswith((PLATFORMS, "workers/graphs/"))]
    assert not [file.name for file in others if any(name in file.text for name in chosen)]


def test_retired_choices_are_gone() -> None:
    """What Platform replaced."""
    retired = {"select_attention", "select_lora_ops", "select_fused_ops", "make_matrix", "make_copier", "set_threads"}
    for file in FILES:
        assert not retired & {node.id for node in file.nodes if isinstance(node, ast.Name)}, file.name
