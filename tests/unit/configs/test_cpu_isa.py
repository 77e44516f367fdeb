"""The older CPU that tests imitate: one variable, which kernels and torch's libraries follow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.configs import environment
from tandem.configs.environment import CPU_ISA, CpuIsa, cpu_isa, lacks_bf16_products
from tandem.configs.errors import SettingsError
from tests.support.cpu_flags import cpu_flags

SHOWN = """
from tandem.configs.environment import imitate_cpu
imitate_cpu()
import torch
torch.set_num_threads(1)
x = torch.randn(64, 64)
torch.nn.functional.linear(x, x)
torch.ops.mkldnn._reorder_linear_weight(x)
print(torch.backends.cpu.get_cpu_capability())
"""
TOLD = """
import sys, torch
from tandem.cluster.cli.main import main
from tandem.parallel.quantization.weight_plan import DENSE
from tandem.workers.platforms.cpu import CpuPlatform
platform = CpuPlatform.open(1, 1)
assert platform.obstacle(torch.bfloat16) is None, platform.obstacle(torch.bfloat16)
print(*platform.kernel_notes(torch.bfloat16, DENSE))
sys.argv = ["tandem", "plan", "demo"]
main()
"""


def test_an_unknown_word_is_refused_by_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_ISA, "sse2")
    with pytest.raises(SettingsError, match=r"^TANDEM_CPU_ISA=sse2: there is avx2 and avx512$"):
        environment.imitate_cpu()


@pytest.mark.parametrize("given", [None, ""])
def test_without_a_word_nothing_is_hidden(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_ISA, raising=False)
    if given is not None:
        monkeypatch.setenv(CPU_ISA, given)
    before = dict(os.environ)
    environment.imitate_cpu()
    assert cpu_isa() is None and dict(os.environ) == before


@pytest.mark.parametrize("isa", CpuIsa)
def test_torchs_libraries_follow(isa: CpuIsa) -> None:
    """A process that has set the variable itself; oneDNN says which instructions it takes."""
    env = {name: value for name, value in os.environ.items() if name not in {*environment.LIBRARY_ISA[CpuIsa.AVX2]}}
    env |= {CPU_ISA: isa, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", SHOWN], env=env, capture_output=True, text=True, timeout=240)
    (capability,) = [line for line in done.stdout.splitlines() if not line.startswith("onednn_verbose")]
    said = done.stdout.replace(" ", "").lower()
    assert done.returncode == 0, done.stderr[-2000:]
    assert capability != "AVX512" or isa is CpuIsa.AVX512
    assert "amx" not in said and "avx512_core_bf16" not in said and (isa is CpuIsa.AVX512 or "avx512" not in said)


@pytest.mark.parametrize(
    ("flags", "isa", "lacks"),
    [
        ("avx512f avx512_vnni", "", True),
        ("avx512f avx512_vnni avx512_bf16", "", False),
        ("avx512f avx512_vnni avx512_bf16", "avx512", True),
        ("avx512f avx512_vnni avx512_bf16", "avx2", False),
        ("avx512f", "", False),
    ],
)
def test_cpus_without_products_of_bf16_pairs(
    flags: str, isa: str, lacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_ISA, isa)
    assert not lacks_bf16_products(tmp_path / "none")
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}")
    assert lacks_bf16_products(tmp_path / "cpuinfo") == lacks


@pytest.mark.skipif(not {"avx512_vnni", "avx512bw"} <= cpu_flags(), reason="this CPU cannot imitate one with VNNI")
def test_such_a_cpu_is_told_what_helps() -> None:
    """By a start's notes and by `tandem plan`, in a process that imitates one from its beginning on."""
    env = {**os.environ, CPU_ISA: CpuIsa.AVX512, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", TOLD], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("--quantization w8a8 is two to four times as fast") == 2
