"""Compiles every Triton kernel of the tree for GPUs, without one, and prints registers, spills and shared memory.

    python -m tools.check_kernels

The launching code itself runs, on CPU tensors, with a driver that has no device: Triton specializes and compiles the
variants that those launches choose, for each of TARGETS with its own ptxas, and launches nothing. The exit status is 1
for a compile error, a spill, more shared memory than the target has, and for a @triton.jit function that no launch in
LAUNCHES reaches.
"""

import ast
import contextlib
import io
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tools.sources import TOPS

ROOT = Path(__file__).resolve().parents[1]
TARGETS: Mapping[int, int] = {80: 163, 90: 227, 100: 227}
"""Compute capability (A100, H100, B200) and KiB of shared memory that one block may have."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant of a kernel for one target. spilled: bytes. error: empty when it compiled."""

    kernel: str
    variant: str
    capability: int
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    error: str = ""


# ---- launches ----


class LoraShape(NamedTuple):
    """A call of grouped LoRA: widths in elements, `room` ranks of a table. offset: elements before x in its memory."""

    dtype: str
    inputs: int
    outputs: tuple[int, ...]
    room: int
    offset: int


LORA_SHAPES = (
    LoraShape("bfloat16", 4096, (4096, 1024, 1024), 64, 0),
    LoraShape("bfloat16", 4095, (1001,), 33, 1),
    LoraShape("float16", 4096, (12288, 12288), 16, 0),
    LoraShape("float32", 2048, (2048,), 8, 0),
)
"""Each dtype; one and several projections; sizes and addresses that are multiples of 16 and ones that are not: Triton
makes variants of those that the kernel does not exclude. Other sizes change constants only."""


def launch_lora(shape: LoraShape) -> None:
    """Calls TritonLora as a layer does: single tokens, then tiles of tokens."""
    import torch

    from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables
    from tandem.workers.kernels.triton.triton_lora import TOKEN_STEP, TritonLora

    dtype, starts = getattr(torch, shape.dtype), torch.zeros(2, shape.room, dtype=torch.int64)
    ranks, scales = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
    places = [sum(shape.outputs[:i]) for i in range(len(shape.outputs))]
    projections = [
        ProjectionTables(starts, starts, ranks, scales, shape.inputs, outputs, start)
        for outputs, start in zip(shape.outputs, places, strict=True)
    ]
    for tokens in (1, TOKEN_STEP + 1):
        x_TI = torch.empty(shape.offset + tokens * shape.inputs, dtype=dtype)[shape.offset :].view(tokens, -1)
        y_TO = torch.empty(tokens, sum(shape.outputs), dtype=dtype)
        rows = AdapterRows(torch.zeros(tokens, dtype=torch.int32), [(0, tokens, 0)])
        TritonLora().add(y_TO, x_TI, torch.empty(4096, dtype=dtype), projections, rows)


class ExpertShape(NamedTuple):
    """A mixture of experts: widths in elements; biased: experts have biases."""

    dtype: str
    hidden: int
    width: int
    experts: int
    biased: bool


EXPERT_SHAPES = (
    ExpertShape("bfloat16", 2048, 768, 128, False),
    ExpertShape("bfloat16", 2880, 2880, 32, True),
    ExpertShape("float16", 4096, 14336, 8, False),
    ExpertShape("float32", 1001, 333, 5, True),
)
"""Each dtype, with and without biases, sizes that are multiples of 16 and ones that are not."""


def launch_experts(shape: ExpertShape) -> None:
    """Calls TritonExperts as a layer does, with few and with many rows for each expert."""
    import torch

    from tandem.parallel.context import ParallelContext
    from tandem.parallel.expert_methods import ExpertParams, Groups
    from tandem.parallel.linear_methods import as_given, plain
    from tandem.parallel.params import Param, Source
    from tandem.workers.kernels.triton.triton_experts import MANY_FROM, TritonExperts

    def param(*size: int) -> Param:
        return Param(name="x.weight", shape=size, role="x", source=Source(("x.weight",)), merge="x")

    dtype, ops = getattr(torch, shape.dtype), TritonExperts(plain, as_given)
    biases = (param(shape.width),) if shape.biased else ()
    one = ExpertParams((param(shape.width, shape.hidden),), biases)
    method = ops.method([one] * shape.experts, ParallelContext.single())
    for slot in method.slots():
        slot.accept(torch.empty(slot.params[0].shape, dtype=dtype))
    for tokens in (1, MANY_FROM * shape.experts):
        order, ends = torch.zeros(2 * tokens, dtype=torch.int32), torch.zeros(shape.experts, dtype=torch.int32)
        groups = Groups(order, order, ends, 2)
        for gathers in (True, False):
            x = torch.empty((1 if gathers else 2) * tokens, shape.hidden, dtype=dtype)
            method.apply(x, groups, gathers=gathers)
        y_PH, weight_TK = torch.empty(2 * tokens, shape.hidden, dtype=dtype), torch.zeros(tokens, 2)
        base, gate = torch.empty(tokens, shape.hidden, dtype=dtype), torch.empty(tokens, 1, dtype=dtype)
        for more in ((), (base,), (base, gate)):
            ops.combine(y_PH, weight_TK, groups, *more)


