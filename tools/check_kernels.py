"""Compiles every Triton kernel of the tree for GPUs, without one, and prints registers, spills and shared memory.

    python -m tools.check_kernels [--all] [--targets 90 ...] [--candidates] [--triton FOLDER]

The launching code itself runs, on CPU tensors, with a driver that has no device: Triton specializes and compiles the
variants that those launches choose, for each of TARGETS (--all: OTHERS too) with its own ptxas, and launches nothing.
--candidates: the tiles of workers/kernels/triton/tiles.py that are no defaults too, for TARGETS, which takes hours.
--triton: a folder with another Triton, made by `pip install --target FOLDER --no-deps triton==3.6.0`. The exit status
is 1 for a compile error, a spill, more shared memory than the target has, a kernel of FETCHING whose inner loop fetches
nothing ahead (tools/kernel_pipelines.py), and for a @triton.jit function that no launch in LAUNCHES
(tools/kernel_launches.py) reaches.
"""

import argparse
import ast
import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import distributions
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tools.kernel_launches import LAUNCHES, candidate_launches
from tools.kernel_pipelines import Loop, bytes_of_loop, loops_of
from tools.sources import TOPS

ROOT = Path(__file__).resolve().parents[1]
TARGETS: Mapping[int, int] = {80: 163, 90: 227, 100: 227}
"""Compute capability (A100, H100, B200) and KiB of shared memory that one block may have."""
OTHERS: Mapping[int, int] = {86: 99, 89: 99, 120: 99}
"""Those with `--all` (RTX 30, RTX 40 and L40S, RTX 50)."""
PROGRESS = 50
"""Entries, each for a target, between two lines of progress where nobody watches."""
ROOMS: Mapping[int, int] = {**TARGETS, **OTHERS}

FETCHING: Mapping[str, int] = {
    "triton_attention.attend_tiles": 90,
    "triton_decode.attend_parts": 90,
    "triton_latents.attend_latent_tiles": 90,
    "triton_latents.attend_latent_parts": 90,
    "triton_experts.grouped_product": 90,
    "triton_few_rows.multiply_few": 90,
    "triton_code_gemm.multiply_codes": 90,
    "triton_code_gemm.multiply_expert_codes": 90,
    "triton_lora.shrink_tokens": 90,
    "triton_lora.expand_tokens": 90,
    "triton_lora.shrink_tiles": 90,
    "triton_lora.expand_tiles": 90,
}
"""Kernels whose inner loops must fetch ahead, and the target for which it is read: newer ones have other products."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant of a kernel for one target. spilled: bytes. error: empty when it compiled. loops: with products, whose
    turns load so many bytes of each type."""

    kernel: str
    variant: str
    capability: int
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    error: str = ""
    loops: tuple[Loop, ...] = ()
    loaded: Mapping[str, int] = field(default_factory=dict)


# ---- compilation ----


class NoDevice:
    """A Triton driver for a GPU that is not there: it names the target and refuses everything else."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        """Returns a number of its own per target: Triton keeps a function's variants by device."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


_kept: dict[int, Any] = {}
"""What this process has compiled and measured. Triton keeps variants too, and compiles none twice."""


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Makes launches in this process only compile, into an empty cache; yields the list of variants that are new."""
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    run, before = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:  # whatever the compiler raises is a finding, and the other kernels follow
            found.append(Compiled(_name(self), "", capability, error=f"{type(error).__name__}: {error}"))
            return None
        if id(compiled) not in _kept:
            _kept[id(compiled)] = compiled
            found.append(_measured(compiled, capability, printed.getvalue()))
        return compiled

    with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as folder, triton.knobs.nvidia.scope():
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            triton.knobs.nvidia.dump_ptxas_log = True
            JITFunction.run = compile_only
            driver.set_active(NoDevice(capability))
            try:
                yield found
            finally:
                JITFunction.run = run
                driver._active = before


def _measured(compiled: Any, capability: int, log: str) -> Compiled:
    """Reads the figures from the compiled kernel and from ptxas's log."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert registers is not None and spills, f"ptxas printed no figures:\n{log}"
    return Compiled(
        _name(compiled.src.fn),
        f"{variant_of(compiled.src)} {compiled.metadata.num_warps}w {compiled.metadata.num_stages}st",
        capability,
        int(registers.group(1)),
        sum(map(int, spills)),
        int(compiled.metadata.shared),
        loops=loops_of(compiled.asm["ttgir"]),
        loaded=bytes_of_loop(compiled.asm["ttgir"]),
    )


def _name(function: Any) -> str:
    """The module's last name and the function's, as in KernelSource."""
    return f"{function.__module__.rsplit('.')[-1]}.{function.__name__}"


def variant_of(source: Any) -> str:
    """The floating-point types of the tensors, the constants, and how many of the pointers and integers are multiples
    of 16."""
    types = {kind[1:] for kind in source.signature.values() if kind.startswith("*")}
    names = source.fn.arg_names
    constants = {names[place]: value for (place, *_), value in source.constants.items()}
    numbers = [name for name, kind in source.signature.items() if kind[0] in "*i" and name not in constants]
    aligned = sum(1 for attributes in source.attrs.values() if attributes)
    values = " ".join(f"{name}={value}" for name, value in constants.items() if name.isupper())
    return f"{'/'.join(sorted(types & {'bf16', 'fp16', 'fp32'}))} {values} aligned {aligned}/{len(numbers)}"


def compile_launches(name: str, capability: int) -> list[Compiled]:
    """Compiles what one entry of LAUNCHES launches, for one target."""
    with compiling(capability) as found:
        (LAUNCHES.get(name) or candidate_launches()[name])()
    return found


