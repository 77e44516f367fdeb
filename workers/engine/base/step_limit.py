"""StepLimit: the most tokens of a step after the device ran out of memory in one.

Each failure halves the limit. After GOOD_STEPS steps without a failure it doubles, up to the ordinary budget. Called by
the scheduler.
"""

import logging

log = logging.getLogger("tandem.engine")
GOOD_STEPS = 32


class StepLimit:
    """budget: tokens of a step without a limit, rows that decode included."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._good_steps = 0
        self.tokens = budget

    @property
    def is_reduced(self) -> bool:
        return self.tokens < self._budget

    def failed(self, num_tokens: int) -> None:
        """Notes a step of so many tokens that the device had no memory for."""
        self._good_steps = 0
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        log.warning("the device ran out of memory; for now a step has at most %d tokens", self.tokens)

    def succeeded(self) -> None:
        """Notes a step that was computed."""
        if self.is_reduced:
            self._good_steps += 1
            if self._good_steps == GOOD_STEPS:
                self._good_steps = 0
                self.tokens = min(self._budget, 2 * self.tokens)
