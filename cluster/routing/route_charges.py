"""RouteCharges: what each request of this gateway still costs its group, from its dispatch to its end.

begin --> [ look: its first token, every 256 tokens ]* --> end, which teaches the forecast
"""

from collections.abc import Callable

import msgspec

from tandem.cluster.routing.output_forecast import STEP_TOKENS, OutputForecast, left
from tandem.workers.messages.request import GenerationRequest

Correct = Callable[[str, int], None]
"""Takes a request's id, and its tokens that are still to come."""


class _Charge(msgspec.Struct):
    """One request: its forecast and its limit in output tokens of all choices, and the step that is charged."""

    model: str
    tenant: str
    expected: int
    most: int
    step: int = 0


class RouteCharges:
    """One per gateway process, one thread. correct: tells the router."""

    def __init__(self, correct: Correct) -> None:
        self._correct = correct
        self._forecast = OutputForecast()
        self._charges: dict[str, _Charge] = {}

    def cost(self, request: GenerationRequest) -> int:
        """Returns the tokens of a request at its dispatch: its prompt, and what is expected to come of all choices
        beside what other groups have delivered."""
        charge, delivered = self._charge(request), sum(map(len, request.resume_token_ids))
        return len(request.prompt_token_ids) + delivered + left(charge.expected, delivered, charge.most)

    def begin(self, request: GenerationRequest) -> int:
        """Notes a dispatch; returns its cost. Another dispatch of the same request replaces it."""
        self._charges[request.request_id] = self._charge(request)
        return self.cost(request)

    def look(self, request_id: str, produced: int) -> None:
        """Tells the router what is left of a request of which so many tokens are out, if that has changed by a step.
        Its prompt is computed then."""
        charge = self._charges.get(request_id)
        step = 1 + produced // STEP_TOKENS
        if charge is not None and charge.step != step:
            charge.step = step
            self._correct(request_id, left(charge.expected, produced, charge.most))

    def end(self, request_id: str, tokens: int | None = None, *, was_cut: bool = False) -> None:
        """Forgets a dispatch. tokens: of a choice in the mean, if the answer has ended by itself or by its limit
        (was_cut)."""
        charge = self._charges.pop(request_id, None)
        if charge is not None and tokens is not None and charge.most:
            self._forecast.ended(charge.model, charge.tenant, tokens, was_cut=was_cut)

    def _charge(self, request: GenerationRequest) -> _Charge:
        model = "" if request.adapter is None else request.adapter.digest
        limit, count = request.sampling.max_tokens, request.sampling.n
        expected = self._forecast.expect(model, request.tenant, limit) if limit else 0
        return _Charge(model, request.tenant, expected * count, limit * count)