# ---- the tree ----


class KernelSource(NamedTuple):
    """A @triton.jit function of the tree as `module.function`, and the names that it calls."""

    name: str
    where: str
    calls: frozenset[str]


def kernel_sources(folders: Sequence[Path]) -> list[KernelSource]:
    """Finds every function with Triton's `jit` decorator below the folders."""
    found = []
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                calls = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                found.append(KernelSource(f"{path.stem}.{node.name}", f"{path.name}:{node.lineno}", frozenset(calls)))
    return found


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in {"triton.jit", "jit"}


def forgotten(sources: Sequence[KernelSource], launched: set[str]) -> list[str]:
    """A line for each function that was neither launched nor is called, directly or not, by one that was."""
    by_name = {source.name: source for source in sources}
    reached, todo = set[str](), [name for name in launched if name in by_name]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [other for other in by_name if other.split(".")[1] in by_name[name].calls]
    return [
        f"{source.where}: {source.name} is compiled by no launch in LAUNCHES of tools/kernel_launches.py"
        for source in sources
        if source.name not in reached
    ]


# ---- report ----


def faults(found: Sequence[Compiled], *, fetching: Mapping[str, int] = FETCHING) -> list[str]:
    """A line for each variant that does not compile, spills, takes more shared memory than its target has, or should
    fetch ahead and does not. fetching: the kernels that should, none of tiles that may be slow."""
    lines = []
    for one in found:
        where, limit = f"{one.kernel} for sm_{one.capability}", ROOMS[one.capability] * 1024
        if one.error:
            lines.append(f"{where} does not compile: {one.error}")
        if one.spilled:
            lines.append(f"{where} spills {one.spilled} bytes ({one.variant})")
        if one.shared > limit:
            lines.append(f"{where} takes {one.shared} bytes of shared memory of {limit} ({one.variant})")
        if fetching.get(one.kernel) == one.capability and not one.error:
            stalls = [loop.fault for loop in one.loops if loop.fault] or ["has no loop that loads"][: not one.loops]
            lines += [f"{where} {stall} ({one.variant})" for stall in stalls]
    return list(dict.fromkeys(lines))


def table(found: Sequence[Compiled]) -> list[str]:
    """A line per variant; per target its registers, bytes spilled, and KiB of shared memory."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for one in found:
        if not one.error:
            cell = f"{one.registers:>4} {one.spilled:>5} {one.shared / 1024:>6.1f}"
            cells.setdefault((one.kernel, one.variant), {})[one.capability] = cell
    width = max((len(variant) for _, variant in cells), default=0)
    name = max((len(kernel) for kernel, _ in cells), default=0)
    targets = [capability for capability in ROOMS if any(one.capability == capability for one in found)]
    names = "".join(f"   sm_{capability}, {ROOMS[capability]} KiB".ljust(20) for capability in targets)
    head = "".join("   regs spill    KiB" for _ in targets)
    lines = [f"{'':<{name}}  {'':<{width}}{names}".rstrip(), f"{'kernel':<{name}}  {'variant':<{width}}{head}"]
    for (kernel, variant), of in sorted(cells.items()):
        values = "".join(f"   {of.get(capability, '-'):<17}" for capability in targets)
        lines.append(f"{kernel:<{name}}  {variant:<{width}}{values}".rstrip())
    return lines


def use_triton(folder: Path) -> None:
    """Has the processes of this one import the Triton in a folder."""
    if not (folder / "triton" / "__init__.py").exists():
        raise SystemExit(f"--triton {folder}: there is no triton in it; see the head of tools/check_kernels.py")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder.absolute()), os.environ.get("PYTHONPATH", "")]).rstrip(":")


def version(folder: Path | None) -> str:
    """The version of the installed Triton, or of the one in a folder."""
    found = distributions(name="triton", **({} if folder is None else {"path": [str(folder)]}))
    return next((one.version for one in found), "of unknown version")


def compiled(jobs: Sequence[tuple[str, int]]) -> list[Compiled]:
    """What entries of LAUNCHES or candidate_launches() launch, each for a target, in a process per core."""
    if not jobs:
        return []
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    found: list[Compiled] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        results = [pool.submit(compile_launches, *job) for job in jobs]
        for count, result in enumerate(results, 1):
            found += result.result()
            if sys.stderr.isatty() or count % PROGRESS == 0:
                print(f"{count} of {len(jobs)}: {len(found)} variants", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Compiles in one process per core; prints the table, then what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="for sm_86, sm_89 and sm_120 too")
    parser.add_argument("--targets", type=int, nargs="+", choices=sorted(ROOMS), help="for these alone")
    parser.add_argument("--candidates", action="store_true", help="the tiles that are no defaults too; takes hours")
    parser.add_argument("--triton", type=Path, metavar="FOLDER", help="of another Triton than the installed one")
    options = parser.parse_args()
    started_s = time.perf_counter()
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
    if options.triton is not None:
        use_triton(options.triton)
    targets = options.targets or list(ROOMS if options.all else TARGETS)
    found = compiled(list(product(LAUNCHES, targets)))
    others = compiled(list(product(candidate_launches(), options.targets or TARGETS))) if options.candidates else []
    print("\n".join(table([*found, *others])))
    wrong = [
        *faults(found),
        *faults(others, fetching={}),
        *forgotten(kernel_sources([ROOT / top for top in TOPS]), {one.kernel for one in found}),
    ]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    kernels, took_s = {one.kernel for one in found}, time.perf_counter() - started_s
    print(
        f"{len([*found, *others])} variants of {len(kernels)} kernels, Triton {version(options.triton)}, {took_s:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
