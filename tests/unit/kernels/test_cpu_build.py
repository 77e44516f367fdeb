"""Compiling the C kernels leaves no file, however it ends, and says when it did not work."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.service import wait_for
from workers.kernels import cpu_build

BUILD = "import torch; from workers.kernels.cpu_build import cpu_library; print(cpu_library(torch.float32) is not None)"
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")


def build(folder: Path, path: str) -> "subprocess.Popen[str]":
    """A process that compiles, with its temporary files in `folder`."""
    env = {**os.environ, "TMPDIR": str(folder), "PATH": path}
    return subprocess.Popen([sys.executable, "-c", BUILD], env=env, stdout=subprocess.PIPE, text=True)


def compiler(folder: Path, script: str) -> str:
    """PATH with another gcc."""
    folder.mkdir()
    (folder / "gcc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "gcc").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_library_is_built_and_no_file_is_left(tmp_path: Path) -> None:
    (temp := tmp_path / "temp").mkdir()
    process = build(temp, os.environ["PATH"])
    assert process.communicate(timeout=120)[0] == "True\n"
    assert list(temp.iterdir()) == []


def test_no_file_is_left_by_a_process_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    (temp := tmp_path / "temp").mkdir()
    begun, over = tmp_path / "begun", tmp_path / "over"
    script = f"touch {begun}; while [ ! -e {over} ]; do sleep 0.01; done"
    process = build(temp, compiler(tmp_path / "bin", script))
    try:
        wait_for(begun.exists, 60, "the compiler runs")
        process.kill()
        process.communicate(timeout=30)
        assert list(temp.iterdir()) == []
    finally:
        over.touch()


def test_a_compiler_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", "echo no room >&2; exit 1"))
    before = len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.WARNING):
        assert cpu_build._compiled(cpu_build.LORA_SOURCES, torch.float32, None) is None
    assert caplog.messages == ["the CPU kernels cannot be compiled, so torch computes, slower: no room"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_without_memory_files_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
