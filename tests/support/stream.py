"""A streaming request of its own thread, against a running service."""

import threading
from collections.abc import Mapping

import httpx

from tests.support.plain_http import plain_http
from tests.support.service import Service


class Stream:
    """A streaming request on a thread of its own; it has begun when the constructor returns."""

    def __init__(self, service: Service, asked: Mapping[str, object], headers: Mapping[str, str] = {}) -> None:
        self._lines: list[str] = []
        self._headers = dict(headers)
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(service.url, {**asked, "stream": True}))
        self._thread.start()
        assert self._begun.wait(30)

    def join(self) -> list[str]:
        self._thread.join(30)
        return self._lines

    def _read(self, url: str, asked: dict[str, object]) -> None:
        try:
            with plain_http.stream(
                "POST", url + "/v1/completions", json=asked, headers=self._headers, timeout=60
            ) as response:
                for line in response.iter_lines():
                    if line:
                        self._lines.append(line)
                        self._begun.set()
        except httpx.HTTPError as error:
            self._lines.append(f"broken: {error}")
