"""Masks of allowed tokens, a bit for each: bit i % 32 of word i / 32 is of token i. Torch-free.

P places of a step, W words.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

Bits = npt.NDArray[np.uint32]
ALLOWED: Final = 0xFFFFFFFF
"""A word of tokens that are all allowed."""
MIN_PARALLEL = 4
"""Masks for which waking other threads pays."""


class MaskWriter:
    """Writes matchers' masks. Its threads begin with the first step that needs them."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, bits_PW: Bits, jobs: Sequence[tuple[LLMatcher, int]], threads: int) -> None:
        """Writes the mask of each matcher to its place; the interpreter's lock is free meanwhile."""
        assert bits_PW.flags.c_contiguous and bits_PW.dtype == np.uint32
        row_bytes, address = bits_PW.strides[0], bits_PW.ctypes.data
        if len(jobs) < MIN_PARALLEL or threads == 1:
            for matcher, place in jobs:
                matcher.unsafe_compute_mask_ptr(address + place * row_bytes, row_bytes)
            return
        if self._executor is None:
            self._executor = LLExecutor(threads)
        self._executor.unsafe_compute_mask_ptr(list(jobs), address, row_bytes, len(bits_PW))


def allow(bits_W: Bits, ids: Iterable[int]) -> None:
    """Allows more tokens in one mask."""
    for token in ids:
        bits_W[token >> 5] |= np.uint32(1 << (token & 31))