class AttentionShape(NamedTuple):
    """A layer's attention: dtypes of queries and cache, elements of a head, query heads of each of two KV heads.
    is_plain: without window, soft-cap, slopes and sinks; else with all of them."""

    dtype: str
    kv_dtype: str
    dim: int
    group: int
    is_plain: bool


ATTENTION_SHAPES = (
    AttentionShape("bfloat16", "bfloat16", 128, 4, True),
    AttentionShape("bfloat16", "float8_e4m3fn", 128, 8, True),
    AttentionShape("bfloat16", "int8", 80, 1, False),
    AttentionShape("bfloat16", "bfloat16", 256, 2, False),
    AttentionShape("float16", "float16", 64, 7, True),
    AttentionShape("float16", "int8", 128, 71, False),
    AttentionShape("float32", "float32", 96, 3, False),
    AttentionShape("float32", "float32", 128, 17, True),
)
"""Each dtype of queries and of caches, both sizes of tiles; one query head of each KV head, more than a tile has."""


def launch_attention(shape: AttentionShape) -> None:
    """Attends as a layer does: decodes of few rows and of many, whose contexts are split and are not, and chunks."""
    import torch

    from tandem.workers.attention.triton_paged import CHUNKS, DECODES
    from tandem.workers.kernels.kv_store import LayerKV
    from tandem.workers.kernels.triton.triton_attention import PROGRAMS, Numbers, Rows, attend
    from tandem.workers.models.spec.arch import AttentionParams

    dtype, kv_dtype, heads = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype), 2 * shape.group
    plane = torch.zeros(4, 16, 2, shape.dim, dtype=kv_dtype)
    scales = None if kv_dtype.itemsize > 1 else torch.zeros(4, 16, 2)
    kv = LayerKV(plane, plane, scales, scales)
    each = (1.0,) * heads
    params = AttentionParams(1.0) if shape.is_plain else AttentionParams(1.0, 100, 5.0, each, each)
    for num_rows, queries in ((1, DECODES), (PROGRAMS, DECODES), (2, CHUNKS)):
        tokens = num_rows * queries.start
        q_TND = torch.empty(tokens, heads, shape.dim, dtype=dtype)
        table = torch.zeros(num_rows, 16, dtype=torch.int32)
        rows = Rows(torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64), table)
        attend(q_TND, kv, torch.empty_like(q_TND), rows, params, Numbers(), queries=queries, in_parts=True)


class FusedShape(NamedTuple):
    """A layer's small operations: dtypes of activations and cache, widths in elements, heads of q and of k, elements of
    a head. is_plain: RMSNorms, a rotation, a gated activation; else LayerNorms, norms of heads, no gate. offset:
    elements before each row of activations in its memory."""

    dtype: str
    kv_dtype: str
    hidden: int
    width: int
    heads: tuple[int, int]
    dim: int
    is_plain: bool
    offset: int


FUSED_SHAPES = (
    FusedShape("bfloat16", "bfloat16", 4096, 14336, (32, 8), 128, True, 0),
    FusedShape("bfloat16", "float8_e4m3fn", 16384, 53248, (128, 8), 128, True, 0),
    FusedShape("bfloat16", "int8", 2560, 10240, (32, 32), 80, False, 0),
    FusedShape("bfloat16", "float8_e4m3fn", 2304, 9216, (8, 4), 256, False, 0),
    FusedShape("float16", "int8", 4544, 18176, (71, 1), 64, True, 0),
    FusedShape("float16", "float16", 1001, 3003, (3, 1), 66, False, 1),
    FusedShape("float32", "float32", 8192, 28672, (12, 12), 512, False, 0),
    FusedShape("float32", "float8_e4m3fn", 576, 1536, (9, 3), 64, True, 1),
)
"""Each dtype of activations and of caches; the widest rows and heads; sizes and addresses that are multiples of 16 and
ones that are not."""


