"""Thresholds of top-k, top-p and min-p by sorting whole rows: what workers/kernels/sampling_ops.py is compared with."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def sorted_floor(weights_V: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> float:
    """The least weight that a row keeps. Sums are in float64, from the greatest weight down."""
    ordered = np.sort(weights_V)[::-1]
    floor = np.float32(min_p)
    if top_k:
        floor = max(floor, ordered[min(top_k, len(ordered)) - 1])
    if top_p < 1:
        kept = np.where(ordered >= floor, ordered, 0).astype(np.float64)
        ends = np.cumsum(kept)
        floor = max(floor, ordered[min(np.searchsorted(ends, top_p * ends[-1]), len(ordered) - 1)])
    return float(floor)


def mass_from(weights_V: Floats, floor: float) -> float:
    return float(weights_V[weights_V >= floor].astype(np.float64).sum())
