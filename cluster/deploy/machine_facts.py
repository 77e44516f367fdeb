"""Facts of this machine and environment, for `tandem doctor`: versions, memory, limits, CPU, compiler. Torch-free.

torch is not imported: its version and the CUDA that it was built for stand in a file of the package.
"""

import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tandem.cluster.deploy import devices
from tandem.cluster.process.redis_server import find_binary
from tandem.configs.environment import proxies
from tandem.configs.errors import SettingsError
from tandem.configs.limits import available_cores
from tandem.configs.secrets import without_password
from tandem.workers.planning.budget import available_bytes, machine_bytes

CPU_FEATURES: Final[Mapping[str, str | None]] = {
    "avx512f": "__AVX512F__",
    "avx512_bf16": "__AVX512BF16__",
    "amx_bf16": None,
}
"""CPU features, as /proc/cpuinfo spells them, and the macro by which a compiler says that it uses them. The last is
oneDNN's, which torch brings; the others are used by our kernels."""
COMPILER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Versions are None for what is not installed."""

    tandem: str
    python: str
    torch: str | None
    torch_cuda: str | None  # the CUDA that torch was built for, None for a CPU build
    triton: str | None
    nccl: str | None
    ray: str | None
    driver: str | None  # of the kernel module
    driver_cuda: int | None  # the newest CUDA that the driver runs, as 1000 * major + 10 * minor
    gpus: int  # devices of the driver
    redis: str | None
    cpu: str
    cores: int
    memory_bytes: int
    available_bytes: int
    shm_bytes: int | None
    memlock_bytes: int | None  # None without a limit
    cpu_features: tuple[str, ...]  # those of CPU_FEATURES that the CPU has
    compiler: str | None
    compiler_features: tuple[str, ...] | None  # those that the compiler uses for this CPU; None where it fails
    proxies: Mapping[str, str]  # variables of proxies in the environment, without passwords


def read_facts() -> MachineFacts:
    """Reads all facts of this machine; the slowest takes a call of the compiler."""
    torch, torch_cuda = torch_build(_file_of("torch", "version.py"))
    cpuinfo, compiler = _text(Path("/proc/cpuinfo")), shutil.which("gcc") or shutil.which("cc")
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    name = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return MachineFacts(
        tandem=_installed("tandem-serve") or "not installed",
        python=platform.python_version(),
        torch=torch,
        torch_cuda=torch_cuda,
        triton=_installed("triton") or _installed("pytorch-triton"),
        nccl=next((d.version for d in distributions() if (d.name or "").startswith("nvidia-nccl-")), None),
        ray=_installed("ray"),
        driver=driver_version(_text(Path("/proc/driver/nvidia/version"))),
        driver_cuda=devices.cuda_driver_version(),
        gpus=devices.cuda_device_count(),
        redis=_redis(),
        cpu=name.group(1) if name else platform.machine(),
        cores=available_cores(),
        memory_bytes=machine_bytes(),
        available_bytes=available_bytes(),
        shm_bytes=_room(Path("/dev/shm")),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        cpu_features=cpu_features(cpuinfo),
        compiler=compiler,
        compiler_features=() if compiler is None else _features_of(compiler),
        proxies={name: without_password(value) for name, value in proxies().items()},
    )


def torch_build(version_file: str) -> tuple[str | None, str | None]:
    """Returns (version, CUDA that it was built for) from the text of torch/version.py; an empty text: no torch."""
    release = re.search(r"^__version__ = ['\"](.+)['\"]", version_file, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]*)? = ['\"](.+)['\"]", version_file, re.MULTILINE)
    return (release.group(1) if release else None), (cuda.group(1) if cuda else None)


def driver_version(text: str) -> str | None:
    """Returns the version in /proc/driver/nvidia/version."""
    found = re.search(r"Kernel Module\D*?(?:for \S+ +)?(\d+\.\d+(?:\.\d+)?)", text)
    return found.group(1) if found else None


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Returns the features of the first core that matter here."""
    flags = re.search(r"^flags\s*: (.*)$", cpuinfo, re.MULTILINE)
    found = set(flags.group(1).split()) if flags else set()
    return tuple(feature for feature in CPU_FEATURES if feature in found)


def compiler_features(macros: str) -> tuple[str, ...]:
    """Returns the features in a compiler's list of macros."""
    defined = set(re.findall(r"^#define (\w+)", macros, re.MULTILINE))
    return tuple(feature for feature, macro in CPU_FEATURES.items() if macro in defined)


def _features_of(compiler: str) -> tuple[str, ...] | None:
    """The features that the compiler uses for this CPU; None where it fails."""
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c", "/dev/null"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return compiler_features(done.stdout) if done.returncode == 0 else None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _file_of(package: str, name: str) -> str:
    """Returns the text of a file of an installed package, which is not imported."""
    spec = find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return _text(Path(places[0]) / name) if places else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _room(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _redis() -> str | None:
    try:
        return find_binary()
    except SettingsError:
        return None
