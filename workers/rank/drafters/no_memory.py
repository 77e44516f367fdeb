"""unless_full: a drafter that runs out of device memory says nothing in that step, and the step goes on without it."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

Said = TypeVar("Said")
log = logging.getLogger(__name__)


def unless_full(call: Callable[[], Said], nothing: Said) -> Said:
    """Returns what the call does; `nothing`, with a warning, where the device is out of memory. Peers wait for it."""
    try:
        return call()
    except torch.OutOfMemoryError as error:
        log.warning("no drafts in this step: %s", error)
    return nothing
