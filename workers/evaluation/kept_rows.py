"""KeptRows: a reference's log probabilities on disk, each row [V] in float32, which is 4 V bytes a token."""

import shutil
from pathlib import Path

import numpy as np
import torch

from tandem.configs.errors import SettingsError

GB = 10**9


class KeptRows:
    """Rows in the order of a sample's scored tokens. folder: for the file."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._path = folder / "reference.f32"
        self._vocab_size = vocab_size
        self._path.write_bytes(b"")

    def append(self, rows_NV: torch.Tensor) -> None:
        """Writes rows behind the others. SettingsError where the disk takes them no more: others have filled it."""
        try:
            with self._path.open("ab") as file:
                file.write(np.ascontiguousarray(rows_NV.numpy()).data)
        except OSError as error:
            words = f"the reference's probabilities cannot be written in {self._path.parent}: {error.strerror}"
            raise SettingsError(f"{words}; give fewer --tokens, or another TMPDIR", "--tokens") from error

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Returns `count` rows from the first-th on, float32 [count, V], mapped from the file. ValueError beyond its
        end."""
        row = self._vocab_size
        mapped = np.memmap(self._path, np.float32, "c", offset=4 * first * row, shape=(count, row))
        return torch.from_numpy(mapped)


def check_room(folder: Path, tokens: int, window: int, vocab_size: int) -> None:
    """Refuses a sample whose rows the folder's disk has no room for: of all tokens that are kept, and of one window.
    SettingsError says how many tokens there is room for."""
    row = 4 * vocab_size
    wanted, free = (tokens + window) * row, shutil.disk_usage(folder).free
    if wanted <= free:
        return
    words = f"{tokens or window} tokens of {vocab_size} probabilities need {wanted / GB:.1f} GB in {folder.parent}"
    fewer = f"at most {free // row - window} --tokens" if tokens else "a smaller --window"
    flag = "--tokens" if tokens else "--window"
    raise SettingsError(f"{words}, where {free / GB:.1f} GB are free: give {fewer}, or another TMPDIR", flag)
