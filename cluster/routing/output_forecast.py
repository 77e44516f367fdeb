"""OutputForecast: how long an answer will be, by how long the last ones of its model and tenant were.

Few answers take all the tokens that they may: charged with `max_tokens`, a group with ten chats looks like one with ten
books. One per gateway process, one thread; gateways learn for themselves.
"""

from collections import OrderedDict
from typing import Final

FOLLOW: Final = 1 / 16
"""Weight of the newest end in an average of more than 16."""
FIRST_TOKENS: Final = 256
"""Expected before any answer has ended."""
MOST_PAIRS: Final = 4096
STEP_TOKENS: Final = 256
"""A request that goes on is charged anew at its first token and every so many."""


class OutputForecast:
    """Averages of output tokens of one choice. model: a name or digest, of the base model or an adapter."""

    def __init__(self) -> None:
        self._averages: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._of_all: tuple[float, int] = (float(FIRST_TOKENS), 0)

    def expect(self, model: str, tenant: str, most: int) -> int:
        """Returns the tokens that a choice will have, `most` at most. A pair without an end has the average of all."""
        average, _ = self._averages.get((model, tenant), self._of_all)
        return min(most, max(1, round(average)))

    def ended(self, model: str, tenant: str, tokens: int, *, was_cut: bool = False) -> None:
        """Learns from an answer that has ended. was_cut: by its limit, so that it says only that it would be longer."""
        pair = (model, tenant)
        known = self._averages.pop(pair, None)
        self._averages[pair] = _with(known or (0.0, 0), tokens, was_cut)
        self._of_all = _with(self._of_all, tokens, was_cut)
        if len(self._averages) > MOST_PAIRS:
            self._averages.popitem(last=False)


def left(expected: int, produced: int, most: int) -> int:
    """Returns the tokens that are still to come of a request: of `expected` so many are out, and `most` may come. One
    that is longer than its forecast is expected to have a quarter of it more."""
    return max(expected - produced, min(expected // 4 + 1, most - produced), 0)


def _with(known: tuple[float, int], tokens: int, was_cut: bool) -> tuple[float, int]:
    average, count = known
    if was_cut and count and tokens < average:
        return known
    return average + max(FOLLOW, 1 / (count + 1)) * (tokens - average), count + 1
