"""Compiled C kernels are cached whole for the next process or not at all; failures are logged."""

import gc
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import torch

from tandem.configs.environment import CPU_ISA, CpuIsa
from tandem.workers.kernels.cpu import cpu_build, kernel_cache
from tandem.workers.kernels.cpu.kernel_cache import compiling
from tests.support.service import wait_for

BUILD = (
    "import torch; from tandem.workers.kernels.cpu.cpu_build import cpu_lora_library; "
    "print(cpu_lora_library(torch.float32) is not None)"
)
BUILD_ALL = """
import torch
from tandem.workers.kernels.cpu.cpu_build import cpu_lora_library, cpu_sampling_library
libraries = [cpu_lora_library(torch.float32), cpu_lora_library(torch.bfloat16), cpu_sampling_library()]
print(len({library._handle for library in libraries}))
"""
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The temporary files of processes, and where libraries are kept."""
    (temp := tmp_path / "temp").mkdir()
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_build, "failures", [])  # which others take for this machine's
    return temp, tmp_path / "cache" / "tandem" / "kernels"


def build(path: str | None = None, script: str = BUILD) -> "subprocess.Popen[str]":
    """A process that needs a library."""
    env = os.environ | ({} if path is None else {"PATH": path})
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def built(path: str | None = None, script: str = BUILD) -> str:
    return build(path, script).communicate(timeout=300)[0]


def compiler(folder: Path, script: str) -> str:
    """PATH with another gcc."""
    folder.mkdir()
    (folder / "gcc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "gcc").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def counting(folder: Path, log: Path) -> str:
    """PATH with a gcc that writes a line each time, and does not optimise: what it builds is only loaded."""
    return compiler(folder, f'echo asked >> {log}; exec {shutil.which("gcc")} "$@" -O0')


def test_what_one_process_has_built_the_next_one_takes(folders: tuple[Path, Path], tmp_path: Path) -> None:
    temp, kept = folders
    path, log = counting(tmp_path / "bin", tmp_path / "log"), tmp_path / "log"
    assert [built(path), built(path)] == ["True\n"] * 2
    assert log.read_text() == "asked\n"
    (library,) = kept.glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o600 and kept.stat().st_mode & 0o777 == 0o700
    assert list(temp.iterdir()) == []


def test_one_process_at_a_time_compiles_a_library(folders: tuple[Path, Path]) -> None:
    first, naps_s = ExitStack(), list[float]()
    assert not first.enter_context(compiling("a.so"))

    def nap(seconds: float) -> None:
        naps_s.append(seconds)
        if len(naps_s) == 3:
            first.close()

    with compiling("another.so", sleep=nap) as waited:
        assert not waited, "others are compiled meanwhile"
    with compiling("a.so", sleep=nap) as waited:
        assert waited and len(naps_s) == 3
    assert [path.stat().st_size for path in folders[1].iterdir()] == [0], "one empty file for all locks"


def test_nobody_waits_for_ever_for_a_process_that_stands_still(folders: tuple[Path, Path]) -> None:
    times_s = iter(range(0, 1000, 50))
    naps_s: list[float] = []
    with compiling("a.so"), compiling("a.so", clock=lambda: next(times_s), sleep=naps_s.append) as waited:
        assert waited and len(naps_s) == 2, "at 50 and 100 s; WAIT_S is over at the next look"


def test_all_cached_libraries_of_one_process_are_different_ones(folders: tuple[Path, Path], tmp_path: Path) -> None:
    path, log = counting(tmp_path / "bin", tmp_path / "log"), tmp_path / "log"
    assert [built(path, BUILD_ALL) for _ in range(2)] == ["3\n"] * 2
    assert log.read_text() == "asked\n" * 3, "the second process has compiled nothing"


def test_a_library_that_cannot_be_trusted_is_made_again(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, kept = folders
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", counting(tmp_path / "bin", log))

    def compiled() -> bool:
        return cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is not None

    assert compiled()
    (library,) = kept.glob("*.so")
    content = library.read_bytes()
    harms: list[Callable[[], object]] = [
        lambda: library.write_bytes(content[: len(content) // 2]),
        lambda: library.write_bytes(content[:4096] + bytes(len(content) - 4096)),
        lambda: library.chmod(0o777),
    ]
    for number, harm in enumerate(harms):
        harm()
        assert compiled()
        assert log.read_text() == "asked\n" * (2 + number), "it is built once more"
        (again,) = kept.glob("*.so")
        assert again.stat().st_mode & 0o777 == 0o600
    assert compiled()
    assert log.read_text() == "asked\n" * (1 + len(harms)), "and that one is kept"


def test_another_compiler_source_or_cpu_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gcc := tmp_path / "gcc").write_text("one")
    (source := tmp_path / "a.c").write_text("int a;")

    def name(*arguments: str) -> str:
        return kernel_cache.library_name(str(gcc), arguments, [source])

    names = [name("-O3"), name("-O2")]
    source.write_text("int b;")
    names.append(name("-O3"))
    gcc.write_text("another")
    names.append(name("-O3"))
    monkeypatch.setattr(kernel_cache, "_cpu_facts", lambda: iter(["flags : avx512f"]))
    names.append(name("-O3"))
    assert len(set(names)) == len(names)
    assert name("-O3") == names[-1]


def test_where_nothing_can_be_kept_it_is_built_each_time(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, kept = folders
    kept.parent.mkdir(parents=True)
    kept.write_text("a file where the folder should be")
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", counting(tmp_path / "bin", log))
    for _ in range(2):
        assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is not None
    assert log.read_text() == "asked\n" * 2
    assert kept.read_text() == "a file where the folder should be"


def test_what_nobody_has_loaded_for_long_is_removed(folders: tuple[Path, Path]) -> None:
    _, kept = folders
    kernel_cache.store("old.so", b"old")
    kernel_cache.store("used.so", b"used")
    os.utime(kept / "old.so", (0, 0))
    kernel_cache.store("new.so", b"new")
    kernel_cache.store("new.so", b"another's, later")
    found = {path.name: path.read_bytes()[: -kernel_cache.DIGEST] for path in kept.glob("*.so")}
    assert found == {"used.so": b"used", "new.so": b"another's, later"}


def test_no_file_is_left_by_a_process_that_is_killed_while_it_compiles(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    temp, kept = folders
    begun, over = tmp_path / "begun", tmp_path / "over"
    script = f"touch {begun}; while [ ! -e {over} ]; do sleep 0.01; done"
    process = build(compiler(tmp_path / "bin", script))
    try:
        wait_for(begun.exists, 60, "the compiler runs")
        process.kill()
        process.communicate(timeout=60)
        assert list(temp.iterdir()) == list(kept.glob("*.so")) == []
    finally:
        over.touch()


def test_a_compiler_that_fails_is_said(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", "echo no room >&2; exit 1"))
    gc.collect()  # what earlier tests have left is not closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.WARNING):
        assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is None
    assert caplog.messages == ["the CPU kernels cannot be compiled, so torch computes, slower: no room"]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("script", "limit_s", "words"),
    [("exec sleep 60", 0.2, "gcc has not ended within 0.2 s"), ("exit 3", 60.0, "gcc ended with exit status 3")],
)
def test_a_compiler_that_says_nothing_has_a_reason(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, words: str
) -> None:
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", script))
    monkeypatch.setattr(cpu_build, "TIMEOUT_S", limit_s)
    assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is None
    assert cpu_build.compiler_words() == f"{tmp_path}/bin/{words}"


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_what_a_slow_compiler_started_ends_with_it(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcc's own process only waits for cc1, which does the work."""
    pid = tmp_path / "pid"

    def takes_too_long(compiler: "subprocess.Popen[bytes]", timeout: float) -> None:
        wait_for(pid.exists, 60, "the compiler starts another process")
        raise subprocess.TimeoutExpired(compiler.args, timeout)

    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", f"sleep 60 & echo $! > {pid}.new; mv {pid}.new {pid}; wait"))
    monkeypatch.setattr(subprocess.Popen, "communicate", takes_too_long)
    assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is None
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(int(pid.read_text()))
        wait_for(lambda: not is_running(started), 10, "what the compiler has started ends")


