"""Folders that take long to make, made once: runs and their workers have them from each other, as they have kernels."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch


def kept(name: str, facts: object, source: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder in the cache that `make` made. facts: all that it is made of, with a repr that tells. source:
    the file of `make`."""
    versions = *map(version, ("transformers", "peft")), torch.__version__, torch.backends.cpu.get_cpu_capability()
    digest = sha256(repr((facts, versions)).encode() + Path(source).read_bytes()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem" / "tests"
    folder = cache / f"{name}-{digest[:32]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            make(Path(made, "made"))
            with suppress(OSError):  # another process was as fast
                Path(made, "made").rename(folder)
    return folder


def digest_of(folder: Path) -> str:
    """Of the names and contents of a folder's files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()
