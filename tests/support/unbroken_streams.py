"""Streams that run one after the other while something happens to the service that answers them."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.plain_http import plain_http

TOKENS = 1200
"""Of a stream: it takes several seconds."""
PAUSE_S = 2.0
KNOCK_PERIOD_S = 0.2


class Streams:
    """Greedy streams of one prompt, one after the other on a thread of their own, and requests without a key beside
    them, until stop(). ends: when each began and ended, and its last line; texts: what those said that ended well. A
    stream takes seconds of CPU time in all the processes that it passes: relax() while nothing happens."""

    def __init__(self, url: str, key: str) -> None:
        self.ends: list[tuple[float, float, str]] = []
        self.texts: set[str] = set()
        self.keyless: list[int] = []
        self._pieces = list[str]()
        self._url = url + "/v1/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self._stop = threading.Event()
        self._without_pause = threading.Event()
        self._without_pause.set()
        self._pool = ThreadPoolExecutor(2)
        self._loops = [self._pool.submit(self._stream_on), self._pool.submit(self._knock)]

    @property
    def has_just_begun(self) -> bool:
        """Whether a stream runs that has most of its tokens still before it."""
        return 0 < len(self._pieces) < TOKENS // 4

    def relax(self) -> None:
        """From now on PAUSE_S pass between two streams, until hurry()."""
        self._without_pause.clear()

    def hurry(self) -> None:
        """From now on a stream begins as soon as one ends, the next one at once."""
        self._without_pause.set()

    def stop(self) -> None:
        self._stop.set()
        self.hurry()
        for loop in self._loops:
            loop.result(120)
        self._pool.shutdown()

    def _stream_on(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                last = self._stream()
            except httpx.HTTPError as error:
                last = f"{type(error).__name__}: {error}"
            self.ends.append((began_s, time.monotonic(), last))
            self._pieces = []
            self._without_pause.wait(PAUSE_S)

    def _stream(self) -> str:
        """The last line, or the one with an error."""
        asked = {"model": "demo", "prompt": "Once", "max_tokens": TOKENS, "temperature": 0}
        asked |= {"ignore_eos": True, "stream": True}
        last = ""
        with plain_http.stream("POST", self._url, json=asked, headers=self._headers, timeout=90) as answer:
            for line in answer.iter_lines():
                last = line or last
                if "error" in line or answer.status_code != 200:
                    return f"{answer.status_code}: {line}"
                if line.startswith("data: {"):
                    self._pieces += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
        self.texts.add("".join(self._pieces))
        return last

    def _knock(self) -> None:
        asked = {"model": "demo", "prompt": "Once", "max_tokens": 1}
        while not self._stop.wait(KNOCK_PERIOD_S):
            self.keyless.append(plain_http.post(self._url, json=asked, timeout=90).status_code)
