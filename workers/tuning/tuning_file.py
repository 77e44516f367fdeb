"""The file of trials: one for each kind of device, versions of torch and Triton, and sources of the kernels.

In the user's cache folder, in JSON. What is not whole, not of this device or could be another user's is passed over
with a line in the log: the uses are measured again. A file appears whole or not at all.
"""

import hashlib
import logging
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tandem.configs.environment import tuning_folder
from tandem.workers.tuning.trials import Trial, Trials

log = logging.getLogger(__name__)
KERNELS = Path(__file__).parents[1] / "kernels" / "triton"
TUNING = Path(__file__).parent


class TunedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device and versions that times depend on. source: a digest of the kernels and of what measures them."""

    gpu: str
    capability: str
    torch: str
    triton: str
    source: str

    @property
    def digest(self) -> str:
        """Its digest, 64 characters."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def path(self) -> Path:
        """The file of its trials. RuntimeError for a user without a home."""
        return tuning_folder() / f"{self.digest[:32]}.json"


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: TunedDevice
    uses: dict[str, tuple[Trial, ...]]


def source_digest(folders: Sequence[Path] = (KERNELS, TUNING)) -> str:
    """Returns a digest of the Python files in the folders."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def read_trials(device: TunedDevice) -> Trials:
    """Returns what is known of a device; nothing without a file that can be believed."""
    try:
        path = device.path
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read()
    except (FileNotFoundError, RuntimeError):
        return {}
    except OSError as error:
        return _passed_over(str(error))
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return _passed_over(f"{path}: another user could have written it")
    try:
        read = msgspec.json.decode(content, type=_Content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _passed_over(f"{path}: {error}")
    if read.device != device:
        return _passed_over(f"{path}: it is of another device: {read.device}")
    times = [us for trials in read.uses.values() for trial in trials for us in trial.us.values()]
    if not all(math.isfinite(us) and us > 0 for us in times):
        return _passed_over(f"{path}: it has times that are none")
    if any(trial.us.keys() != trials[0].us.keys() for trials in read.uses.values() for trial in trials if trial.us):
        return _passed_over(f"{path}: tiles of a use were timed on different loads")
    return read.uses


def _passed_over(why: str) -> Trials:
    log.warning("times of kernels are not read: %s", why)
    return {}


def add_trials(device: TunedDevice, trials: Mapping[str, tuple[Trial, ...]]) -> Path | None:
    """Writes trials in place of those of the same uses, beside the others; returns the file. None, and a line in the
    log, where it cannot be written: the next start measures again."""
    try:
        path = device.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = msgspec.json.encode(_Content(device, {**read_trials(device), **trials}))
        part = path.with_suffix(f".{os.getpid()}")
        try:
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(msgspec.json.format(content, indent=1))
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        log.warning("times of kernels are not kept for the next start: %s", error)
        return None
    return path
