"""Environment variables: the folders for this user's private and cached files, and the name of the API key's variable.

No other file names a variable of the environment.
"""

import os
import tempfile
from pathlib import Path

SOCKET_PATH_ROOM = 84
"""Characters that the longest socket of Ray adds to the temp folder, ours included; a path may have 107."""
API_KEY = "TANDEM_API_KEY"
"""The key that `tandem chat` and `tandem complete` send where no flag gives one. `ps` shows flags to other users."""


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


def adapter_cache_folder() -> Path:
    """The cache of adapters from URLs: the check downloads them, and this machine's ranks read them."""
    return cache_folder() / "adapters"


def kernel_cache_folder() -> Path:
    """The cache of kernels compiled for this machine (workers/kernels/cpu/kernel_cache.py)."""
    return cache_folder() / "kernels"


def short_temp_folder() -> Path:
    """The temp folder, or /tmp where socket paths in the temp folder would be too long for the system."""
    wanted = Path(tempfile.gettempdir()).resolve()
    return wanted if len(str(wanted)) + SOCKET_PATH_ROOM <= 107 else Path("/tmp")