def launch_fused(shape: FusedShape) -> None:
    """Calls TritonFusedOps as layers do: the first of a stage, whose residual has nothing to add, and later ones; with
    and without norms of heads, rotations and a cache."""
    import torch

    from tandem.workers.kernels.kv_store import LayerKV
    from tandem.workers.kernels.triton.triton_fused_ops import TritonFusedOps
    from tandem.workers.models.spec.arch import Activation

    dtype, kv_dtype, ops = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype), TritonFusedOps()
    (q_heads, kv_heads), dim = shape.heads, shape.dim

    def rows(*size: int) -> torch.Tensor:
        return torch.empty(shape.offset + math.prod(size), dtype=dtype)[shape.offset :].view(size)

    for x_TH in (None, rows(2, shape.hidden)):
        if shape.is_plain:
            ops.add_rms_norm(x_TH, rows(2, shape.hidden), rows(shape.hidden), 1e-6)
        else:
            for weight, bias in ((None, None), (rows(shape.hidden), None), (rows(shape.hidden), rows(shape.hidden))):
                ops.add_layer_norm(x_TH, rows(2, shape.hidden), weight, bias, 1e-6)
    for kind in Activation:
        ops.activate(rows(2, shape.width), kind, gated=shape.is_plain)
    qk_TSD, v_TKD = rows(2, q_heads + 2 * kv_heads, dim).split((q_heads + kv_heads, kv_heads), dim=1)
    plane = torch.zeros(4, 16, kv_heads, dim, dtype=kv_dtype)
    scales = None if kv_dtype.itemsize > 1 else torch.zeros(4, 16, kv_heads)
    kv, slots = LayerKV(plane, plane, scales, scales), torch.zeros(2, dtype=torch.int64)
    weight, angle = None if shape.is_plain else rows(q_heads + kv_heads, dim), rows(2, 1, dim)
    ops.norm_rotate(qk_TSD, weight, 1e-6, angle, angle)
    for angles in ((angle, angle), (None, None)):
        ops.rotate_store(qk_TSD, v_TKD, weight, 1e-6, *angles, kv, slots)


LAUNCHES: Mapping[str, Callable[[], None]] = {
    **{f"lora {number}": partial(launch_lora, shape) for number, shape in enumerate(LORA_SHAPES)},
    **{f"attention {number}": partial(launch_attention, shape) for number, shape in enumerate(ATTENTION_SHAPES)},
    **{f"experts {number}": partial(launch_experts, shape) for number, shape in enumerate(EXPERT_SHAPES)},
    **{f"fused {number}": partial(launch_fused, shape) for number, shape in enumerate(FUSED_SHAPES)},
}
"""Every module that launches kernels has entries, which together launch all variants that it can choose. Each is a job
of its own, so that they fill all cores."""


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
        variant_of(compiled.src),
        capability,
        int(registers.group(1)),
        sum(map(int, spills)),
        int(compiled.metadata.shared),
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
        LAUNCHES[name]()
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
        f"{source.where}: {source.name} is compiled by no launch in LAUNCHES of tools/check_kernels.py"
        for source in sources
        if source.name not in reached
    ]


# ---- report ----


def faults(found: Sequence[Compiled]) -> list[str]:
    """A line for each variant that does not compile, spills, or takes more shared memory than its target has."""
    lines = []
    for one in found:
        where, limit = f"{one.kernel} for sm_{one.capability}", TARGETS[one.capability] * 1024
        if one.error:
            lines.append(f"{where} does not compile: {one.error}")
        if one.spilled:
            lines.append(f"{where} spills {one.spilled} bytes ({one.variant})")
        if one.shared > limit:
            lines.append(f"{where} takes {one.shared} bytes of shared memory of {limit} ({one.variant})")
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
    targets = "".join(f"   sm_{capability}, {limit} KiB".ljust(20) for capability, limit in TARGETS.items())
    head = "".join("   regs spill    KiB" for _ in TARGETS)
    lines = [f"{'':<{name}}  {'':<{width}}{targets}".rstrip(), f"{'kernel':<{name}}  {'variant':<{width}}{head}"]
    for (kernel, variant), of in sorted(cells.items()):
        values = "".join(f"   {of.get(capability, '-'):<17}" for capability in TARGETS)
        lines.append(f"{kernel:<{name}}  {variant:<{width}}{values}".rstrip())
    return lines


def main() -> int:
    """Compiles in one process per core; prints the table, then what is wrong."""
    started_s = time.perf_counter()
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
    jobs = list(product(LAUNCHES, TARGETS))
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        results = [pool.submit(compile_launches, *job) for job in jobs]
        found = [one for result in results for one in result.result()]
    print("\n".join(table(found)))
    wrong = [*faults(found), *forgotten(kernel_sources([ROOT / top for top in TOPS]), {one.kernel for one in found})]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    took_s = time.perf_counter() - started_s
    print(f"{len(found)} variants of {len({one.kernel for one in found})} kernels, {took_s:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
