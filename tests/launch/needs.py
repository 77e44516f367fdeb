"""What the players need of the machine, and which packages of Debian or Ubuntu bring it."""

import shutil
import subprocess
from collections.abc import Iterable

from tools.lab import lack, refusal

PACKAGES = {
    "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "rsync": "rsync",
    "curl": "curl", "openssl": "openssl", "buildah": "buildah", "mmdebstrap": "mmdebstrap", "venv": "python3-venv",
}  # fmt: skip
"""By program; venv is that of /usr/bin/python3."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What users of a machine of the lab have."""


class NotHereError(RuntimeError):
    """The machine lacks what a player needs; says the command that installs it, or why there can be no lab."""


def check_needs(programs: Iterable[str]) -> None:
    """Raises NotHereError naming all that is absent."""
    if absent := [program for program in programs if not _is_here(program)]:
        packages = " ".join(sorted({PACKAGES[program] for program in absent}))
        raise NotHereError(f"no {', '.join(absent)} here; apt-get install --no-install-recommends {packages}")
    if (why := lack() or refusal()) is not None:
        raise NotHereError(why)


def which(program: str) -> str:
    """The whole path of a program; its name where there is none."""
    return shutil.which(program, path=PATH) or program


def _is_here(program: str) -> bool:
    if program == "venv":
        asked = ["/usr/bin/python3", "-c", "import ensurepip, venv"]
        return shutil.which(asked[0]) is not None and subprocess.run(asked, capture_output=True).returncode == 0
    return which(program) != program