START = """
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.load import build_settings
from tandem.workers.build import open_executor

flags = {"device": "cpu", "cpu_threads": 1, "tensor_parallel_size": TP}
ranks = open_executor(build_settings(str(DEMO_MODEL), flags).engine)
for note in ranks.start().kernel_notes:
    print(note)
ranks.close()
"""
SLOWER = "torch computes instead of kernels compiled for this CPU, slower: "


@pytest.mark.parametrize(
    ("tp_size", "script", "reason"),
    [
        (2, "echo no 'as' >&2; exit 1", "the C compiler does not compile the kernels: no as"),
        (1, None, "there is no C compiler (gcc or cc)"),
    ],
)
def test_ranks_that_start_without_kernels_say_so(
    folders: tuple[Path, Path], tmp_path: Path, tp_size: int, script: str | None, reason: str
) -> None:
    path = str(tmp_path / "empty") if script is None else compiler(tmp_path / "bin", script)
    command = [sys.executable, "-c", START.replace("TP", str(tp_size))]
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=240)
    assert done.stdout == f"{SLOWER}{reason}\n", done.stderr[-2000:]


def test_a_machine_without_a_compiler_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu_build._warn_once.cache_clear()
    for _ in range(2):
        assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is None
    (said,) = caplog.messages
    assert "no C compiler" in said


def test_a_system_without_memory_files_is_said(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(name: str) -> int:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "memfd_create", denied)
    assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is None
    assert caplog.messages == ["the CPU kernels cannot be compiled, so torch computes, slower: not here"]


def test_libraries_of_one_process_are_different_ones() -> None:
    one, other = (cpu_build.cpu_library(dtype) for dtype in (torch.float32, torch.bfloat16))
    lora = cpu_build.cpu_lora_library(torch.float32)
    assert len({library._handle for library in (one, other, lora) if library is not None}) == 3


@pytest.mark.parametrize("isa", CpuIsa)
def test_an_older_cpu_is_imitated(
    isa: CpuIsa, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is told what it lacks, and then does not know it."""
    told = tmp_path / "told"
    command = ["gcc", *cpu_build.FLAGS, *cpu_build.HIDING[isa], "-dM", "-E", "-x", "c", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "__AVX512BF16__" not in macros and ("__AVX512F__" not in macros or isa is CpuIsa.AVX512)
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", f'echo "$@" > {told}; exit 1'))
    monkeypatch.setenv(CPU_ISA, isa)
    assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is None
    assert [*cpu_build.FLAGS, *cpu_build.HIDING[isa]] == told.read_text().split()[: len(cpu_build.FLAGS) + 1]
