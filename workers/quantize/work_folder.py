"""WorkFolder: what a run has finished, on the disk, so that one that was killed goes on where it was.

It lies in the folder of the result until that is complete. A layer counts as done when state.json says so, which is
written behind all of its files.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from copy import deepcopy
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, ClassVar, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.headers import STATE, UNFINISHED, weight_files
from tandem.workers.quantize.files.hidden_states import HiddenStates
from tandem.workers.quantize.files.tensor_file import write_text

FLAG: Final = "--output"
REPORT: Final = "quantize_report.json"


class WorkFolder:
    """output: the folder of the result. made_of: everything that decides what is written, for comparison with what an
    earlier run has left there. SettingsError where that is another result, or none of these. Other verbs than
    `tandem quantize` have a subclass, which names its flag and its report."""

    flag: ClassVar[str] = FLAG
    report: ClassVar[str] = REPORT
    result: ClassVar[str] = "a model that was quantized"
    new_state: ClassVar[Mapping[str, Any]] = {"layers": 0, "rows": []}

    def __init__(self, output: Path, made_of: Mapping[str, Any]) -> None:
        self.output = output
        self.path = output / UNFINISHED
        self._leftover = output / "removed"
        self._made_of = json.loads(json.dumps(made_of))
        self._state_file = self.path / STATE
        self._lock: int | None = None
        self.state: dict[str, Any] = {**deepcopy(dict(self.new_state)), "made_of": self._made_of}

    @property
    def finished(self) -> dict[str, Any] | None:
        """The report of an earlier run with the same settings that has finished."""
        file = self.output / self.report
        if self.path.exists() or not file.is_file():
            return None
        report = self._read(file)
        self._check(report.get("made_of", {}), self.result)
        shutil.rmtree(self._leftover, ignore_errors=True)
        return report

    def open(self) -> None:
        """Reads the state of an earlier run that has kept something, or begins one, and keeps other processes out until
        close(). SettingsError."""
        if self.path.is_dir():
            self._hold()
        if self._state_file.is_file() and any(one != self._state_file for one in self.path.iterdir()):
            self.state |= self._read(self._state_file)
            self._check(self.state["made_of"], "an unfinished run")
            return
        if self.output.exists() and not self.output.is_dir():
            raise SettingsError(f"{self.output} is a file", self.flag)
        if self.output.is_dir() and any(one.name != self.path.name for one in self.output.iterdir()):
            raise SettingsError(f"{self.output} is not empty; name a new folder, or empty it", self.flag)
        self.path.mkdir(parents=True, exist_ok=True)
        self._hold()
        self.save()

    def close(self) -> None:
        """Lets other processes in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def save(self) -> None:
        """Makes the state durable."""
        write_text(self._state_file, json.dumps(self.state))

    def kept(self, name: str) -> Any:
        """Returns what put() has kept; None for nothing."""
        file = self.path / f"{name}.json"
        return self._read(file) if file.is_file() else None

    def put(self, name: str, value: Any) -> None:
        """Keeps a value."""
        write_text(self.path / f"{name}.json", json.dumps(value))

    def hidden(self, stream: str, layer: int, shape: tuple[int, int]) -> HiddenStates:
        """Returns the hidden states before a layer. stream: of the quantized model, or of the dense one."""
        return HiddenStates(self.path / f"{stream}-{layer}.f32", shape)

    def shard(self, place: int) -> Path:
        """Returns the file of a layer's tensors; that behind the last layer has all others."""
        return self.path / f"layer-{place:05}.safetensors"

    def remove(self) -> None:
        """Removes all that is not the result. From its first step on the result is complete, whenever it is ended."""
        shutil.rmtree(self.path.replace(self._leftover))

    def _hold(self) -> None:
        if self._lock is None:
            self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SettingsError(f"another process is writing {self.output}", self.flag) from None

    def _check(self, made_of: Mapping[str, Any], what: str) -> None:
        unlike = sorted(key for key in {*made_of, *self._made_of} if made_of.get(key) != self._made_of.get(key))
        if not unlike:
            return
        words = ", ".join(f"{key} {made_of.get(key)!r} (here {self._made_of.get(key)!r})" for key in unlike)
        raise SettingsError(f"{self.output} holds {what} with other settings: {words}; name a new folder", self.flag)

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            assert isinstance(found, dict | list), found
        except (OSError, ValueError, AssertionError) as error:
            words = f"{file} is not read: {error}; remove {file.parent} to begin again"
            raise SettingsError(words, self.flag) from error
        return found  # type: ignore[return-value]


def weights_digest(folder: Path) -> str:
    """Returns a digest of a model's config.json and weights, which are read."""
    digest = sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        with file.open("rb") as stream:
            digest.update(file_digest(stream, "sha256").digest())
    return digest.hexdigest()
