"""Environment variables: those that stand for flags, the folders for this user's private, cached and kept files,
proxies, and the older CPU to imitate.

No other file names a variable of the environment.
"""

import os
import pwd
import re
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

from tandem.configs.errors import SettingsError

SOCKET_PATH_ROOM = 84
"""Characters that the longest socket of Ray adds to the temp folder, ours included; a path may have 107."""
PREFIX: Final = "TANDEM_"
"""The beginning of our variables' names. What follows is a flag's name (cluster/cli/base/flag_variables.py), but for
NO_FLAGS and FOR_TESTS. `ps` shows flags to other users, but no variables."""
CPUINFO: Final = Path("/proc/cpuinfo")
CPU_ISA = "TANDEM_CPU_ISA"
"""The older CPU that this process and those that it starts imitate: a word of CpuIsa. Tests set it; services leave it
unset and use what the CPU has."""
SHARED_MEMORY = "TANDEM_SHARED_MEMORY"
"""0: CPU ranks of one machine exchange over gloo, as those of several machines do. Tests set it."""
NO_FLAGS: Final = (CPU_ISA, SHARED_MEMORY)
FOR_TESTS: Final = "TANDEM_TEST_"
"""The beginning of names in our tests, benchmarks and tools."""
_SERVICE_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_ADDRESS_LINK: Final = re.compile(r"(tcp|udp|sctp)://")
MEMORY: Final = "dev/shm"
FIRST_USER: Final = 1000
"""The least id of a user who logs in, and not of a service."""


GRPC_PROXY: Final = "grpc_proxy"
PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
"""Variables of proxies; in capitals they mean the same to most programs."""


_TOLD: Final = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "ATEN_", "CUDA_", "NVIDIA_VISIBLE_", "NCCL_", "GLOO_", "TORCH_",
    "PYTORCH_", "TRITON_", "MALLOC_", "LD_",
)  # fmt: skip
_NAMED: Final = (PREFIX, "VLLM_", "RAY_", "HF_", "TRANSFORMERS_", "PYTHON", "XDG_")
"""Beginnings of names in a report of a machine: those whose values say how it computes, and those that may hold keys,
URLs or a user's folders."""


class CpuIsa(StrEnum):
    """The instructions of CPUs that a newer one can imitate."""

    AVX2 = "avx2"
    AVX512 = "avx512"
    """AVX512 with VNNI (Cascade Lake, Ice Lake): no products of bf16 pairs, no AMX."""


