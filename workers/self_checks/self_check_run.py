"""Runs all self-checks in this process, for `tandem doctor`, and prints a JSON line for each event on standard output.

    python -m tandem.workers.self_checks.self_check_run [--device]

--device: the checks of a rank's device alone. First {"choices": [...], "torch": [...]}, then {"begins": NAME} and
{"name", "status", "detail", "seconds"} of each check. A process of its own: a kernel that this CPU cannot run ends it,
and the last line names the check.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from tandem.configs.limits import available_cores
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.platforms.platform_choices import choices
from tandem.workers.self_checks.device_checks import SETTINGS, device_checks
from tandem.workers.self_checks.kernel_checks import kernel_checks
from tandem.workers.self_checks.outcome import Check, CheckFailed, NotHere
from tandem.workers.self_checks.step_checks import speed_checks, step_checks
from tandem.workers.self_checks.two_ranks import rank_checks


def all_checks(platform: Platform | None = None) -> list[Check]:
    """Returns the checks in the order in which they run: without torch.distributed's threads until the last. platform:
    of a rank on the device that is chosen here; None: a CPU's."""
    on_device = device_checks(CpuPlatform() if platform is None else platform)
    return [*kernel_checks(), *step_checks(), *speed_checks(), *on_device, *rank_checks()]


def torch_build() -> list[str]:
    """Returns what torch says of its build, a line each: compilers, libraries, the CPU capability that it uses."""
    lines = (line.strip().removeprefix("- ") for line in torch.__config__.show().splitlines()[1:])
    return [line for line in lines if not line.startswith("Build settings")]


def outcome(check: Check) -> dict[str, object]:
    """Runs a check. status: "ok", "failed", or "not here" where the machine lacks what it is about."""
    started_s = time.perf_counter()
    try:
        status, detail = "ok", check.run()
    except NotHere as reason:
        status, detail = "not here", str(reason)
    except Exception as error:  # whatever a check raises is its outcome, and the others follow
        status, detail = "failed", str(error) if isinstance(error, CheckFailed) else _words(error)
    return {"name": check.name, "status": status, "detail": detail, "seconds": time.perf_counter() - started_s}


def _words(error: Exception) -> str:
    """Returns what an error says; of an assertion without words its place."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or f'{Path(where.filename).name}:{where.lineno}: {where.line}'}"


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no event
    platform = open_platform(SETTINGS, rank=0, ranks_on_node=1)
    torch.set_num_threads(available_cores())  # on a GPU too: many checks compute on the CPU
    chosen = [choice._asdict() for choice in choices(platform)]
    print(json.dumps({"choices": chosen, "torch": torch_build()}), file=lines)
    for check in device_checks(platform) if "--device" in sys.argv[1:] else all_checks(platform):
        print(json.dumps({"begins": check.name}), file=lines)
        print(json.dumps(outcome(check)), file=lines)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
