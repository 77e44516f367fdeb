"""Choices: what a rank on a platform computes with, and why, in the words of its facts.

Used by `tandem doctor` through workers/self_checks/.
"""

from typing import NamedTuple

import torch

from tandem.workers.platforms.base import Platform


class PlatformChoice(NamedTuple):
    """An implementation. subject: the thing that was chosen; why: the reason, in words."""

    subject: str
    chosen: str
    why: str


def choices(platform: Platform, dtype: torch.dtype = torch.bfloat16) -> list[PlatformChoice]:
    """Return the choices for ranks on this platform, in `dtype`."""
    name, missing = str(dtype).removeprefix("torch."), platform.obstacle(dtype)
    return [
        PlatformChoice(subject, chosen, platform.facts.implementations[subject][chosen].reason(name, missing))
        for subject, chosen in platform.implementations(dtype).items()
    ]
