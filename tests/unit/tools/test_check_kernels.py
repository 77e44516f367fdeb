"""`make check-kernels` fails on kernels that do not compile, spill, take too much, or that nobody compiles."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tools import check_kernels
from tools.check_kernels import LAUNCHES, TOPS, Compiled, compiling, faults, forgotten, kernel_sources, table

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def _half(value):
    return value * 0.5


@triton.jit
def halve(x, out, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, _half(tl.load(x + i, mask=i < count)), mask=i < count)


@triton.jit
def changes_its_type(x, out, count):
    total = 0
    for _ in range(count):
        total += tl.load(x)
    tl.store(out, total)


@triton.jit(do_not_specialize=["count"])
def never_launched(x, count):
    tl.store(x, count)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "some_kernels.py"
    path.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location("some_kernels", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "some_kernels", made)
    spec.loader.exec_module(made)
    return made


def test_a_kernel_is_measured_and_a_type_error_is_found(module: ModuleType) -> None:
    x, out = torch.zeros(64), torch.zeros(64)
    with compiling(90) as found:
        module.changes_its_type[(1,)](x, out, 7, enable_fp_fusion=True)
        module.halve[(1,)](x, out, 64, BLOCK=64, enable_fp_fusion=True)
        module.halve[(1,)](x, out, 128, BLOCK=64, enable_fp_fusion=True)  # the same variant
        module.halve[(1,)](x, out[1:], 7, BLOCK=64, enable_fp_fusion=True)
    broken, aligned, other = found
    assert [one.kernel for one in found] == ["some_kernels.changes_its_type", *["some_kernels.halve"] * 2]
    assert "total" in broken.error and not aligned.error
    assert aligned.registers > 0 and (aligned.variant, other.variant) == (
        "fp32 BLOCK=64 aligned 3/3",
        "fp32 BLOCK=64 aligned 1/3",
    )
    (line,) = faults(found)
    assert line.startswith("some_kernels.changes_its_type for sm_90 does not compile: CompilationError")
    assert not torch.count_nonzero(out), "nothing was launched"
    with pytest.raises(RuntimeError):
        module.halve[(1,)](
            x, out, 64, BLOCK=64, enable_fp_fusion=True
        )  # Triton has its own driver again, which finds no GPU


def test_a_kernel_without_an_entry_is_found(module: ModuleType) -> None:
    assert module.__file__ is not None
    sources = kernel_sources([Path(module.__file__).parent])
    assert [source.name for source in sources] == [
        f"some_kernels.{name}" for name in ("_half", "halve", "changes_its_type", "never_launched")
    ]
    launched = {"some_kernels.halve", "some_kernels.changes_its_type"}
    (line,) = forgotten(sources, launched)
    assert line.startswith("some_kernels.py:26: some_kernels.never_launched is compiled by no launch")
    assert len(forgotten(sources, launched - {"some_kernels.halve"})) == 3
    assert not forgotten(sources, launched | {"some_kernels.never_launched"})


def test_every_kernel_of_the_tree_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launches reach them all, shown without compiling again."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    with compiling(90):
        monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.add(check_kernels._name(self)))
        for launch in LAUNCHES.values():
            launch()
    sources = kernel_sources([ROOT / top for top in TOPS])
    assert len(sources) >= 8 and not forgotten(sources, launched)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Compiled("k", "bf16", 90, 255, 16, 1024), "k for sm_90 spills 16 bytes (bf16)"),
        (Compiled("k", "bf16", 80, 64, 0, 163 * 1024 + 1), "k for sm_80 takes 166913 bytes of shared memory of 166912"),
        (Compiled("k", "bf16", 100, 64, 0, 227 * 1024 + 1), "k for sm_100 takes 232449 bytes of shared memory of"),
    ],
)
def test_spills_and_shared_memory_have_limits(found: Compiled, words: str) -> None:
    (line,) = faults([found, Compiled("k", "bf16", 90, 255, 0, 227 * 1024)])
    assert line.startswith(words)


def test_the_table_has_a_line_per_variant_and_a_place_per_target() -> None:
    lines = table([Compiled("k", "bf16", 80, 40, 0, 1024), Compiled("k", "bf16", 100, 50, 8, 2048)])
    assert [line.split() for line in lines[2:]] == [["k", "bf16", "40", "0", "1.0", "-", "50", "8", "2.0"]]


def test_it_exits_with_1_when_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Here:
        """The pool, in this process."""

        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, function: Callable[..., object], *args: object) -> "Here":
            self.result = lambda: function(*args)
            return self

    monkeypatch.setattr(check_kernels, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(check_kernels, "compile_launches", lambda _, target: [Compiled("k", "bf16", target, 9, 8, 0)])
    assert check_kernels.main() == 1
    printed = capsys.readouterr()
    assert "k for sm_100 spills 8 bytes (bf16)" in printed.err
    assert "triton_lora.shrink_tiles is compiled by no launch" in printed.err
    assert "spill" in printed.out
