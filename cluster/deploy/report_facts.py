"""Facts for who reads a report of this machine from afar, for `tandem doctor`: system, container's limits, GPUs,
packages, variables, log files. Torch-free, without secrets.
"""

import platform
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from tandem.cluster.deploy import devices
from tandem.configs.environment import reported_variables, state_folder
from tandem.configs.limits import CGROUP, cpu_limit

LIMIT_FILES = {"memory": ("memory.max", "memory/memory.limit_in_bytes"), "pids": ("pids.max", "pids/pids.max")}
NO_LIMIT = 2**60
"""Bytes from which a limit of version 1 of control groups is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """A limit of None is none."""

    system: str  # such as Debian GNU/Linux 12 (bookworm), x86_64
    kernel: str
    libc: str
    python: str  # the interpreter's path
    folder: str  # of the package that runs
    cpu_limit: float | None  # of the control group: CPU seconds in a second
    memory_limit_bytes: int | None
    process_limit: int | None  # of the control group
    user_process_limit: int | None
    open_files: tuple[int | None, int | None]  # soft and hard
    gpus: tuple[str, ...]  # names and memory
    packages: Mapping[str, str | None]  # direct dependencies, None for those that are absent
    variables: Mapping[str, str | None]  # of the environment; None: there, with a value that is not told
    log_folder: str  # of this user's services, unless --log-dir names another
    newest_log: str | None  # the newest folder in it


def read_report_facts(cgroup: Path = CGROUP) -> ReportFacts:
    """Reads them. cgroup: the control group's folder, of version 2 or 1."""
    logs = state_folder() / "logs"
    runs = sorted(logs.glob("*/"), key=lambda folder: folder.stat().st_mtime) if logs.is_dir() else []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ReportFacts(
        system=f"{_distribution()}, {platform.machine()}",
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()),
        python=sys.executable,
        folder=str(Path(__file__).resolve().parents[2]),
        cpu_limit=cpu_limit(cgroup),
        memory_limit_bytes=group_limit("memory", cgroup),
        process_limit=group_limit("pids", cgroup),
        user_process_limit=_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        open_files=(_limit(files[0]), _limit(files[1])),
        gpus=devices.cuda_device_names(),
        packages=packages(),
        variables=reported_variables(),
        log_folder=str(logs),
        newest_log=runs[-1].name if runs else None,
    )


def group_limit(kind: str, cgroup: Path = CGROUP) -> int | None:
    """Returns a limit of the control group, a key of LIMIT_FILES; None without one."""
    for name in LIMIT_FILES[kind]:
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        return limit if limit < NO_LIMIT else None
    return None


def packages() -> dict[str, str | None]:
    """Returns the versions of what the package needs, without what is optional, by name."""
    try:
        needed = requires("tandem-serve") or []
    except PackageNotFoundError:
        return {}
    names = (match[0] for need in needed if "extra ==" not in need if (match := re.match(r"[\w.-]+", need)))
    return {name: _installed(name) for name in sorted(names)}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return platform.system()
