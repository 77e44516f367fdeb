"""The one file that reads the environment. What is read: where private and fetched files of this user may live,
and the key that `tandem chat` and `tandem complete` send."""

import os
import tempfile
from pathlib import Path

SOCKET_PATH_ROOM = 84
"""What Ray adds to its temp folder for its longest socket, and ours adds to reach that folder; the limit is 107."""


API_KEY = "TANDEM_API_KEY"


def api_key() -> str | None:
    """The key to send to a service when no flag gives one; unlike a flag's, other users cannot read it in `ps`."""
    return os.environ.get(API_KEY) or None


def runtime_folder() -> Path:
    """Folder for this user's run files: XDG_RUNTIME_DIR/tandem, else tandem-UID in the temp folder. May not exist."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "tandem"
    return Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"


def cache_folder() -> Path:
    """Folder for what this user fetched and may fetch again: XDG_CACHE_HOME/tandem, else ~/.cache/tandem. May not
    exist."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "tandem"


def adapter_cache_folder() -> Path:
    """Below it: adapters that came from URLs, so that ranks of this machine find what was fetched to be checked."""
    return cache_folder() / "adapters"


def kernel_cache_folder() -> Path:
    """Below it: kernels compiled for this machine (workers/kernels/kept_libraries.py)."""
    return cache_folder() / "kernels"


def short_temp_folder() -> Path:
    """The temp folder, unless socket paths below it would be too long for the system; then /tmp."""
    wanted = Path(tempfile.gettempdir()).resolve()
    return wanted if len(str(wanted)) + SOCKET_PATH_ROOM <= 107 else Path("/tmp")
