"""Settings under which tests of Triton's attention run: short parts, few programs, new memory full of NaN."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tandem.workers.kernels.triton.tiles import DECODES
from tests.support.interpreted import INTERPRETED

LENGTH = 64
"""Positions of a part."""


@contextmanager
def small_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs one program after the other; short contexts have several parts."""
    if not INTERPRETED and not torch.cuda.is_available():
        yield
        return
    short = {of: [tile._replace(length=LENGTH) for tile in candidates] for of, candidates in DECODES.items()}
    monkeypatch.setattr("tandem.workers.kernels.triton.triton_decode.DECODES", short)
    # a device with room for one program has the tiles of others, so that bits can be compared
    monkeypatch.setattr("tandem.workers.kernels.triton.triton_decode.SHORT_DECODES", short[2, 128, True])
    from tandem.workers.kernels.triton import triton_latents

    latents = {of: tile._replace(length=LENGTH) for of, tile in triton_latents.DECODE.items()}
    monkeypatch.setattr(triton_latents, "DECODE", latents)
    if INTERPRETED:
        from tandem.workers.kernels.triton.triton_attention import Multiprocessors

        monkeypatch.setattr("tandem.workers.kernels.triton.triton_attention.H100", Multiprocessors(1, 228 * 2**10))
        monkeypatch.setattr("tandem.workers.kernels.triton.triton_attention.PARTS_BYTES", 2**21)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills new memory with NaN
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
