"""Streams that follow one another on many clients at once, for as long as something is done to the service."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from tests.lab.ray_nodes import HTTP_PORT
from tools.lab import Node

URL = f"http://127.0.0.1:{HTTP_PORT}/v1/completions"
MOST_TOKENS, LEAST_TOKENS = 1900, 20
KNOCK_PERIOD_S, MEASURE_S = 1.0, 3.0
SILENT_S = 240.0


@dataclass
class Stream:
    """One stream and how it ended. end: ok, refused (no connection, or a status that is no 200), failed (an error as
    its last event), cut (no [DONE]), short (fewer tokens than asked)."""

    client: int
    prompt: str
    began_s: float
    tokens: int
    ended_s: float = 0.0
    got: int = 0
    gap_s: float = 0.0
    end: str = ""
    why: str = ""
    text: str = ""

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.began_s


class SteadyStreams:
    """`count` clients, each with one greedy stream after the other, of a prompt of `prompts`, through the proxy of a
    node. Each stream is to last some time between `seconds`: it asks for as many tokens as came in so many seconds of
    late. Beside them somebody without a key knocks once a second."""

    def __init__(
        self, node: Node, key: str, prompts: Sequence[str], count: int, seconds: tuple[float, float], rate: float
    ) -> None:
        self.streams: list[Stream] = []
        self.keyless: Counter[object] = Counter()
        self._node, self._key, self._prompts, self._count, self._seconds = node, key, prompts, count, seconds
        self._rate = rate
        self._stop = threading.Event()
        self._live: dict[int, Stream] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def running(self) -> int:
        """How many streams have got tokens and have more to come."""
        return sum(stream.got > 0 for stream in list(self._live.values()))

    def begin_no_more(self) -> None:
        """Lets those that run end, and no other follow."""
        self._stop.set()

    def stop(self) -> None:
        """Begins no more streams, and returns when all have ended."""
        self.begin_no_more()
        self._thread.join()

    def bad(self) -> list[str]:
        """What went wrong, a line each; texts that are not what others of their prompt say are `torn`."""
        lines = [
            f"{s.end} after {s.got} of {s.tokens} tokens, {s.lasted_s:.0f} s: {s.why}"
            for s in self.streams
            if s.end != "ok"
        ]
        for prompt in self._prompts:
            texts = [s.text for s in self.streams if s.prompt == prompt and s.end == "ok"]
            longest = max(texts, key=len, default="")
            lines += [f"torn: {prompt!r} goes on in two ways" for text in texts if not longest.startswith(text)]
        return lines

    def counts(self, since_s: float = 0.0) -> dict[str, object]:
        """Ends of streams by kind, their seconds and the longest silence of one, for those that ended since then."""
        streams = [stream for stream in self.streams if stream.ended_s >= since_s]
        lasted = sorted(s.lasted_s for s in streams if s.end == "ok") or [0.0]
        ends = Counter(s.end for s in streams)
        return {
            "streams": len(streams),
            **{end: ends[end] for end in ("ok", "refused", "failed", "cut", "short")},
            "seconds_min_p50_max": [round(lasted[int(q * (len(lasted) - 1))], 1) for q in (0, 0.5, 1)],
            "longest_silence_s": round(max((s.gap_s for s in streams), default=0.0), 1),
            "keyless": {str(status): count for status, count in self.keyless.items()},
        }

    def _run(self) -> None:
        with self._node.network():
            asyncio.run(self._run_all())

    async def _run_all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENT_S, sock_connect=30)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            beside = [asyncio.create_task(self._knock(session)), asyncio.create_task(self._measure())]
            await asyncio.gather(*(self._client(session, number) for number in range(self._count)))
            for task in beside:
                task.cancel()

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(number)
        await asyncio.sleep(chance.uniform(0, 5))  # not all in one step
        while not self._stop.is_set():
            tokens = int(chance.uniform(*self._seconds) * self._rate)
            tokens = max(LEAST_TOKENS, min(MOST_TOKENS, tokens))
            stream = Stream(number, self._prompts[number % len(self._prompts)], time.monotonic(), tokens)
            self._live[number] = stream
            try:
                await self._stream(session, stream)
            except aiohttp.ClientConnectorError as error:
                stream.end, stream.why = "refused", str(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                stream.end, stream.why = "cut", f"{type(error).__name__}: {error}"
            stream.ended_s = time.monotonic()
            del self._live[number]
            self.streams.append(stream)
            if stream.end != "ok":
                await asyncio.sleep(1)

    async def _stream(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        asked = {"model": "demo", "prompt": stream.prompt, "max_tokens": stream.tokens, "temperature": 0}
        asked |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        headers = {"authorization": f"Bearer {self._key}"}
        last_s, last, pieces = stream.began_s, b"", []
        async with session.post(URL, json=asked, headers=headers) as answer:
            if answer.status != 200:
                stream.end, stream.why = "refused", f"{answer.status}: {(await answer.text())[:200]}"
                return
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                now_s = time.monotonic()
                stream.gap_s, last_s = max(stream.gap_s, now_s - last_s), now_s
                last = line
                if line.startswith(b"data: {"):
                    body = json.loads(line[6:])
                    if "error" in body:
                        stream.end, stream.why = "failed", str(body["error"])[:200]
                        return
                    for choice in body["choices"]:
                        stream.got += len(choice.get("token_ids") or ())
                        pieces.append(choice["text"])
        stream.text = "".join(pieces)
        if last.strip() != b"data: [DONE]":
            stream.end, stream.why = "cut", f"its last line: {last[:200]!r}"
        else:
            stream.end = "ok" if stream.got == stream.tokens else "short"

    async def _measure(self) -> None:
        """Follows how many tokens a second one stream gets."""
        while True:
            before, began_s = {number: stream.got for number, stream in self._live.items()}, time.monotonic()
            await asyncio.sleep(MEASURE_S)
            took_s = time.monotonic() - began_s
            rates = [(s.got - before[n]) / took_s for n, s in self._live.items() if 0 < before.get(n, 0) <= s.got]
            if rates:
                self._rate += 0.3 * (sum(rates) / len(rates) - self._rate)

    async def _knock(self, session: aiohttp.ClientSession) -> None:
        asked = {"model": "demo", "prompt": "Once", "max_tokens": 1}
        while True:
            try:
                async with session.post(URL, json=asked) as answer:
                    self.keyless[answer.status] += 1
            except aiohttp.ClientError as error:
                self.keyless[type(error).__name__] += 1
            await asyncio.sleep(KNOCK_PERIOD_S)
