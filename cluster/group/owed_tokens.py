"""OwedTokens: what a group still has to do for each gateway, for the routers of all gateways.

Charged at a request's begin are its prompt and the output that its gateway expects (RouteHint.cost_tokens). That sum is
reported, by which a gateway finds calls whose end it has not seen; and what is left of it, by which the others choose:
no prompt once there is a token, and less output the more is out.
"""

import asyncio
from collections.abc import Iterable, Mapping

from msgspec import Struct

from tandem.cluster.routing.output_forecast import left
from tandem.cluster.routing.outstanding import tokens_by_gateway
from tandem.workers.engine.base.sequence import RequestState
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.thread.engine_thread import EngineThread
from tandem.workers.messages.request import GenerationRequest

ANSWER_S = 0.5
"""An engine that has not answered by then is in a long step: what was charged counts."""
Key = tuple[str, int]
"""A request's id and attempt."""


class _Owed(Struct, frozen=True):
    gateway: str
    charged: int
    expected: int  # output tokens of all choices, those of earlier groups too
    most: int


class OwedTokens:
    """The requests that have not ended. One event loop."""

    def __init__(self) -> None:
        self._owed: dict[Key, _Owed] = {}

    def __len__(self) -> int:
        return len(self._owed)

    def begin(self, request: GenerationRequest, gateway: str, cost_tokens: int) -> Key:
        """Notes a request, with its gateway and cost of its hint; returns its name for end()."""
        key = request.request_id, request.attempt
        expected = max(0, cost_tokens - len(request.prompt_token_ids))
        most = request.sampling.max_tokens * request.sampling.n
        self._owed[key] = _Owed(gateway, cost_tokens, expected, most)
        return key

    def end(self, key: Key) -> None:
        self._owed.pop(key, None)

    @property
    def total(self) -> int:
        """Tokens as they were charged."""
        return sum(one.charged for one in self._owed.values())

    def charged(self) -> dict[str, int]:
        """Tokens by gateway, as they were charged."""
        return tokens_by_gateway((one.gateway, one.charged) for one in self._owed.values())

    def left(self, produced: Mapping[Key, int]) -> dict[str, int]:
        """Tokens by gateway that are still to come. produced: output tokens of the requests that have any."""
        return tokens_by_gateway(
            (one.gateway, one.charged if key not in produced else left(one.expected, produced[key], one.most))
            for key, one in self._owed.items()
        )

    async def ask_left(self, thread: EngineThread) -> dict[str, int]:
        """Like left(), with what the engine has produced; as charged while it does not answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[Key, int]] = loop.create_future()

        def tell(produced: dict[Key, int]) -> None:
            if not answer.done():
                answer.set_result(produced)

        def ask(engine: Engine) -> None:
            loop.call_soon_threadsafe(tell, produced_by(engine.requests))

        thread.call(ask)
        try:
            async with asyncio.timeout(ANSWER_S):
                return self.left(await answer)
        except TimeoutError:
            return self.charged()


def produced_by(states: Iterable[RequestState]) -> dict[Key, int]:
    """Returns the output tokens of the requests that have their first token, those of earlier groups too."""
    return {
        (state.request.request_id, state.request.attempt): sum(seq.num_output for seq in state.sequences)
        for state in states
        if state.first_token_s is not None
    }
