"""Settings under which tests of Triton's attention run: short parts, few programs, new memory full of NaN."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support.interpreted import INTERPRETED

LENGTH = 64
"""Positions of a part."""


@contextmanager
def small_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs one program after the other; short contexts have several parts."""
    if not INTERPRETED and not torch.cuda.is_available():
        yield
        return
    monkeypatch.setattr("tandem.workers.kernels.triton.triton_decode.LENGTH", LENGTH)
    if INTERPRETED:
        from tandem.workers.kernels.triton.triton_attention import Multiprocessors

        monkeypatch.setattr("tandem.workers.kernels.triton.triton_attention.H100", Multiprocessors(1, 228 * 2**10))
        monkeypatch.setattr("tandem.workers.kernels.triton.triton_attention.PARTS_BYTES", 2**21)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills new memory with NaN
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
