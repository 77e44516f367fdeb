"""The instructions that kernels may use on this CPU, or on the older one that is imitated (configs/environment.py)."""

from pathlib import Path

from tandem.configs.environment import CpuIsa, cpu_isa


def cpu_flags() -> set[str]:
    """Return the names that /proc/cpuinfo has for them; none where there is no such file."""
    file, isa = Path("/proc/cpuinfo"), cpu_isa()
    flags = set(file.read_text().split()) if file.exists() else set()
    if isa is CpuIsa.AVX2:
        return {flag for flag in flags if not flag.startswith(("avx512", "amx", "avx_vnni"))}
    if isa is CpuIsa.AVX512:
        return {flag for flag in flags if not flag.startswith(("avx512_bf16", "avx512_fp16", "amx"))}
    return flags
