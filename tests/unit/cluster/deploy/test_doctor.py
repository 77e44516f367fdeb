"""`tandem doctor`: every misfit in words from faked facts, its exit status, and a process of checks that breaks."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.cluster.cli.base import check_process
from tandem.cluster.cli.base.check_process import self_checks
from tandem.cluster.cli.verbs.doctor import fact_rows, report_rows
from tandem.cluster.deploy import machine_facts
from tandem.cluster.deploy.devices import cuda_device_names
from tandem.cluster.deploy.machine_facts import (
    MachineFacts,
    compiler_features,
    cpu_features,
    driver_version,
    read_facts,
    torch_build,
)
from tandem.cluster.deploy.misfits import device_choice, dtype_choice, misfits
from tandem.cluster.deploy.preflight import choose_device
from tandem.cluster.deploy.report_facts import group_limit, read_report_facts
from tandem.configs.load import build_settings
from tandem.workers.kernels.cpu import cpu_build
from tests.support.verbs import invoked

STORE = 80 * 2**20
CPU_BOX = MachineFacts(
    tandem="0.1.0", python="3.11.7", torch="2.13.0+cpu", torch_cuda=None, triton=None, nccl=None, ray="2.60.0",
    driver=None, driver_cuda=None, gpus=0, redis="/usr/bin/redis-server", cpu="Some CPU", cores=2,
    memory_bytes=8 * 2**30, available_bytes=4 * 2**30, shm_bytes=2**30, memlock_bytes=None,
    cpu_features=("avx512f", "avx512_bf16"), compiler="/usr/bin/gcc", compiler_features=("avx512f", "avx512_bf16"),
    proxies={},
)  # fmt: skip
GPU_BOX = replace(
    CPU_BOX,
    torch="2.13.0",
    torch_cuda="13.0",
    triton="3.9.0",
    nccl="2.28.9",
    driver="580.65.06",
    driver_cuda=13000,
    gpus=2,
)


@pytest.mark.parametrize(
    "facts",
    [
        CPU_BOX,
        GPU_BOX,
        replace(GPU_BOX, driver_cuda=13020),
        replace(GPU_BOX, torch_cuda="12.9", driver_cuda=12040),  # within a major version
        replace(GPU_BOX, driver=None, driver_cuda=None, gpus=0),  # a CUDA build without a GPU
        replace(GPU_BOX, gpus=1, nccl=None),
        replace(CPU_BOX, cpu_features=("amx_bf16",), compiler_features=()),  # oneDNN's, which needs no compiler
        replace(CPU_BOX, shm_bytes=None),
        replace(CPU_BOX, shm_bytes=STORE),
    ],
)
def test_what_fits_together(facts: MachineFacts) -> None:
    assert misfits(facts, STORE) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            replace(GPU_BOX, torch="2.13.0+cpu", torch_cuda=None),
            "2 CUDA device(s), and torch 2.13.0+cpu is a CPU build, which cannot use them: ranks would end with "
            "`torch sees no CUDA device`; install a CUDA build in its place (`pip install --force-reinstall "
            "torch==2.13.0` from an index with CUDA builds), or serve with --device cpu",
        ),
        (replace(GPU_BOX, torch_cuda=None, gpus=0), "a CUDA driver (580.65.06), and torch 2.13.0 is a CPU build"),
        (replace(GPU_BOX, gpus=0), "driver 580.65.06 is loaded and offers no device"),
        (
            replace(GPU_BOX, driver_cuda=12080),
            "the driver runs programs up to CUDA 12.8, and torch 2.13.0 was built for CUDA 13.0: update the driver, or "
            "install a torch for CUDA 12.x",
        ),
        (replace(GPU_BOX, triton=None), "Triton is not installed"),
        (replace(GPU_BOX, nccl=None), "NCCL is not installed"),
        (replace(CPU_BOX, torch=None), "torch is not installed"),
        (replace(CPU_BOX, ray=None), "Ray is not installed"),
        (replace(CPU_BOX, shm_bytes=64 * 2**20), "/dev/shm has 64 MiB, and Ray's object store takes 80 MiB"),
        (replace(CPU_BOX, redis=None), "needs --redis-url"),
        (replace(CPU_BOX, compiler=None, compiler_features=()), "there is no C compiler"),
        (replace(CPU_BOX, compiler_features=None), "/usr/bin/gcc fails with -march=native: on the CPU torch computes"),
        (replace(CPU_BOX, compiler_features=("avx512f",)), "/usr/bin/gcc does not know this CPU's avx512_bf16"),
    ],
)
def test_a_misfit_is_said_in_words(facts: MachineFacts, words: str) -> None:
    (line,) = misfits(facts, STORE)
    assert words in line
    assert "http" not in line and ".org" not in line


def test_the_device_is_the_one_that_serve_takes() -> None:
    here = read_facts()
    assert device_choice(here)[0] == choose_device(build_settings("demo", {})).engine.device.device
    assert device_choice(CPU_BOX) == ("cpu", "there is no CUDA driver")
    assert device_choice(replace(GPU_BOX, gpus=0)) == ("cpu", "the CUDA driver has no device")
    assert device_choice(GPU_BOX) == ("cuda", "the CUDA driver has 2 device(s)")
    assert "cannot use" in device_choice(replace(GPU_BOX, torch_cuda=None))[1]
    assert "bfloat16" in dtype_choice("cpu")[1] and "bfloat16" not in dtype_choice("cuda")[1]


def test_facts_are_read_from_what_other_programs_write() -> None:
    written = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    assert torch_build(written) == ("2.13.0+cu130", "13.0")
    assert torch_build("__version__ = '2.13.0+cpu'\ncuda: str | None = None\n") == ("2.13.0+cpu", None)
    assert torch_build("") == (None, None)
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16 2025\n"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.3.0\n"
    assert (driver_version(closed), driver_version(opened), driver_version("")) == ("570.86.15", "580.65.06", None)
    assert cpu_features("model name\t: X\nflags\t\t: fpu avx512f amx_bf16\n") == ("avx512f", "amx_bf16")
    assert compiler_features("#define __AVX512F__ 1\n#define __AVX512BF16__ 1\n") == ("avx512f", "avx512_bf16")
    assert compiler_features("#define X __AVX512F__\n") == ()


def test_a_compiler_that_fails_is_not_said_to_lack_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gcc := tmp_path / "gcc").write_text("#!/bin/sh\nexit 1\n")
    gcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    here = read_facts()
    assert (here.compiler, here.compiler_features) == (str(gcc), None)
    assert dict(fact_rows(here))["C compiler"] == f"{gcc}, which fails"


def test_the_facts_of_this_machine_are_those_of_torch() -> None:
    import torch

    here = read_facts()
    assert (here.torch, here.torch_cuda) == (torch.__version__, torch.version.cuda)
    assert here.cores == len(os.sched_getaffinity(0)) and 0 < here.available_bytes <= here.memory_bytes
    assert [len(row) for row in fact_rows(here)] == [2] * 15


@pytest.mark.parametrize("cuda", [12080, None])
def test_the_facts_are_printed_for_any_machine(cuda: int | None) -> None:
    rows = dict(
        fact_rows(replace(GPU_BOX, driver_cuda=cuda, torch=None, compiler=None, shm_bytes=None, memlock_bytes=0))
    )
    assert rows["CUDA driver"] == ("580.65.06, runs CUDA up to 12.8" if cuda else "580.65.06")
    assert (rows["torch"], rows["C compiler"], rows["/dev/shm"]) == ("not installed", "not found", "none")
    assert rows["locked memory"] == "up to 0 MiB"


def test_what_a_report_needs_is_there_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TANDEM_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "TANDEM_REDIS_URL", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sk-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "tandem" / "logs" / "run-1").mkdir(parents=True)
    for name, text in (("cpu.max", "150000 100000"), ("memory.max", str(2**31)), ("pids.max", "max")):
        (tmp_path / name).write_text(text)
    report = read_report_facts(tmp_path)
    assert "sk-secret" not in json.dumps(asdict(report))
    assert report.variables["OMP_NUM_THREADS"] == "3" and report.variables["HF_TOKEN"] is None
    assert "AWS_SECRET_ACCESS_KEY" not in report.variables
    assert (report.cpu_limit, report.memory_limit_bytes, report.process_limit) == (1.5, 2**31, None)
    assert report.packages["torch"] == read_facts().torch and "ray" in report.packages
    assert "openai" not in report.packages, "what is optional"
    rows = dict(report_rows(report))
    assert rows["container"] == "1.5 CPUs, 2.0 GiB" and "newest run-1" in rows["log files"]
    assert "TANDEM_API_KEY" in rows["variables"] and "OMP_NUM_THREADS=3" in rows["variables"]
    assert Path(report.folder).name == "tandem" or (Path(report.folder) / "cluster").is_dir()
    bare = replace(
        report, cpu_limit=None, memory_limit_bytes=None, variables={}, newest_log=None, gpus=("A GPU, 8.0 GiB",)
    )
    rows = dict(report_rows(bare))
    assert (rows["container"], rows["variables"], rows["log files"]) == ("no limits", "none that matter", "none yet")
    assert rows["GPUs"] == "A GPU, 8.0 GiB"


def test_limits_of_either_version_of_control_groups_are_read(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    assert group_limit("memory", tmp_path) is None
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert group_limit("memory", tmp_path) is None, "version 1's word for no limit"
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")
    assert group_limit("memory", tmp_path) == 1000
    (tmp_path / "memory.max").write_text("2000\n")
    assert group_limit("memory", tmp_path) == 2000


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int room, int device) { strncpy(name, device ? "Large" : "Small", room); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = ((size_t)8 << device) << 30; return 0; }
"""
"""A driver with two devices."""


