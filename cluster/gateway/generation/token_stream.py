"""One request in the gateway: its deltas in order, the tokens delivered, how it ends.

Fed by dispatch.py (deltas from the token channel, the answer of the handle call), read by the HTTP side as a
GenerationStream. One event loop only.

    open --all deltas--> complete        open --Ended(refused)--> refused
    open --Ended, deltas missing for 1 s, or the call failed--> lost (the client may dispatch it again: open)
    open --aclose--> closed
"""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from tandem.workers.messages.request import Ended, GenerationRequest, TokenDelta


class RequestStream:
    """GenerationStream of one request. `on_close(stream)` runs once, when the reader leaves or the stream has ended."""

    def __init__(self, request: GenerationRequest, on_close: Callable[["RequestStream"], None]) -> None:
        self.request = request
        self.delivered: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.finished = [False] * request.sampling.n
        self.complete = False
        for choice, tokens in enumerate(request.resume_token_ids):
            self.delivered[choice].extend(tokens)
        self._items: deque[list[TokenDelta]] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_close = on_close
        self._over = asyncio.Event()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[TokenDelta]:
        while not self._items:
            if self._closed or self.complete:
                await self.aclose()
                raise StopAsyncIteration
            if self._error is not None:
                await self.aclose()
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    async def aclose(self) -> None:
        """The reader is done; an unfinished request is aborted. Never waits."""
        if not self._closed:
            self._closed = True
            self._items.clear()
            self._on_close(self)
            self._wake()

    @property
    def is_over(self) -> bool:
        """Nothing more will come, or nobody reads it."""
        return self._closed or self.complete or self._error is not None

    async def wait_over(self, timeout_s: float) -> bool:
        """True as soon as is_over; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    def take(self, deltas: list[TokenDelta]) -> bool:
        """Deltas of one step, as a group sent them. False when tokens are missing before one of them."""
        fresh: list[TokenDelta] = []
        for delta in deltas:
            missing = delta.first_position - len(self.delivered[delta.choice])
            if missing > 0:
                return False
            trimmed = self._trimmed(delta, -missing)
            if trimmed is None:
                continue
            self.delivered[delta.choice].extend(trimmed.token_ids)
            self.finished[delta.choice] |= trimmed.finish_reason is not None
            fresh.append(trimmed)
            self.complete |= delta.usage is not None
        if fresh and not self._closed and self._error is None:
            self._items.append(fresh)
        self._wake()
        return True

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, after what was already delivered."""
        if not self.is_over:
            self._error = error
            self._wake()

    def has_all(self, ended: Ended) -> bool:
        """True when every token that Ended counts was delivered."""
        return all(len(got) >= want for got, want in zip(self.delivered, ended.positions, strict=False))

    def finish(self, ended: Ended | None) -> None:
        """Ends a stream whose last delta will not come (it was aborted); `ended` has the usage."""
        if not self.is_over:
            if ended is not None:
                self._items.append(self._closing_deltas(ended))
            self.complete = True
            self._wake()

    def _closing_deltas(self, ended: Ended) -> list[TokenDelta]:
        """An empty delta for each choice that had no end yet; the last one carries the usage."""
        open_choices = [i for i, done in enumerate(self.finished) if not done] or [len(self.finished) - 1]
        last = open_choices[-1]
        return [
            TokenDelta(
                request_id=self.request.request_id,
                attempt=ended.attempt,
                choice=choice,
                first_position=len(self.delivered[choice]),
                token_ids=[],
                finish_reason=None if self.finished[choice] else ended.finish_reasons[choice],
                usage=ended.usage if choice == last else None,
            )
            for choice in open_choices
        ]

    def _trimmed(self, delta: TokenDelta, known: int) -> TokenDelta | None:
        """Without the tokens that were delivered before (another group sent them); None when nothing is new."""
        if self.finished[delta.choice]:
            if delta.usage is None:
                return None
            return msgspec.structs.replace(delta, token_ids=[], logprobs=None, finish_reason=None)
        if known == 0:
            return delta
        logprobs = delta.logprobs[known:] if delta.logprobs is not None else None
        rest = delta.token_ids[known:]
        if not rest and delta.finish_reason is None and delta.usage is None:
            return None
        first = delta.first_position + min(known, len(delta.token_ids))
        return msgspec.structs.replace(delta, first_position=first, token_ids=rest, logprobs=logprobs)

    def _wake(self) -> None:
        if self.is_over:
            self._over.set()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
