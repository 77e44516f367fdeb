"""SamplingOps compiled for CPUs: one thread per row, a few passes over a row that stays in its cache.

Definitions as in sampling_ops.py, whose TorchSampling is the twin and draws the same tokens, to the last bit.
"""

import ctypes
import threading
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel, Scratch
from tandem.workers.kernels.sampling_ops import Change, Draws, DrawTokens
from tandem.workers.kernels.step_arrays import Send

KINDS = ("l", "f", "f", "l", "d", "L", "l")
SCRATCH_FLOATS = 48
"""Floats of a thread, beside three for each token of the vocabulary."""


class _Own(threading.local):
    """A thread's scratch memory: ranks of several models in one process share the operations."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class CpuSampling:
    """The compiled operations, on float32 logits. Serves several threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._best = Kernel(library, "best_tokens", POINTER, NUMBER, NUMBER, NUMBER, POINTER, POINTER, COUNT)
        self._draw = Kernel(
            library, "draw_tokens", POINTER, NUMBER, NUMBER, POINTER, POINTER, POINTER, NUMBER, POINTER, POINTER,
            POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, COUNT,
        )  # fmt: skip
        self._keep = Kernel(library, "keep_tokens", POINTER, NUMBER, NUMBER, POINTER, NUMBER, POINTER, NUMBER, COUNT)
        self._own = _Own()

    def best(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocab = logits_SV.shape
        assert logits_SV.dtype is torch.float32 and logits_SV.stride(1) == 1
        best_S, ids_S = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
        self._best(
            logits_SV.data_ptr(), logits_SV.stride(0), rows, vocab, best_S.data_ptr(), ids_S.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return best_S, ids_S

    def prepare_draw(self, draws: Draws, send: Send) -> DrawTokens:
        return partial(self.draw, draws)

    def prepare_keep(self, places_P: npt.NDArray[np.int64], bits_PW: npt.NDArray[np.uint32], send: Send) -> Change:
        return partial(self.keep, places_P, bits_PW)

    def draw(
        self,
        draws: Draws,
        logits_SV: torch.Tensor,
        best_S: torch.Tensor,
        ids_S: torch.Tensor,
        positions_S: torch.Tensor,
    ) -> None:
        """Reads arrays of the host; leaves the logits as they are."""
        vocab, threads = logits_SV.shape[1], torch.get_num_threads()
        assert logits_SV.dtype is torch.float32 and logits_SV.stride(1) == 1
        columns = (
            draws.places, draws.factor, draws.lowest, draws.top_k, draws.top_p, draws.seed, draws.choice,
        )  # fmt: skip
        assert tuple(column.dtype.char for column in columns) == KINDS, "as Draws says"
        assert all(column.flags.c_contiguous for column in columns)
        assert positions_S.dtype is torch.int64 and positions_S.is_contiguous()
        places, *numbers = (column.ctypes.data for column in columns)
        scratch = self._own.scratch
        scratch.reserve(threads * (3 * vocab + SCRATCH_FLOATS))
        self._draw(
            logits_SV.data_ptr(), logits_SV.stride(0), vocab, best_S.data_ptr(), ids_S.data_ptr(), places,
            len(draws.places), *numbers, positions_S.data_ptr(), scratch.address, threads,
        )  # fmt: skip

    def keep(self, places_P: npt.NDArray[np.int64], bits_PW: npt.NDArray[np.uint32], logits_SV: torch.Tensor) -> None:
        """Reads the host's bits."""
        vocab, words = logits_SV.shape[1], bits_PW.shape[1]
        assert logits_SV.dtype is torch.float32 and logits_SV.stride(1) == 1 and 32 * words >= vocab
        assert (places_P.dtype.char, bits_PW.dtype.char) == ("l", "I")
        assert places_P.flags.c_contiguous and bits_PW.flags.c_contiguous
        self._keep(
            logits_SV.data_ptr(), logits_SV.stride(0), vocab, places_P.ctypes.data, len(places_P), bits_PW.ctypes.data,
            words, torch.get_num_threads(),
        )  # fmt: skip