def test_gpus_have_names_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    driver = ctypes.CDLL(str(library))
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    assert cuda_device_names() == ("Small, 8.0 GiB", "Large, 16.0 GiB")


# ---- the verb ----

PASSED = {"name": "a", "status": "ok", "detail": "equal", "seconds": 0.1}
FAILED = {"name": "b", "status": "failed", "detail": "not equal", "seconds": 0.1}
ABSENT = {"name": "c", "status": "not here", "detail": "no kernel", "seconds": 0.1}


@pytest.mark.parametrize(
    ("facts", "checks", "status", "last"),
    [
        (CPU_BOX, [PASSED, ABSENT], 0, "All checks passed."),
        (CPU_BOX, [PASSED, FAILED], 1, "failed: b"),
        (replace(CPU_BOX, redis=None), [PASSED], 1, "1 thing(s) do not fit together"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_status_says_whether_all_fits(
    monkeypatch: pytest.MonkeyPatch,
    facts: MachineFacts,
    checks: list[dict[str, Any]],
    status: int,
    last: str,
    as_json: bool,
) -> None:
    def events() -> Generator[dict[str, Any]]:
        yield {"choices": [{"subject": "attention", "chosen": "some", "why": "because"}], "torch": ["with OpenMP"]}
        for check in checks:
            yield {"begins": check["name"]}
            yield check

    monkeypatch.setattr(machine_facts, "read_facts", lambda: facts)
    monkeypatch.setattr(check_process, "self_checks", events)
    done = invoked(["doctor", *(["--json"] if as_json else [])])
    assert done.exit_code == status, done.output
    if as_json:
        found = json.loads(done.stdout)
        assert found["checks"] == checks and found["fits"] is (status == 0)
        assert found["torch_build"] == ["with OpenMP"] and found["report"]["packages"]["ray"]
        assert found["facts"]["cores"] == 2 and len(found["misfits"]) == (facts.redis is None)
        assert [choice["subject"] for choice in found["choices"]] == ["device", "dtype", "attention"]
        assert all(f"{check['name']}  " in done.stderr for check in checks), "progress"
    else:
        assert done.stdout.rstrip().endswith(last)
        assert "attention  some" in done.stdout and ("Does not fit" in done.stdout) is (facts.redis is None)


def test_wrong_usage_has_another_exit_status() -> None:
    assert invoked(["doctor", "--jsn"]).exit_code == 2
    assert invoked(["doctor", "demo"]).exit_code == 2


# ---- the process of the checks ----

HEAD = 'import os, sys, time, subprocess\nprint(\'{"begins": "x"}\', flush=True)\n'


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("os.kill(os.getpid(), 4)", "the process ended by SIGILL"),
        ("sys.exit('it is broken')", "exit status 1: it is broken"),
        ("time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_process_that_breaks_is_a_failed_check(rest: str, words: str) -> None:
    with closing(self_checks([sys.executable, "-c", HEAD + rest], limit_s=1)) as events:
        begins, failed = list(events)
    assert begins == {"begins": "x"}
    assert (failed["name"], failed["status"], failed["detail"]) == ("x", "failed", words)


def test_a_check_has_time_to_compile_its_kernels() -> None:
    """A check that is ended while gcc runs keeps nothing of it, and would fail at the next time too."""
    assert check_process.LIMIT_S > cpu_build.TIMEOUT_S


def test_nothing_of_the_checks_is_left(tmp_path: Path) -> None:
    """Ctrl-C closes the events: the process and what it started end."""
    file = tmp_path / "pid"
    starts = f"p = subprocess.Popen(['sleep', '60']); open({str(file)!r}, 'w').write(str(p.pid))\n"
    waits = "print('{}', flush=True); time.sleep(60)\n"
    with closing(self_checks([sys.executable, "-c", HEAD + starts + waits])) as events:
        assert next(events) == {"begins": "x"} and next(events) == {}
        child = psutil.Process(int(file.read_text()))
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
