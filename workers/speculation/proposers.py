"""PROPOSERS: the proposers by the `method` of --speculative-config. GUESSES: their forms for devices.

Called by workers/rank/loading.py and drafters/draft_rank.py, which makes those that need a model.
"""

from collections.abc import Callable

from tandem.configs.schema import SpeculativeSettings
from tandem.workers.platforms.device_rows import Guess
from tandem.workers.speculation.ngram import NgramProposer
from tandem.workers.speculation.ngram_on_device import NgramOnDevice
from tandem.workers.speculation.proposer import Proposer
from tandem.workers.speculation.suffix import SuffixProposer

PROPOSERS: dict[str, Callable[[SpeculativeSettings], Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
"""Proposers that need no model; the others: DRAFTERS (workers/rank/drafters/draft_rank.py)."""

GUESSES: dict[str, Callable[[SpeculativeSettings], Guess]] = {"ngram": NgramOnDevice}
"""The same on a device with memory of its own, for those methods that need not wait there for the step before."""


def make_guess(settings: SpeculativeSettings | None) -> Guess | None:
    """Returns the form of the proposer that runs on a device; None where there is none: then the host proposes."""
    make = None if settings is None else GUESSES.get(settings.method)
    return None if settings is None or make is None else make(settings)


def make_proposer(settings: SpeculativeSettings | None) -> Proposer | None:
    """Returns the proposer of --speculative-config where it needs no model; None without one."""
    return None if settings is None else PROPOSERS[settings.method](settings)