LIBRARY_ISA: Final[Mapping[CpuIsa, Mapping[str, str]]] = {
    CpuIsa.AVX2: {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    CpuIsa.AVX512: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"},
}
"""Variables of the libraries that multiply for torch. ATen uses nothing beyond AVX512, and believes what it is told: a
CPU without AVX512 must not read that it has it."""


def flag_variables() -> dict[str, str]:
    """Return the variables that should stand for flags, by name, those that are empty left out. None is what Kubernetes
    puts into every container for a Service whose name begins with `tandem`, as TANDEM_PORT=tcp://10.0.0.1:8000 and
    TANDEM_SERVICE_HOST."""
    named = {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and value}
    return {
        name: value
        for name, value in named.items()
        if name not in NO_FLAGS and not name.startswith(FOR_TESTS)
        if not (_SERVICE_LINK.search(name) or (name.endswith("_PORT") and _ADDRESS_LINK.match(value)))
    }


def cpu_isa() -> CpuIsa | None:
    """Return the CPU to imitate; None for the one that there is. SettingsError for a word that is none of CpuIsa."""
    given = os.environ.get(CPU_ISA)
    if not given:
        return None
    if given not in [*CpuIsa]:
        raise SettingsError(f"{CPU_ISA}={given}: there is {' and '.join(CpuIsa)}", CPU_ISA)
    return CpuIsa(given)


def lacks_bf16_products(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether this CPU, or the one that is imitated, multiplies bytes by AVX512-VNNI and no pairs of bf16."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        return False
    isa = cpu_isa()
    has_pairs = "avx512_bf16" in flags and isa is None
    return "avx512_vnni" in flags and isa is not CpuIsa.AVX2 and not has_pairs


def imitate_cpu() -> None:
    """Hide what the CPU to imitate lacks from torch's libraries, in this process and those that it starts. They look
    once, at their first operation. Raises as cpu_isa does."""
    isa = cpu_isa()
    if isa is not None:
        os.environ.update(LIBRARY_ISA[isa])


def may_share_memory() -> bool:
    """Return whether ranks of one machine may exchange through memory that they share."""
    return os.environ.get(SHARED_MEMORY) != "0"


def keep_off_proxies() -> None:
    """Keeps gRPC, in this process and those that it starts, off the proxies of the environment. It looks for one, also
    in http_proxy and https_proxy, whenever a channel is made; ours, Ray's and Serve's channels all go to processes of
    one service. Downloads use HTTP and keep their proxies."""
    os.environ[GRPC_PROXY] = ""


def proxies() -> dict[str, str]:
    """Return the variables of proxies that are set, by name. A URL among the values may hold a password."""
    names = (*PROXIES, *(name.upper() for name in PROXIES))
    return {name: value for name in names if (value := os.environ.get(name))}


def reported_variables() -> dict[str, str | None]:
    """Return the variables that matter to who reads a report of this machine, by name, sorted. None for a value that is
    not told."""
    return {
        name: value if name.startswith(_TOLD) else None
        for name, value in sorted(os.environ.items())
        if name.startswith((*_TOLD, *_NAMED))
    }


def use_hub_token(token: str) -> None:
    """Puts a token where downloads from the hub look for one, in this process and those that it starts."""
    os.environ["HF_TOKEN"] = token


def variable(name: str) -> str | None:
    """The variable that a setting names (configs/secrets.py); None when it is not set."""
    return os.environ.get(name)


def runtime_folder() -> Path:
    """The folder of this user's run files: XDG_RUNTIME_DIR/tandem, else tandem-UID in the temp folder. It may not exist
    yet."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "tandem"
    return Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"


def cache_folder() -> Path:
    """The folder of files that can be fetched or built again: XDG_CACHE_HOME/tandem, else ~/.cache/tandem. It may not
    exist yet."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "tandem"


def state_folder() -> Path:
    """The folder of files that are kept and that nothing needs, as logs: XDG_STATE_HOME/tandem, else
    ~/.local/state/tandem; tandem-state-UID in the temp folder for a user without a home. It may not exist yet."""
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given) / "tandem"
    try:
        return Path.home() / ".local" / "state" / "tandem"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"tandem-state-{os.getuid()}"


def adapter_cache_folder() -> Path:
    """The cache of adapters from URLs: the check downloads them, and this machine's ranks read them."""
    return cache_folder() / "adapters"


def kernel_cache_folder() -> Path:
    """The cache of kernels compiled for this machine (workers/kernels/cpu/kernel_cache.py)."""
    return cache_folder() / "kernels"


def tuning_folder() -> Path:
    """The cache of times of kernels for GPUs (workers/tuning/tuning_file.py)."""
    return cache_folder() / "tuning"


def short_temp_folder() -> Path:
    """The temp folder, or /tmp where socket paths in the temp folder would be too long for the system."""
    wanted = Path(tempfile.gettempdir()).resolve()
    return wanted if len(str(wanted)) + SOCKET_PATH_ROOM <= 107 else Path("/tmp")


def memory_folder(root: Path = Path("/"), uid: int | None = None) -> Path | None:
    """Returns /dev/shm, where it is in memory and this user's files stay there; else None. systemd removes a user's
    files from it after a logout (RemoveIPC), but not those of services and of users who linger. root: of the file
    system."""
    try:
        mounts = [line.split()[1:3] for line in (root / "proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    kinds = [kind for place, kind in mounts if place == f"/{MEMORY}"]
    return root / MEMORY if kinds[-1:] == ["tmpfs"] and _stays(root, os.getuid() if uid is None else uid) else None


def _stays(root: Path, uid: int) -> bool:
    if uid < FIRST_USER or not (root / "run/systemd/users").is_dir():
        return True
    try:
        return (root / "var/lib/systemd/linger" / pwd.getpwuid(uid).pw_name).exists()
    except KeyError:
        return False
