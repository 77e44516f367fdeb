"""Call: one request to a service on a thread of its own, and what came of it, chunk by chunk."""

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.plain_http import plain_http
from tests.support.service import Service

ANSWER_S = 240.0


@dataclass
class Said:
    """One choice of an answer. logprobs: of the tokens, where they were asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Call:
    """Sends a body to a path and reads the answer to its end.

    choices: by index. id: the answer's. usage: as sent, None without. gap_s: the longest time without a chunk, from the
    request on. port: of this end of the connection. error: the first error, as a body, an event or an exception; ended:
    [DONE] has come, or a whole answer.
    """

    def __init__(self, service: Service, path: str, body: dict[str, Any]) -> None:
        self.body = body
        self.choices: dict[int, Said] = {}
        self.id = ""
        self.num_prompt_tokens = 0
        self.usage: dict[str, Any] | None = None
        self.status = 0
        self.error: Any = None
        self.headers: httpx.Headers | None = None
        self.gap_s = 0.0
        self.port = 0
        self.ended = False
        self._over = False
        self._last_s = time.monotonic()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(service.url + path,), daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        return sum(len(said.token_ids) for said in self.choices.values())

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait_for_tokens(self, count: int) -> None:
        """Until so many have come, or the answer is over."""
        with self._news:
            assert self._news.wait_for(lambda: self.num_tokens >= count or self._over, ANSWER_S), "tokens come"

    def result(self) -> "Call":
        """Waits for the end."""
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), "the answer ends"
        return self

    @property
    def is_ok(self) -> bool:
        """Answered whole, every choice with an end."""
        has_ends = bool(self.choices) and all(said.finish_reason for said in self.choices.values())
        return self.ended and self.error is None and self.status == 200 and has_ends

    def _run(self, url: str) -> None:
        try:
            if self.body.get("stream"):
                self._read_stream(url)
            else:
                self._read_whole(url)
        except (httpx.HTTPError, httpx.StreamError) as error:
            self.error = self.error or repr(error)
        with self._news:
            self._over = True
            self._news.notify_all()

    def _read_whole(self, url: str) -> None:
        response = plain_http.post(url, json=self.body, timeout=ANSWER_S)
        self.status, self.headers = response.status_code, response.headers
        answer = response.json()
        self._tick()
        if self.status != 200:
            self.error = answer["error"]
        else:
            self._take(answer)
        self.ended = True

    def _read_stream(self, url: str) -> None:
        with plain_http.stream("POST", url, json=self.body, timeout=ANSWER_S) as response:
            self.status, self.headers = response.status_code, response.headers
            self.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            if self.status != 200:
                self.error = json.loads(response.read())["error"]
                return
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self._tick()
                    self._take_event(line.removeprefix("data: "))

    def _take_event(self, event: str) -> None:
        assert not self.ended, f"after the end: {event}"
        if event == "[DONE]":
            self.ended = True
            return
        chunk = json.loads(event)
        if "error" in chunk:
            self.error = chunk["error"]
        else:
            self._take(chunk)

    def _tick(self) -> None:
        now_s = time.monotonic()
        self.gap_s, self._last_s = max(self.gap_s, now_s - self._last_s), now_s

    def _take(self, answer: dict[str, Any]) -> None:
        with self._news:
            self.id = answer["id"]
            self.usage = answer.get("usage") or self.usage
            self._take_prompt(answer)
            for choice in answer["choices"]:
                self._take_choice(self.choices.setdefault(choice["index"], Said()), choice)
            self._news.notify_all()

    def _take_prompt(self, answer: dict[str, Any]) -> None:
        """Counts the prompt's tokens; a chat answer names them once, a completion in each choice."""
        for place in (answer, *answer["choices"]):
            self.num_prompt_tokens = len(place.get("prompt_token_ids") or ()) or self.num_prompt_tokens

    @staticmethod
    def _take_choice(said: Said, choice: dict[str, Any]) -> None:
        assert said.finish_reason is None, "nothing follows an end"
        message = choice.get("delta") or choice.get("message") or {}
        said.text += choice.get("text") or message.get("content") or ""
        said.token_ids += choice.get("token_ids") or []
        found = choice.get("logprobs") or {}
        said.logprobs += found.get("token_logprobs") or [entry["logprob"] for entry in found.get("content") or []]
        said.finish_reason = choice.get("finish_reason")
