"""How long one client's text keeps the stream of another one waiting, in a gateway of its own process. Printed, for a
busy machine says more of itself than of the gateway; what one piece of work may hold is in test_loop_law.py."""

import json
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.plain_http import plain_http
from tests.support.service import wait_for
from tests.unit.gateway.listener import USER_HEADERS, gateway_process
from tests.unit.gateway.rig import CHAT, USER
from tests.unit.gateway.test_loop_law import COSTLY, JSON

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
STEP_S = 0.01
TOKENS = 400
GOAL_MS = 250
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway_process(tmp_path_factory.mktemp("adapters"), step_s=STEP_S) as (url, _):
        yield url


class Streams:
    """A client that reads one streamed chat after the other while it is entered. whole: how many it has read to their
    ends. longest_s: the longest silence within one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.whole, self.longest_s = 0, 0.0
        self.errors: list[str] = []

    def __enter__(self) -> "Streams":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set() and not self.errors:
            try:
                self._read()
            except Exception as error:
                self.errors.append(repr(error))

    def _read(self) -> None:
        asked = {"messages": USER, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        with plain_http.stream(
            "POST", self._url + CHAT, json=asked, headers=USER_HEADERS, timeout=DEADLINE_S
        ) as answer:
            assert answer.status_code == 200, answer.read()
            said, last_s = b"", None
            for piece in answer.iter_raw():
                now_s = time.monotonic()
                self.longest_s = max(self.longest_s, 0.0 if last_s is None else now_s - last_s)
                said, last_s = said[-64:] + piece, now_s
        assert said.endswith(b"data: [DONE]\n\n"), said
        self.whole += 1


@pytest.mark.parametrize("name", COSTLY)
def test_a_stream_goes_on_beside_the_text_of_others(url: str, name: str) -> None:
    path, make, _ = COSTLY[name]
    body, headers = msgspec.json.encode(make()), {**USER_HEADERS, **JSON}
    with Streams(url) as streams:
        wait_for(lambda: streams.whole >= 1 or streams.errors, DEADLINE_S, "one has been read alone")
        alone_s, streams.longest_s = streams.longest_s, 0.0
        for _ in range(3):
            answer = plain_http.post(url + path, content=body, headers=headers, timeout=DEADLINE_S)
            assert answer.status_code in (200, 400, 413), answer.text[:200]
    assert not streams.errors
    gaps = f"{1000 * streams.longest_s:.0f} ms, alone {1000 * alone_s:.0f} ms (goal {GOAL_MS} ms)"
    print(f"{name}, {len(body) / 1e6:.1f} MB, {json.loads(answer.text).get('error', {}).get('code', 'served')}: {gaps}")
