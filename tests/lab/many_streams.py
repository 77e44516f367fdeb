"""Many streams at once to a service in a lab, while something happens to its nodes."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence

import httpx

from tests.lab.ray_nodes import HTTP_PORT
from tools.lab import Node

URL = f"http://127.0.0.1:{HTTP_PORT}/v1/completions"
ANSWER_S = 240.0


class ManyStreams:
    """Greedy streams of `tokens` tokens each, all at once, to the proxy of a node from a client there. errors: all that
    went wrong. gap_s: the longest time for which a stream got nothing."""

    def __init__(self, node: Node, prompts: Sequence[str], tokens: int) -> None:
        self.errors: list[str] = []
        self.gap_s = 0.0
        self._texts = [""] * len(prompts)
        self._counts = [0] * len(prompts)
        self._node, self._prompts, self._tokens = node, prompts, tokens
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def silent(self) -> int:
        """Streams that have got nothing yet."""
        return self._counts.count(0)

    def wait_for_tokens(self, count: int, of: int | None = None) -> None:
        """Until every stream, or so many of them, has got so many, and none is over."""
        enough = len(self._counts) if of is None else of

        def are_there() -> bool:
            return sum(got >= count for got in self._counts) >= enough or bool(self.errors)

        with self._news:
            assert self._news.wait_for(are_there, ANSWER_S), self._counts
        assert not self.errors and max(self._counts) < self._tokens, (self.errors, self._counts)

    def result(self) -> list[str]:
        """The texts, once all streams have ended well."""
        self._thread.join(ANSWER_S)
        assert self.is_over, self._counts
        assert not self.errors, self.errors
        assert self._counts == [self._tokens] * len(self._prompts)
        return self._texts

    def _run(self) -> None:
        with self._node.network():
            asyncio.run(self._stream_all())

    async def _stream_all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(self._stream(client, place) for place in range(len(self._prompts))))

    async def _stream(self, client: httpx.AsyncClient, place: int) -> None:
        asked = {"model": "demo", "prompt": self._prompts[place], "max_tokens": self._tokens, "temperature": 0}
        asked |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        last, last_s = "", time.monotonic()
        try:
            async with client.stream("POST", URL, json=asked) as answer:
                async for line in answer.aiter_lines():
                    last = line or last
                    self.gap_s, last_s = max(self.gap_s, time.monotonic() - last_s), time.monotonic()
                    if line.startswith("data: {"):
                        self._take(place, json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            last = f"{type(error).__name__}: {error}"
        if last != "data: [DONE]":
            self._fail(place, last)

    def _take(self, place: int, body: dict[str, object]) -> None:
        with self._news:
            for choice in body.get("choices", ()):  # type: ignore[attr-defined]
                self._texts[place] += choice["text"]
                self._counts[place] += len(choice.get("token_ids") or ())
            self._news.notify_all()

    def _fail(self, place: int, last: str) -> None:
        with self._news:
            self.errors.append(f"stream {place} after {self._counts[place]} tokens: {last}")
            self._news.notify_all()
