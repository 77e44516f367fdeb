"""Limits of what a process may use of its machine: cores, files that are open at once."""

import os
import resource
from pathlib import Path
from typing import Final

CGROUP: Final = Path("/sys/fs/cgroup")
MANY_FILES: Final = 65_536


def available_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of cores that this process may use, at least 1: those of its affinity, or fewer where its
    container has a limit of CPU time, as a pod of Kubernetes has. More threads would be stopped in turns, in the middle
    of what others wait for. cgroup: the control group's folder, of version 2 or 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _cpu_limit(cgroup)
    return cores if limit is None else max(1, min(cores, int(limit)))


def _cpu_limit(cgroup: Path) -> float | None:
    """Return the CPU seconds that the control group may use in a second, None without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / file).read_text() for file in files).split()
            limit = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # no such group, or one without a limit: "max"
            continue
        return limit if limit > 0 else None  # -1: no limit, of version 1
    return None


def allow_many_open_files() -> int:
    """Raise the soft limit of open files to 65,536, as far as the hard limit allows; return the soft limit then.

    A connection costs one. The usual soft limit, 1,024, is for programs that use select(), which ours do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MANY_FILES
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
