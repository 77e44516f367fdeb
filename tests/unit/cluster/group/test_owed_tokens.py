"""What a group tells the routers that it still has to do, while its engine works and while it does not answer."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.cluster.group import owed_tokens
from tandem.cluster.group.owed_tokens import OwedTokens, produced_by
from tandem.workers.engine.base.sequence import RequestState
from tandem.workers.messages.request import GenerationRequest, SamplingParams


def begin(owed: OwedTokens, name: str, expected: int, gateway: str = "g1", **more: Any) -> tuple[str, int]:
    request = GenerationRequest(
        request_id=name, prompt_token_ids=[1] * 100, sampling=SamplingParams(max_tokens=1000, n=2), **more
    )
    return owed.begin(request, gateway, 100 + expected)


def state(name: str, *outputs: int, first_token_s: float | None = 1.0) -> RequestState:
    request = GenerationRequest(
        request_id=name, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1000, n=max(1, len(outputs)))
    )
    sequences = [SimpleNamespace(num_output=count) for count in outputs]
    return RequestState(request, 0.0, cast(Any, sequences), first_token_s=first_token_s)


class Thread:
    """An engine's thread that runs calls at once, or never."""

    def __init__(self, *states: RequestState, answers: bool = True) -> None:
        self.engine = SimpleNamespace(requests=states)
        self.answers = answers

    def call(self, run: Any) -> None:
        if self.answers:
            run(self.engine)


def test_a_prompt_counts_until_there_is_a_token_and_output_until_it_is_out() -> None:
    owed = OwedTokens()
    first, second = begin(owed, "a", 400), begin(owed, "b", 50, gateway="g2")
    assert owed.charged() == owed.left({}) == {"g1": 500, "g2": 150} and owed.total == 650 and len(owed) == 2
    assert owed.left({("a", 0): 100}) == {"g1": 300, "g2": 150}
    assert owed.left({("a", 0): 1999, ("b", 0): 60}) == {"g1": 1, "g2": 13}, "as much as may come; a quarter more"
    assert owed.charged() == {"g1": 500, "g2": 150}
    owed.end(first)
    owed.end(second)
    owed.end(second)
    assert owed.total == 0 and owed.charged() == {}


def test_only_requests_with_a_token_have_produced_any() -> None:
    states = [state("a", 3, 4), state("b", 0, first_token_s=None), state("c", 0)]
    assert produced_by(states) == {("a", 0): 7, ("c", 0): 0}


async def test_the_engine_is_asked_and_an_older_attempt_is_not_meant() -> None:
    owed = OwedTokens()
    begin(owed, "a", 400)
    begin(owed, "b", 400, attempt=1)
    asked = owed.ask_left(cast(Any, Thread(state("a", 100), state("b", 100))))
    assert await asked == {"g1": 300 + 500}


async def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owed_tokens, "ANSWER_S", 0.01)
    owed = OwedTokens()
    begin(owed, "a", 400)
    async with asyncio.timeout(10):
        assert await owed.ask_left(cast(Any, Thread(state("a", 100), answers=False))) == {"g1": 500}
