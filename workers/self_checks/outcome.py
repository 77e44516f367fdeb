"""A self-check and its outcome; the list of checks is in self_check_run.py."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class NotHere(Exception):
    """This machine does not have what the check is about."""


class CheckFailed(AssertionError):
    """A result that is wrong."""


class Check(NamedTuple):
    """`run` returns what it found, in words; it raises NotHere, and anything else where it fails."""

    name: str
    run: Callable[[], str]


def require(holds: bool, words: str) -> None:
    """Raises CheckFailed with the words unless it holds. An assert would be gone under `python -O`."""
    if not holds:
        raise CheckFailed(words)


def relative_error(ours: torch.Tensor, twin: torch.Tensor) -> float:
    """The largest difference over the twin's largest value; NaN where there is one."""
    exact = twin.double()
    return float((ours.double() - exact).abs().max() / exact.abs().max())
