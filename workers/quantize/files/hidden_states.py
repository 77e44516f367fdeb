"""HiddenStates: hidden states of sequences in a file, so that memory has one sequence's at a time. N sequences, W
tokens, H hidden size."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from tandem.workers.quantize.files.tensor_file import keep


class HiddenStates:
    """A file of [N, W, H] float32. shape: W and H."""

    def __init__(self, file: Path, shape: tuple[int, int]) -> None:
        self.file = file
        self._shape = shape

    def read(self, places: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yields some sequences, each in new memory."""
        count = self._shape[0] * self._shape[1]
        with self.file.open("rb") as stream:
            for place in places:
                found = np.fromfile(stream, np.float32, count, offset=4 * count * place - stream.tell())
                yield torch.from_numpy(found.reshape(self._shape))

    def write(self, sequences: Iterable[torch.Tensor]) -> None:
        """Writes all sequences, in order; the file is there when they are on the disk."""
        new = self.file.with_name(f"{self.file.name}.new")
        with new.open("wb") as stream:
            for hidden_WH in sequences:
                stream.write(memoryview(hidden_WH.contiguous().numpy()).cast("B"))
            stream.flush()
            keep(stream.fileno(), new, self.file)

    def remove(self) -> None:
        """Frees the disk."""
        if self.file.exists():
            os.unlink(self.file)
