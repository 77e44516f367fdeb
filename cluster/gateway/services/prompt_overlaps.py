"""PromptOverlaps: what groups have of a request's prompt, found before it is sent: of a long one off the event loop."""

import asyncio
import logging
from collections.abc import Mapping

from tandem.cluster.gateway.http.text_workers import INLINE_BYTES, TextWorkers
from tandem.cluster.routing.told_prefixes import PromptPrefix, ToldPrefixes
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import GenerationRequest

log = logging.getLogger("tandem.gateway")
WITHIN_S = 0.1
"""A request that would wait longer for a thread goes out without."""
INLINE_TOKENS = 512
"""A prompt up to here is hashed on the event loop: some 40 us, less than what a thread for it takes."""


class PromptOverlaps:
    """prefixes: what groups have told. workers: the threads on which prompts are hashed. within_s: see WITHIN_S."""

    def __init__(self, prefixes: ToldPrefixes, workers: TextWorkers, within_s: float = WITHIN_S) -> None:
        self._prefixes = prefixes
        self._workers = workers
        self._within_s = within_s

    async def find(self, request: GenerationRequest) -> Mapping[str, tuple[int, int]]:
        """Returns the overlaps of a RouteHint, and notes them for the router; empty where nothing can be said. Raises
        nothing: no request fails for lack of them."""
        least = self._prefixes.least_tokens
        if least is None or len(request.prompt_token_ids) <= least:
            return {}
        try:
            self._prefixes.expect_sent()
            prefix = await self._overlaps(request)
        except (TimeoutError, RequestRefused):
            return {}
        except Exception:
            log.exception("nobody knows what groups have of request %s", request.public_id)
            return {}
        self._prefixes.note(request.request_id, prefix)
        return prefix.overlaps

    async def _overlaps(self, request: GenerationRequest) -> PromptPrefix:
        if len(request.prompt_token_ids) <= INLINE_TOKENS:
            return self._prefixes.overlaps(request)
        async with asyncio.timeout(self._within_s):
            # counted as the least work that goes to a thread: a hot prompt of 100,000 tokens takes milliseconds
            return await self._workers.run(request.tenant, INLINE_BYTES, self._prefixes.overlaps, request)
